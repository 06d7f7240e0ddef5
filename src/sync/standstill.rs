//! A fork waits until no other thread is in a long section, and none begins one before it is over. So a child finds no
//! list half changed, and no charge that some of its accounts have and others lack.
//!
//! Brief sections go on: what is done in them is one block's numbers in one account, of a thread that the child does
//! not have.
//!
//! A thread that has no record takes none meanwhile. So in a child, where functions that are called before ours may
//! start threads, none of these takes a record before those of the threads that only the parent has are given back.
//!
//! Why no section is missed: a thread marks its section, then looks whether somebody forks (`forking`); whoever forks
//! says so, then looks at the marks. One of them must see the other, as in `owner`.

use super::forking::{end, may_begin, say, wait};
use super::threads::threads;
use super::{SOON, membarrier, yield_now};
use std::sync::atomic::{AtomicUsize, Ordering, fence};

/// How many threads without a record are in what would be a long section. 0 at a fork.
static UNMARKED: AtomicUsize = AtomicUsize::new(0);

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
    say();
    fence(Ordering::SeqCst);
    membarrier::heavy();
    let is_busy = || {
        let is_marked = threads().any(|thread| !thread.is_own() && thread.is_in_long_section());
        is_marked || UNMARKED.load(Ordering::Acquire) > 0
    };
    let is_still = (0..SOON).any(|_| {
        let is_still = !is_busy();
        if !is_still {
            yield_now();
        }
        is_still
    });
    if !is_still {
        end();
    }
    is_still
}
