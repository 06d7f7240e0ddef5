//! What is guaranteed to a tenant, beside others that flood its budget and Rust's heap.

use ctxalloc::strategy::Budget;
use ctxalloc::{Buffer, request};
use std::hint::black_box; // the compiler may leave out blocks that nobody looks at
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;

const LIMIT: usize = 1_000_000;
const PROMISED: usize = 300_000;
const HEAP: usize = 200_000;

/// Holds what it gets, of blocks and of the heap, and lets go of it where it is refused.
fn floods(budget: &Budget, is_over: &AtomicBool, refused: &AtomicUsize) {
    while !is_over.load(Ordering::Relaxed) {
        let own = request().root().budget(budget).heap_limit_bytes(HEAP).heap_refuses().begin().unwrap();
        own.run(|| {
            let (mut blocks, mut heap) = (Vec::with_capacity(1000), Vec::with_capacity(1000));
            while let Ok(block) = Buffer::zeroed(20_000) {
                blocks.push(block);
                let mut more: Vec<u8> = Vec::new();
                if more.try_reserve_exact(10_000).is_ok() {
                    heap.push(black_box(more));
                }
            }
            refused.fetch_add(1, Ordering::Relaxed);
        });
    }
}

/// Has what it is guaranteed, and what its heap may have.
fn patiently(budget: &Budget) {
    let own = request().root().budget(budget).reserve_bytes(PROMISED / 2).heap_limit_bytes(HEAP).heap_refuses();
    let own = own.begin().expect("within its guarantee");
    own.run(|| {
        let first = Buffer::zeroed(PROMISED / 2).expect("reserved");
        let mut heap: Vec<u8> = Vec::new();
        heap.try_reserve_exact(HEAP * 9 / 10).expect("within its heap's limit, which nobody else uses");
        let second = Buffer::zeroed(PROMISED / 2).expect("guaranteed");
        assert!(Vec::<u8>::new().try_reserve_exact(black_box(HEAP / 2)).is_err(), "its own limit, however");
        black_box((first, heap, second));
    });
}

#[test]
fn whoever_is_within_its_guarantee_is_refused_nothing_for_others() {
    let process = Budget::new("process", Some(LIMIT));
    let patient = process.guaranteed_child("patient", None, PROMISED).unwrap();
    let greedy = process.child("greedy", None);
    let (is_over, refused) = (AtomicBool::new(false), AtomicUsize::new(0));
    thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| floods(&greedy, &is_over, &refused));
        }
        let mut left = if cfg!(miri) { 3 } else { 300 };
        while left > 0 || refused.load(Ordering::Relaxed) == 0 {
            let done = std::panic::catch_unwind(|| patiently(&patient));
            if done.is_err() {
                is_over.store(true, Ordering::Relaxed); // or the others would go on for ever
            }
            done.unwrap();
            left = usize::saturating_sub(left, 1);
            thread::yield_now();
        }
        is_over.store(true, Ordering::Relaxed);
    });
    assert_eq!((process.in_use_bytes(), process.reserved_bytes(), patient.refused()), (0, PROMISED, 0));
}
