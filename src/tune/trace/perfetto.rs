//! Chrome's JSON, which `ui.perfetto.dev` reads: a counter of live bytes for each name, and the requests as slices of
//! their own tracks.

use super::{BYTES_AT_ONCE, EVENTS_AT_ONCE, Export, NameOf, Names, Walk, rooms, text};
use crate::error::Error;
use crate::recording::{Recording, Room, Sums, What};
use std::io::Write;
use std::sync::Arc;

pub(crate) struct Perfetto {
    walk: Walk,
    names: Names,
    name_of: NameOf,
    /// The live bytes of each name.
    live: Vec<i128>,
    room: Room,
    is_first: bool,
}

impl Perfetto {
    pub(crate) fn new(recording: &Arc<Recording>) -> Self {
        let (mut room, blocks) = rooms(recording, 2);
        let live = vec![0; recording.names().len()];
        room.0 = room.0.saturating_sub(size_of_val(live.as_slice()));
        let (walk, names) = (Walk::new(recording, blocks), Names::new(recording));
        Self { walk, names, name_of: NameOf::default(), live, room, is_first: true }
    }
}

impl Export for Perfetto {
    fn more(&mut self, out: &mut Vec<u8>) -> Result<bool, Error> {
        if self.is_first {
            out.extend(b"{\"displayTimeUnit\":\"ms\",\"traceEvents\":[\n");
        }
        for _ in 0..EVENTS_AT_ONCE {
            let Some((event, before)) = self.walk.next()? else {
                out.extend(b"\n]}\n");
                return Ok(false);
            };
            if let What::Begin { name, .. } = event.what {
                let done = self.name_of.set(event.request, self.names.number(name), &mut self.room);
                done.map_err(|full| self.walk.full(full))?;
            }
            let number = self.name_of.get(event.request);
            let name = self.names.text(number);
            if !std::mem::replace(&mut self.is_first, false) {
                out.extend(b",\n");
            }
            out.extend(b"{\"name\":");
            match event.what {
                What::Begin { .. } | What::End { .. } => text(out, &[name]),
                What::Refused { .. } => text(out, &[name, " refused"]),
                _ => text(out, &[name, " bytes"]),
            }
            let at = (event.at_ns / 1000, event.at_ns % 1000, event.thread);
            let _ = match event.what {
                What::Begin { .. } => {
                    write!(out, ",\"cat\":\"request\",\"ph\":\"b\",\"id\":{},", event.request)
                }
                What::End { .. } => write!(out, ",\"cat\":\"request\",\"ph\":\"e\",\"id\":{},", event.request),
                What::Refused { .. } => write!(out, ",\"cat\":\"request\",\"ph\":\"i\",\"s\":\"t\","),
                _ => write!(out, ",\"ph\":\"C\","),
            };
            moment(out, at);
            let _ = match event.what {
                What::Begin { .. } => write!(out, "{{}}}}"),
                What::End { sums, .. } => {
                    let Sums { peak_bytes, total_bytes, blocks, live_bytes, refused, .. } = sums;
                    write!(
                        out,
                        "{{\"peak_bytes\":{peak_bytes},\"total_bytes\":{total_bytes},\"blocks\":{blocks},\
                         \"live_bytes\":{live_bytes},\"refused\":{refused}}}}}"
                    )
                }
                What::Refused { bytes, .. } => write!(out, "{{\"bytes\":{bytes}}}}}"),
                What::Allocate { bytes, .. } | What::Resize { bytes, .. } => {
                    live(out, &mut self.live[number as usize], i128::from(bytes) - i128::from(before.bytes))
                }
                What::Free { .. } => live(out, &mut self.live[number as usize], -i128::from(before.bytes)),
            };
            if out.len() >= BYTES_AT_ONCE {
                break;
            }
        }
        Ok(true)
    }
}

/// When and where, in microseconds.
fn moment(out: &mut Vec<u8>, (micros, rest, thread): (u64, u64, u32)) {
    let rest = format!("{rest:03}");
    let digits = rest.trim_end_matches('0');
    let digits = if digits.is_empty() { "0" } else { digits };
    let _ = write!(out, "\"ts\":{micros}.{digits},\"pid\":1,\"tid\":{thread},\"args\":");
}

fn live(out: &mut Vec<u8>, live: &mut i128, change: i128) -> std::io::Result<()> {
    *live += change;
    write!(out, "{{\"live\":{live}}}}}")
}
