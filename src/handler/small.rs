//! Small blocks by the shortest way, for callers in Rust: of `pool`, of requests that take theirs from it, and of
//! `system`. The C functions of the first two try the same first ([`AtHand`]).
//!
//! A C function of a handler has to be ready for everything: a hook, code of a user's that panics, a limit that
//! refuses, memory that is to be mapped. Here is only the common case, of a thread that has a block of the class: no
//! call through a pointer, no lock, no memory of our own. Where it is not that case, nothing is
//! done, and the caller goes the long way.

use super::events::is_silent;
use super::process::{is_pool, is_system};
use super::requests::{Slot, slot_behind};
use super::trampoline::AtHand;
use super::word::Handler;
use crate::strategy::{Pool, Small, Strategy, System};
use crate::unattributed::is_watched;
use std::ptr::NonNull;

/// What these blocks are aligned to at least, in bytes: what a request's handler promises, and less than a pool's.
pub(crate) const ALIGN: usize = 16;

/// A block of `size_bytes`, which is not zero; `None` if it has to go the long way. Whoever calls holds the handler.
#[inline(never)]
pub(crate) fn allocate(handler: Handler, size_bytes: usize) -> Option<NonNull<u8>> {
    if !is_silent() {
        return None;
    }
    if handler.is_request() {
        allocate_in_request(slot_behind(handler)?, size_bytes)
    } else if is_pool(handler) {
        Pool::shared().kept().take(size_bytes)
    } else {
        // Where the C heap is watched, its blocks of a handler are told from others on the long way; so is a size that
        // no block can have.
        let is_heap = is_system(handler) && !is_watched() && isize::try_from(size_bytes).is_ok();
        if is_heap { System.allocate(size_bytes) } else { None }
    }
}

/// A function of its own, as [`release_in_request`] is: what it saves and restores, the others need not.
#[inline(never)]
fn allocate_in_request(slot: &'static Slot, size_bytes: usize) -> Option<NonNull<u8>> {
    slot.allocate_small(size_bytes)
}

/// Takes a block back; false if it has to go the long way, and nothing was done.
///
/// # Safety
/// - `block` is a live block of `handler`; after `true` it is not used again.
#[inline(never)]
pub(crate) unsafe fn release(handler: Handler, block: NonNull<u8>) -> bool {
    if !is_silent() {
        return false;
    }
    if handler.is_request() {
        // SAFETY: a live block of the slot, which it holds; given up where this succeeds (this function's contract).
        return slot_behind(handler).is_some_and(|slot| unsafe { release_in_request(slot, block) });
    }
    if !is_pool(handler) {
        let is_heap = is_system(handler) && !is_watched();
        if is_heap {
            // SAFETY: a live block of the C heap, given up by this.
            unsafe { System.release(block) };
        }
        return is_heap;
    }
    // SAFETY: a live block of the shared pool, given up where it is a small one.
    unsafe {
        let Some(small) = Small::of(block) else { return false };
        Pool::shared().kept().keep(small, block);
    }
    true
}

/// # Safety
/// - `block` is a live block of this slot; after `true` it is not used again.
#[inline(never)]
unsafe fn release_in_request(slot: &'static Slot, block: NonNull<u8>) -> bool {
    // SAFETY: a live block of this slot, which is not used again after `true` (this function's contract).
    unsafe { slot.release_small(block) }
}

/// The block with room for `new_bytes`, which is not zero, and its first bytes kept; `None` if it has to go the long
/// way, and nothing was done.
///
/// # Safety
/// - `block` is a live block of `handler`; after `Some` it is not used again.
#[inline(never)]
pub(crate) unsafe fn grow(handler: Handler, block: NonNull<u8>, new_bytes: usize) -> Option<NonNull<u8>> {
    if !handler.is_request() || !is_silent() {
        return None;
    }
    // SAFETY: a live block of the slot, which it holds; given up where this succeeds (this function's contract).
    unsafe { slot_behind(handler)?.grow_small(block, new_bytes) }
}

impl AtHand for Pool {
    #[inline(always)]
    fn take(&'static self, size_bytes: usize) -> Option<NonNull<u8>> {
        self.kept().take(size_bytes)
    }

    #[inline(always)]
    unsafe fn put_back(&'static self, block: NonNull<u8>) -> bool {
        // SAFETY: a live block of this pool, given up where it is a small one.
        unsafe {
            let Some(small) = Small::of(block) else { return false };
            self.kept().keep(small, block);
        }
        true
    }
}
