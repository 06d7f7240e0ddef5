//! What `GlobalScoped` hands out, block by block. Whose each is: `tests/rust/heap.rs`.

use ctxalloc::GlobalScoped;
use std::alloc::{GlobalAlloc, Layout, System};

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
