//! What a user supplies panics inside of ours: a pool's source in each of its calls, also on the decay thread; `Debug`;
//! an allocator below `GlobalScoped` (`memory/global_scoped.rs`). Each in a process of its own, which is this binary
//! once more, running one ignored test: where a lock stayed taken it would hang.
#![cfg(not(miri))]
#![allow(unsafe_code, reason = "a source; blocks are touched")]

#[path = "support/child.rs"]
mod child;

use child::{fate_of, killed_after};
use ctxalloc::source::{Pages, PrivatePages};
use ctxalloc::strategy::{
    Arena, Budget, Budgeted, Fallback, Pool, PoolOptions, Strategy, System, Zeroing, conformance,
};
use ctxalloc::{Buffer, register, request};
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::thread;
use std::time::Duration;

const MIB: usize = 1 << 20;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Call {
    Map = 1,
    Commit,
    Unmap,
    Discard,
    Empty,
    Clear,
    Copy,
}

/// Panics in the next call of one kind.
#[derive(Clone, Default)]
struct Panicking(Arc<Seen>);

#[derive(Default)]
struct Seen {
    next: AtomicUsize,
    /// Panics each time.
    always: AtomicBool,
    panics: AtomicUsize,
    mapped_bytes: AtomicUsize,
    largest_bytes: AtomicUsize,
    is_debug_bad: AtomicBool,
    decays: AtomicBool,
}

impl fmt::Debug for Panicking {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        assert!(!self.0.is_debug_bad.load(SeqCst), "Debug");
        f.write_str("Panicking")
    }
}

impl Panicking {
    fn set(&self, call: Call) {
        self.0.next.store(call as usize, SeqCst);
    }

    fn at(&self, call: Call) {
        let seen = &self.0;
        if seen.next.load(SeqCst) == call as usize {
            if !seen.always.load(SeqCst) {
                seen.next.store(0, SeqCst);
            }
            seen.panics.fetch_add(1, SeqCst);
            panic!("{call:?}");
        }
    }
}

// SAFETY: each call is PrivatePages', or panics and does nothing.
unsafe impl Pages for Panicking {
    fn map(&self, size_bytes: usize, align: usize) -> Option<NonNull<u8>> {
        self.at(Call::Map);
        self.0.mapped_bytes.fetch_add(size_bytes, SeqCst);
        self.0.largest_bytes.fetch_max(size_bytes, SeqCst);
        PrivatePages.map(size_bytes, align)
    }

    unsafe fn commit(&self, _start: NonNull<u8>, _size_bytes: usize) -> bool {
        self.at(Call::Commit);
        true
    }

    unsafe fn unmap(&self, start: NonNull<u8>, size_bytes: usize) {
        self.at(Call::Unmap);
        self.0.mapped_bytes.fetch_sub(size_bytes, SeqCst);
        // SAFETY: this function's contract is the same.
        unsafe { PrivatePages.unmap(start, size_bytes) }
    }

    unsafe fn discard(&self, start: NonNull<u8>, size_bytes: usize) -> bool {
        self.at(Call::Discard);
        // SAFETY: this function's contract is the same.
        unsafe { PrivatePages.discard(start, size_bytes) }
    }

    unsafe fn empty(&self, start: NonNull<u8>, size_bytes: usize) -> bool {
        self.at(Call::Empty);
        // SAFETY: this function's contract is the same.
        unsafe { PrivatePages.empty(start, size_bytes) }
    }

    unsafe fn clear(&self, start: NonNull<u8>, size_bytes: usize) -> bool {
        self.at(Call::Clear);
        // SAFETY: this function's contract is the same.
        unsafe { PrivatePages.clear(start, size_bytes) }
    }

    unsafe fn copy(&self, to: NonNull<u8>, from: NonNull<u8>, size_bytes: usize) -> bool {
        self.at(Call::Copy);
        // SAFETY: this function's contract is the same.
        unsafe { PrivatePages.copy(to, from, size_bytes) }
    }

    fn decays_by_itself(&self) -> bool {
        self.0.decays.load(SeqCst)
    }
}

/// Hundreds of panics of the source say nothing.
fn only_others_are_told() {
    let tells = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        let text = panic.payload().downcast_ref::<String>().map_or("", String::as_str);
        if !["Map", "Unmap", "Discard", "Copy"].contains(&text) {
            tells(panic);
        }
    }));
}

/// Blocks with a byte of their own; released at the end, by a panic too.
struct Blocks<'a, S: Strategy>(&'a S, Vec<(NonNull<u8>, usize)>);

