//! `Tracked` from the inside: what is listed and when, attribution that fails or allocates, many threads.

use super::{Attribution, Frame, LiveBlock, Origin, Place, Report, Totals, Tracked};
use crate::strategy::{Budget, Budgeted, Fallback, Faulty, Pool, Strategy, System, conformance};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Barrier};
use std::thread;

fn release(strategy: &impl Strategy, block: NonNull<u8>) {
    // SAFETY: tests release each of their live blocks once.
    unsafe { strategy.release(block) }
}

fn resize(strategy: &impl Strategy, block: NonNull<u8>, size_bytes: usize) -> Option<NonNull<u8>> {
    // SAFETY: a live block; tests use what it became from here on.
    unsafe { strategy.resize(block, size_bytes) }
}

fn live(strategy: &impl Strategy) -> Vec<LiveBlock> {
    strategy.live_blocks().expect("tracked")
}

fn sizes(strategy: &impl Strategy) -> Vec<usize> {
    live(strategy).iter().map(|block| block.size_bytes).collect()
}

fn new() -> Tracked<System> {
    Tracked::new(System).expect("not tracked")
}

#[test]
fn tracked_keeps_the_strategy_contract_and_ends_with_nothing_alive() {
    for tracked in
        [Tracked::new(Pool::new()), Tracked::with_attribution(Pool::new(), || Attribution::Origin(Arc::default()))]
    {
        let tracked = tracked.expect("not tracked");
        conformance::check(tracked.clone());
        assert_eq!((tracked.totals(), sizes(&tracked)), (Totals::default(), vec![]));
    }
}

#[test]
fn every_live_block_is_listed_the_oldest_first_with_its_address() {
    let tracked = new();
    let blocks: Vec<_> = (1..=100).map(|size| tracked.allocate(size).expect("memory")).collect();
    assert_eq!(sizes(&tracked), (1..=100).collect::<Vec<_>>());
    let addresses: Vec<_> = live(&tracked).iter().map(|block| block.address).collect();
    assert_eq!(addresses, blocks.iter().map(|block| block.addr().get()).collect::<Vec<_>>());
    // From the ends and from the middle.
    for index in [0, 99, 50, 1, 98, 49] {
        release(&tracked, blocks[index]);
    }
    let left: Vec<_> = (1..=100).filter(|size| ![1, 100, 51, 2, 99, 50].contains(size)).collect();
    assert_eq!(sizes(&tracked), left);
    assert_eq!(tracked.totals(), Totals { blocks: 94, bytes: left.iter().sum() });
    for index in (2..98).filter(|index| ![49, 50].contains(index)) {
        release(&tracked, blocks[index]);
    }
    assert_eq!(tracked.totals(), Totals::default());
    let again = tracked.allocate_zeroed(7).expect("memory");
    assert_eq!(sizes(&tracked), [7]);
    release(&tracked, again);
}

#[test]
fn a_resized_block_keeps_its_place_in_the_list_and_is_the_same_block() {
    let tracked = new();
    let blocks = [1, 2, 3].map(|size| tracked.allocate(size).expect("memory"));
    let before = live(&tracked);
    let moved = [0, 1, 2].map(|index| resize(&tracked, blocks[index], 100_000 + index).expect("memory"));
    let after = live(&tracked);
    assert_eq!(before, after, "equal by what they are");
    assert_eq!(sizes(&tracked), [100_000, 100_001, 100_002]);
    assert_eq!(after[1].address, moved[1].addr().get());
    assert_eq!(tracked.totals().bytes, 300_003);
    moved.iter().for_each(|&block| release(&tracked, block));
}

#[test]
fn a_resize_that_fails_leaves_the_block_listed_as_it_was() {
    let tracked = Tracked::new(Faulty::every(System, 3).expect("a count")).expect("not tracked");
    let blocks = [10, 20].map(|size| tracked.allocate(size).expect("memory"));
    assert!(resize(&tracked, blocks[0], 1000).is_none(), "the third request");
    assert_eq!(sizes(&tracked), [10, 20]);
    assert_eq!(live(&tracked)[0].address, blocks[0].addr().get());
    blocks.iter().for_each(|&block| release(&tracked, block));
    assert_eq!(tracked.totals(), Totals::default());
}

#[test]
fn a_refused_block_is_not_listed_and_its_attribution_is_dropped() {
    let origin = Arc::new(Origin::default());
    let attribution = Arc::clone(&origin);
    let faulty = Faulty::every(System, 2).expect("a count");
    let tracked =
        Tracked::with_attribution(faulty, move || Attribution::Origin(Arc::clone(&attribution))).expect("not tracked");
    let block = tracked.allocate(10).expect("the first request");
    assert!(tracked.allocate(20).is_none());
    assert_eq!((sizes(&tracked), Arc::strong_count(&origin)), (vec![10], 3));
    release(&tracked, block);
    assert_eq!(Arc::strong_count(&origin), 2);
}

