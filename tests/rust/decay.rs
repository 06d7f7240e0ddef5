//! Memory that comes back, pools that go, and what a fork costs: measured, each in a process of its own, which is this
//! binary once more, running one ignored test.
#![cfg(not(miri))]
#![allow(unsafe_code, reason = "blocks are touched; processes fork")]

#[path = "support/child.rs"]
mod child;

use child::{fate_in, fate_of, killed_after};
use ctxalloc::handler::requests::metrics;
use ctxalloc::strategy::{Arena, Budget, Pool, PoolOptions, Strategy};
use ctxalloc::{Buffer, Error, Settings, configure, request, source::PrivatePages};
use std::collections::VecDeque;
use std::ptr::NonNull;
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use std::{fs, thread};

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

fn burst(strategy: &impl Strategy, count: usize, size_bytes: usize) {
    let blocks: Vec<_> = (0..count).map(|_| touched(strategy, size_bytes)).collect();
    blocks.into_iter().for_each(|block| release(strategy, block));
}

fn set_decay() {
    let mut settings = Settings::default();
    settings.decay = Some(DECAY);
    configure(settings).expect("nothing was used so far");
}

/// Waits until the process is back at what it had, a fifth more at most: at the latest when the promise says so.
fn comes_back_to(before: usize, meanwhile: impl Fn()) {
    let begun = Instant::now();
    while begun.elapsed() < DECAY + GRACE {
        if rss_bytes() <= before + before / 5 {
            return;
        }
        meanwhile();
        thread::sleep(Duration::from_millis(20));
    }
    panic!("{} KiB are still there, of {} before", rss_bytes() >> 10, before >> 10);
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
    burst(pool, 300, 800_000);
    assert!(rss_bytes() > before + 100 * MIB, "warm for the next one");
    comes_back_to(before, || ());
    // The list of the blocks is the C heap's.
    burst(pool, 1_000_000, 100);
    assert!(rss_bytes() > before + 60 * MIB, "warm for the next one");
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
    thread::sleep(2 * DECAY);
    let turns = timers_turns().expect("it was needed");
    thread::sleep(2 * DECAY);
    assert_eq!(timers_turns(), Some(turns), "it sleeps without an end");
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
        let begun = Instant::now();
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
        begun.elapsed().as_secs_f64() / count as f64
    };
    let empty = rss_bytes();
    requests(200_000);
    let (full, slots) = (rss_bytes(), metrics().slots);
    let early = requests(100_000);
    let late = requests(700_000);
    let grown = rss_bytes().saturating_sub(full);
    println!("{} bytes an escape; grown by {grown}; {early:.2e} s, then {late:.2e} s", (full - empty) / 100_000);
    assert!(grown < full / 5, "grown by {grown} bytes from {full}");
    assert!((full - empty) / 100_000 < 2048, "{} bytes an escape", (full - empty) / 100_000);
    assert!(metrics().slots == slots && metrics().present == 100_000, "{:?}", metrics());
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
    let said = |name| std::env::var(name).expect("told by the parent");
    burst(Pool::shared(), 3, MIB); // the default serves
    let refused = configure(Settings::default()).expect_err("a bad value").to_string();
    assert!(refused.contains(&said("BAD_NAME")) && refused.contains(&said("BAD_VALUE")), "{refused}");
}

#[test]
fn an_arena_of_many_blocks_costs_what_a_pool_costs() {
    let time = |strategy: &dyn Fn() -> Box<dyn FnOnce()>| {
        let one = || {
            let work = strategy();
            let begun = Instant::now();
            work();
            begun.elapsed()
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
