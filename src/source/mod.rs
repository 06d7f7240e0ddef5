//! Layer 1: where bytes come from. One file a source; each is the only place that speaks to its system.
//!
//! A source hands out raw bytes and knows nothing of names, scopes or strategies. Mapped pages, SYCL queues
//! and device drivers stand beside the C heap here.
#![allow(unsafe_code, reason = "sources hand out raw memory")]

pub mod heap;
pub mod pages;

mod huge;
mod locked;
mod numa;
mod shared;

pub use huge::HugePages;
pub use locked::LockedPages;
pub use numa::{NumaPages, NumaPolicy};
pub(crate) use shared::{Shared, grow_shared, map_shared};

use std::fmt::Debug;
use std::ptr::NonNull;

/// Where a pool gets its regions from: pages that can be mapped, given back, and emptied.
///
/// A mapping is either cut into spans, whose pages are [committed](Pages::commit) when the first of them is taken and
/// [decommitted](Pages::decommit) when they come back; or it is [one block](Pages::map_block), ready for use.
///
/// # Safety
/// - [`map`](Pages::map) and [`map_block`](Pages::map_block) return `size_bytes` of zeroed, writable memory at a multiple
///   of `align`, not in use by anybody else until it is unmapped;
/// - after a [`discard`](Pages::discard) that said true the memory is zero;
/// - [`commit`](Pages::commit) changes no contents.
pub unsafe trait Pages: Debug + Send + Sync + 'static {
    /// `size_bytes` of zero pages at a multiple of `align`, or nothing.
    fn map(&self, size_bytes: usize, align: usize) -> Option<NonNull<u8>>;

    /// A mapping for one large block: as [`map`](Pages::map), and committed.
    fn map_block(&self, size_bytes: usize, align: usize) -> Option<NonNull<u8>> {
        let start = self.map(size_bytes, align)?;
        // SAFETY: the mapping just made.
        if unsafe { self.commit(start, size_bytes) } {
            return Some(start);
        }
        // SAFETY: as above; nobody knows it yet.
        unsafe { self.unmap(start, size_bytes) };
        None
    }

    /// Makes pages fit for blocks before the first one lies in them. False: they cannot be used, and nothing changed.
    ///
    /// # Safety
    /// - the pages lie in a mapping of this source, and nobody else has them.
    unsafe fn commit(&self, start: NonNull<u8>, size_bytes: usize) -> bool {
        let _ = (start, size_bytes);
        true
    }

    /// Takes back what [`commit`](Pages::commit) did to pages in which no block lies any more; their contents may go. Not
    /// called before a whole mapping is [unmapped](Pages::unmap).
    ///
    /// # Safety
    /// - the pages were committed, and nobody uses them.
    unsafe fn decommit(&self, start: NonNull<u8>, size_bytes: usize) {
        let _ = (start, size_bytes);
    }

    /// Gives a whole mapping back.
    ///
    /// # Safety
    /// - `start` and `size_bytes` are those of one [`map`](Pages::map) or [`map_block`](Pages::map_block), and nobody uses
    ///   it any more.
    unsafe fn unmap(&self, start: NonNull<u8>, size_bytes: usize);

    /// Gives the memory of some pages back but not their addresses. Says whether it could; then they are zero.
    ///
    /// # Safety
    /// - the pages lie in a mapping of this source, and nobody needs their contents.
    unsafe fn discard(&self, start: NonNull<u8>, size_bytes: usize) -> bool;
}

/// Private anonymous pages; huge ones behind large mappings, where the system has them.
#[derive(Debug, Clone, Copy, Default)]
pub struct PrivatePages;

/// From this size on huge pages pay: what NumPy's own default uses too.
const HUGE_FROM: usize = 4 << 20;

// SAFETY: private anonymous mappings are zero when fresh and after MADV_DONTNEED, and ours alone (mmap(2), madvise(2)).
unsafe impl Pages for PrivatePages {
    fn map(&self, size_bytes: usize, align: usize) -> Option<NonNull<u8>> {
        let start = pages::map(size_bytes, align)?;
        if size_bytes > HUGE_FROM {
            // SAFETY: the mapping just made.
            unsafe { pages::prefer_huge(start, size_bytes) };
        }
        Some(start)
    }

    unsafe fn unmap(&self, start: NonNull<u8>, size_bytes: usize) {
        // SAFETY: the caller's promises are the same.
        unsafe { pages::unmap(start, size_bytes) }
    }

    unsafe fn discard(&self, start: NonNull<u8>, size_bytes: usize) -> bool {
        // SAFETY: the caller's promises are the same.
        unsafe { pages::discard(start, size_bytes) }
    }
}