#[test]
fn a_block_names_the_thread_that_made_it_also_after_its_end() {
    let tracked = new();
    let there = tracked.clone();
    let maker = thread::Builder::new().name("the maker".into());
    let address = maker
        .spawn(move || there.allocate(10).expect("memory").expose_provenance().get())
        .expect("a thread")
        .join()
        .expect("no panic");
    let blocks = live(&tracked);
    if cfg!(all(target_os = "linux", not(miri))) {
        assert_eq!(blocks[0].thread.name, "the maker");
        // SAFETY: gettid takes no argument and cannot fail.
        assert_ne!(blocks[0].thread.id, unsafe { libc::gettid() } as u32);
    }
    assert_ne!(blocks[0].thread.id, 0);
    let block = NonNull::new(std::ptr::with_exposed_provenance_mut(address)).expect("not NULL");
    release(&tracked, block); // on another thread than its maker's
    assert_eq!(tracked.totals(), Totals::default());
}

#[test]
fn no_live_block_is_ever_missed_while_others_come_and_go_and_are_resized() {
    let tracked = Tracked::new(Pool::new()).expect("not tracked");
    let kept: Vec<_> = (0..50).map(|_| tracked.allocate(1000).expect("memory")).collect();
    let before = live(&tracked);
    let (stop, resized) = (AtomicBool::new(false), AtomicUsize::new(0));
    let begin = Barrier::new(4);
    thread::scope(|scope| {
        for number in 0..3 {
            scope.spawn(|| {
                begin.wait();
                let mut block = tracked.allocate(10).expect("memory");
                for round in 0.. {
                    let other = tracked.allocate(100).expect("memory");
                    block = resize(&tracked, block, round % 5000 + 1).expect("memory");
                    resized.fetch_add(1, Ordering::Relaxed);
                    release(&tracked, other);
                    if stop.load(Ordering::Relaxed) {
                        break;
                    }
                }
                release(&tracked, block);
            });
            let _ = number;
        }
        begin.wait();
        let least = if cfg!(miri) { 5 } else { 3000 };
        while resized.load(Ordering::Relaxed) < least {
            let now = live(&tracked);
            assert!(before.iter().all(|block| now.contains(block)));
            assert!(now.iter().all(|block| block.size_bytes <= 5000), "a half-written record was seen");
        }
        stop.store(true, Ordering::Relaxed);
    });
    assert_eq!(live(&tracked), before);
    kept.iter().for_each(|&block| release(&tracked, block));
}

/// How many blocks it takes for several turns of a listing.
const SEVERAL_TURNS: usize = 3 * super::ledger::AT_ONCE + 7;

#[test]
fn several_list_a_list_of_any_length_whole_while_its_blocks_go() {
    let tracked = Tracked::new(Pool::new()).expect("not tracked");
    for length in [0, 1, super::ledger::AT_ONCE - 1, super::ledger::AT_ONCE, super::ledger::AT_ONCE + 1, SEVERAL_TURNS]
    {
        let blocks: Vec<_> = (0..length).map(|size| tracked.allocate(size + 1).expect("memory")).collect();
        assert_eq!(sizes(&tracked), (1..=length).collect::<Vec<_>>());
        blocks.iter().for_each(|&block| release(&tracked, block));
    }
    // Every other block stays; those between go, and the first is resized, where a bookmark may be at that moment.
    let blocks: Vec<_> = (0..SEVERAL_TURNS).map(|size| tracked.allocate(size + 1).expect("memory")).collect();
    let stay: Vec<_> = live(&tracked).into_iter().step_by(2).skip(1).collect();
    let over = AtomicBool::new(false);
    thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                while !over.load(Ordering::Relaxed) {
                    let now = live(&tracked);
                    let kept: Vec<_> = now.iter().filter(|block| stay.contains(block)).collect();
                    assert_eq!(kept, stay.iter().collect::<Vec<_>>(), "each once, in order");
                }
            });
        }
        let mut resized = blocks[0];
        for (index, &block) in blocks.iter().enumerate() {
            if index % 2 == 1 {
                release(&tracked, block);
            }
            resized = resize(&tracked, resized, index + 1).expect("memory");
        }
        over.store(true, Ordering::Relaxed);
        release(&tracked, resized);
    });
    blocks.iter().step_by(2).skip(1).for_each(|&block| release(&tracked, block));
    assert_eq!((tracked.totals(), sizes(&tracked)), (Totals::default(), vec![]));
}

#[test]
fn nobody_waits_for_more_than_one_turn_of_a_listing() {
    let tracked = new();
    let mut blocks: Vec<_> = (0..SEVERAL_TURNS).map(|size| tracked.allocate(size + 1).expect("memory")).collect();
    let mut turns = 0;
    tracked.inner.ledger.in_turns(|some| {
        assert!(some.len() <= super::ledger::AT_ONCE);
        turns += usize::from(!some.is_empty());
        // In the very list that is being listed: it would wait here for ever if that were locked.
        release(&tracked, blocks.remove(blocks.len() / 2));
        let new = resize(&tracked, blocks.pop().expect("many"), 5).expect("memory");
        blocks.push(new);
        blocks.push(tracked.allocate(7).expect("memory"));
    });
    assert_eq!(turns, SEVERAL_TURNS.div_ceil(super::ledger::AT_ONCE), "what was made meanwhile is not waited for");
    blocks.iter().for_each(|&block| release(&tracked, block));
    assert_eq!((tracked.totals(), sizes(&tracked)), (Totals::default(), vec![]));
}

