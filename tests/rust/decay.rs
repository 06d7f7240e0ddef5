//! Memory that comes back, pools that go, and what a fork costs: measured, each in a process of its own, which is this
//! binary once more, running one ignored test.
#![cfg(not(miri))]
#![allow(unsafe_code, reason = "blocks are touched; processes fork")]

#[path = "support/child.rs"]
mod child;

use child::{fate_in, fate_of, fork_and, killed_after};
use ctxalloc::metrics::request_counts;
use ctxalloc::strategy::{Arena, Budget, Pool, PoolBytes, PoolOptions, Strategy};
use ctxalloc::{Buffer, Error, Settings, configure, request, source::PrivatePages};
use std::collections::VecDeque;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Barrier, Mutex};
use std::time::{Duration, Instant};
use std::{fs, panic, thread};

const MIB: usize = 1 << 20;

/// What the children that measure ages set, so that the tests are short.
const DECAY: Duration = Duration::from_secs(1);
/// What the promise has beyond `decay`.
const GRACE: Duration = Duration::from_secs(5);

fn rss_bytes() -> usize {
    let status = fs::read_to_string("/proc/self/statm").expect("readable");
    let pages: usize = status.split(' ').nth(1).and_then(|pages| pages.parse().ok()).expect("a number");
    pages * 4096
}

fn touched(strategy: &impl Strategy, size_bytes: usize) -> NonNull<u8> {
    let block = strategy.allocate(size_bytes).expect("memory");
    // SAFETY: a new block of that size.
    unsafe { block.write_bytes(1, size_bytes) };
    block
}

fn release(strategy: &impl Strategy, block: NonNull<u8>) {
    // SAFETY: the tests release each live block once.
    unsafe { strategy.release(block) }
}

/// What this thread took of a processor: what others do on this machine is not in it.
fn processor_time() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: a place for the answer.
    assert_eq!(unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time) }, 0);
    Duration::new(time.tv_sec.cast_unsigned(), u32::try_from(time.tv_nsec).expect("less than a second"))
}

fn burst(strategy: &impl Strategy, count: usize, size_bytes: usize) {
    let blocks: Vec<_> = (0..count).map(|_| touched(strategy, size_bytes)).collect();
    blocks.into_iter().for_each(|block| release(strategy, block));
}

fn set_decay() {
    let mut settings = Settings::default();
    settings.decay = Some(DECAY);
    configure(settings).expect("nothing was used so far");
}

/// A burst leaves more than so many bytes warm for the next one. On a slow machine `DECAY` may be over before anybody
/// can look, so it may need another try.
fn stays_warm(more_than: usize, burst: impl Fn()) {
    for _ in 0..20 {
        let begun = Instant::now();
        burst();
        if rss_bytes() > more_than {
            return;
        }
        assert!(begun.elapsed() >= DECAY / 2, "it went back at once: {} KiB are there", rss_bytes() >> 10);
    }
    panic!("no burst was short enough to look at");
}

/// Waits until the process is back at what it had, a fifth more at most: at the latest when the promise says so, on a
/// machine that lets it run. Where this thread oversleeps, the one that gives memory back does so too: that does not
/// count.
fn comes_back_to(before: usize, meanwhile: impl Fn()) {
    const NAP: Duration = Duration::from_millis(20);
    let mut waited = Duration::ZERO;
    while waited < DECAY + GRACE {
        if rss_bytes() <= before + before / 5 {
            return;
        }
        meanwhile();
        let begun = Instant::now();
        thread::sleep(NAP);
        waited += begun.elapsed().min(2 * NAP);
    }
    let pools = ctxalloc::metrics::pools();
    panic!("{} KiB are still there, of {} before; of pools: {pools:?}", rss_bytes() >> 10, before >> 10);
}

#[test]
fn memory_of_a_burst_comes_back_in_a_process_that_idles() {
    fate_of("child_that_bursts_and_idles").ended_well();
}

#[test]
#[ignore = "a child of memory_of_a_burst_comes_back_in_a_process_that_idles"]
fn child_that_bursts_and_idles() {
    killed_after(120);
    set_decay();
    let pool = Pool::shared();
    burst(pool, 10, 1000);
    burst(pool, 10, 800_000);
    let before = rss_bytes();
    stays_warm(before + 100 * MIB, || burst(pool, 300, 800_000));
    comes_back_to(before, || ());
    // The list of the blocks is the C heap's.
    stays_warm(before + 60 * MIB, || burst(pool, 1_000_000, 100));
    // SAFETY: may be called at any time.
    unsafe { libc::malloc_trim(0) };
    comes_back_to(before, || ());
    let arena = Arena::over(pool);
    burst(&arena, 100_000, 1000);
    assert!(arena.reset());
    comes_back_to(before, || ());
}

