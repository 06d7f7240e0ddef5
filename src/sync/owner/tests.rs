//! What threads see of the lock, without a model.

use super::{Owned, OwnerLock, enter_all_owned, with_all};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Barrier};
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

/// Whether a fork waits for a thread that is in a section of two locks, and goes on after it.
#[cfg(all(unix, not(any(ctxalloc_loom, miri))))]
fn a_fork_waits_for_a_section_of_two_locks() -> bool {
    use super::super::{forking, standstill};
    let (entered, seen) = (Barrier::new(2), Barrier::new(2));
    let waits = thread::scope(|scope| {
        scope.spawn(|| {
            let locks = [OwnerLock::new_owned(), OwnerLock::new_owned()];
            let _section = enter_all_owned(&[&locks[0], &locks[1]]);
            entered.wait();
            seen.wait();
        });
        entered.wait();
        // Without `membarrier` no thread owns a lock.
        let waits = !OwnerLock::new_owned().is_owned_here() || !standstill::begin();
        seen.wait();
        waits
    });
    let goes_on = standstill::begin();
    forking::end();
    waits && goes_on
}

#[test]
#[cfg(all(unix, not(any(ctxalloc_loom, miri))))]
#[allow(unsafe_code, reason = "forks")]
fn no_fork_goes_on_while_a_thread_charges_all_its_accounts() {
    // In a child, where no other test forks meanwhile; an alarm ends it if it hangs.
    // SAFETY: the child runs only the code below and then ends.
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        // SAFETY: alarm takes any number; _exit ends the child.
        unsafe {
            libc::alarm(300);
            libc::_exit(i32::from(!a_fork_waits_for_a_section_of_two_locks()));
        }
    }
    let mut status = -1;
    // SAFETY: our child, and a place for its status.
    assert_eq!(unsafe { libc::waitpid(pid, &raw mut status, 0) }, pid);
    assert_eq!(status, 0, "a child could find one of two accounts charged");
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