impl<S: Strategy> Blocks<'_, S> {
    fn add(&mut self, size_bytes: usize, zeroed: bool) {
        let block = if zeroed { self.0.allocate_zeroed(size_bytes) } else { self.0.allocate(size_bytes) };
        let block = block.expect("memory");
        if zeroed {
            // SAFETY: a new block of that size, written in full.
            let bytes = unsafe { std::slice::from_raw_parts(block.as_ptr(), size_bytes) };
            assert!(are_all(bytes, 0), "zeroed");
        }
        // SAFETY: a new block of that size.
        unsafe { block.write_bytes(mark(size_bytes), size_bytes) };
        self.1.push((block, size_bytes));
    }

    fn resize_last(&mut self, size_bytes: usize) {
        let (block, before) = self.1[self.1.len() - 1];
        // SAFETY: a live block, which is another one afterwards; where this panics it is the same one.
        let moved = unsafe { self.0.resize(block, size_bytes) }.expect("memory");
        // SAFETY: live with that many bytes; the old ones are written.
        unsafe {
            assert_eq!(moved.read(), mark(before), "its bytes moved with it");
            moved.write_bytes(mark(size_bytes), size_bytes);
        }
        *self.1.last_mut().expect("it is there") = (moved, size_bytes);
    }

    fn check(&self) {
        for &(block, size_bytes) in &self.1 {
            // SAFETY: live, of that size and written.
            let bytes = unsafe { std::slice::from_raw_parts(block.as_ptr(), size_bytes) };
            assert!(are_all(bytes, mark(size_bytes)), "a live block of {size_bytes} bytes changed");
        }
    }
}

impl<S: Strategy> Drop for Blocks<'_, S> {
    fn drop(&mut self) {
        for (block, _) in self.1.drain(..) {
            // A release that panics has released.
            // SAFETY: live, and released once.
            let _ = catch_unwind(AssertUnwindSafe(|| unsafe { self.0.release(block) }));
        }
    }
}

/// Whether each byte is this one: the first is, and each other one is as that before it. Fast without optimization too.
fn are_all(bytes: &[u8], value: u8) -> bool {
    bytes.first().is_none_or(|&first| first == value && bytes[1..] == bytes[..bytes.len() - 1])
}

fn mark(size_bytes: usize) -> u8 {
    u8::try_from(size_bytes % 251).expect("small") + 1
}

/// Every kind of call of the source, sooner or later.
fn work<S: Strategy>(strategy: &S) {
    let mut blocks = Blocks(strategy, Vec::new());
    for size_bytes in [100, 5000, 70_000, 200_000, MIB, 3 * MIB] {
        (0..8).for_each(|_| blocks.add(size_bytes, false));
    }
    blocks.resize_last(5 * MIB);
    blocks.add(3000, false);
    blocks.resize_last(30_000);
    blocks.check();
    drop(blocks);
    let mut blocks = Blocks(strategy, Vec::new());
    for size_bytes in [100, 5000, MIB] {
        (0..50).for_each(|_| blocks.add(size_bytes, true));
    }
    // Holes around live blocks, which an arena empties.
    for number in (0..50).rev() {
        if number % 20 != 0 {
            let (block, _) = blocks.1.remove(50 + number);
            // SAFETY: live, and taken out of the list.
            unsafe { strategy.release(block) };
        }
    }
    strategy.trim();
    blocks.check();
    drop(blocks);
    strategy.trim();
}

fn goes_on_after_each_panic<S: Strategy + Clone>(make: impl Fn(&Pool<Panicking>) -> S, calls: &[Call]) {
    for &call in calls {
        for round in 0..2 {
            let source = Panicking::default();
            let pool = Pool::over(source.clone(), PoolOptions::default());
            let strategy = make(&pool);
            let mut live = Blocks(&strategy, Vec::new());
            [100, 5000, 200_000, MIB].into_iter().for_each(|size_bytes| live.add(size_bytes, false));
            (0..round).for_each(|_| work(&strategy)); // in another state each time
            source.set(call);
            let outcome = catch_unwind(AssertUnwindSafe(|| work(&strategy)));
            let panics = source.0.panics.load(SeqCst);
            assert_eq!(panics, 1, "{call:?} was not called, in round {round}; {:?}", outcome.is_err());
            live.check();
            thread::scope(|scope| {
                scope.spawn(|| conformance::check(strategy.clone())).join().expect("another thread works");
            });
            work(&strategy);
            live.check();
            drop(live);
            drop(strategy);
            pool.trim();
            drop(pool);
            let lost = source.0.mapped_bytes.load(SeqCst);
            let at_most = if call == Call::Unmap { source.0.largest_bytes.load(SeqCst) } else { 0 };
            assert!(lost <= at_most, "{call:?} in round {round} cost {} MiB for ever", lost / MIB);
        }
    }
}

#[test]
fn a_pool_goes_on_after_its_source_panicked() {
    fate_of("child_whose_pools_source_panics").ended_well();
}