#[test]
fn memory_of_a_burst_comes_back_under_a_small_load() {
    fate_of("child_that_bursts_and_works_a_little").ended_well();
}

#[test]
#[ignore = "a child of memory_of_a_burst_comes_back_under_a_small_load"]
fn child_that_bursts_and_works_a_little() {
    killed_after(120);
    set_decay();
    let pool = Pool::shared();
    let work = || burst(pool, 3, 8_000);
    work();
    burst(pool, 10, 800_000);
    let before = rss_bytes();
    for (count, size_bytes) in [(300, 800_000), (1_000_000, 100)] {
        burst(pool, count, size_bytes);
        // SAFETY: may be called at any time.
        unsafe { libc::malloc_trim(0) };
        comes_back_to(before, work);
    }
}

/// Blocks of all sizes that threads cache.
fn burst_of_all_sizes(strategy: &impl Strategy) {
    for size_bytes in (6..18).map(|doubling| 1 << doubling) {
        burst(strategy, (2 << 20) / size_bytes, size_bytes);
    }
}

/// Runs `then` beside threads that are alive and do nothing after a burst; it gets the memory from before.
fn beside_idle_threads(then: impl FnOnce(usize)) {
    const THREADS: usize = 24;
    let pool = Pool::shared();
    let barrier = Barrier::new(THREADS + 1);
    thread::scope(|scope| {
        for _ in 0..THREADS {
            scope.spawn(|| {
                burst_of_all_sizes(pool); // what else threads need for it, they have then
                barrier.wait();
                barrier.wait();
                burst_of_all_sizes(pool);
                barrier.wait();
                barrier.wait();
            });
        }
        barrier.wait();
        ctxalloc::trim();
        // SAFETY: may be called at any time.
        unsafe { libc::malloc_trim(0) };
        let before = rss_bytes();
        barrier.wait();
        barrier.wait();
        // The lists of the blocks are the C heap's.
        // SAFETY: may be called at any time.
        unsafe { libc::malloc_trim(0) };
        // Without anybody who takes the caches, 50 MiB stay; the C heap keeps a few for its threads.
        let outcome = panic::catch_unwind(panic::AssertUnwindSafe(|| then(before + 12 * MIB)));
        barrier.wait();
        outcome.unwrap_or_else(|panic| panic::resume_unwind(panic));
    });
}

#[test]
fn memory_of_a_burst_comes_back_from_threads_that_idle() {
    fate_of("child_with_idle_threads").ended_well();
}

#[test]
#[ignore = "a child of memory_of_a_burst_comes_back_from_threads_that_idle"]
fn child_with_idle_threads() {
    killed_after(60);
    set_decay();
    beside_idle_threads(|before| comes_back_to(before, || ()));
}

