//! Small blocks by the shortest way, for callers in Rust: of `pool`, of requests that take theirs from it, and of
//! `system`. The C functions of the first two try the same first ([`AtHand`]).
//!
//! A C function of a handler has to be ready for everything: a hook, code of a user's that panics, a limit that
//! refuses, memory that is to be mapped. Here is only the common case, of a thread that has a block of the class: no
//! call through a pointer, no lock, no memory of our own. Where it is not that case, nothing is
//! done, and the caller goes the long way.

use super::events::is_silent;
use super::process::{is_pool, is_system};
use super::requests::{Latest, slot_behind};
use super::trampoline::AtHand;
use super::word::Handler;
use crate::strategy::{Kept, Over, Pool, Strategy, System};
use crate::unattributed::is_watched;
use std::ptr::NonNull;

/// What these blocks are aligned to at least, in bytes: what a request's handler promises, and less than a pool's.
pub(crate) const ALIGN: usize = 16;

/// A block of `size_bytes`, which is not zero, aligned to what the handler promises; `None` if it has to go the long
/// way. Whoever calls holds the handler.
#[inline(never)]
pub(crate) fn allocate(handler: Handler, size_bytes: usize) -> Option<NonNull<u8>> {
    allocate_by(handler, size_bytes, |pool| pool.take(size_bytes))
}

/// The same for those who need an alignment of [`ALIGN`] at most.
#[inline(never)]
pub(crate) fn allocate_tight(handler: Handler, size_bytes: usize) -> Option<NonNull<u8>> {
    allocate_by(handler, size_bytes, |pool| match pool.take_tight(size_bytes) {
        Some(block) => Some(block),
        None => pool.fetch_tiny(size_bytes),
    })
}

/// `take` takes a block of `pool`.
#[inline(always)]
fn allocate_by(
    handler: Handler,
    size_bytes: usize,
    take: impl FnOnce(Kept) -> Option<NonNull<u8>>,
) -> Option<NonNull<u8>> {
    if !is_silent() {
        return None;
    }
    if handler.is_request() {
        allocate_in_request(handler, size_bytes)
    } else if is_pool(handler) {
        take(Pool::shared_before()?.kept())
    } else if is_system(handler) {
        allocate_on_heap(size_bytes)
    } else {
        None
    }
}

#[inline(never)]
fn allocate_on_heap(size_bytes: usize) -> Option<NonNull<u8>> {
    // Where the C heap is watched, its blocks of a handler are told from others on the long way; so is a size that
    // no block can have.
    let goes_shortly = !is_watched() && isize::try_from(size_bytes).is_ok();
    if goes_shortly { System.allocate(size_bytes) } else { None }
}

/// A function of its own, as [`release_in_request`] is: what it saves and restores, the others need not.
#[inline(never)]
fn allocate_in_request(handler: Handler, size_bytes: usize) -> Option<NonNull<u8>> {
    // SAFETY: whoever calls holds the handler.
    match unsafe { Latest::of(handler) }.map_or_else(|| Err(Over::default()), |latest| latest.allocate(size_bytes)) {
        Ok(block) => Some(block),
        Err(over) => allocate_in_another(handler, size_bytes, over),
    }
}

/// In a request that this thread did not use last, or where more is to be looked at.
#[inline(never)]
fn allocate_in_another(handler: Handler, size_bytes: usize, over: Over) -> Option<NonNull<u8>> {
    let slot = slot_behind(handler)?; // the one that `over` is of, if it has any
    slot.give_back(over);
    let block = slot.allocate_small(size_bytes)?;
    slot.note_latest(handler);
    Some(block)
}

/// Takes a block back; false if it has to go the long way, and nothing was done.
///
/// # Safety
/// - `block` is a live block of `handler`; after `true` it is not used again.
#[inline(never)]
pub(crate) unsafe fn release(handler: Handler, block: NonNull<u8>) -> bool {
    // SAFETY: a live block of the shared pool, and of the handler, given up where this succeeds (this function's
    // contract).
    unsafe { release_by(handler, block, |pool| release_in_pool(pool, block)) }
}

/// [`release_tight`] of a request's block where this thread used the request last: it calls nothing then.
///
/// # Safety
/// - as for [`release`].
#[inline(always)]
pub(crate) unsafe fn release_of_latest(handler: Handler, block: NonNull<u8>) -> bool {
    // SAFETY: a live block of the handler, which it holds, given up where this succeeds (this function's contract).
    is_silent() && unsafe { Latest::of(handler).is_some_and(|latest| latest.release(block)) }
}