#[test]
#[ignore = "a child of a_pool_goes_on_after_its_source_panicked"]
fn child_whose_pools_source_panics() {
    killed_after(120);
    let calls = [Call::Map, Call::Commit, Call::Unmap, Call::Discard, Call::Clear, Call::Copy];
    goes_on_after_each_panic(Pool::clone, &calls);
}

#[test]
fn an_arena_goes_on_after_its_source_panicked() {
    fate_of("child_whose_arenas_source_panics").ended_well();
}

#[test]
#[ignore = "a child of an_arena_goes_on_after_its_source_panicked"]
fn child_whose_arenas_source_panics() {
    killed_after(120);
    let calls = [Call::Map, Call::Commit, Call::Unmap, Call::Discard, Call::Empty, Call::Clear, Call::Copy];
    goes_on_after_each_panic(Arena::over, &calls);
}

#[test]
fn wrappers_go_on_after_a_source_panicked() {
    fate_of("child_with_wrappers_whose_source_panics").ended_well();
}

/// All of a wrapper's work, with a source that always panics where a block goes back, or is copied. What moved has
/// moved.
#[test]
#[ignore = "a child of wrappers_go_on_after_a_source_panicked"]
fn child_with_wrappers_whose_source_panics() {
    killed_after(120);
    only_others_are_told();
    let budget = Budget::new("scarce", None);
    let wrappers: [&dyn Fn(Pool<BothPanic>) -> Arc<dyn Strategy>; 4] = [
        &|pool| Arc::new(pool),
        &|pool| Arc::new(Zeroing::new(pool)),
        &|pool| Arc::new(Budgeted::new(pool, Budget::new("any", None))),
        &|pool| Arc::new(Fallback::new(Budgeted::new(pool, budget.clone()), System)),
    ];
    for (number, wrap) in wrappers.into_iter().enumerate() {
        let source = Panicking::default();
        source.0.always.store(true, SeqCst);
        let pool = Pool::over(BothPanic(source.clone()), PoolOptions::default());
        let handler = register(&format!("wrapper {number}"), wrap(pool)).expect("a new name");
        for round in 0..100 {
            let mut moved = Buffer::zeroed_in(handler, (1 + round % 9) * 3 * MIB / 2).expect("memory");
            moved.fill(7);
            if number == 3 {
                budget.set_limit_bytes(Some(budget.in_use_bytes())); // a larger one is the other strategy's
            }
            let before = (moved.as_ptr(), moved.len());
            source.set(Call::Unmap);
            let resized = moved.resize(before.1 + 3 * MIB);
            source.0.next.store(0, SeqCst);
            budget.set_limit_bytes(None);
            assert!(resized.is_ok(), "what moved has moved, in round {round} of {number}");
            let mut other = Buffer::zeroed_in(handler, before.1).expect("memory"); // in the old place, perhaps
            other.fill(9);
            assert_eq!((moved[0], moved[before.1 - 1], other[0]), (7, 7, 9), "one block, two owners");
        }
        assert!(source.0.panics.load(SeqCst) > 0, "nothing panicked in {number}");
    }
    // A copy that panics, and the release of its half-made target as well.
    let source = Panicking::default();
    source.0.always.store(true, SeqCst);
    let mut options = PoolOptions::default();
    options.warm_bytes = 0;
    let handler = register("two at once", Pool::over(BothPanic(source.clone()), options)).expect("a new name");
    let mut buffer = Buffer::zeroed_in(handler, 3 * MIB).expect("memory");
    buffer.fill(7);
    source.set(Call::Copy);
    assert!(buffer.resize(9 * MIB).is_err());
    source.0.next.store(0, SeqCst);
    assert!(buffer.len() == 3 * MIB && buffer.iter().all(|&byte| byte == 7), "it is unchanged");
}

/// Panics in all of its releases while it is set to panic in one, or in its copies.
#[derive(Debug)]
struct BothPanic(Panicking);

// SAFETY: each call is Panicking's, or panics and does nothing.
unsafe impl Pages for BothPanic {
    fn map(&self, size_bytes: usize, align: usize) -> Option<NonNull<u8>> {
        self.0.map(size_bytes, align)
    }

    unsafe fn unmap(&self, start: NonNull<u8>, size_bytes: usize) {
        self.0.at(Call::Copy);
        // SAFETY: this function's contract is the same.
        unsafe { self.0.unmap(start, size_bytes) }
    }

    unsafe fn discard(&self, start: NonNull<u8>, size_bytes: usize) -> bool {
        self.0.at(Call::Copy);
        self.0.at(Call::Unmap);
        // SAFETY: this function's contract is the same.
        unsafe { self.0.discard(start, size_bytes) }
    }

    unsafe fn copy(&self, to: NonNull<u8>, from: NonNull<u8>, size_bytes: usize) -> bool {
        // SAFETY: this function's contract is the same.
        unsafe { self.0.copy(to, from, size_bytes) }
    }
}

