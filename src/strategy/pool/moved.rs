//! Small blocks that are resized to others which the thread keeps: by one look at the record.

use super::resize::{Unfinished, stays_small};
use super::{Pool, classes, local, region};
use crate::source::Pages;
use crate::survived::survived;
use std::ptr::NonNull;

impl<P: Pages> Pool<P> {
    /// [`resize`](crate::strategy::Strategy::resize) of a small block to one that this thread keeps; `None`, and nothing was done, where
    /// it is not that.
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
        let inner = &*self.inner;
        let moved = local::pop(&inner.number, new_class)?;
        // SAFETY: it was just made, and is not returned unless it is finished.
        let unfinished = unsafe { Unfinished::new(self, moved) };
        // SAFETY: two live blocks with so many bytes in committed pages of the source.
        if !unsafe { inner.heap.source.copy(moved, block, room.min(new_size_bytes)) } {
            return None;
        }
        if !local::push(&inner.number, class, block) {
            survived(|| self.release_small_slowly(class, block)); // as in `resize_by`
        }
        Some(unfinished.finish())
    }
}
