//! What an upstream is asked for, and gets back: layouts, addresses, contents.

use crate::attribution::Random;
use ctxalloc::{Context, GlobalScoped, request};
use std::alloc::{GlobalAlloc, Layout, System};
use std::ptr::null_mut;
use std::sync::{LazyLock, Mutex};

/// Blocks are aligned to what was asked for and to no more. It knows the layout of each, and allocates nothing by
/// itself.
struct Exact {
    live: Mutex<Vec<(usize, Layout)>>,
}

impl Exact {
    fn new() -> Self {
        Self { live: Mutex::new(Vec::with_capacity(1000)) }
    }

    fn around(layout: Layout) -> Layout {
        Layout::from_size_align(layout.size() + layout.align(), 2 * layout.align()).unwrap()
    }

    fn requested_bytes(&self) -> usize {
        self.live.lock().unwrap().iter().map(|(_, layout)| layout.size()).sum()
    }
}

// SAFETY: the blocks of `System`, which is asked for as much more as the block is aligned to.
unsafe impl GlobalAlloc for Exact {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: its size is above zero.
        let start = unsafe { System.alloc(Self::around(layout)) };
        if start.is_null() {
            return null_mut();
        }
        // SAFETY: a new block with room for it.
        let block = unsafe { start.add(layout.align()) };
        self.live.lock().unwrap().push((block.addr(), layout));
        block
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        let mut live = self.live.lock().unwrap();
        let at = live.iter().position(|(address, _)| *address == block.addr()).expect("a block of this allocator");
        assert_eq!(live.swap_remove(at).1, layout, "freed as it was made");
        // SAFETY: made by `alloc` with this layout.
        unsafe { System.dealloc(block.sub(layout.align()), Self::around(layout)) };
    }
}

struct Block {
    start: *mut u8,
    layout: Layout,
    mark: u8,
}

impl Block {
    fn write(&self) {
        // SAFETY: a live block of that size.
        unsafe { self.start.write_bytes(self.mark, self.layout.size()) };
    }

    fn check(&self, bytes: usize) {
        assert!(self.start.addr().is_multiple_of(self.layout.align()), "{:?}", self.layout);
        // SAFETY: a live block, of which so many bytes were written.
        let contents = unsafe { std::slice::from_raw_parts(self.start, bytes) };
        assert!(contents.iter().all(|byte| *byte == self.mark), "{:?}", self.layout);
    }
}

/// Makes, resizes and frees blocks of all layouts, of a request and of nobody, each under whatever is selected.
fn run(scoped: &impl GlobalAlloc, seed: u64) {
    let own = request().root().begin().unwrap();
    let mut random = Random(seed);
    let mut blocks: Vec<Block> = Vec::with_capacity(300);
    let mut live = (0, 0);
    let mut mine: Vec<bool> = Vec::with_capacity(300);
    for number in 0..if cfg!(miri) { 300 } else { 20_000 } {
        let is_selected = random.below(2) == 0;
        let under = |work: &mut dyn FnMut()| if is_selected { own.run(work) } else { Context::new().run(work) };
        let max_size = [60, 5000][usize::from(random.below(8) == 0)];
        let size = 1 + random.below(max_size);
        match random.below(3) {
            0 if blocks.len() < 300 => {
                let layout = Layout::from_size_align(size, 1 << random.below(8)).unwrap();
                let is_zeroed = random.below(4) == 0;
                let mut block = Block { start: null_mut(), layout, mark: number as u8 };
                // SAFETY: its size is above zero.
                under(&mut || unsafe {
                    block.start = if is_zeroed { scoped.alloc_zeroed(layout) } else { scoped.alloc(layout) };
                });
                if is_zeroed {
                    Block { mark: 0, ..block }.check(size);
                }
                block.write();
                block.check(size);
                if is_selected {
                    live = (live.0 + 1, live.1 + size);
                }
                mine.push(is_selected);
                blocks.push(block);
            }
            1 if !blocks.is_empty() => {
                let at = random.below(blocks.len());
                let block = &mut blocks[at];
                let before = block.layout.size();
                // SAFETY: a live block with this layout.
                under(&mut || block.start = unsafe { scoped.realloc(block.start, block.layout, size) });
                block.layout = Layout::from_size_align(size, block.layout.align()).unwrap();
                block.check(size.min(before));
                block.write();
                if mine[at] {
                    live.1 = live.1 + size - before;
                }
            }
            2 if !blocks.is_empty() => {
                let at = random.below(blocks.len());
                let (block, is_mine) = (blocks.swap_remove(at), mine.swap_remove(at));
                block.check(block.layout.size());
                // SAFETY: a live block with this layout.
                under(&mut || unsafe { scoped.dealloc(block.start, block.layout) });
                if is_mine {
                    live = (live.0 - 1, live.1 - block.layout.size());
                }
            }
            _ => {}
        }
        if number % 100 == 0 {
            let heap = own.heap().unwrap();
            assert_eq!((heap.live_blocks, heap.live_bytes), live);
        }
    }
    for block in blocks {
        // SAFETY: a live block with this layout.
        unsafe { scoped.dealloc(block.start, block.layout) };
    }
    assert_eq!(own.heap().unwrap().live_blocks, 0);
}

