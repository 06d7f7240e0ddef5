//! A fork waits until no other thread is in a long section, and none begins one before it is over. So a child finds no
//! list half changed, and no charge that some of its accounts have and others lack.
//!
//! Brief sections go on: what is done in them is one block's numbers, of a thread that the child does not have.
//!
//! A thread that has no record takes none meanwhile. So in a child, where functions that are called before ours may start
//! threads, none of these takes a record before those of the threads that only the parent has are given back.
//!
//! Why no section is missed: a thread marks its section, then looks whether somebody forks; whoever forks says so, then
//! looks at the marks. One of them must see the other, as in `owner`.

use super::threads::{Thread, threads};
use super::{SOON, membarrier, yield_now};
use std::sync::atomic::{AtomicUsize, Ordering, fence};

/// The [place](Thread::place) of the thread that forks, while others begin no long section; else 0.
/// - set: by it, under the lock of those who are told of forks.
/// - cleared: by it, in the parent and in the child.
static FORKING: AtomicUsize = AtomicUsize::new(0);

/// How many threads without a record are in what would be a long section. 0 at a fork.
static UNMARKED: AtomicUsize = AtomicUsize::new(0);

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
    forking != 0 && forking != Thread::place()
}

/// Waits until no other thread forks. Outside of sections.
#[cold]
pub(super) fn wait() {
    while another_forks() {
        yield_now();
    }
}

/// What stands for a section of a thread that has no record, because it ends.
pub(super) struct Unmarked(());

impl Unmarked {
    #[cold]
    pub(super) fn begin() -> Self {
        loop {
            UNMARKED.fetch_add(1, Ordering::SeqCst);
            fence(Ordering::SeqCst);
            let unmarked = Self(());
            if may_begin() {
                return unmarked;
            }
            drop(unmarked);
            wait();
        }
    }
}

impl Drop for Unmarked {
    fn drop(&mut self) {
        UNMARKED.fetch_sub(1, Ordering::Release);
    }
}

/// Lets no other thread begin a long section. False if one was in its own for longer than a moment: then they may.
#[cfg_attr(any(ctxalloc_loom, miri), allow(dead_code, reason = "neither forks"))]
pub(super) fn begin() -> bool {
    FORKING.store(Thread::place(), Ordering::SeqCst);
    fence(Ordering::SeqCst);
    membarrier::heavy();
    let is_busy = || {
        let is_marked = threads().any(|thread| !thread.is_own() && thread.is_in_long_section());
        is_marked || UNMARKED.load(Ordering::Acquire) > 0
    };
    let is_still = (0..SOON).any(|_| !is_busy() || (yield_now(), false).1);
    if !is_still {
        end();
    }
    is_still
}

/// Lets them begin again.
#[cfg_attr(any(ctxalloc_loom, miri), allow(dead_code, reason = "neither forks"))]
pub(super) fn end() {
    FORKING.store(0, Ordering::Release);
}
