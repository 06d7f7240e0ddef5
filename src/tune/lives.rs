//! `Lives`: when each thread of a recording begins and ends, so that those of a replay do too.
//!
//! A thread's end gives its caches up, and its arena in the C heap to the next thread. A server that has a thread for
//! each request would otherwise look as if it had all of them at once.

use super::steps::Turn;
use crate::error::Error;
use crate::recording::Recording;
use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};

#[derive(Debug, Default)]
pub(super) struct Lives {
    /// When the recording's threads end; those that are missing never do.
    ends: HashMap<u32, u64>,
    /// Lanes that have begun, the one that ends first at the top.
    alive: BinaryHeap<Reverse<(u64, u32)>>,
    turns: Vec<Turn>,
    pub(super) most: usize,
}

impl Lives {
    pub(super) fn of(recording: &Recording) -> Result<Self, Error> {
        Ok(Self { ends: recording.thread_ends()?, ..Self::default() })
    }

    /// Ends the lanes whose thread had ended before this time.
    pub(super) fn end_before(&mut self, at_ns: u64) {
        while let Some(&Reverse((end, lane))) = self.alive.peek()
            && end < at_ns
        {
            self.alive.pop();
            self.turns.push(Turn { lane, is_end: true });
        }
    }

    /// How many there are now.
    pub(super) fn count(&self) -> usize {
        self.alive.len()
    }

    pub(super) fn begin(&mut self, lane: u32, thread: u32) {
        self.alive.push(Reverse((self.ends.get(&thread).copied().unwrap_or(u64::MAX), lane)));
        self.turns.push(Turn { lane, is_end: false });
        self.most = self.most.max(self.alive.len());
    }

    pub(super) fn into_turns(self) -> Vec<Turn> {
        self.turns
    }
}
