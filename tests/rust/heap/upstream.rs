//! The allocator below: the C heap, or a pool of ctxalloc's, which calls back; it notes if it is entered while it is at
//! work.

use ctxalloc::handler;
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::{Cell, RefCell};
use std::ptr::{NonNull, null_mut};
use std::sync::atomic::{AtomicUsize, Ordering};

pub(crate) struct Upstream;

/// How often it was entered on a thread on which it was at work.
pub(crate) static ENTERED_TWICE: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    static IS_AT_WORK: Cell<bool> = const { Cell::new(false) };
    /// Whether this thread's blocks come from the pool, whose bookkeeping comes from the global allocator.
    static FORWARDS: Cell<bool> = const { Cell::new(false) };
    static REFUSES: Cell<bool> = const { Cell::new(false) };
    /// What this thread was given, less what it gave back.
    static GIVEN_BYTES: Cell<isize> = const { Cell::new(0) };
    /// Made outside, freed inside.
    static KEPT: RefCell<Vec<Box<[u8]>>> = const { RefCell::new(Vec::new()) };
    /// Made outside, grown inside.
    static LIST: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

/// Runs `work` while this thread's blocks come from the pool, with allocations and frees in the middle of each of them.
pub(crate) fn forwarding<R>(work: impl FnOnce() -> R) -> R {
    KEPT.with_borrow_mut(|kept| kept.extend((0..100).map(|size| vec![1; size].into_boxed_slice())));
    LIST.set(vec![1; 10]);
    FORWARDS.set(true);
    let answer = work();
    FORWARDS.set(false);
    answer
}

/// Runs `work` while there is no memory for this thread.
pub(crate) fn refusing<R>(work: impl FnOnce() -> R) -> R {
    REFUSES.set(true);
    let answer = work();
    REFUSES.set(false);
    answer
}

/// By how many bytes more this thread was given than it gave back while `work` ran.
pub(crate) fn growth(work: impl FnOnce()) -> isize {
    let before = GIVEN_BYTES.get();
    work();
    GIVEN_BYTES.get() - before
}

/// The pool's blocks are aligned so.
const HEAD: usize = 64;

fn watched<R>(work: impl FnOnce() -> R) -> R {
    if IS_AT_WORK.replace(true) {
        ENTERED_TWICE.fetch_add(1, Ordering::Relaxed);
    }
    if FORWARDS.get() {
        // What a careless allocator may do: a list that grows, something old that goes.
        drop(vec![0_u8; 50]);
        let gone = KEPT.try_with(|kept| kept.try_borrow_mut().ok()?.pop());
        drop(gone);
        let _ = LIST.try_with(|list| list.try_borrow_mut().map(|mut list| list.push(1)));
        let mut list = Vec::new();
        (0..10).for_each(|number| list.push(number));
    }
    let answer = work();
    IS_AT_WORK.set(false);
    answer
}

// SAFETY: blocks are the pool's or the C heap's, with room for `HEAD` bytes more, of which the first says whose the
// block is.
unsafe impl GlobalAlloc for Upstream {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if REFUSES.get() {
            return null_mut();
        }
        GIVEN_BYTES.set(GIVEN_BYTES.get() + layout.size().cast_signed());
        watched(|| {
            let inner = Layout::from_size_align(layout.size() + HEAD, HEAD).expect("small");
            if layout.align() > HEAD {
                // SAFETY: the caller passes a layout with a size above zero.
                return unsafe { System.alloc(layout) };
            }
            let pool = FORWARDS.get().then(|| handler("pool").expect("built in"));
            let block = match pool {
                Some(pool) => pool.allocate(inner.size()).map_or(null_mut(), NonNull::as_ptr),
                // SAFETY: its size is above zero.
                None => unsafe { System.alloc(inner) },
            };
            if block.is_null() {
                return block;
            }
            // SAFETY: a new block with room for it.
            unsafe {
                block.write(u8::from(pool.is_some()));
                block.add(HEAD)
            }
        })
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        GIVEN_BYTES.set(GIVEN_BYTES.get() - layout.size().cast_signed());
        watched(|| {
            if layout.align() > HEAD {
                // SAFETY: `alloc` got it from System with this layout.
                return unsafe { System.dealloc(block, layout) };
            }
            // SAFETY: made by `alloc`, which wrote its first byte.
            unsafe {
                let block = block.sub(HEAD);
                if block.read() == 1 {
                    let pool = handler("pool").expect("built in");
                    pool.release(NonNull::new_unchecked(block), layout.size() + HEAD);
                } else {
                    System.dealloc(block, Layout::from_size_align_unchecked(layout.size() + HEAD, HEAD));
                }
            }
        });
    }
}
