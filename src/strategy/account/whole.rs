//! What of a request's account is not arrays: native blocks and Python objects, where it counts the whole request.

use super::{Account, Chain};
use crate::sync::with_all;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};

/// The parts of a whole request's account. The sum is the account's own; these are changed beside it.
#[derive(Debug, Default)]
pub(crate) struct Parts {
    native_bytes: AtomicUsize,
    object_bytes: AtomicUsize,
    /// The sum of the squares of the weights of live samples, in units of [`UNIT`] squared: the variance of the sum.
    variance: AtomicU64,
    /// How many blocks were given though a limit had no room, since their callers do not survive a refusal.
    granted: AtomicU64,
}

/// In bytes. Samples weigh some KiB at least, so little is lost.
const UNIT: usize = 64;

/// What a native block or an object weighs in its account.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Weight {
    pub(crate) bytes: usize,
    pub(crate) is_object: bool,
    /// It stands for others that were not looked at.
    pub(crate) is_sample: bool,
}

/// What a whole request holds beside arrays. Together with the arrays it is what its account says.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct WholeStats {
    /// The bytes of live native blocks: `malloc` and its kin.
    pub native_bytes: usize,
    /// The bytes of live Python objects.
    pub object_bytes: usize,
    /// The standard deviation of the estimate for small blocks, in bytes: two times in three the error is smaller.
    pub error_bytes: usize,
    /// How many blocks were given beyond a limit, because their callers do not survive a refusal.
    pub granted: u64,
}

impl Parts {
    pub(crate) fn stats(&self) -> WholeStats {
        WholeStats {
            native_bytes: self.native_bytes.load(Relaxed),
            object_bytes: self.object_bytes.load(Relaxed),
            error_bytes: (self.variance.load(Relaxed) as f64).sqrt() as usize * UNIT,
            granted: self.granted.load(Relaxed),
        }
    }

    // Relaxed, and wrapping: what is read together is ordered by other means, and each addition is undone once.
    fn change(&self, weight: Weight, is_more: bool) {
        let part = if weight.is_object { &self.object_bytes } else { &self.native_bytes };
        let square = if weight.is_sample { (weight.bytes / UNIT).pow(2) as u64 } else { 0 };
        if is_more {
            part.fetch_add(weight.bytes, Relaxed);
            self.variance.fetch_add(square, Relaxed);
        } else {
            part.fetch_sub(weight.bytes, Relaxed);
            self.variance.fetch_sub(square, Relaxed);
        }
    }

    fn granted(&self) {
        self.granted.fetch_add(1, Relaxed);
    }
}

/// For the chain of a request that counts the whole of it.
impl Chain {
    fn change_parts(&self, weight: Weight, is_more: bool) {
        if let Some(parts) = &self.whole {
            parts.change(weight, is_more);
        }
    }

    /// Charges a block; false if a limit has no room, which is remembered. `first` is as for `take_block`.
    pub(crate) fn take_whole(&self, weight: Weight, first: impl FnOnce()) -> bool {
        let is_taken = self.take_block(weight.bytes, false, first);
        if is_taken {
            self.change_parts(weight, true);
        }
        is_taken
    }

    /// Charges a block whatever the limits say: the overdraft is on the accounts. `is_granted`: it is told at the
    /// request's end.
    pub(crate) fn take_whole_anyway(&self, weight: Weight, is_granted: bool, first: impl FnOnce()) {
        with_all(self.accounts(), || {
            self.accounts().iter().for_each(|account| account.take(weight.bytes, 1));
            self.add_own(first);
        });
        self.change_parts(weight, true);
        if let (true, Some(parts)) = (is_granted, &self.whole) {
            parts.granted();
        }
    }

    /// Whether all accounts have room, or exceed their limit by no more than `reserve_bytes` with it.
    pub(crate) fn has_reserve_for(&self, bytes: usize, reserve_bytes: usize) -> bool {
        let fits = |account: &Account| {
            account.live_bytes().saturating_add(bytes) <= account.limit_bytes().saturating_add(reserve_bytes)
        };
        self.accounts().iter().all(|account| fits(account))
    }

    /// Changes what a block weighs; false if a limit has no room, which is remembered.
    pub(crate) fn reweigh(&self, old: Weight, new: Weight, is_forced: bool) -> bool {
        let growth = new.bytes.saturating_sub(old.bytes);
        if growth > 0 {
            if is_forced {
                with_all(self.accounts(), || self.accounts().iter().for_each(|account| account.take(growth, 0)));
                if let Some(parts) = &self.whole {
                    parts.granted();
                }
            } else if let Err(refused) = self.take(growth, 0) {
                self.remember(refused);
                return false;
            }
        } else if old.bytes > new.bytes {
            self.give_back(old.bytes - new.bytes, 0);
        }
        self.change_parts(old, false);
        self.change_parts(new, true);
        true
    }

    /// Gives a block's charge back; whether it was the last block of an ended request. The parts change first: the
    /// chain may be gone afterwards.
    #[must_use]
    pub(crate) fn give_whole_back(&self, weight: Weight) -> bool {
        self.change_parts(weight, false);
        self.give_block_back(weight.bytes)
    }
}
