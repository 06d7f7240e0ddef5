//! What of a request's account is not arrays: native blocks and Python objects, where it counts the whole request.

use super::refused::{RefusalNote, Refused};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed};

/// The parts of a whole request's account. The sum is the account's own; these are changed beside it.
#[derive(Debug, Default)]
pub(crate) struct Parts {
    native_bytes: AtomicUsize,
    object_bytes: AtomicUsize,
    /// The sum of the squares of the weights of live samples, in units of [`UNIT`] squared: the variance of the sum.
    variance: AtomicU64,
    /// How many blocks were given though a limit had no room, since their callers do not survive a refusal.
    granted: AtomicU64,
    /// The last refusal that was not carried out for that reason. Changed under the own account's lock.
    overdraft: RefusalNote,
    /// Whether nobody was told of it.
    is_untold: AtomicBool,
}

/// In bytes. Samples weigh some KiB at least, so little is lost.
const UNIT: usize = 64;

/// What a native block or an object weighs in its account.
#[cfg(ctxalloc_whole)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Weight {
    pub(crate) bytes: usize,
    pub(crate) is_object: bool,
    /// It stands for others that were not looked at.
    pub(crate) is_sample: bool,
}

/// What a whole request holds beside arrays. Together with the arrays it is what its account says.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct WholeStats {
    /// The bytes of live native blocks: `malloc` and its kin.
    pub(crate) native_bytes: usize,
    /// The bytes of live Python objects.
    pub(crate) object_bytes: usize,
    /// The standard deviation of the estimate for small blocks, in bytes: two times in three the error is smaller.
    pub(crate) error_bytes: usize,
    /// How many blocks were given beyond a limit, because their callers do not survive a refusal.
    pub(crate) granted: u64,
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
    #[cfg(ctxalloc_whole)]
    pub(super) fn change(&self, weight: Weight, is_more: bool) {
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

    /// A block was given though `refused` says that there is no room. Under the own account's lock.
    #[cfg(ctxalloc_whole)]
    pub(super) fn granted(&self, refused: &Refused) {
        self.granted.fetch_add(1, Relaxed);
        self.overdraft.fill(refused, refused.at + 1, 0);
        self.is_untold.store(true, Relaxed);
    }

    /// The overdraft that nobody was told of; with `again` the last one in any case. Under the own account's lock.
    pub(super) fn overdraft(&self, again: bool) -> Option<Refused> {
        let is_told = !self.is_untold.swap(false, Relaxed);
        let at_plus_one = self.overdraft.at_plus_one.load(Relaxed);
        if at_plus_one == 0 || (is_told && !again) {
            return None;
        }
        Some(Refused { at: at_plus_one - 1, ..self.overdraft.read() })
    }
}
