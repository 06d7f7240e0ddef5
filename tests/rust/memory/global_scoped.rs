//! What `GlobalScoped` hands out, block by block. Whose each is: `tests/rust/heap.rs`.

use ctxalloc::GlobalScoped;
use std::alloc::{GlobalAlloc, Layout, System};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};

/// Also where Rust asks for less: C code reads and writes 16 bytes at once in what it takes for a block of `malloc`.
#[test]
fn blocks_of_nobody_are_aligned_as_those_of_malloc_are() {
    let scoped = GlobalScoped::new(System);
    for (align, size) in [1, 2, 4, 8, 16, 64].into_iter().flat_map(|align| (1..=300).map(move |size| (align, size))) {
        let [small, large] = [size, size + 1000].map(|size| Layout::from_size_align(size, align).expect("small"));
        let is_aligned = |block: *mut u8| !block.is_null() && block.addr().is_multiple_of(align.max(16));
        // SAFETY: sizes above zero; each block is resized and freed once, with the layout that it has.
        unsafe {
            let (block, zeroed) = (scoped.alloc(small), scoped.alloc_zeroed(small));
            assert!(is_aligned(block) && is_aligned(zeroed), "{small:?}: {block:?}, {zeroed:?}");
            scoped.dealloc(zeroed, small);
            let moved = scoped.realloc(block, small, large.size());
            assert!(is_aligned(moved), "{large:?}: {moved:?}");
            scoped.dealloc(moved, large);
        }
    }
}

/// Counts, and panics once if it is told to.
#[derive(Default)]
struct Panicking {
    calls: AtomicUsize,
    is_next: AtomicBool,
}

// SAFETY: all of it is System's.
unsafe impl GlobalAlloc for Panicking {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        self.calls.fetch_add(1, SeqCst);
        assert!(!self.is_next.swap(false, SeqCst), "alloc");
        // SAFETY: this function's contract is the same.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        self.calls.fetch_add(1, SeqCst);
        // SAFETY: this function's contract is the same.
        unsafe { System.dealloc(block, layout) }
    }
}

/// It must not, but where it does, all later blocks of the thread would be taken for its own.
#[test]
fn an_upstream_that_panicked_is_asked_again() {
    static UPSTREAM: Panicking = Panicking { calls: AtomicUsize::new(0), is_next: AtomicBool::new(false) };
    let upstream = &UPSTREAM;
    struct By(&'static Panicking);
    // SAFETY: all of it is System's.
    unsafe impl GlobalAlloc for By {
        unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
            // SAFETY: this function's contract is the same.
            unsafe { self.0.alloc(layout) }
        }

        unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
            // SAFETY: this function's contract is the same.
            unsafe { self.0.dealloc(block, layout) }
        }
    }
    let scoped = GlobalScoped::new(By(upstream));
    let layout = Layout::new::<[u8; 100]>();
    upstream.is_next.store(true, SeqCst);
    // SAFETY: a size above zero.
    let outcome = catch_unwind(AssertUnwindSafe(|| unsafe { scoped.alloc(layout) }));
    assert!(outcome.is_err());
    // SAFETY: a size above zero; freed once.
    unsafe { scoped.dealloc(scoped.alloc(layout), layout) };
    assert_eq!(upstream.calls.load(SeqCst), 3, "the one that panicked, one more and its end");
}
