//! Resizing and clearing blocks of a pool or an arena: both cut their blocks from regions in the same way.

use super::classes;
use super::geometry::PAGE;
use super::large::Large;
use super::region;
use crate::source::Pages;
use crate::strategy::Strategy;
use std::ptr::NonNull;

/// Whether a block stays in place if it is resized to `new_size_bytes`.
///
/// # Safety
/// - `block` came from a pool and was not released.
pub(super) unsafe fn stays(block: NonNull<u8>, new_size_bytes: usize) -> bool {
    // SAFETY: the block is live (this function's contract).
    let room = unsafe { room(block) };
    if room <= classes::MAX {
        new_size_bytes <= room && classes::bytes(classes::of(new_size_bytes)) == room
    } else {
        Large::fits(room, new_size_bytes)
    }
}

/// How many bytes a block has room for.
///
/// # Safety
/// - `block` came from a pool and was not released.
unsafe fn room(block: NonNull<u8>) -> usize {
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
    // SAFETY: the block has `size_bytes` bytes in memory of `source`, and nobody else has it (this function's
    // contract).
    if unsafe { source.clear(block, size_bytes) } {
        return Some(block);
    }
    // SAFETY: a live block of `strategy` that nobody else has and that is not returned.
    unsafe { strategy.release(block) };
    None
}

/// Resizes a block in memory of `source`: in place if its size class stays the same, else by moving it.
///
/// # Safety
/// - `block` came from `strategy`, which cuts its blocks from regions as pools do, and was not released; after `Some`
///   the old pointer is not used again.
pub(super) unsafe fn resize_by(
    strategy: &impl Strategy,
    source: &impl Pages,
    block: NonNull<u8>,
    new_size_bytes: usize,
) -> Option<NonNull<u8>> {
    // SAFETY: the block is live and cut from a region (this function's contract).
    if unsafe { stays(block, new_size_bytes) } {
        return Some(block);
    }
    // SAFETY: the block is live and cut from a region.
    let room = unsafe { room(block) };
    let moved = strategy.allocate(new_size_bytes)?;
    // SAFETY: both blocks are live, hence disjoint, and have at least the smaller of the two sizes; both are memory of
    // `source`.
    let copied = unsafe { source.copy(moved, block, room.min(new_size_bytes)) };
    let (gone, answer) = if copied { (block, Some(moved)) } else { (moved, None) };
    // SAFETY: a live block of `strategy`. The caller uses only the other one from here on.
    unsafe { strategy.release(gone) };
    answer
}