/// Panics in each resize while its flag is set.
#[derive(Debug)]
struct Panicking(Arc<AtomicBool>);

// SAFETY: System's blocks; a resize that panics does nothing to them.
unsafe impl Strategy for Panicking {
    fn alignment(&self) -> usize {
        System.alignment()
    }

    fn allocate(&self, size_bytes: usize) -> Option<NonNull<u8>> {
        System.allocate(size_bytes)
    }

    fn allocate_zeroed(&self, size_bytes: usize) -> Option<NonNull<u8>> {
        System.allocate_zeroed(size_bytes)
    }

    unsafe fn resize(&self, block: NonNull<u8>, new_size_bytes: usize) -> Option<NonNull<u8>> {
        assert!(!self.0.load(Ordering::Relaxed), "the flag is set");
        // SAFETY: the caller's promises are the same, and the blocks are System's.
        unsafe { System.resize(block, new_size_bytes) }
    }

    unsafe fn release(&self, block: NonNull<u8>) {
        // SAFETY: the caller's promises are the same, and the blocks are System's.
        unsafe { System.release(block) }
    }
}

#[test]
fn a_resize_that_panics_leaves_the_block_listed_as_it_was() {
    let panics = Arc::new(AtomicBool::new(true));
    let tracked = Tracked::new(Panicking(Arc::clone(&panics))).expect("not tracked");
    let blocks = [10, 20, 30].map(|size| tracked.allocate(size).expect("memory"));
    let before = live(&tracked);
    for block in blocks {
        catch_unwind(AssertUnwindSafe(|| resize(&tracked, block, 1000))).expect_err("the flag is set");
    }
    assert_eq!(live(&tracked), before);
    assert_eq!(live(&tracked)[1].address, blocks[1].addr().get());
    assert_eq!(sizes(&tracked), [10, 20, 30]);
    panics.store(false, Ordering::Relaxed);
    for block in blocks {
        let moved = resize(&tracked, block, 40).expect("memory");
        release(&tracked, moved);
    }
    assert_eq!((tracked.totals(), sizes(&tracked)), (Totals::default(), vec![]));
}

#[test]
fn the_attribution_is_kept_until_the_block_is_released() {
    let numbered = Tracked::with_attribution(System, || Attribution::from(Some(1 << 40))).expect("not tracked");
    let block = numbered.allocate(8).expect("memory");
    assert_eq!(live(&numbered)[0].task.as_deref(), Some("1099511627776"));
    release(&numbered, block);

    let frame = |line, function: &str| Frame { file: "/src/load.py".into(), line, function: function.into() };
    let place = Arc::new(Place { frames: [frame(7, "load"), frame(31, "main")].into() });
    let here = Arc::clone(&place);
    let tracked = Tracked::with_attribution(System, move || {
        Attribution::Origin(Arc::new(Origin { task: Some("Task-3".into()), place: Some(Arc::clone(&here)) }))
    })
    .expect("not tracked");
    let blocks = [100, 1000].map(|size| tracked.allocate(size).expect("memory"));
    let found = live(&tracked);
    assert_eq!(found[1].task.as_deref(), Some("Task-3"));
    assert_eq!(found[1].place.as_ref(), Some(&place));
    let report = Report::of(&found).to_string();
    assert_eq!(report.lines().next(), Some("2 live blocks, 1100 bytes"));
    assert!(report.contains("1100 bytes in 2 blocks, oldest 0"), "{report}");
    assert!(report.ends_with("load (load.py:7) < main (load.py:31)"), "{report}");
    drop(found);
    blocks.iter().for_each(|&block| release(&tracked, block));
    drop(tracked);
    assert_eq!(Arc::strong_count(&place), 1);
}

#[test]
fn others_pass_the_list_on_as_the_user_sees_it() {
    let budget = Budget::new("all", None);
    let first = Faulty::every(Budgeted::new(new(), budget), 2).expect("a count");
    let strategy = Fallback::new(first, Fallback::new(new(), System));
    let blocks = [10, 20, 30].map(|size| strategy.allocate(size).expect("memory"));
    let mut found: Vec<_> = live(&strategy).iter().map(|block| (block.size_bytes, block.address)).collect();
    found.sort_unstable();
    assert_eq!(found, [0, 1, 2].map(|index| ((index + 1) * 10, blocks[index].addr().get())));
    blocks.iter().for_each(|&block| release(&strategy, block));
    assert_eq!(System.live_blocks().map(|_| ()), None);
}

#[test]
fn to_track_what_is_tracked_is_refused_with_the_reason() {
    for refused in [
        Tracked::new(Budgeted::new(new(), Budget::new("all", None))).map(|_| ()),
        Tracked::new(Fallback::new(System, new())).map(|_| ()),
    ] {
        let message = refused.expect_err("senseless").to_string();
        assert!(message.contains("its own list would be out of reach"), "{message}");
    }
}
