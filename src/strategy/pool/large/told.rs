//! For tests: private pages of a source that does what it is told, and counts.

use crate::source::{Pages, PrivatePages};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicUsize, Ordering};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Discards {
    All,
    None,
    Panics,
}

#[derive(Debug)]
pub(super) struct Told {
    pub(super) discards: Discards,
    pub(super) is_lazy: bool,
    /// How often it was asked whether it is.
    pub(super) asked: AtomicUsize,
    /// How many commits it refuses from now on, once it has made `commits`.
    pub(super) refusals: AtomicUsize,
    pub(super) commits: AtomicUsize,
    pub(super) mapped_bytes: AtomicUsize,
    pub(super) given_back_bytes: AtomicUsize,
}

impl Default for Told {
    fn default() -> Self {
        let [asked, refusals, commits, mapped_bytes, given_back_bytes] = [(); 5].map(|()| AtomicUsize::new(0));
        Self { discards: Discards::All, is_lazy: true, asked, refusals, commits, mapped_bytes, given_back_bytes }
    }
}

fn count_down(left: &AtomicUsize) -> bool {
    left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1)).is_ok()
}

impl Told {
    /// It makes so many commits, and no more.
    pub(super) fn that_commits(commits: usize) -> Self {
        Self { commits: AtomicUsize::new(commits), refusals: AtomicUsize::new(usize::MAX), ..Self::default() }
    }
}

// SAFETY: what it does is PrivatePages'.
unsafe impl Pages for Told {
    fn map(&self, size_bytes: usize, align: usize) -> Option<NonNull<u8>> {
        self.mapped_bytes.fetch_add(size_bytes, Ordering::Relaxed);
        PrivatePages.map(size_bytes, align)
    }

    unsafe fn commit(&self, _start: NonNull<u8>, _size_bytes: usize) -> bool {
        count_down(&self.commits) || !count_down(&self.refusals)
    }

    fn maps_lazily(&self) -> bool {
        self.asked.fetch_add(1, Ordering::Relaxed);
        self.is_lazy
    }

    unsafe fn unmap(&self, start: NonNull<u8>, size_bytes: usize) {
        self.given_back_bytes.fetch_add(size_bytes, Ordering::Relaxed);
        // SAFETY: this function's contract is the same.
        unsafe { PrivatePages.unmap(start, size_bytes) }
    }

    unsafe fn discard(&self, start: NonNull<u8>, size_bytes: usize) -> bool {
        match self.discards {
            Discards::All => {}
            Discards::None => return false,
            Discards::Panics => panic!("the source"),
        }
        self.given_back_bytes.fetch_add(size_bytes, Ordering::Relaxed);
        // SAFETY: this function's contract is the same.
        unsafe { PrivatePages.discard(start, size_bytes) }
    }
}
