//! Layer 1: where bytes come from. One file per source, the only one that calls its system.
//!
//! A source hands out raw bytes and knows nothing of names, scopes or strategies: the C heap, mapped pages, SYCL
//! queues, the CUDA driver.
#![allow(unsafe_code, reason = "sources hand out raw memory")]

pub mod heap;
pub mod pages;

#[cfg(feature = "cuda")]
mod cuda;
mod huge;
mod locked;
#[cfg(target_os = "linux")]
mod memfd;
#[cfg(not(target_os = "linux"))]
mod no_memfd;
mod numa;
#[cfg(feature = "usm")]
mod sycl;

#[cfg(feature = "cuda")]
pub(crate) use cuda::Marks;
#[cfg(feature = "cuda")]
pub use cuda::{CudaDevice, CudaDriver, CudaKind, CudaManaged, CudaPinned, CudaPinnedOptions, CudaSource, cuda_mapped};
pub use huge::HugePages;
pub use locked::LockedPages;
#[cfg(target_os = "linux")]
pub(crate) use memfd::{Shared, can_share, grow_shared, map_shared};
#[cfg(not(target_os = "linux"))]
pub(crate) use no_memfd::{Shared, can_share, grow_shared, map_shared};
pub use numa::{NumaPages, NumaPolicy};
#[cfg(feature = "usm")]
pub use sycl::{Event, Queue, RowAxis, Runtime, UsmKind, UsmPages};

use std::fmt::Debug;
use std::ptr::NonNull;
use std::sync::Arc;

/// Where a pool gets its memory from: pages that can be mapped, committed, emptied and unmapped. All sizes are in
/// bytes.
///
/// A pool may call these functions while it holds its locks: they must use neither that pool nor
/// [`trim`](crate::trim), or they may wait for ever. One that panics costs the pool what it was called for (one block's
/// pages, or a mapping that is not unmapped); the pool goes on, and so does the thread `ctxalloc-decay`.
///
/// # Safety
/// - [`map`](Pages::map) returns `size_bytes` of writable memory at a multiple of `align`, which nobody else uses until
///   it is unmapped, and which is zero once it is committed;
/// - after a [`discard`](Pages::discard) or an [`empty`](Pages::empty) that returned true the memory is zero;
/// - [`commit`](Pages::commit) keeps contents or makes them zero;
/// - if the host cannot access the memory, [`clear`](Pages::clear) and [`copy`](Pages::copy) work by other means.
pub unsafe trait Pages: Debug + Send + Sync + 'static {
    /// Maps `size_bytes` of pages at a multiple of `align`; `None` if there are none.
    fn map(&self, size_bytes: usize, align: usize) -> Option<NonNull<u8>>;

    /// Makes pages usable, before the first block lies in them and again after a [`discard`](Pages::discard). Some of
    /// them may be committed already. Returns false if they cannot be used; the pool then discards them.
    ///
    /// # Safety
    /// - the pages lie in a mapping of this source, and nobody else has them.
    unsafe fn commit(&self, start: NonNull<u8>, size_bytes: usize) -> bool {
        let _ = (start, size_bytes);
        true
    }

    /// Unmaps a whole mapping.
    ///
    /// # Safety
    /// - `start` and `size_bytes` are those of one [`map`](Pages::map), and nobody uses it any more.
    unsafe fn unmap(&self, start: NonNull<u8>, size_bytes: usize);

    /// Returns the memory of some pages to the system but keeps their addresses, and undoes [`commit`](Pages::commit).
    /// Returns whether it did; then they are zero.
    ///
    /// # Safety
    /// - the pages lie in a mapping of this source, and nobody needs their contents.
    unsafe fn discard(&self, start: NonNull<u8>, size_bytes: usize) -> bool;

    /// Returns the memory of some pages to the system, and the pages stay committed. Returns whether it did; then they
    /// are zero.
    ///
    /// # Safety
    /// - as for [`discard`](Pages::discard).
    unsafe fn empty(&self, start: NonNull<u8>, size_bytes: usize) -> bool {
        // SAFETY: `discard` has the same contract.
        unsafe { self.discard(start, size_bytes) }
    }

    /// Writes zeros. Returns whether it could.
    ///
    /// # Safety
    /// - `start` has that many bytes in committed pages of this source, which nobody else uses.
    unsafe fn clear(&self, start: NonNull<u8>, size_bytes: usize) -> bool {
        // SAFETY: committed pages that nobody else uses (this function's contract) are writable.
        unsafe { start.write_bytes(0, size_bytes) };
        true
    }

    /// Copies from one block to another. Returns whether it could.
    ///
    /// # Safety
    /// - both have that many bytes in committed pages of this source, which nobody else uses; they do not overlap.
    unsafe fn copy(&self, to: NonNull<u8>, from: NonNull<u8>, size_bytes: usize) -> bool {
        // SAFETY: committed pages that nobody else uses and that do not overlap (this function's contract).
        unsafe { to.copy_from_nonoverlapping(from, size_bytes) };
        true
    }

    /// Moves what is in a block to another one, and returns the memory behind it to the system as it goes, so that
    /// there is not twice as much, unless the system refuses it (locked pages); its pages stay committed, as with
    /// [`empty`](Pages::empty). Returns whether it did; if not, or where it panics, nothing was moved. A pool asks for
    /// this when a large block moves to grow, and copies otherwise.
    ///
    /// # Safety
    /// - as for [`copy`](Pages::copy); `from` is the start of a page that a pool has from this source, and nobody needs
    ///   what is there afterwards.
    unsafe fn relocate(&self, to: NonNull<u8>, from: NonNull<u8>, size_bytes: usize) -> bool {
        let _ = (to, from, size_bytes);
        false
    }

    /// Whether the thread `ctxalloc-decay` may return old memory to the system. If not, only threads that use the pool
    /// do, and an idle pool keeps what it has.
    fn decays_by_itself(&self) -> bool {
        true
    }

    /// Whether a mapping takes addresses only, and memory no sooner than it is committed and touched. If so, a pool
    /// maps as much again behind a large block that grows, up to 1 GiB, so that it can grow in place.
    fn maps_lazily(&self) -> bool {
        false
    }

    /// The source for blocks of 2 MiB and more; `None` if this one serves them too.
    ///
    /// The pool rounds such blocks up to multiples of 2 MiB and cuts them at multiples of 2 MiB.
    fn huge(&self) -> Option<Arc<dyn Pages>> {
        None
    }
}

