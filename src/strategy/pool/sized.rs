//! Blocks of a pool whose requested size is known to the byte: requests count these sizes.
//!
//! The note of the size is in the region's record (`region`), not in the block, so it costs the block nothing.

use super::region;
use super::resize::{Unfinished, moved_to};
use super::{Pool, classes};
use crate::source::Pages;
use crate::strategy::Strategy;
use crate::survived::survived;
use std::ptr::NonNull;

impl Pool {
    /// How many bytes were requested.
    ///
    /// # Safety
    /// - `block` came from [`allocate_sized`](Self::allocate_sized) or [`resize_sized`](Self::resize_sized) of a pool
    ///   over any pages, and was not released.
    #[inline]
    pub(crate) unsafe fn requested_bytes(block: NonNull<u8>) -> usize {
        // SAFETY: the block is live (this function's contract), so its region is in the map.
        let region = unsafe { region::find(block.addr().get()) };
        region.requested_at(block.addr().get())
    }

    /// Notes another size than was requested.
    ///
    /// # Safety
    /// - as for [`requested_bytes`](Self::requested_bytes).
    pub(crate) unsafe fn note_requested(block: NonNull<u8>, size_bytes: usize) {
        // SAFETY: the block is live (this function's contract), so its region is in the map.
        let region = unsafe { region::find(block.addr().get()) };
        let noted = region.note_requested(block.addr().get(), size_bytes);
        debug_assert!(noted, "a block with a note has memory for it");
    }
}

impl<P: Pages> Pool<P> {
    /// [`allocate`](Strategy::allocate), or `allocate_zeroed`, that notes the requested size. Up to 48 bytes it is a
    /// tiny block, which is aligned to 16. It may be released like any other block of the pool.
    #[inline]
    pub(crate) fn allocate_sized(&self, size_bytes: usize, zeroed: bool) -> Option<NonNull<u8>> {
        let class = classes::TIGHT.find(size_bytes);
        self.noted(self.make(class, size_bytes, zeroed)?, class, size_bytes)
    }

    /// A new block, of this class or large, with a note of its requested size. Without memory for that it is released.
    #[inline]
    fn noted(&self, block: NonNull<u8>, class: Option<usize>, size_bytes: usize) -> Option<NonNull<u8>> {
        let address = block.addr().get();
        // SAFETY: the block was just made, so its region is in the map.
        let region = unsafe { region::find(address) };
        let is_noted = match class {
            Some(class) => region.note_small(address, class, size_bytes),
            None => region.note_requested(address, size_bytes),
        };
        if is_noted {
            return Some(block);
        }
        // SAFETY: the callers have just made it from this pool, and nobody else has it.
        unsafe { self.release(block) };
        None
    }

    /// [`release`](Strategy::release) that returns the noted size.
    ///
    /// # Safety
    /// - as for `release`; `block` came from [`allocate_sized`](Self::allocate_sized) or
    ///   [`resize_sized`](Self::resize_sized).
    #[inline]
    pub(crate) unsafe fn release_sized(&self, block: NonNull<u8>) -> usize {
        let address = block.addr().get();
        // SAFETY: the block is live (this function's contract), so its region is in the map.
        let region = unsafe { region::find(address) };
        let Some(class) = region.class_at(address) else {
            let requested_bytes = region.requested_at(address);
            self.inner.release_large(region, block);
            return requested_bytes;
        };
        let requested_bytes = region.requested_small(address, class);
        self.release_small(class, block);
        requested_bytes
    }

    /// [`resize`](Strategy::resize) that notes the new size. A failure leaves the block and its size as they were.
    ///
    /// # Safety
    /// - `block` came from [`allocate_sized`](Self::allocate_sized) or [`resize_sized`](Self::resize_sized) of this
    ///   pool and was not released; after `Some` the old pointer is not used again.
    pub(crate) unsafe fn resize_sized(&self, block: NonNull<u8>, new_size_bytes: usize) -> Option<NonNull<u8>> {
        // SAFETY: the block is live and from this pool (this function's contract).
        if unsafe { self.resize_in_place(block, new_size_bytes) } {
            // SAFETY: the block is live, so its region is in the map.
            let region = unsafe { region::find(block.addr().get()) };
            // This cannot fail: the block has a note, so there is memory for it.
            return region.note_requested(block.addr().get(), new_size_bytes).then_some(block);
        }
        // SAFETY: the block is live and has a note.
        let old_size_bytes = unsafe { Pool::requested_bytes(block) };
        let grows = new_size_bytes > old_size_bytes && new_size_bytes > classes::MAX;
        let moved = if grows {
            self.allocate_to_grow(new_size_bytes).and_then(|block| self.noted(block, None, new_size_bytes))
        } else {
            self.allocate_sized(new_size_bytes, false)
        }?;
        // SAFETY: it was just made, and is not returned unless it is finished.
        let unfinished = unsafe { Unfinished::new(self, moved) };
        // SAFETY: both blocks are live, hence disjoint, and have at least the smaller of the two sizes, more than which
        // nobody needs; both are of this pool.
        if !unsafe { moved_to(&self.inner, moved, block, old_size_bytes.min(new_size_bytes), grows) } {
            return None;
        }
        // A panic from here on would tell the caller that the old block is still there.
        // SAFETY: a live block of this pool. The caller uses only the other one from here on.
        survived(|| unsafe { self.release(block) });
        Some(unfinished.finish())
    }
}
