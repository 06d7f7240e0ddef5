//! Memory that comes back, pools that go, and what a fork costs: measured, each in a process of its own, which is this
//! binary once more, running one ignored test.
#![cfg(not(miri))]
#![allow(unsafe_code, reason = "blocks are touched; processes fork")]

#[path = "support/child.rs"]
mod child;
#[path = "decay/forks.rs"]
mod forks;
#[path = "decay/trims.rs"]
mod trims;

use child::{fate_in, fate_of, killed_after};
use ctxalloc::metrics::request_counts;
use ctxalloc::strategy::{Arena, Pool, PoolOptions, Strategy};
use ctxalloc::{Buffer, Error, Settings, configure, request, source::PrivatePages};
use std::collections::VecDeque;
use std::ptr::NonNull;
use std::sync::Barrier;
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
