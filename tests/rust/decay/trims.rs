//! What `trim` gives back, beside threads that have caches.

use crate::child::{fate_of, killed_after};
use crate::{MIB, beside_idle_threads, burst, rss_bytes};
use ctxalloc::strategy::{Arena, Pool, PoolBytes, Strategy};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Barrier, Mutex};
use std::thread;
use std::time::Duration;

#[test]
fn trim_takes_what_other_threads_cache() {
    fate_of("trims::child_that_trims_beside_threads").ended_well();
}

#[test]
#[ignore = "a child of trim_takes_what_other_threads_cache"]
fn child_that_trims_beside_threads() {
    killed_after(60);
    beside_idle_threads(|before| {
        ctxalloc::trim();
        // What the caches were kept in is the C heap's.
        // SAFETY: may be called at any time.
        unsafe { libc::malloc_trim(0) };
        assert!(
            rss_bytes() <= before + before / 5,
            "{} KiB of {}; of pools: {:?}",
            rss_bytes() >> 10,
            before >> 10,
            ctxalloc::metrics::pools()
        );
    });
}

#[test]
fn two_that_trim_at_once_each_find_everything_given_back() {
    fate_of("trims::child_that_trims_twice_at_once").ended_well();
}

#[test]
#[ignore = "a child of two_that_trim_at_once_each_find_everything_given_back"]
fn child_that_trims_twice_at_once() {
    const THREADS: usize = 4;
    killed_after(60);
    let (pool, barrier, found) = (Pool::shared(), Barrier::new(THREADS + 2), Mutex::new(Vec::new()));
    thread::scope(|scope| {
        for number in 0..THREADS + 2 {
            let (barrier, found) = (&barrier, &found);
            scope.spawn(move || {
                for round in 0..200 {
                    if number < THREADS {
                        burst(pool, 10, 1000);
                        barrier.wait();
                    } else {
                        barrier.wait();
                        ctxalloc::trim();
                        let left = ctxalloc::metrics::pools();
                        if left != PoolBytes::default() {
                            found.lock().expect("no panic").push((round, left));
                        }
                    }
                    barrier.wait();
                }
            });
        }
    });
    let found = found.into_inner().expect("no panic");
    assert!(found.is_empty(), "left: {found:?}");
}

#[test]
fn threads_at_work_lose_no_block_when_their_caches_are_taken() {
    fate_of("trims::child_that_trims_beside_work").ended_well();
}

/// Works with blocks that hold their own address, and some of which end on another thread, until it is time to stop.
fn work_with_marked_blocks(pools: &[Pool], stop: &AtomicBool, others: &Mutex<Vec<(usize, usize, usize)>>) {
    let mut state = 1_u64;
    let mut random = |below: usize| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as usize % below
    };
    let mut live = Vec::new();
    while !stop.load(Ordering::Relaxed) {
        if live.len() < 100 || random(2) == 0 {
            let (which, words) = (random(pools.len()), 1 + random(1000));
            let block = pools[which].allocate(words * 8).expect("memory").expose_provenance().get();
            let first: *mut usize = std::ptr::with_exposed_provenance_mut(block);
            // SAFETY: a new block of that size.
            unsafe { (first.write(block), first.add(words - 1).write(block)) };
            live.push((which, words, block));
            continue;
        }
        let mut ending = live.swap_remove(random(live.len()));
        if random(4) == 0 {
            let mut others = others.lock().expect("no panic");
            others.push(ending);
            let last = others.len();
            ending = others.swap_remove(random(last));
        }
        end_marked(pools, ending);
    }
    live.into_iter().for_each(|block| end_marked(pools, block));
}

fn end_marked(pools: &[Pool], (which, words, block): (usize, usize, usize)) {
    let first: *mut usize = std::ptr::with_exposed_provenance_mut(block);
    // SAFETY: a live block of so many words, of that pool.
    unsafe {
        assert_eq!((first.read(), first.add(words - 1).read()), (block, block), "somebody else wrote to it");
        pools[which].release(NonNull::new(first.cast()).expect("a block"));
    }
}

#[test]
#[ignore = "a child of threads_at_work_lose_no_block_when_their_caches_are_taken"]
fn child_that_trims_beside_work() {
    killed_after(120);
    let pools = [Pool::new(), Pool::new(), Pool::shared().clone()];
    let (stop, others) = (AtomicBool::new(false), Mutex::new(Vec::new()));
    let passes = thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| work_with_marked_blocks(&pools, &stop, &others));
        }
        // Threads that come and go.
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                let soon = AtomicBool::new(false);
                thread::scope(|scope| {
                    scope.spawn(|| work_with_marked_blocks(&pools, &soon, &others));
                    thread::sleep(Duration::from_micros(300));
                    soon.store(true, Ordering::Relaxed);
                });
            }
        });
        let trims: Vec<_> = (0..2)
            .map(|_| {
                scope.spawn(|| {
                    let mut passes = 0;
                    while !stop.load(Ordering::Relaxed) {
                        ctxalloc::trim();
                        passes += 1;
                    }
                    passes
                })
            })
            .collect();
        for number in 0..30 {
            thread::sleep(Duration::from_millis(100));
            // SAFETY: the child uses the pool, which works after fork.
            let pid = unsafe { libc::fork() };
            if pid == 0 {
                // SAFETY: ends the child, should it hang.
                unsafe { libc::alarm(20) };
                burst(&pools[number % 3], 1000, 100);
                ctxalloc::trim();
                burst(&pools[number % 3], 1000, 100);
                // SAFETY: ends the child.
                unsafe { libc::_exit(0) };
            }
            let mut status = -1;
            // SAFETY: our child, and a place for its status.
            assert_eq!(unsafe { libc::waitpid(pid, &raw mut status, 0) }, pid);
            assert_eq!(status, 0, "the child hung or failed");
        }
        stop.store(true, Ordering::Relaxed);
        trims.into_iter().map(|trim| trim.join().expect("no panic")).sum::<usize>()
    });
    assert!(passes > 100, "{passes} trims");
    others.into_inner().expect("no panic").into_iter().for_each(|block| end_marked(&pools, block));
    // What the decay thread has just taken from a thread is on its way.
    let is_all_back = (0..200).any(|_| {
        ctxalloc::trim();
        thread::sleep(Duration::from_millis(20));
        ctxalloc::metrics::pools() == PoolBytes::default()
    });
    assert!(is_all_back, "lost: {:?}", ctxalloc::metrics::pools());
}

#[test]
fn trim_gives_back_what_all_pools_keep() {
    fate_of("trims::child_that_trims").ended_well();
}

#[test]
#[ignore = "a child of trim_gives_back_what_all_pools_keep"]
fn child_that_trims() {
    killed_after(60);
    let own = Pool::new();
    let arena = Arena::over(&own);
    burst(&own, 10, MIB);
    burst(Pool::shared(), 10, MIB);
    burst(&arena, 1000, 1000);
    assert!(ctxalloc::trim() > 20 * MIB);
    assert_eq!(ctxalloc::trim(), 0, "a second time there is nothing left");
}
