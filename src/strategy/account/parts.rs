//! What of a request's account is not arrays: native blocks and Python objects, where it counts the whole request.

use super::refused::{RefusalNote, Refused};
use crate::unattributed::nobodys_bytes;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed};

/// The parts of a whole request's account. The sum is the account's own; these are changed beside it, under its lock.
#[derive(Debug)]
pub(crate) struct Parts {
    native_bytes: AtomicUsize,
    object_bytes: AtomicUsize,
    /// The account's peak when the next two were noted, and what they were then. They are noted before a change, and
    /// before they are read: since its last peak the account may have shrunk, but the parts have not changed.
    noted_peak_bytes: AtomicUsize,
    native_at_peak_bytes: AtomicUsize,
    object_at_peak_bytes: AtomicUsize,
    /// What was nobody's when the request began.
    nobodys_before: u64,
    /// And when it ended; `u64::MAX` until then.
    nobodys_after: AtomicU64,
    /// The sum of the squares of the weights of live samples, in units of [`UNIT`] squared: the variance of the sum.
    variance: AtomicU64,
    /// How many blocks were given though a limit had no room, since their callers do not survive a refusal.
    granted: AtomicU64,
    /// The last refusal that was not carried out for that reason. Changed under the own account's lock.
    overdraft: RefusalNote,
    /// Whether nobody was told of it.
    is_untold: AtomicBool,
    /// How many calls of Python's that import a module the request was begun within.
    #[cfg(ctxalloc_whole)]
    imports_around: AtomicUsize,
}

/// How many there are: of requests that blocks may be charged to, or are.
pub(crate) static WHOLE_REQUESTS: AtomicUsize = AtomicUsize::new(0);

impl Drop for Parts {
    fn drop(&mut self) {
        WHOLE_REQUESTS.fetch_sub(1, Relaxed);
    }
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
    /// What of the account's peak was arrays, native blocks and objects.
    pub(crate) array_at_peak_bytes: usize,
    pub(crate) native_at_peak_bytes: usize,
    pub(crate) object_at_peak_bytes: usize,
    /// How many bytes were asked for from its beginning to its end that no request was charged, in the whole process.
    pub(crate) nobodys_bytes: u64,
}

impl Parts {
    pub(super) fn begun() -> Arc<Self> {
        // A block that grows on another thread is seen from here on: its Context has the request after this.
        WHOLE_REQUESTS.fetch_add(1, Relaxed);
        Arc::new(Self {
            native_bytes: AtomicUsize::default(),
            object_bytes: AtomicUsize::default(),
            noted_peak_bytes: AtomicUsize::default(),
            native_at_peak_bytes: AtomicUsize::default(),
            object_at_peak_bytes: AtomicUsize::default(),
            nobodys_before: nobodys_bytes(),
            nobodys_after: AtomicU64::new(u64::MAX),
            variance: AtomicU64::default(),
            granted: AtomicU64::default(),
            overdraft: RefusalNote::default(),
            is_untold: AtomicBool::default(),
            #[cfg(ctxalloc_whole)]
            imports_around: AtomicUsize::default(),
        })
    }

    /// Under the account's lock, whose peak is this.
    pub(super) fn stats(&self, peak_bytes: usize) -> WholeStats {
        self.note_peak(peak_bytes);
        let native_at_peak_bytes = self.native_at_peak_bytes.load(Relaxed);
        let object_at_peak_bytes = self.object_at_peak_bytes.load(Relaxed);
        let nobodys_now = nobodys_bytes().min(self.nobodys_after.load(Relaxed));
        WholeStats {
            native_bytes: self.native_bytes.load(Relaxed),
            object_bytes: self.object_bytes.load(Relaxed),
            error_bytes: (self.variance.load(Relaxed) as f64).sqrt() as usize * UNIT,
            granted: self.granted.load(Relaxed),
            array_at_peak_bytes: peak_bytes.saturating_sub(native_at_peak_bytes + object_at_peak_bytes),
            native_at_peak_bytes,
            object_at_peak_bytes,
            nobodys_bytes: nobodys_now.saturating_sub(self.nobodys_before),
        }
    }

    /// What is nobody's from now on is after the request's end.
    pub(super) fn end(&self) {
        self.nobodys_after.store(nobodys_bytes(), Relaxed);
    }

    /// Notes what was alive at the account's peak, if that is a new one. Under the account's lock.
    pub(super) fn note_peak(&self, peak_bytes: usize) {
        if peak_bytes > self.noted_peak_bytes.load(Relaxed) {
            self.noted_peak_bytes.store(peak_bytes, Relaxed);
            self.native_at_peak_bytes.store(self.native_bytes.load(Relaxed), Relaxed);
            self.object_at_peak_bytes.store(self.object_bytes.load(Relaxed), Relaxed);
        }
    }

    // One writer at a time, under the account's lock, so no read-modify-write is needed.
    #[cfg(ctxalloc_whole)]
    pub(super) fn change(&self, weight: Weight, is_more: bool) {
        let part = if weight.is_object { &self.object_bytes } else { &self.native_bytes };
        let before = part.load(Relaxed);
        let after = if is_more { before.wrapping_add(weight.bytes) } else { before.wrapping_sub(weight.bytes) };
        part.store(after, Relaxed);
        if weight.is_sample {
            let (before, square) = (self.variance.load(Relaxed), (weight.bytes / UNIT).pow(2) as u64);
            let after = if is_more { before.wrapping_add(square) } else { before.wrapping_sub(square) };
            self.variance.store(after, Relaxed);
        }
    }

    /// A block was given though `refused` says that there is no room. Under the own account's lock.
    #[cfg(ctxalloc_whole)]
    pub(super) fn granted(&self, refused: &Refused) {
        self.granted.fetch_add(1, Relaxed);
        self.overdraft.fill(refused, refused.at + 1, 0);
        self.is_untold.store(true, Relaxed);
    }

    /// Whether nobody was told of the last overdraft. It orders nothing.
    #[cfg(any(ctxalloc_whole, feature = "python"))]
    pub(crate) fn is_untold(&self) -> bool {
        self.is_untold.load(Relaxed)
    }

    #[cfg(ctxalloc_whole)]
    pub(crate) fn note_imports_around(&self, calls: usize) {
        self.imports_around.store(calls, Relaxed);
    }

    #[cfg(ctxalloc_whole)]
    pub(crate) fn imports_around(&self) -> usize {
        self.imports_around.load(Relaxed)
    }

    #[cfg(ctxalloc_whole)]
    pub(crate) fn note_told(&self) {
        self.is_untold.store(false, Relaxed);
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
