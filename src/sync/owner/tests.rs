//! What threads see of the lock, without a model.

use super::{Owned, OwnerLock, with_all};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread;

#[test]
fn a_panic_under_locks_lets_all_of_them_go() {
    let panics = |locks: &[&OwnerLock]| {
        let panics = || with_all(locks, || panic!("inside"));
        assert!(catch_unwind(AssertUnwindSafe(panics)).is_err());
    };
    let (own, shared) = (OwnerLock::new_owned(), OwnerLock::new());
    thread::scope(|scope| drop(scope.spawn(|| shared.with(|| ()))));
    own.with(|| ());
    for locks in [&[&own][..], &[&shared], &[&own, &shared], &[&shared, &own]] {
        panics(locks);
        // Both by another thread, which waits for ever if one is still held.
        thread::scope(|scope| drop(scope.spawn(|| with_all(&[&shared], || ()))));
        with_all(locks, || ());
    }
    let many: Vec<OwnerLock> = (0..70).map(|_| OwnerLock::new()).collect();
    let many: Vec<&OwnerLock> = many.iter().collect();
    panics(&many);
    with_all(&many, || ());
    thread::scope(|scope| drop(scope.spawn(|| with_all(&[&own], || ()))));
}

#[test]
fn a_lock_that_changes_hands_loses_nothing() {
    for _ in 0..if cfg!(miri) { 3 } else { 300 } {
        let counts = Arc::new([(); 3].map(|()| Owned::new(0_usize)));
        let rounds = if cfg!(miri) { 20 } else { 2000 };
        (0..rounds).for_each(|_| counts[0].with(|count| *count += 1));
        let threads: Vec<_> = (0..3)
            .map(|_| {
                let counts = Arc::clone(&counts);
                thread::spawn(move || {
                    for round in 0..rounds {
                        counts[round % 3].with(|count| *count += 1);
                    }
                })
            })
            .collect();
        (0..rounds).for_each(|_| counts[0].with(|count| *count += 1));
        threads.into_iter().for_each(|thread| thread.join().expect("no panic"));
        let sum: usize = counts.iter().map(|count| count.with(|count| *count)).sum();
        assert_eq!(sum, 5 * rounds);
    }
}
