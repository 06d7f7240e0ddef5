//! Which thread forks, while no other may begin a long section or take a record: `standstill` waits for those that are
//! in one.

use super::{membarrier, yield_now};
use std::cell::Cell;
use std::sync::atomic::{AtomicUsize, Ordering, fence};

/// The [place] of the thread that forks, while others begin no long section; else 0.
/// - set: by it, under the lock of those who are told of forks.
/// - cleared: by it, in the parent and in the child.
static FORKING: AtomicUsize = AtomicUsize::new(0);

/// A word that no other thread that lives has, wherever this runs: the place of a thread-local.
fn place() -> usize {
    thread_local! {
        static PLACE: Cell<u8> = const { Cell::new(0) };
    }
    PLACE.with(Cell::as_ptr).addr()
}

/// Whether a long section that was marked just now may go on.
#[inline]
pub(super) fn may_begin() -> bool {
    if cfg!(any(ctxalloc_loom, miri)) {
        return true; // neither forks
    }
    if !membarrier::is_there() {
        fence(Ordering::SeqCst); // pairs with that in `begin`
    }
    !another_forks()
}

/// Acquire pairs with the Release in `end`: whoever goes on in a child finds what the thread that forked has set right.
#[inline]
fn another_forks() -> bool {
    let forking = FORKING.load(Ordering::Acquire);
    forking != 0 && forking != place()
}

/// Waits until no other thread forks. Outside of sections.
#[cold]
pub(super) fn wait() {
    while another_forks() {
        yield_now();
    }
}

/// This thread forks: no other one begins a long section, but for those that have not seen this yet.
#[cfg_attr(any(ctxalloc_loom, miri), allow(dead_code, reason = "neither forks"))]
pub(super) fn say() {
    FORKING.store(place(), Ordering::SeqCst);
}

/// They may begin again.
#[cfg_attr(any(ctxalloc_loom, miri), allow(dead_code, reason = "neither forks"))]
pub(super) fn end() {
    FORKING.store(0, Ordering::Release);
}
