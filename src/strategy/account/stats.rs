//! An account's numbers, all of one moment.

use super::{Account, RELAXED};
use crate::recording::Sums;

/// A request's numbers at one moment. All bytes are requested sizes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Stats {
    /// The bytes of live blocks.
    pub live_bytes: usize,
    /// The number of live blocks.
    pub live_blocks: usize,
    /// The largest value of `live_bytes` so far.
    pub peak_bytes: usize,
    /// The bytes of all blocks ever allocated. A resize adds what it grew by.
    pub total_bytes: u64,
    /// The number of blocks ever allocated.
    pub total_blocks: u64,
    /// How many requests for memory were refused, by its own limit or because it had ended; also by the limit of its
    /// heap. A limit of the heap that refuses nothing is one, if it was exceeded.
    pub refused: u64,
    /// By how many bytes `live_bytes` exceeds its own limit, because blocks of up to 1 KiB may
    /// ([`Builder::overdraft_bytes`](crate::request::Builder::overdraft_bytes)) or because the limit was lowered.
    pub overdraft_bytes: usize,
}

impl Stats {
    /// As a recording has them.
    pub(crate) fn as_recorded(&self) -> Sums {
        Sums {
            peak_bytes: self.peak_bytes as u64,
            total_bytes: self.total_bytes,
            blocks: self.total_blocks,
            live_bytes: self.live_bytes as u64,
            refused: self.refused,
            includes_others: false,
        }
    }
}

impl Account {
    /// All numbers at one moment.
    pub(crate) fn stats(&self) -> Stats {
        self.lock.with(|| {
            self.call_in();
            self.numbers()
        })
    }

    pub(super) fn numbers(&self) -> Stats {
        let live_bytes = self.live_bytes.load(RELAXED);
        Stats {
            live_bytes,
            live_blocks: self.live_blocks.load(RELAXED),
            peak_bytes: self.peak_bytes.load(RELAXED),
            total_bytes: self.total_bytes.load(RELAXED),
            total_blocks: self.total_blocks.load(RELAXED),
            refused: self.refused.load(RELAXED),
            overdraft_bytes: live_bytes.saturating_sub(self.limit_bytes.load(RELAXED)),
        }
    }
}
