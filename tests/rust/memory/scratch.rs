//! `Scratch`: values side by side in chunks of a handler, by themselves, under containers, at a limit, and under random
//! operations: every live value keeps its bytes and its alignment, and nothing stays behind.

use crate::support::{Odd, marked, rounds};
use allocator_api2::alloc::{Allocator, Layout};
use allocator_api2::vec::Vec as VecIn;
use ctxalloc::strategy::{Arena, Budget, Pool};
use ctxalloc::{AfterEnd, Error, Handler, Scratch, handler, register, request, scope};
use proptest::prelude::*;
use std::ptr::NonNull;
use std::sync::OnceLock;
use std::thread;

/// Handlers aligned to 1, 16 and 64 bytes.
fn owners() -> [Handler; 3] {
    static ODD: OnceLock<Handler> = OnceLock::new();
    let odd = *ODD.get_or_init(|| register("odd under a scratch", Odd).expect("a name of its own"));
    [odd, handler("system").expect("built in"), handler("aligned64").expect("built in")]
}

#[test]
fn a_scratch_takes_nothing_before_its_first_value() {
    let (owner, strategy) = marked("unused scratch");
    let scratch = scope(owner, Scratch::new);
    assert_eq!((scratch.handler(), scratch.held_bytes(), strategy.made()), (Some(owner), 0, 0));
    assert!(scratch.copy_from_slice::<u64>(&[]).expect("no memory is needed").is_empty());
    assert_eq!(strategy.made(), 0);
}

#[test]
#[cfg_attr(miri, ignore = "a million bytes, one by one")]
fn values_of_a_scratch_lie_side_by_side_in_its_handler() {
    let (owner, strategy) = marked("scratch");
    let mut scratch = Scratch::with_handler(owner);
    let (first, second) = (scratch.put(1_u64).expect("memory"), scratch.put(2_u64).expect("memory"));
    assert_eq!((&raw const *first).addr() - (&raw const *second).addr(), 8);
    (*first, *second) = (3, 4);
    assert_eq!((*first, *second, strategy.live_blocks()), (3, 4, 1));
    for _ in 0..10_000 {
        scratch.put([7_u8; 100]).expect("memory");
    }
    let (chunks, bytes) = (strategy.live_blocks(), strategy.live_bytes());
    assert_eq!((bytes as usize, chunks), (scratch.held_bytes(), 9), "4, 8, ... 256 KiB, and two more of 256 KiB");
    scratch.reset();
    assert_eq!((strategy.live_blocks(), scratch.held_bytes()), (1, 256 << 10));
    scratch.put(5_u8).expect("memory");
    thread::spawn(move || drop(scratch)).join().expect("no panic");
    assert_eq!((strategy.live_blocks(), strategy.live_bytes()), (0, 0));
}

#[test]
fn a_scratch_in_an_arena_holds_chunks_of_it_until_dropped() {
    let arena = Arena::over(&Pool::new());
    let mut scratch = Scratch::in_arena(&arena);
    assert_eq!((scratch.handler(), arena.live_blocks()), (None, 0));
    for number in 0..2000_u64 {
        assert_eq!(*scratch.put([number; 3]).expect("memory"), [number; 3]);
    }
    assert!(arena.live_blocks() > 1);
    assert!(!arena.reset(), "chunks are alive");
    scratch.reset();
    assert_eq!(arena.live_blocks(), 1, "the newest chunk stays");
    drop(scratch);
    assert!(arena.reset());
}

#[test]
fn a_value_that_fits_counts_no_refusal_of_a_larger_chunk() {
    let tenant = Budget::new("tenant", Some(10_000));
    let by_limit = request().limit_bytes(10_000).begin().expect("memory");
    let by_budget = request().budget(&tenant).begin().expect("memory");
    for request in [by_limit, by_budget] {
        let scratch = request.run(Scratch::new);
        for _ in 0..2 {
            scratch.put([0_u8; 3000]).expect("3 KB fit");
        }
        assert_eq!((request.stats().refused, tenant.refused()), (0, 0));
        assert!(scratch.put([0_u8; 8000]).is_err());
        assert_eq!(request.stats().refused + tenant.refused(), 1, "what fails is refused once");
    }
}

#[test]
fn a_scratch_of_an_ended_request_is_refused_once_or_detached() {
    for (after_end, refused) in [(AfterEnd::Refuse, 1), (AfterEnd::Detach, 0)] {
        let request = request().limit_bytes(10_000).after_end(after_end).begin().expect("memory");
        let (scratch, handle) = (request.run(Scratch::new), request.handle());
        request.end();
        assert_eq!(scratch.put([0_u8; 3000]).is_err(), refused > 0);
        assert_eq!(handle.stats().refused, refused);
    }
}

#[test]
fn a_limit_refuses_what_a_scratch_asks_for_and_nothing_is_lost() {
    let request = request().limit_bytes(10_000).begin().expect("memory");
    request.run(|| {
        let scratch = Scratch::new();
        let kept = scratch.copy_from_slice(&[1_u8; 4000]).expect("4 KiB fit");
        let refused = scratch.copy_from_slice(&[2_u8; 8000]);
        assert!(matches!(refused, Err(Error::BudgetExceeded { .. })), "{refused:?}");
        // The usual 8 KiB do not fit any more; what is needed does.
        scratch.copy_from_slice(&[3_u8; 5000]).expect("5 KB fit");
        assert!(kept.iter().all(|&byte| byte == 1));
        let mut numbers = VecIn::new_in(&scratch);
        assert!(numbers.try_reserve(100_000).is_err());
        numbers.push(1_u8);
        assert_eq!(request.stats().live_bytes, scratch.held_bytes());
    });
    assert_eq!(request.stats().live_bytes, 0);
}

