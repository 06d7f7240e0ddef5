//! Small blocks that are resized to others which the thread keeps: by one look at the record.

use super::resize::{Unfinished, stays_small};
use super::{Pool, classes, local, region};
use crate::source::Pages;
use crate::survived::survived;
use std::ptr::NonNull;

impl<P: Pages> Pool<P> {
    /// [`resize`](crate::strategy::Strategy::resize) of a small block to one that this thread keeps; `None`, and
    /// nothing was done, where it is not that.
    ///
    /// # Safety
    /// - `block` came from this pool and was not released; after `Some` the old pointer is not used again.
    #[inline]
    pub(super) unsafe fn resize_kept(&self, block: NonNull<u8>, new_size_bytes: usize) -> Option<NonNull<u8>> {
        let address = block.addr().get();
        // SAFETY: the block is live (this function's contract), so its region is in the map.
        let class = unsafe { region::find(address) }.class_at(address)?;
        let room = classes::bytes(class);
        if stays_small(room, new_size_bytes) {
            return Some(block);
        }
        // Who has a tiny block needs no more than its alignment.
        let is_tiny = room.max(new_size_bytes) <= classes::TINY_MAX;
        let new_class =
            if is_tiny { classes::TIGHT.of(new_size_bytes) } else { classes::ALIGNED.find(new_size_bytes)? };
        // SAFETY: a live block of this class, which has room for so many bytes; the other one has no less.
        unsafe { self.move_kept(block, class, new_class, room.min(new_size_bytes)) }
    }

    /// The same where the block was made for `size_bytes` and an alignment of 16 at most, and is to have no larger
    /// one.
    ///
    /// # Safety
    /// - as for [`resize_kept`](Self::resize_kept), and `block` has `size_bytes` bytes.
    #[inline(never)]
    pub(super) unsafe fn resize_kept_tight(
        &self,
        block: NonNull<u8>,
        size_bytes: usize,
        new_size_bytes: usize,
    ) -> Option<NonNull<u8>> {
        let class = classes::TIGHT.find(size_bytes)?;
        let new_class = classes::TIGHT.find(new_size_bytes)?;
        let address = block.addr().get();
        // SAFETY: the block is live (this function's contract), so its region is in the map.
        if !unsafe { region::find(address) }.has_class_at(address, class) {
            return None;
        }
        if class == new_class || (classes::is_tiny(class) && new_size_bytes < size_bytes) {
            return Some(block);
        }
        // SAFETY: a live block of this class with `size_bytes` bytes; the other one has `new_size_bytes`.
        unsafe { self.move_kept(block, class, new_class, size_bytes.min(new_size_bytes)) }
    }

    /// Moves a block to one of another class that this thread keeps, if it keeps one.
    ///
    /// # Safety
    /// - `block` is a live block of this pool and of `class`; after `Some` it is not used again;
    /// - blocks of both classes have `size_bytes`, and of this one nobody needs more.
    #[inline]
    unsafe fn move_kept(
        &self,
        block: NonNull<u8>,
        class: usize,
        new_class: usize,
        size_bytes: usize,
    ) -> Option<NonNull<u8>> {
        let inner = &*self.inner;
        let moved = local::pop(inner.number.serial(), new_class)?;
        // SAFETY: it was just made, and is not returned unless it is finished.
        let unfinished = unsafe { Unfinished::new(self, moved) };
        // SAFETY: two live blocks with so many bytes in committed pages of the source (this function's contract).
        if !unsafe { inner.heap.source.copy(moved, block, size_bytes) } {
            return None;
        }
        if !local::push(inner.number.serial(), class, block) {
            survived(|| self.release_small_slowly(class, block)); // as in `resize_by`
        }
        Some(unfinished.finish())
    }
}