#[test]
fn what_a_source_panicked_about_is_charged_to_nobody() {
    only_others_are_told();
    let source = Panicking::default();
    source.0.always.store(true, SeqCst);
    let mut options = PoolOptions::default();
    options.warm_bytes = 0;
    let pool = Pool::over(source.clone(), options);
    let tenant = Budget::new("tenant", Some(64 * MIB));
    let budgeted = register("charged to a tenant", Budgeted::new(pool.clone(), tenant.clone())).expect("a new name");
    let request = request().root().strategy(pool).begin().expect("memory");
    for handler in [budgeted, request.handler()] {
        for call in [Call::Map, Call::Discard, Call::Unmap] {
            source.set(call);
            for _ in 0..9 {
                let _ = Buffer::zeroed_in(handler, 5 * MIB);
            }
            source.0.next.store(0, SeqCst);
            assert_eq!((tenant.in_use_bytes(), tenant.reserved_bytes()), (0, 0), "{call:?}");
            assert_eq!(request.stats().live_bytes, 0, "{call:?}");
        }
    }
    assert!(source.0.panics.load(SeqCst) > 0);
}

#[test]
fn the_decay_thread_goes_on_after_a_source_panicked() {
    fate_of("child_whose_source_panics_on_the_decay_thread").ended_well();
}

#[test]
#[ignore = "a child of the_decay_thread_goes_on_after_a_source_panicked"]
fn child_whose_source_panics_on_the_decay_thread() {
    killed_after(60);
    let source = Panicking::default();
    source.0.decays.store(true, SeqCst);
    source.0.always.store(true, SeqCst);
    let mut options = PoolOptions::default();
    options.decay = Duration::from_millis(100);
    let pool = Pool::over(source.clone(), options);
    let good = Pool::over(PrivatePages, options);
    let kept = pool.allocate(100).expect("memory"); // so that its region stays
    let is_here = thread::current().id();
    std::panic::set_hook(Box::new(move |_| assert_ne!(thread::current().id(), is_here, "not on the decay thread")));
    while source.0.panics.load(SeqCst) < 3 {
        source.0.next.store(0, SeqCst);
        for pool in [&pool as &dyn Strategy, &good] {
            // SAFETY: new, and nobody else has it.
            unsafe { pool.release(pool.allocate(MIB).expect("memory")) };
        }
        source.set(Call::Unmap);
        let before = source.0.panics.load(SeqCst);
        while source.0.panics.load(SeqCst) == before {
            thread::sleep(Duration::from_millis(5));
        }
    }
    source.0.next.store(0, SeqCst);
    // SAFETY: live, and released once.
    unsafe { pool.release(kept) };
}

struct BadDebug;

impl fmt::Debug for BadDebug {
    fn fmt(&self, _: &mut fmt::Formatter<'_>) -> fmt::Result {
        panic!("Debug")
    }
}

// SAFETY: all of it is System's.
unsafe impl Strategy for BadDebug {
    fn alignment(&self) -> usize {
        ctxalloc::strategy::System.alignment()
    }

    fn allocate(&self, size_bytes: usize) -> Option<NonNull<u8>> {
        ctxalloc::strategy::System.allocate(size_bytes)
    }

    unsafe fn release(&self, block: NonNull<u8>) {
        // SAFETY: this function's contract is the same.
        unsafe { ctxalloc::strategy::System.release(block) }
    }

    unsafe fn resize(&self, block: NonNull<u8>, new_size_bytes: usize) -> Option<NonNull<u8>> {
        // SAFETY: this function's contract is the same.
        unsafe { ctxalloc::strategy::System.resize(block, new_size_bytes) }
    }
}

#[test]
fn a_debug_that_panics_leaves_no_lock_behind() {
    fate_of("child_whose_debug_panics").ended_well();
}

#[test]
#[ignore = "a child of a_debug_that_panics_leaves_no_lock_behind"]
fn child_whose_debug_panics() {
    killed_after(60);
    let registered = catch_unwind(|| register("bad", BadDebug).map(|handler| format!("{handler:?}")));
    drop(registered);
    let source = Panicking::default();
    let pool = Pool::over(source.clone(), PoolOptions::default());
    source.0.is_debug_bad.store(true, SeqCst);
    assert!(catch_unwind(AssertUnwindSafe(|| format!("{pool:?} {:?}", Arena::over(&pool)))).is_err());
    let registered = catch_unwind(AssertUnwindSafe(|| register("bad source", pool.clone()).map(|_| ())));
    drop(registered);
    source.0.is_debug_bad.store(false, SeqCst);
    work(&pool);
    thread::spawn(|| {
        let handler = register("good", Pool::new()).expect("a new name");
        drop(Buffer::zeroed_in(handler, 100).expect("memory"));
    })
    .join()
    .expect("the table's lock is free");
}