/// Private anonymous pages. Large mappings get huge pages if the system has some.
#[derive(Debug, Clone, Copy, Default)]
#[allow(clippy::exhaustive_structs, reason = "its name is its value")]
pub struct PrivatePages;

/// Mappings above this size ask for huge pages, as NumPy's default handler does. In bytes.
const HUGE_FROM: usize = 4 << 20;

// SAFETY: private anonymous mappings belong to this process alone and are zero when new (mmap(2)) and after
// `pages::discard`.
unsafe impl Pages for PrivatePages {
    fn map(&self, size_bytes: usize, align: usize) -> Option<NonNull<u8>> {
        let start = pages::map(size_bytes, align).ok()?;
        if size_bytes > HUGE_FROM {
            // SAFETY: the whole mapping that was just made.
            unsafe { pages::prefer_huge(start, size_bytes) };
        }
        Some(start)
    }

    /// Not while the process locks what it maps (`mlockall(MCL_FUTURE)`).
    fn maps_lazily(&self) -> bool {
        pages::are_mapped_lazily()
    }

    unsafe fn relocate(&self, to: NonNull<u8>, from: NonNull<u8>, size_bytes: usize) -> bool {
        // SAFETY: two blocks in private anonymous pages, of which nobody needs the old one afterwards (this function's
        // contract).
        unsafe { pages::relocate(to, from, size_bytes) };
        true
    }

    unsafe fn unmap(&self, start: NonNull<u8>, size_bytes: usize) {
        // SAFETY: a whole mapping of `pages::map`, not used any more (this function's contract).
        unsafe { pages::unmap(start, size_bytes) }
    }

    unsafe fn discard(&self, start: NonNull<u8>, size_bytes: usize) -> bool {
        // SAFETY: pages of `pages::map` whose contents nobody needs (this function's contract).
        unsafe { pages::discard(start, size_bytes) }
    }
}
