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
#[cfg(feature = "usm")]
mod sycl;

pub use huge::HugePages;
pub use locked::LockedPages;
pub use numa::{NumaPages, NumaPolicy};
pub(crate) use shared::{Shared, grow_shared, map_shared};
#[cfg(feature = "usm")]
pub use sycl::{Event, Queue, RowAxis, Runtime, UsmKind, UsmPages};

use std::fmt::Debug;
use std::ptr::NonNull;
use std::sync::Arc;

/// Where a pool gets its memory from: pages that can be mapped, made fit for use, emptied, and given back.
///
/// # Safety
/// - [`map`](Pages::map) returns `size_bytes` of writable memory at a multiple of `align`, not in use by anybody else until
///   it is unmapped, which is zero, at the latest once it is committed;
/// - after a [`discard`](Pages::discard) or an [`empty`](Pages::empty) that said true the memory is zero;
/// - [`commit`](Pages::commit) leaves contents as they are, or makes them zero;
/// - where the host cannot read or write the memory, [`clear`](Pages::clear) and [`copy`](Pages::copy) do it in another way.
pub unsafe trait Pages: Debug + Send + Sync + 'static {
    /// `size_bytes` of pages at a multiple of `align`, or nothing.
    fn map(&self, size_bytes: usize, align: usize) -> Option<NonNull<u8>>;

    /// Makes pages fit for blocks, before the first block lies in them and again after a [`discard`](Pages::discard).
    /// Some of them may be fit already. False: they cannot be used; the pool gives them back by `discard`.
    ///
    /// # Safety
    /// - the pages lie in a mapping of this source, and nobody else has them.
    unsafe fn commit(&self, start: NonNull<u8>, size_bytes: usize) -> bool {
        let _ = (start, size_bytes);
        true
    }

    /// Gives a whole mapping back.
    ///
    /// # Safety
    /// - `start` and `size_bytes` are those of one [`map`](Pages::map), and nobody uses it any more.
    unsafe fn unmap(&self, start: NonNull<u8>, size_bytes: usize);

    /// Gives the memory of some pages back but not their addresses, and undoes [`commit`](Pages::commit). Says whether it
    /// could; then they are zero.
    ///
    /// # Safety
    /// - the pages lie in a mapping of this source, and nobody needs their contents.
    unsafe fn discard(&self, start: NonNull<u8>, size_bytes: usize) -> bool;

    /// Gives the memory of some pages back that stay committed. Says whether it could; then they are zero.
    ///
    /// # Safety
    /// - as for [`discard`](Pages::discard).
    unsafe fn empty(&self, start: NonNull<u8>, size_bytes: usize) -> bool {
        // SAFETY: the caller's promises are the same.
        unsafe { self.discard(start, size_bytes) }
    }

    /// Writes zeros. Says whether it could.
    ///
    /// # Safety
    /// - `start` has that many bytes in committed pages of this source, which nobody else uses.
    unsafe fn clear(&self, start: NonNull<u8>, size_bytes: usize) -> bool {
        // SAFETY: the caller vouches for the bytes.
        unsafe { start.write_bytes(0, size_bytes) };
        true
    }

    /// Copies from one block to another. Says whether it could.
    ///
    /// # Safety
    /// - both have that many bytes in committed pages of this source, which nobody else uses; they do not overlap.
    unsafe fn copy(&self, to: NonNull<u8>, from: NonNull<u8>, size_bytes: usize) -> bool {
        // SAFETY: the caller vouches for the bytes.
        unsafe { to.copy_from_nonoverlapping(from, size_bytes) };
        true
    }

    /// Whether a thread of the process may give memory back that nobody used for a while (`ctxalloc-decay`). Where not, the
    /// threads that use the pool do, and a pool that nobody uses keeps what it has.
    fn decays_by_itself(&self) -> bool {
        true
    }

    /// Pages of another kind for blocks of 2 MiB and more; nothing where they are of this kind too.
    ///
    /// Such blocks are cut in whole multiples of 2 MiB, at multiples of 2 MiB.
    fn huge(&self) -> Option<Arc<dyn Pages>> {
        None
    }
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
