//! A pool ends, or an arena that owns one, and the source panics in every call: the process goes on, no lock stays
//! taken, and each mapping was offered to the source once. In a process of its own: it would abort or hang.
#![cfg(not(miri))]
#![allow(unsafe_code, reason = "a source; blocks are released")]

#[path = "support/child.rs"]
mod child;

use child::{fate_of, fork_and, killed_after};
use ctxalloc::source::{Pages, PrivatePages};
use ctxalloc::strategy::{Arena, Pool, PoolOptions, Strategy, conformance};
use std::cell::RefCell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::thread;

const MIB: usize = 1 << 20;

/// Panics in every call once it is bad.
#[derive(Debug, Clone, Default)]
struct Source(Arc<Seen>);

#[derive(Debug, Default)]
struct Seen {
    is_bad: AtomicBool,
    has_huge: bool,
    maps: AtomicUsize,
    unmaps: AtomicUsize,
}

impl Source {
    fn with_huge() -> Self {
        Self(Arc::new(Seen { has_huge: true, ..Seen::default() }))
    }

    fn call(&self) {
        assert!(!self.0.is_bad.load(SeqCst), "the source");
    }

    fn is_offered_all(&self) {
        assert!(self.0.maps.load(SeqCst) >= 3, "mappings of both kinds");
        assert_eq!(self.0.maps.load(SeqCst), self.0.unmaps.load(SeqCst));
    }
}

// SAFETY: each call is PrivatePages', or panics; then nothing was done, and a mapping stays for ever.
unsafe impl Pages for Source {
    fn map(&self, size_bytes: usize, align: usize) -> Option<NonNull<u8>> {
        self.call();
        self.0.maps.fetch_add(1, SeqCst);
        PrivatePages.map(size_bytes, align)
    }

    unsafe fn commit(&self, _start: NonNull<u8>, _size_bytes: usize) -> bool {
        self.call();
        true
    }

    unsafe fn unmap(&self, start: NonNull<u8>, size_bytes: usize) {
        self.0.unmaps.fetch_add(1, SeqCst);
        self.call();
        // SAFETY: this function's contract is the same.
        unsafe { PrivatePages.unmap(start, size_bytes) }
    }

    unsafe fn discard(&self, start: NonNull<u8>, size_bytes: usize) -> bool {
        self.call();
        // SAFETY: this function's contract is the same.
        unsafe { PrivatePages.discard(start, size_bytes) }
    }

    unsafe fn empty(&self, start: NonNull<u8>, size_bytes: usize) -> bool {
        self.call();
        // SAFETY: this function's contract is the same.
        unsafe { PrivatePages.empty(start, size_bytes) }
    }

    fn huge(&self) -> Option<Arc<dyn Pages>> {
        self.0.has_huge.then(|| Arc::new(self.clone()) as Arc<dyn Pages>)
    }

    fn decays_by_itself(&self) -> bool {
        false // only its end calls it once it is bad
    }
}

/// Small and large blocks, from several mappings each; all are released.
fn use_up<S: Strategy>(strategy: &S) {
    let sizes = [100, 70_000, 200_000, MIB, 3 * MIB, 9 * MIB];
    let blocks: Vec<_> = (0..60).filter_map(|number| strategy.allocate(sizes[number % sizes.len()])).collect();
    assert_eq!(blocks.len(), 60);
    // SAFETY: live, and released once.
    blocks.into_iter().for_each(|block| unsafe { strategy.release(block) });
}

/// What was used by two threads, one of which has ended, and whose source is bad from now on.
fn used<S: Strategy + Clone>(strategy: S, source: &Source) -> S {
    use_up(&strategy);
    thread::scope(|scope| scope.spawn(|| use_up(&strategy)).join().expect("it works"));
    source.0.is_bad.store(true, SeqCst);
    strategy
}

/// Lets it end: as the last thing of a thread, by a panic, and as its owner says.
fn end_each_way<S: Strategy + Clone>(make: impl Fn(&Source) -> S) {
    thread_local! {
        static LAST: RefCell<Option<Box<dyn Strategy>>> = const { RefCell::new(None) };
    }
    for source in [Source::default, Source::with_huge] {
        let said = source();
        drop(used(make(&said), &said));
        said.is_offered_all();

        let panicked = source();
        let kept = used(make(&panicked), &panicked);
        let outcome = catch_unwind(AssertUnwindSafe(move || {
            let _kept = kept;
            panic!("what owns it");
        }));
        assert!(outcome.is_err_and(|payload| payload.downcast_ref() == Some(&"what owns it")));
        panicked.is_offered_all();

        let last = source();
        let kept = used(make(&last), &last);
        thread::scope(|scope| {
            scope.spawn(|| LAST.set(Some(Box::new(kept)))).join().expect("it ended well");
        });
        last.is_offered_all();
    }
}

#[test]
fn a_pool_or_an_arena_ends_although_its_source_panics() {
    fate_of("child_whose_source_panics_when_it_ends").ended_well();
}

#[test]
#[ignore = "a child of a_pool_or_an_arena_ends_although_its_source_panics"]
fn child_whose_source_panics_when_it_ends() {
    killed_after(60);
    let pool = |source: &Source| Pool::over(source.clone(), PoolOptions::default());
    end_each_way(pool);
    end_each_way(|source| Arena::over(&pool(source)));
    // No lock stayed behind: of the lists of all pools, of the threads' caches, of what is held across fork.
    ctxalloc::trim();
    thread::spawn(|| conformance::check(Pool::new())).join().expect("pools work");
    assert_eq!(fork_and(|| Pool::new().allocate(MIB).is_some()), 0);
}