#[test]
fn trim_takes_what_other_threads_cache() {
    fate_of("child_that_trims_beside_threads").ended_well();
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
    fate_of("child_that_trims_twice_at_once").ended_well();
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
fn a_child_of_fork_takes_what_its_parents_threads_cached() {
    fate_of("child_that_forks_beside_caches").ended_well();
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
    fate_of("child_that_forks_beside_trims").ended_well();
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
fn threads_at_work_lose_no_block_when_their_caches_are_taken() {
    fate_of("child_that_trims_beside_work").ended_well();
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
fn an_idle_process_does_not_tick() {
    fate_of("child_that_idles").ended_well();
}

/// How often the thread that gives memory back was on a processor; nothing where there is none.
fn timers_turns() -> Option<usize> {
    fs::read_dir("/proc/self/task").expect("readable").flatten().find_map(|task| {
        let name = fs::read_to_string(task.path().join("comm")).ok()?;
        let status = fs::read_to_string(task.path().join("status")).ok()?;
        let turns = status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"))?;
        (name.trim() == "ctxalloc-decay").then(|| turns.trim().parse().expect("a number"))
    })
}

#[test]
#[ignore = "a child of an_idle_process_does_not_tick"]
fn child_that_idles() {
    killed_after(60);
    set_decay();
    assert_eq!(timers_turns(), None, "nothing is there to give back");
    let before = rss_bytes();
    burst(Pool::shared(), 100, 800_000);
    comes_back_to(before + 4 * MIB, || ());
    // What is left to do after that is soon done; then it sleeps without an end.
    let sleeps = (0..10).any(|_| {
        let turns = timers_turns().expect("it was needed");
        thread::sleep(2 * DECAY);
        timers_turns() == Some(turns)
    });
    assert!(sleeps, "it goes on to tick in a process that does nothing");
}

#[test]
fn dropped_pools_leave_nothing_behind() {
    fate_of("child_that_drops_pools").ended_well();
}

#[test]
#[ignore = "a child of dropped_pools_leave_nothing_behind"]
fn child_that_drops_pools() {
    killed_after(200);
    let threads = 3;
    let use_once = |pool: &Pool| {
        for size_bytes in [100, 5_000, 300_000] {
            release(pool, touched(pool, size_bytes));
        }
    };
    let barrier = Barrier::new(threads);
    let grown: Vec<usize> = thread::scope(|scope| {
        let users: Vec<_> = (0..threads)
            .map(|_| {
                scope.spawn(|| {
                    (0..100).for_each(|_| use_once(&Pool::new()));
                    barrier.wait();
                    let before = rss_bytes();
                    (0..10_000).for_each(|_| use_once(&Pool::new()));
                    barrier.wait();
                    rss_bytes().saturating_sub(before)
                })
            })
            .collect();
        users.into_iter().map(|user| user.join().expect("no panic")).collect()
    });
    assert!(grown.iter().all(|&grown| grown < 2 * MIB), "30,000 pools left {grown:?} bytes");
}

#[test]
fn a_fork_costs_what_is_alive() {
    fate_of("child_that_forks_after_many_pools").ended_well();
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
    fate_of("child_that_forks_beside_busy_requests").ended_well();
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
fn a_million_requests_that_leave_blocks_in_a_cache_run_in_flat_memory() {
    fate_of("child_with_a_cache_of_escapes").ended_well();
}

#[test]
#[ignore = "a child of a_million_requests_that_leave_blocks_in_a_cache_run_in_flat_memory"]
fn child_with_a_cache_of_escapes() {
    killed_after(300);
    let mut cache = VecDeque::new();
    let mut requests = |count: usize| {
        let begun = processor_time();
        for _ in 0..count {
            let request = request().begin().expect("memory");
            cache.push_back(request.run(|| {
                let scratch: Vec<_> = (0..10).map(|n| Buffer::zeroed(1000 * n + 1).expect("memory")).collect();
                drop(scratch);
                Buffer::zeroed(80).expect("memory")
            }));
            if cache.len() > 100_000 {
                cache.pop_front();
            }
        }
        (processor_time() - begun).as_secs_f64() / count as f64
    };
    let empty = rss_bytes();
    requests(200_000);
    let (full, slots) = (rss_bytes(), request_counts().slots);
    let early = requests(100_000);
    let late = requests(700_000);
    let grown = rss_bytes().saturating_sub(full);
    println!("{} bytes an escape; grown by {grown}; {early:.2e} s, then {late:.2e} s", (full - empty) / 100_000);
    assert!(grown < full / 5, "grown by {grown} bytes from {full}");
    assert!((full - empty) / 100_000 < 2048, "{} bytes an escape", (full - empty) / 100_000);
    assert!(request_counts().slots == slots && request_counts().present == 100_000, "{:?}", request_counts());
    assert!(late < 3.0 * early, "{early:.2e} s a request at first, then {late:.2e} s");
}

#[test]
fn a_child_of_fork_gives_its_own_memory_back() {
    fate_of("child_whose_child_bursts").ended_well();
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

#[test]
fn trim_gives_back_what_all_pools_keep() {
    fate_of("child_that_trims").ended_well();
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

#[test]
fn settings_count_until_they_are_used() {
    fate_in("child_that_configures", &[("CTXALLOC_DECAY_SECONDS", "2.5"), ("CTXALLOC_WARM_BYTES", "70000000")])
        .ended_well();
}

#[test]
#[ignore = "a child of settings_count_until_they_are_used"]
fn child_that_configures() {
    let options = PoolOptions::default();
    assert_eq!((options.decay, options.warm_bytes), (Duration::from_millis(2500), 70_000_000));
    let before = Pool::over(PrivatePages, options);
    let mut settings = Settings::default();
    settings.warm_bytes = Some(4 * MIB);
    configure(settings).expect("nothing was used so far");
    assert_eq!(PoolOptions::default().warm_bytes, 4 * MIB);
    assert_eq!(PoolOptions::default().decay, Duration::from_millis(2500), "as it was");
    burst(&before, 100, MIB);
    assert!(before.trim() < 10 * MIB, "a pool that was made before follows");
    let late = configure(settings).expect_err("it was used");
    assert_eq!(late, Error::SettingsInUse);
    assert!(late.to_string().contains("CTXALLOC_WARM_BYTES"), "it says what to do: {late}");
}

#[test]
fn a_bad_value_in_the_environment_is_named() {
    for (name, value) in [
        ("CTXALLOC_DECAY_SECONDS", "-1"),
        ("CTXALLOC_DECAY_SECONDS", "soon"),
        ("CTXALLOC_WARM_BYTES", "64MiB"),
        ("CTXALLOC_WARM_BYTES", "-5"),
    ] {
        fate_in("child_with_a_bad_value", &[(name, value), ("BAD_NAME", name), ("BAD_VALUE", value)]).ended_well();
    }
}

#[test]
#[ignore = "a child of a_bad_value_in_the_environment_is_named"]
fn child_with_a_bad_value() {
    let said = |name| std::env::var(name).expect("given by the parent");
    burst(Pool::shared(), 3, MIB); // the default serves
    let refused = configure(Settings::default()).expect_err("a bad value").to_string();
    assert!(refused.contains(&said("BAD_NAME")) && refused.contains(&said("BAD_VALUE")), "{refused}");
}

#[test]
fn an_arena_of_many_blocks_costs_what_a_pool_costs() {
    let time = |strategy: &dyn Fn() -> Box<dyn FnOnce()>| {
        let one = || {
            let work = strategy();
            let begun = processor_time();
            work();
            processor_time() - begun
        };
        (0..3).map(|_| one()).min().expect("3 times")
    };
    let count = if cfg!(debug_assertions) { 200_000 } else { 1_000_000 };
    let pool = time(&|| Box::new(move || burst(&Pool::new(), count, 100)));
    let arena = time(&|| Box::new(move || burst(&Arena::over(&Pool::new()), count, 100)));
    println!("{count} blocks: {pool:?} of a pool, {arena:?} of an arena");
    assert!(arena < pool * 3, "an arena took {arena:?}, a pool {pool:?}");
}

#[test]
fn an_arena_that_was_large_once_is_small_again() {
    fate_of("child_with_arenas").ended_well();
}

#[test]
#[ignore = "a child of an_arena_that_was_large_once_is_small_again"]
fn child_with_arenas() {
    killed_after(60);
    let pool = Pool::new();
    let arenas: Vec<_> = (0..60).map(|_| Arena::over(&pool)).collect();
    burst(&arenas[0], 200_000, 100);
    assert!(arenas[0].reset());
    let before = rss_bytes();
    for arena in &arenas {
        burst(arena, 200_000, 100);
        assert!(arena.reset());
    }
    let grown = rss_bytes().saturating_sub(before);
    // 16 pages of 64 KiB each.
    assert!(grown < 80 * MIB, "60 arenas keep {} KiB", grown >> 10);
    let trimmed = pool.trim() + arenas.iter().map(Strategy::trim).sum::<usize>();
    assert!(rss_bytes() < before + 4 * MIB, "{trimmed} bytes were given back");
}

#[test]
fn an_end_with_an_escape_costs_no_system_call() {
    let pool = Pool::new();
    let arena = Arena::over(&pool);
    let mut escapes = Vec::new();
    let mut times: Vec<Duration> = (0..2000)
        .map(|_| {
            let blocks: Vec<_> = (0..30).map(|_| touched(&arena, 5_000)).collect();
            let escape = blocks[7];
            blocks.into_iter().filter(|&block| block != escape).for_each(|block| release(&arena, block));
            escapes.push(escape);
            let begun = Instant::now();
            arena.release_dead_pages();
            begun.elapsed()
        })
        .collect();
    times.sort_unstable();
    println!("an end with an escape: {:?}", times[times.len() / 2]);
    assert!(times[times.len() / 2] < Duration::from_micros(if cfg!(debug_assertions) { 20 } else { 2 }));
    escapes.into_iter().for_each(|escape| release(&arena, escape));
    assert!(arena.reset());
}