/// [`release_tight`] of a block of `pool` whose class is found in a table: it calls nothing where this thread has room.
///
/// # Safety
/// - as for [`release`].
#[inline(always)]
pub(crate) unsafe fn release_of_pool(handler: Handler, block: NonNull<u8>, size_bytes: usize) -> bool {
    if handler.is_request() || !is_silent() || !is_pool(handler) || !Kept::is_tabled(size_bytes) {
        return false;
    }
    // SAFETY: a live block of the shared pool with so many bytes, given up where this succeeds (this function's
    // contract).
    Pool::shared_before().is_some_and(|pool| unsafe { pool.kept().keep_tight(block, size_bytes) })
}

/// The same of a block of [`allocate_tight`] that has `size_bytes`.
///
/// # Safety
/// - as for [`release`].
#[inline(never)]
pub(crate) unsafe fn release_tight(handler: Handler, block: NonNull<u8>, size_bytes: usize) -> bool {
    // SAFETY: a live block of the shared pool, and of the handler, with so many bytes, given up where this succeeds
    // (this function's contract).
    unsafe { release_by(handler, block, |pool| release_tight_in_pool(pool, block, size_bytes)) }
}

/// A function of its own, as [`release_in_request`] is.
///
/// # Safety
/// - `block` is a live block of `pool`, the shared one; after `true` it is not used again.
#[inline(never)]
unsafe fn release_tight_in_pool(pool: &'static Pool, block: NonNull<u8>, size_bytes: usize) -> bool {
    // SAFETY: a live block of the shared pool with so many bytes, given up where this succeeds (this function's
    // contract).
    unsafe { pool.kept().keep_tight(block, size_bytes) || release_in_pool(pool, block) }
}

