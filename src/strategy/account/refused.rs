//! A refused charge, and the note that a request keeps of it for whoever asks why there was no memory.

use crate::error::Error;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed};

/// A charge that was refused.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub(crate) struct Refusal {
    /// [`Error::BudgetExceeded`], with the budget whose limit it was, or [`Error::RequestEnded`].
    pub error: Error,
    /// Whether nothing was allocated in the request since then.
    pub is_last: bool,
}

/// A refusal as it is passed up from where it happens: numbers only, so nothing is allocated.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Refused {
    /// The position in the chain of the account that refused; or [`ENDED`], or [`NO_MEMORY`].
    pub(super) at: usize,
    pub(super) limit_bytes: usize,
    pub(super) in_use_bytes: usize,
    /// What the request that asked holds of it.
    pub(super) held_bytes: usize,
    pub(crate) requested_bytes: usize,
    /// Whether it was refused because the request was chosen to make room.
    pub(super) is_chosen: bool,
}

/// Instead of an account: the request has ended and refuses memory.
pub(super) const ENDED: usize = usize::MAX - 1;
/// Instead of an account: the system or a strategy had no memory.
pub(super) const NO_MEMORY: usize = usize::MAX - 2;

/// How many refusals a request remembers. More than one, because cleaning up after a refusal may cause another.
pub(super) const REMEMBERED: usize = 4;

/// A remembered refusal. Changed under the own account's lock.
#[derive(Debug, Default)]
pub(super) struct RefusalNote {
    /// [`Refused::at`] plus one. Set by `fill`; 0 before the first refusal and once the refusal was taken.
    pub(super) at_plus_one: AtomicUsize,
    limit_bytes: AtomicUsize,
    in_use_bytes: AtomicUsize,
    held_bytes: AtomicUsize,
    requested_bytes: AtomicUsize,
    is_chosen: AtomicBool,
    /// The account's `total_blocks` at that moment.
    pub(super) made_before: AtomicU64,
}

impl RefusalNote {
    pub(super) fn read(&self) -> Refused {
        Refused {
            at: 0,
            limit_bytes: self.limit_bytes.load(Relaxed),
            in_use_bytes: self.in_use_bytes.load(Relaxed),
            held_bytes: self.held_bytes.load(Relaxed),
            requested_bytes: self.requested_bytes.load(Relaxed),
            is_chosen: self.is_chosen.load(Relaxed),
        }
    }

    pub(super) fn fill(&self, refused: &Refused, at_plus_one: usize, made_before: u64) {
        self.at_plus_one.store(at_plus_one, Relaxed);
        self.limit_bytes.store(refused.limit_bytes, Relaxed);
        self.in_use_bytes.store(refused.in_use_bytes, Relaxed);
        self.held_bytes.store(refused.held_bytes, Relaxed);
        self.requested_bytes.store(refused.requested_bytes, Relaxed);
        self.is_chosen.store(refused.is_chosen, Relaxed);
        self.made_before.store(made_before, Relaxed);
    }
}
