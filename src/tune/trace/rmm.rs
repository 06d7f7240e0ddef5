//! The log of RMM's logging adaptor, which its `REPLAY_BENCHMARK` reads. A resize is an allocation and a free.

use super::{BYTES_AT_ONCE, EVENTS_AT_ONCE, Export, Walk, rooms};
use crate::error::Error;
use crate::recording::{Event, Recording, What};
use std::io::Write;
use std::sync::Arc;

pub(crate) struct Rmm {
    walk: Walk,
    pointers: u64,
    has_begun: bool,
}

impl Rmm {
    pub(crate) fn new(recording: &Arc<Recording>) -> Self {
        Self { walk: Walk::new(recording, rooms(recording, 1).1), pointers: 0, has_begun: false }
    }
}

impl Export for Rmm {
    fn more(&mut self, out: &mut Vec<u8>) -> Result<bool, Error> {
        if !std::mem::replace(&mut self.has_begun, true) {
            out.extend(b"Thread,Time,Action,Pointer,Size,Stream\n");
        }
        for _ in 0..EVENTS_AT_ONCE {
            let Some((event, before)) = self.walk.next()? else { return Ok(false) };
            if let What::Allocate { bytes, .. } | What::Resize { bytes, .. } = event.what {
                self.pointers += 1;
                line(out, &event, "allocate", self.pointers, bytes);
            }
            if let What::Resize { .. } | What::Free { .. } = event.what {
                line(out, &event, "free", before.made, before.bytes);
            }
            if out.len() >= BYTES_AT_ONCE {
                break;
            }
        }
        Ok(true)
    }
}

fn line(out: &mut Vec<u8>, event: &Event, action: &str, pointer: u64, bytes: u64) {
    let (seconds, micros) = (event.at_ns / 1_000_000_000, event.at_ns / 1000 % 1_000_000);
    let (hours, minutes, seconds) = (seconds / 3600, seconds / 60 % 60, seconds % 60);
    let _ = writeln!(
        out,
        "{},{hours:02}:{minutes:02}:{seconds:02}:{micros:06},{action},{:#x},{bytes},0x0",
        event.thread,
        u128::from(pointer) << 8,
    );
}
