//! `Plan`: a recording as the steps of threads, and which steps of other threads each waits for. `planner.rs` makes it.

use super::steps::{Lane, Turn};
use crate::recording::Sums;
use std::fmt;

#[derive(Debug)]
pub(super) struct Planned {
    /// Which it is in the recording.
    pub(super) number: u64,
    /// The request that it is inside of.
    pub(super) parent: Option<u32>,
    /// The name of the outermost request around it that is no program's, or its own: an index into the plan's names.
    pub(super) route: u32,
    /// What its account says at its end.
    pub(super) sums: Sums,
    /// Whether its end was recorded.
    pub(super) has_ended: bool,
    /// Whether its sums are those of its events only, and not the recorded account's: the recording may lack some of
    /// its events, or the account includes others.
    pub(super) is_uncompared: bool,
    /// Whether something is made in its memory after its end.
    pub(super) is_used_later: bool,
    /// Whether it is one of a route's: inside of no other one, but of a recorded program.
    pub(super) is_counted: bool,
}

/// What the recording says of itself, before any replay.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Facts {
    /// How many events are replayed.
    pub events: u64,
    /// How many threads they were on.
    pub threads: usize,
    /// How many of these there were at one time, at most.
    pub threads_at_once: usize,
    /// The outermost requests; where a program was recorded (`ctxalloc run --record`), those directly inside of it.
    pub requests: u64,
    /// Those whose end is not in the recording. Their sums are not compared.
    pub unfinished: u64,
    /// Requests, inner ones too, that were open where a part of the recording cannot be read. Their sums are not
    /// compared.
    pub torn: u64,
    /// Requests, inner ones too, whose account [includes others](Sums::includes_others). Their sums are not compared.
    pub with_others: u64,
    /// Events that cannot be replayed: of requests or blocks whose beginning is not in the recording, and charges of
    /// what was not made, after the end of their request and of all around it.
    pub left_out: u64,
    /// Requests whose blocks were made on several threads, and whose recorded peak differs from that of their events,
    /// whose order between threads is only as good as the clock.
    pub unordered_peaks: u64,
    /// How many blocks were made.
    pub blocks: u64,
    /// Blocks that were freed by another thread than the one that made them.
    pub freed_elsewhere: u64,
    /// The most bytes alive at one time, in the recorded order.
    pub peak_live_bytes: u64,
    /// The bytes that are never freed in the recording.
    pub live_at_end_bytes: u64,
}

/// A recording, or one route of it, made ready to be replayed.
#[derive(Debug)]
pub struct Plan {
    pub(super) lanes: Vec<Lane>,
    /// The beginnings of lanes, and ends, in their order. A lane that has no end here ends last.
    pub(super) turns: Vec<Turn>,
    /// The lane of the recorded main thread, which is replayed on the thread that replays: `malloc` gives memory of the
    /// main thread back to the system, and that of other threads hardly ever.
    pub(super) main: Option<u32>,
    pub(super) requests: Vec<Planned>,
    /// As the recording has them.
    pub(super) names: Vec<String>,
    pub(super) blocks: usize,
    /// The end of this many requests of routes is the middle of the replay.
    pub(super) middle: u64,
    pub(super) facts: Facts,
    pub(super) _file: ReadFrom,
}

/// The bytes of the file that a plan was read from, kept as long as the plan: from what is freed before a replay,
/// `malloc` would learn.
#[derive(Default)]
pub(super) struct ReadFrom(pub(super) Vec<u8>);

impl fmt::Debug for ReadFrom {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes", self.0.len())
    }
}

impl Plan {
    /// What the recording says of itself.
    #[must_use]
    pub fn facts(&self) -> Facts {
        self.facts
    }
}

/// What an account says, for people.
pub(super) fn plainly(sums: &Sums) -> String {
    let Sums { peak_bytes, total_bytes, blocks, live_bytes, .. } = sums;
    let blocks = if *blocks == 1 { "1 block".to_owned() } else { format!("{blocks} blocks") };
    format!("{blocks} of {total_bytes} bytes, {peak_bytes} at the peak and {live_bytes} at its end")
}