#[test]
fn upstream_gets_its_blocks_back_as_it_made_them() {
    for seed in 0..3 {
        for scoped in [GlobalScoped::new(Exact::new()), GlobalScoped::over_leaf(Exact::new())] {
            run(&scoped, seed);
        }
        run(&GlobalScoped::new(System), seed);
        run(&GlobalScoped::over_leaf(System), seed);
    }
}

#[test]
fn blocks_of_nobody_are_no_larger_than_those_of_upstream() {
    static EXACT: LazyLock<Exact> = LazyLock::new(Exact::new);
    let exact = &*EXACT;
    let scoped = GlobalScoped::over_leaf(exact);
    let own = request().root().begin().unwrap();
    let layout = Layout::from_size_align(100, 8).unwrap();
    // SAFETY: sizes above zero; each block is freed once.
    unsafe {
        let plain = Context::new().run(|| scoped.alloc(layout));
        assert_eq!(exact.requested_bytes(), 100);
        let block = own.run(|| scoped.alloc(layout));
        assert_eq!(exact.requested_bytes(), 208, "a word for its request");
        scoped.dealloc(plain, layout);
        scoped.dealloc(block, layout);
    }
    assert_eq!(exact.requested_bytes(), 0);
}

/// The exception of a panic is such a block, and an unwinder may rely on its alignment.
#[test]
fn small_blocks_made_while_a_panic_unwinds_are_aligned_to_two_words() {
    struct OnUnwind<'a>(&'a mut Vec<usize>);
    impl Drop for OnUnwind<'_> {
        fn drop(&mut self) {
            let blocks: Vec<_> = (0..50).map(|number: u64| Box::new([number; 7])).collect();
            self.0.extend(blocks.iter().map(|block| block.as_ptr().addr()));
        }
    }
    let own = request().root().begin().unwrap();
    let mut addresses = Vec::with_capacity(100);
    let panicked = own.run(|| {
        std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let _on_unwind = OnUnwind(&mut addresses);
            std::panic::resume_unwind(Box::new(7_u64));
        }))
    });
    assert!(panicked.is_err_and(|payload| payload.downcast_ref() == Some(&7_u64)));
    assert_eq!(addresses.len(), 50);
    assert!(addresses.iter().all(|address| address.is_multiple_of(2 * size_of::<usize>())), "{addresses:x?}");
    assert_eq!(own.heap().unwrap().live_blocks, 0);
}

// SAFETY: as `Exact`.
unsafe impl GlobalAlloc for &Exact {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the layout is the caller's, handed on as it is.
        unsafe { (**self).alloc(layout) }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        // SAFETY: the block and its layout are the caller's, and `Exact` made the block.
        unsafe { (**self).dealloc(block, layout) }
    }
}
