//! What `ctxalloc trace` says of a recording (`info.rs`) and makes of it for other tools (`rmm.rs`, `perfetto.rs`,
//! `pprof.rs`): event by event, in a room of the recording's length and [`BESIDE_BYTES`], its own reading included.

mod info;
mod json;
mod perfetto;
mod pprof;
mod rmm;
#[cfg(test)]
mod tests;
mod values;
mod walk;

pub(crate) use info::Info;
use json::text;
pub(crate) use perfetto::Perfetto;
pub(crate) use pprof::Pprof;
pub(crate) use rmm::Rmm;
pub(crate) use values::Quantiles;
use values::Values;
use walk::Walk;

use crate::counters::UNNAMED;
use crate::error::Error;
use crate::recording::{Full, Pages, Recording, Room};
use std::sync::Arc;

/// What may be taken beside the files' own length.
const BESIDE_BYTES: usize = 8 << 20;

/// So many events are read at a time, so that who asked can be interrupted.
const EVENTS_AT_ONCE: usize = 100_000;

/// So many bytes are given at a time.
const BYTES_AT_ONCE: usize = 64 << 10;

/// A file of another tool's, as it is made.
pub(crate) trait Export: Send {
    /// Appends what comes next, or nothing yet. False: that was all.
    ///
    /// # Errors
    /// Those of [`Recording::events`]. [`Error::BadRecording`]: it would take more memory than the files have bytes.
    fn more(&mut self, out: &mut Vec<u8>) -> Result<bool, Error>;
}

/// What `trace info` says of all requests together: for `make fuzz`, which counts the same.
#[cfg(ctxalloc_fuzz)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Told {
    /// That began.
    pub requests: u64,
    /// That ended.
    pub ended: u64,
    /// That were made.
    pub blocks: u64,
    /// Blocks that were freed.
    pub freed: u64,
    /// Of blocks.
    pub resizes: u64,
    /// How often memory was refused.
    pub refused: u64,
    /// That ended, and whose account includes others.
    pub with_others: u64,
    /// That outlived their requests, as often as there are requests around them.
    pub escaped: i64,
}

/// All that `ctxalloc trace` does, for `make fuzz`: what `info` says, and the parts of each export. Each may be
/// refused, since it would take too much memory.
///
/// # Errors
/// Of `info`.
#[cfg(ctxalloc_fuzz)]
pub fn told(
    recording: &Arc<Recording>,
    mut each: impl FnMut(&'static str, Result<&[u8], Error>),
) -> Result<Told, Error> {
    let mut info = Info::new(recording);
    while info.read()? {}
    let mut told = Told::default();
    for row in info.rows() {
        told.requests += row.requests;
        told.ended += row.ended();
        told.blocks += row.blocks;
        told.freed += row.lifetimes_count();
        told.resizes += row.resizes;
        told.refused += row.refused_allocations;
        told.with_others += row.with_others;
        told.escaped += row.escaped;
        let _ = (row.peak_bytes(), row.nanoseconds(), row.lifetimes(), info.name(row), info.handlers(row).count());
    }
    drop(info);
    let classes = (0..=64).map(|log| format!("up to 2^{log}")).collect();
    let mut all = |what, mut export: Box<dyn Export>| {
        let mut part = Vec::new();
        loop {
            part.clear();
            match export.more(&mut part) {
                Ok(has_more) => {
                    each(what, Ok(&part));
                    if !has_more {
                        return;
                    }
                }
                Err(error) => return each(what, Err(error)),
            }
        }
    };
    all("rmm.csv", Box::new(Rmm::new(recording)));
    all("perfetto", Box::new(Perfetto::new(recording)));
    all("pprof", Box::new(Pprof::new(recording, classes)));
    Ok(told)
}

/// What is left for tables, and for [`Walk`] where it needs that: at most one part in so many of all that may be taken.
fn rooms(recording: &Recording, parts: usize) -> (Room, usize) {
    let length = usize::try_from(recording.header().file_bytes).unwrap_or(usize::MAX);
    let all = length.saturating_add(BESIDE_BYTES).saturating_sub(recording.memory_bytes());
    let blocks = walk::bytes_for(recording.max_live_blocks()).min(all / parts);
    (Room(all - blocks), blocks)
}

/// Names by number, for people: one that is empty is the one that is told so.
struct Names {
    recording: Arc<Recording>,
    /// Those whose text is [`UNNAMED`] and empty: the same to a reader.
    unnamed: Option<(u32, u32)>,
}

impl Names {
    fn new(recording: &Arc<Recording>) -> Self {
        let find = |text: &str| recording.names().iter().position(|name| name == text).map(|at| at as u32);
        let unnamed = find("").zip(find(UNNAMED));
        Self { recording: Arc::clone(recording), unnamed }
    }

    /// The number that stands for all that are called the same.
    fn number(&self, name: u32) -> u32 {
        self.unnamed.map_or(name, |(empty, unnamed)| if name == empty { unnamed } else { name })
    }

    fn text(&self, name: u32) -> &str {
        named(&self.recording, name)
    }
}

fn named(recording: &Recording, name: u32) -> &str {
    recording.names().get(name as usize).map_or(UNNAMED, |name| if name.is_empty() { UNNAMED } else { name })
}

/// The name of each request, by its number.
#[derive(Default)]
struct NameOf(Pages<u32>);

impl NameOf {
    fn set(&mut self, request: u64, name: u32, room: &mut Room) -> Result<(), Full> {
        self.0.set(request, name + 1, room)
    }

    fn get(&self, request: u64) -> u32 {
        self.0.get(request).saturating_sub(1)
    }
}