#[test]
fn the_newest_vec_of_a_scratch_grows_in_place() {
    let (owner, strategy) = marked("growing scratch");
    let scratch = Scratch::with_handler(owner);
    let mut numbers = VecIn::new_in(&scratch);
    for number in 0..500_u64 {
        numbers.push(number);
    }
    assert!(numbers.iter().copied().eq(0..500));
    assert_eq!(strategy.live_blocks(), 2, "4096 bytes and the header of a chunk are more than the first chunk has");
    drop(numbers);
    scratch.copy_from_slice(&[1_u8; 8000]).expect("memory");
    assert_eq!(strategy.live_blocks(), 2, "the newest block was taken back");
}

#[test]
fn an_impossible_size_is_refused() {
    for owner in owners() {
        let scratch = Scratch::with_handler(owner);
        let huge = Layout::from_size_align(isize::MAX as usize - 4095, 4096).expect("a layout");
        assert!(scratch.allocate_layout(huge).is_err());
        assert_eq!(scratch.held_bytes(), 0);
    }
}

/// One block that is alive.
struct Block {
    start: NonNull<u8>,
    layout: Layout,
    mark: u8,
}

impl Block {
    fn new(start: NonNull<[u8]>, layout: Layout, mark: u8) -> Self {
        assert_eq!(start.len(), layout.size());
        let start = start.cast::<u8>();
        assert!(start.addr().get().is_multiple_of(layout.align()));
        let block = Self { start, layout, mark };
        // SAFETY: a new block of this layout.
        unsafe { start.write_bytes(mark, layout.size()) };
        block
    }

    fn check(&self, bytes: usize) {
        // SAFETY: live, and filled by `new`.
        let bytes = unsafe { std::slice::from_raw_parts(self.start.as_ptr(), bytes.min(self.layout.size())) };
        assert!(bytes.iter().all(|byte| *byte == self.mark), "another value was written over this one");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: rounds(200, 4) as u32, failure_persistence: None, ..Default::default() })]

    #[test]
    fn random_operations_keep_every_value_of_a_scratch(
        owner in 0..3_usize,
        steps in prop::collection::vec((0..6_u8, 0..rounds(6000, 300), 0..9_u32, any::<prop::sample::Index>()), 1..rounds(80, 15)),
    ) {
        let mut scratch = Scratch::with_handler(owners()[owner]);
        let mut blocks: Vec<Block> = Vec::new();
        for (mark, (step, size, align, which)) in steps.into_iter().enumerate() {
            let mark = mark as u8;
            let layout = Layout::from_size_align(size, 1 << align).expect("a layout");
            match step {
                _ if blocks.is_empty() => blocks.push(Block::new(Allocator::allocate(&&scratch, layout).expect("memory"), layout, mark)),
                0 | 1 => blocks.push(Block::new(Allocator::allocate(&&scratch, layout).expect("memory"), layout, mark)),
                2 => {
                    let block = blocks.swap_remove(which.index(blocks.len()));
                    block.check(usize::MAX);
                    // SAFETY: live, with this layout, and forgotten here.
                    unsafe { (&scratch).deallocate(block.start, block.layout) };
                }
                3 | 4 => {
                    let block = blocks.swap_remove(which.index(blocks.len()));
                    let new = Layout::from_size_align(block.layout.size() + size, 1 << align).expect("a layout");
                    // SAFETY: live, with this layout; the new one is no smaller.
                    let grown = unsafe {
                        if step == 3 {
                            (&scratch).grow(block.start, block.layout, new)
                        } else {
                            (&scratch).grow_zeroed(block.start, block.layout, new)
                        }
                    }
                    .expect("memory");
                    let moved = Block { start: grown.cast(), layout: new, mark: block.mark };
                    moved.check(block.layout.size());
                    if step == 4 {
                        // SAFETY: the new bytes of the block.
                        let tail = unsafe { std::slice::from_raw_parts(moved.start.add(block.layout.size()).as_ptr(), size) };
                        prop_assert!(tail.iter().all(|byte| *byte == 0));
                    }
                    blocks.push(Block::new(grown, new, mark));
                }
                _ => {
                    let block = blocks.swap_remove(which.index(blocks.len()));
                    let new = Layout::from_size_align(block.layout.size() / 2, 1 << align).expect("a layout");
                    // SAFETY: live, with this layout; the new one is no larger.
                    let shrunk = unsafe { (&scratch).shrink(block.start, block.layout, new) }.expect("memory");
                    Block { start: shrunk.cast(), layout: new, mark: block.mark }.check(usize::MAX);
                    blocks.push(Block::new(shrunk, new, mark));
                }
            }
            blocks.iter().for_each(|block| block.check(usize::MAX));
            if blocks.len() > 20 {
                blocks.clear();
                scratch.reset();
            }
        }
    }
}