/// `put_back` takes a block of `pool` back.
///
/// # Safety
/// - as for [`release`].
#[inline(always)]
unsafe fn release_by(handler: Handler, block: NonNull<u8>, put_back: impl FnOnce(&'static Pool) -> bool) -> bool {
    if !is_silent() {
        return false;
    }
    if handler.is_request() {
        // SAFETY: a live block of the handler, given up where this succeeds (this function's contract).
        return unsafe { release_in_request(handler, block) };
    }
    if is_pool(handler) {
        return Pool::shared_before().is_some_and(put_back);
    }
    let is_heap = is_system(handler) && !is_watched();
    if is_heap {
        // SAFETY: a live block of the C heap, given up by this.
        unsafe { System.release(block) };
    }
    is_heap
}

/// A function of its own, as [`release_in_request`] is.
///
/// # Safety
/// - `block` is a live block of the shared pool; after `true` it is not used again.
#[inline(never)]
unsafe fn release_in_pool(pool: &'static Pool, block: NonNull<u8>) -> bool {
    // SAFETY: a live block of the shared pool, given up where it is a small one.
    unsafe { pool.kept().keep_small(block) }
}

/// # Safety
/// - `block` is a live block of this handler of a request; after `true` it is not used again.
#[inline(never)]
unsafe fn release_in_request(handler: Handler, block: NonNull<u8>) -> bool {
    // SAFETY: a live block of the handler, which it holds; given up where this succeeds (this function's contract).
    unsafe {
        let is_done = Latest::of(handler).is_some_and(|latest| latest.release(block));
        is_done || release_in_another(handler, block)
    }
}

/// As [`allocate_in_another`].
///
/// # Safety
/// - as for [`release_in_request`].
#[inline(never)]
unsafe fn release_in_another(handler: Handler, block: NonNull<u8>) -> bool {
    let Some(slot) = slot_behind(handler) else { return false };
    slot.note_latest(handler); // while the block holds it
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
    // SAFETY: a live block of the handler, which it holds; given up where this succeeds (this function's contract).
    unsafe {
        let grown = Latest::of(handler).and_then(|latest| latest.grow(block, new_bytes));
        if grown.is_some() { grown } else { slot_behind(handler)?.grow_small(block, new_bytes) }
    }
}

/// The same of a block of [`allocate_tight`] that has `old_bytes`, no more than the new ones.
///
/// # Safety
/// - as for [`grow`].
#[inline(never)]
pub(crate) unsafe fn grow_tight(
    handler: Handler,
    block: NonNull<u8>,
    old_bytes: usize,
    new_bytes: usize,
) -> Option<NonNull<u8>> {
    if !is_pool(handler) {
        // SAFETY: a live block of the handler, given up where this succeeds (this function's contract).
        return unsafe { grow(handler, block, new_bytes) };
    }
    if !is_silent() {
        return None;
    }
    // SAFETY: a live block of the shared pool with so many bytes, given up where this succeeds (this function's
    // contract).
    unsafe { Pool::shared_before()?.kept().grow_tight(block, old_bytes, new_bytes) }
}

impl AtHand for Pool {
    #[inline(always)]
    fn take(&'static self, size_bytes: usize) -> Option<NonNull<u8>> {
        self.kept().take(size_bytes)
    }

    #[inline(always)]
    unsafe fn put_back(&'static self, block: NonNull<u8>) -> bool {
        // SAFETY: a live block of this pool, given up where it is a small one.
        unsafe { self.kept().keep_small(block) }
    }
}

#[cfg(all(test, not(ctxalloc_loom)))]
mod tests {
    use super::super::requests::{Prepared, Terms};
    use super::super::{Handler, handler};
    use super::allocate_tight;
    use crate::strategy::Small;
    use std::ptr::NonNull;
    use std::thread;

    /// How many bytes a live small block takes.
    fn room(block: NonNull<u8>) -> usize {
        // SAFETY: the callers have the block.
        unsafe { Small::of(block) }.expect("a small one").room_bytes()
    }

    /// By the short way, which is closed while another test listens to events.
    fn tight(handler: Handler, size_bytes: usize) -> NonNull<u8> {
        let tries = std::iter::repeat_with(|| {
            thread::yield_now();
            allocate_tight(handler, size_bytes)
        });
        tries.take(100_000).flatten().next().expect("the short way gives blocks")
    }

    #[test]
    fn the_handler_pool_gives_tiny_blocks_to_those_alone_who_need_16() {
        let pool = handler("pool").expect("built in");
        let mut blocks = Vec::new();
        for size in [1, 16, 17, 32, 33, 48].repeat(if cfg!(miri) { 2 } else { 20 }) {
            let (tiny, aligned) = (tight(pool, size), pool.allocate(size).expect("memory"));
            assert_eq!(room(tiny), size.next_multiple_of(16));
            assert_eq!((room(aligned), aligned.addr().get() % pool.alignment()), (64, 0));
            blocks.extend([tiny, aligned]);
        }
        // SAFETY: blocks of this handler, each given up here.
        blocks.into_iter().for_each(|block| unsafe { pool.release(block, 1) });
    }

    #[test]
    #[cfg_attr(miri, ignore = "minutes under Miri, and `strategy::pool::tight` has the notes")]
    fn a_requests_blocks_are_tiny_and_counted_to_the_byte_on_both_ways() {
        let begun = Prepared::new(Terms { is_of_this_thread: true, ..Terms::default() }).expect("in range").begin();
        let request = begun.handler();
        let mut blocks = Vec::new();
        for number in 0..200 {
            let size = 1 + number * 7 % 48;
            let block = if number % 3 == 0 { request.allocate_zeroed(size) } else { request.allocate(size) };
            let block = block.expect("memory");
            assert_eq!(room(block), size.next_multiple_of(16));
            blocks.push((block, size));
        }
        let live = |blocks: &[(NonNull<u8>, usize)]| blocks.iter().map(|&(_, size)| size).sum::<usize>();
        assert_eq!(begun.stats().live_bytes, live(&blocks));
        for size in [48, 5, 49, 10, 100, 20, 33] {
            for (number, at) in blocks.iter_mut().enumerate() {
                // SAFETY: a live block of this handler with a byte at least; the old pointer is not used again.
                unsafe {
                    at.0.write(number as u8);
                    *at = (request.resize(at.0, size).expect("memory"), size);
                    assert_eq!(at.0.read(), number as u8);
                }
                assert!(room(at.0) >= size);
            }
            assert_eq!(begun.stats().live_bytes, live(&blocks), "{size}");
        }
        // SAFETY: blocks of this handler, each given up here.
        blocks.into_iter().for_each(|(block, size)| unsafe { request.release(block, size) });
        assert_eq!((begun.stats().live_bytes, begun.stats().live_blocks), (0, 0));
    }
}
