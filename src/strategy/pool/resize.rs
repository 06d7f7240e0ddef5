//! Resizing and clearing blocks of a pool or an arena: both cut their blocks from regions in the same way.

use super::geometry::PAGE;
use super::inner::Inner;
use super::large::LEFT_FROM;
use super::{classes, region};
use crate::source::Pages;
use crate::strategy::Strategy;
use crate::survived::survived;
use std::mem::ManuallyDrop;
use std::ptr::NonNull;

/// Whether a block has room for `new_size_bytes`, and not too much.
///
/// # Safety
/// - `block` came from a pool and was not released.
#[cfg(feature = "cuda")]
pub(in crate::strategy) unsafe fn stays(block: NonNull<u8>, new_size_bytes: usize) -> bool {
    // SAFETY: the block is live (this function's contract).
    let room = unsafe { room_bytes(block) };
    if room <= classes::MAX {
        stays_small(room, new_size_bytes)
    } else {
        super::large::Large::fits(room, new_size_bytes)
    }
}

/// A tiny block stays however small it becomes: to move it would save less than a cache line.
pub(super) fn stays_small(room_bytes: usize, new_size_bytes: usize) -> bool {
    new_size_bytes <= room_bytes
        && (room_bytes <= classes::TINY_MAX || classes::bytes(classes::ALIGNED.of(new_size_bytes)) == room_bytes)
}

/// Resizes a block in place: if its size class stays the same, or if it is large, and what it grows by is free behind
/// it. False where it has to move.
///
/// # Safety
/// - `block` came from a strategy over this pool and was not released.
pub(super) unsafe fn resized_in_place<P: Pages>(pool: &Inner<P>, block: NonNull<u8>, new_size_bytes: usize) -> bool {
    let address = block.addr().get();
    // SAFETY: the block is live (this function's contract), so its region is in the map.
    let region = unsafe { region::find(address) };
    match region.class_at(address) {
        Some(class) => stays_small(classes::bytes(class), new_size_bytes),
        None => {
            // One that is smaller than large ones are was made to grow: it shrinks to a small one, if by half.
            let room = region.large_pages_at(address).saturating_mul(PAGE);
            let least = if room > classes::MAX { classes::MAX } else { room / 2 };
            new_size_bytes > least && pool.resize_large(region, block, new_size_bytes)
        }
    }
}

/// How many bytes a block has room for.
///
/// # Safety
/// - `block` came from a pool and was not released.
pub(crate) unsafe fn room_bytes(block: NonNull<u8>) -> usize {
    // SAFETY: the block is live (this function's contract), so its region is in the map.
    let region = unsafe { region::find(block.addr().get()) };
    match region.class_at(block.addr().get()) {
        Some(class) => classes::bytes(class),
        None => region.large_pages_at(block.addr().get()) * PAGE,
    }
}

/// Clears a new block. If the source cannot, releases the block and returns `None`.
///
/// # Safety
/// - `block` is a live block of `strategy` with that many bytes in memory of `source`, and nobody else has it.
#[inline]
pub(super) unsafe fn cleared(
    strategy: &impl Strategy,
    source: &impl Pages,
    block: NonNull<u8>,
    size_bytes: usize,
) -> Option<NonNull<u8>> {
    // SAFETY: a live block of `strategy` that nobody else has (this function's contract).
    let unfinished = unsafe { Unfinished::new(strategy, block) };
    // SAFETY: the block has `size_bytes` bytes in memory of `source`, and nobody else has it (this function's
    // contract).
    unsafe { source.clear(block, size_bytes) }.then(|| unfinished.finish())
}

/// A new block that is released if the source refuses to fill it, or panics.
pub(super) struct Unfinished<'a, S: Strategy> {
    strategy: &'a S,
    block: NonNull<u8>,
}

impl<'a, S: Strategy> Unfinished<'a, S> {
    /// # Safety
    /// - `block` is a live block of `strategy`, and the caller gives it up unless this is finished.
    #[inline]
    pub(super) unsafe fn new(strategy: &'a S, block: NonNull<u8>) -> Self {
        Self { strategy, block }
    }

    #[inline]
    pub(super) fn finish(self) -> NonNull<u8> {
        ManuallyDrop::new(self).block
    }
}

impl<S: Strategy> Drop for Unfinished<'_, S> {
    fn drop(&mut self) {
        // A second panic, while the source's is unwinding, would end the process.
        // SAFETY: a live block of the strategy that was given up (the contract of `new`).
        survived(|| unsafe { self.strategy.release(self.block) });
    }
}

/// Resizes a block in memory of `pool`: in place, or by moving it to one that `allocate` makes. It is told how many
/// bytes the old one has room for, and whether the block grows to `large_from` bytes or more.
///
/// # Safety
/// - `block` came from `strategy`, which cuts its blocks from regions of this pool, and was not released; after `Some`
///   the old pointer is not used again;
/// - `allocate` makes a block of the new size that `strategy` can release.
pub(super) unsafe fn resize_by<P: Pages>(
    strategy: &impl Strategy,
    pool: &Inner<P>,
    block: NonNull<u8>,
    new_size_bytes: usize,
    large_from: usize,
    allocate: impl FnOnce(usize, bool) -> Option<NonNull<u8>>,
) -> Option<NonNull<u8>> {
    // SAFETY: the block is live and cut from a region of the pool (this function's contract).
    if unsafe { resized_in_place(pool, block, new_size_bytes) } {
        return Some(block);
    }
    // SAFETY: the block is live and cut from a region.
    let room = unsafe { room_bytes(block) };
    let grows = new_size_bytes > room && new_size_bytes >= large_from;
    let moved = allocate(room, grows)?;
    // SAFETY: it was just made, and is not returned unless it is finished.
    let unfinished = unsafe { Unfinished::new(strategy, moved) };
    // SAFETY: both blocks are live, hence disjoint, and have at least the smaller of the two sizes; both are cut from
    // regions of the pool. Of the old one nobody needs more than that.
    if !unsafe { moved_to(pool, moved, block, room.min(new_size_bytes), grows) } {
        return None;
    }
    // A panic from here on would tell the caller that the old block is still there.
    // SAFETY: a live block of `strategy`. The caller uses only the other one from here on.
    survived(|| unsafe { strategy.release(block) });
    Some(unfinished.finish())
}

/// Moves what is in a block to another one. Returns whether it could; if not, the old one is as it was. Otherwise it is
/// to be released; if it had to move to grow, and is large, its memory has gone to the system.
///
/// # Safety
/// - both are live and cut from regions of `pool`, and have that many bytes, all that is needed of `from`; nobody else
///   uses them.
pub(super) unsafe fn moved_to<P: Pages>(
    pool: &Inner<P>,
    to: NonNull<u8>,
    from: NonNull<u8>,
    size_bytes: usize,
    grows: bool,
) -> bool {
    let source = &pool.heap.source;
    let is_left = grows && size_bytes >= LEFT_FROM;
    // SAFETY: two live blocks with so many bytes in committed pages of the source (this function's contract). A large
    // one starts with a page.
    let is_moved = unsafe { (is_left && source.relocate(to, from, size_bytes)) || source.copy(to, from, size_bytes) };
    if is_moved && is_left {
        // SAFETY: the old block is live, and what it had is in the other one.
        unsafe { pool.leave(from) };
    }
    is_moved
}
