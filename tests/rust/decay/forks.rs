//! What a child of `fork` has of its parent's memory, and what a fork costs.

use crate::child::{fate_of, fork_and, killed_after};
use crate::{burst, burst_of_all_sizes, comes_back_to, release, rss_bytes, set_decay, timers_turns, touched};
use ctxalloc::strategy::{Arena, Budget, Pool, PoolBytes};
use ctxalloc::{Buffer, request};
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

#[test]
fn a_child_of_fork_takes_what_its_parents_threads_cached() {
    fate_of("forks::child_that_forks_beside_caches").ended_well();
}

#[test]
#[ignore = "a child of a_child_of_fork_takes_what_its_parents_threads_cached"]
fn child_that_forks_beside_caches() {
    const THREADS: usize = 8;
    killed_after(60);
    let (pool, barrier) = (Pool::shared(), Barrier::new(THREADS + 1));
    thread::scope(|scope| {
        for _ in 0..THREADS {
            scope.spawn(|| {
                burst_of_all_sizes(pool);
                barrier.wait();
                barrier.wait();
            });
        }
        barrier.wait();
        let status = fork_and(|| {
            ctxalloc::trim();
            let is_back = ctxalloc::metrics::pools() == PoolBytes::default();
            burst(pool, 10, 1000);
            is_back
        });
        barrier.wait();
        assert_eq!(status, 0, "the child keeps caches of threads that it does not have");
    });
}

#[test]
fn a_child_of_fork_has_what_a_thread_was_giving_back() {
    fate_of("forks::child_that_forks_beside_trims").ended_well();
}

#[test]
#[ignore = "a child of a_child_of_fork_has_what_a_thread_was_giving_back"]
fn child_that_forks_beside_trims() {
    killed_after(60);
    let (pool, stop, mut missing) = (Pool::shared(), AtomicBool::new(false), 0);
    thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    ctxalloc::trim();
                }
            });
        }
        for _ in 0..100 {
            burst_of_all_sizes(pool);
            let status = fork_and(|| {
                ctxalloc::trim();
                ctxalloc::metrics::pools() == PoolBytes::default()
            });
            missing += i32::from(status != 0);
        }
        stop.store(true, Ordering::Relaxed);
    });
    assert_eq!(missing, 0, "children that cannot give back what their parent's threads were giving back");
}

#[test]
fn a_fork_costs_what_is_alive() {
    fate_of("forks::child_that_forks_after_many_pools").ended_well();
}

/// Forks a child that ends at once; what `fork` took here, at best.
fn fork_time() -> Duration {
    let one = || {
        let begun = Instant::now();
        // SAFETY: the child ends at once.
        let pid = unsafe { libc::fork() };
        if pid == 0 {
            // SAFETY: ends the child.
            unsafe { libc::_exit(0) };
        }
        let took = begun.elapsed();
        // SAFETY: our child.
        assert_eq!(unsafe { libc::waitpid(pid, std::ptr::null_mut(), 0) }, pid);
        took
    };
    (0..20).map(|_| one()).min().expect("20 forks")
}

#[test]
#[ignore = "a child of a_fork_costs_what_is_alive"]
fn child_that_forks_after_many_pools() {
    killed_after(60);
    let pool = Pool::new();
    release(&pool, touched(&pool, 100));
    let before = fork_time();
    for _ in 0..2000 {
        let pool = Pool::new();
        let arena = Arena::over(&pool);
        release(&arena, touched(&arena, 100));
        release(&pool, touched(&pool, 100));
    }
    let requests: Vec<_> = (0..4096)
        .map(|_| {
            let request = request().begin().expect("memory");
            let block = request.run(|| Buffer::zeroed(100).expect("memory"));
            (request, block)
        })
        .collect();
    drop(requests);
    let after = fork_time();
    eprintln!("fork: {before:?} before, {after:?} after 2000 pools and 4096 requests at one time");
    assert!(
        after < before + Duration::from_millis(1),
        "fork took {after:?} after 2000 dropped pools and 4096 requests, {before:?} before"
    );
}

#[test]
fn a_child_of_fork_goes_on_with_requests_that_other_threads_own() {
    fate_of("forks::child_that_forks_beside_busy_requests").ended_well();
}

#[test]
#[ignore = "a child of a_child_of_fork_goes_on_with_requests_that_other_threads_own"]
fn child_that_forks_beside_busy_requests() {
    killed_after(120);
    let tenant = Budget::new("tenant", None);
    let requests: Vec<_> = (0..3).map(|_| request().budget(&tenant).begin().expect("memory")).collect();
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        for request in &requests {
            scope.spawn(|| {
                request.run(|| {
                    while !stop.load(Ordering::Relaxed) {
                        drop(Buffer::zeroed(100).expect("memory"));
                    }
                });
            });
        }
        for _ in 0..200 {
            // SAFETY: the child uses requests, the pool and the C heap, which work after fork.
            let pid = unsafe { libc::fork() };
            if pid == 0 {
                // SAFETY: ends the child, should it hang.
                unsafe { libc::alarm(10) };
                for request in &requests {
                    drop(request.run(|| Buffer::zeroed(1000).expect("memory")));
                    let _ = request.stats();
                }
                let own = request().limit_bytes(10).budget(&tenant).begin().expect("memory");
                let limited = own.run(|| Buffer::zeroed(11)).is_err() && own.end().stats.refused == 1;
                // SAFETY: ends the child.
                unsafe { libc::_exit(i32::from(!limited)) };
            }
            let mut status = 0;
            // SAFETY: our child.
            assert_eq!(unsafe { libc::waitpid(pid, &raw mut status, 0) }, pid);
            assert_eq!(status, 0, "the child hung or failed");
        }
        stop.store(true, Ordering::Relaxed);
    });
    assert_eq!(tenant.in_use_bytes(), 0);
}

#[test]
fn a_child_of_fork_gives_its_own_memory_back() {
    fate_of("forks::child_whose_child_bursts").ended_well();
}

#[test]
#[ignore = "a child of a_child_of_fork_gives_its_own_memory_back"]
fn child_whose_child_bursts() {
    killed_after(60);
    set_decay();
    let pool = Pool::shared();
    burst(pool, 10, 800_000);
    let before = rss_bytes();
    burst(pool, 100, 800_000);
    assert!(timers_turns().is_some());
    for _ in 0..30 {
        fork_time(); // while the thread may be at work
    }
    // SAFETY: the child uses the pool and the C heap, which works after fork.
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        // SAFETY: a timer of the child.
        unsafe { libc::alarm(40) };
        let work = || {
            assert_eq!(timers_turns(), None, "a child has one thread");
            burst(pool, 100, 800_000);
            comes_back_to(before, || ());
            assert!(timers_turns().is_some());
        };
        let is_well = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work)).is_ok();
        // SAFETY: ends the child.
        unsafe { libc::_exit(i32::from(!is_well)) };
    }
    comes_back_to(before, || ());
    let mut status = -1;
    // SAFETY: our child, and a place for its status.
    assert_eq!(unsafe { libc::waitpid(pid, &raw mut status, 0) }, pid);
    assert_eq!(status, 0, "the child's memory came back");
}
