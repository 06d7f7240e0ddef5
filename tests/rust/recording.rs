//! Recordings: what is written is what happened, and what is read is never trusted. A process has one recorder: these
//! tests take turns.
#![allow(clippy::unwrap_used, reason = "a test that unwraps nothing has failed")]

#[path = "recording/changed.rs"]
mod changed;
#[path = "recording/charged_twice.rs"]
mod charged_twice;
#[path = "recording/damage.rs"]
mod damage;
#[path = "recording/hostile.rs"]
mod hostile;
#[path = "recording/limits.rs"]
mod limits;
#[path = "../../src/random.rs"]
mod random;
#[path = "recording/sampled.rs"]
mod sampled;

use ctxalloc::recording::{Event, Options, Recording, Sums, What, record};
use ctxalloc::request::Stats;
use ctxalloc::strategy::{Budget, System};
use ctxalloc::tune::{Plan, routes};
use ctxalloc::{Buffer, Handler, request};
use random::Random;
use std::collections::HashMap;
use std::fs;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Barrier, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

fn times() -> usize {
    std::env::var("CTXALLOC_STRESS").ok().and_then(|text| text.parse().ok()).unwrap_or(1)
}

fn in_turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A folder of the test's own, removed at its end.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("ctxalloc-recording-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&path);
        fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    fn file(&self) -> PathBuf {
        self.0.join("trace")
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn everything() -> Options {
    let mut options = Options::default();
    options.one_in = 1;
    options.share = 1.0;
    options
}

/// Has what the program does recorded, one request in so many, and read.
fn with_one_in<R>(one_in: u32, program: impl FnOnce(), read: impl FnOnce(&Recording) -> R) -> R {
    let _turn = in_turn();
    let folder = Folder::new("one-in-so-many");
    let mut options = everything();
    options.one_in = one_in;
    let recorder = record(folder.file(), options).unwrap();
    program();
    recorder.stop().unwrap();
    read(&Recording::open(folder.file()).unwrap())
}

/// How many requests of each name begin.
fn begun(recording: &Recording) -> HashMap<&str, u64> {
    let mut counts = HashMap::new();
    for event in all_of(recording) {
        if let What::Begin { name, .. } = event.what {
            *counts.entry(&*recording.names()[name as usize]).or_default() += 1;
        }
    }
    counts
}

/// What the events of a recording add up to, by the name of the request; panics where a block is made or freed twice.
struct Added {
    sums: HashMap<String, Sums>,
    said: HashMap<String, Sums>,
    never_freed: usize,
}

/// Its events, of which none is an error.
fn all_of(recording: &Recording) -> impl Iterator<Item = Event> {
    recording.events().map(Result::unwrap)
}

fn added(recording: &Recording) -> Added {
    #[derive(Default)]
    struct Open {
        name: String,
        parent: u64,
        live: u64,
        sums: Sums,
    }
    // Of hashbrown, whose hash is the faster one: each event is looked up in all of them.
    let (mut open, mut live): (hashbrown::HashMap<u64, Open>, hashbrown::HashMap<u64, u64>) = Default::default();
    let (mut made, mut ended, mut said) = (hashbrown::HashSet::new(), HashMap::new(), HashMap::new());
    let mut last = 0;
    for event in all_of(recording) {
        assert!(event.at_ns >= last, "time goes forward");
        last = event.at_ns;
        let mut up = Vec::new();
        let mut next = event.request;
        while let Some(at) = open.get(&next) {
            up.push(next);
            next = at.parent;
        }
        let mut each = |work: &dyn Fn(&mut Open)| up.iter().for_each(|on| work(open.get_mut(on).unwrap()));
        let grow = |open: &mut Open, bytes: u64| {
            open.live += bytes;
            open.sums.total_bytes += bytes;
            open.sums.peak_bytes = open.sums.peak_bytes.max(open.live);
        };
        match event.what {
            What::Begin { name, parent, .. } => {
                let name = recording.names()[name as usize].clone();
                let before = open.insert(event.request, Open { name, parent, ..Open::default() });
                assert!(before.is_none(), "a request begins once");
            }
            What::Allocate { block, bytes, .. } => {
                assert!(made.insert(block), "block {block} is made once");
                live.insert(block, bytes);
                each(&|open| {
                    grow(open, bytes);
                    open.sums.blocks += 1;
                });
            }
            What::Resize { block, bytes, .. } => {
                let before = live.insert(block, bytes).expect("a live block is resized");
                each(&|open| {
                    grow(open, bytes.saturating_sub(before));
                    open.live -= before.saturating_sub(bytes);
                });
            }
            What::Free { block } => {
                let bytes = live.remove(&block).expect("a live block is freed");
                each(&|open| open.live -= bytes);
            }
            What::Refused { .. } => open.get_mut(&event.request).unwrap().sums.refused += 1,
            What::End { sums, .. } => {
                let open = &open[&event.request];
                let mut own = open.sums;
                own.live_bytes = open.live;
                ended.insert(open.name.clone(), own);
                said.insert(open.name.clone(), sums);
            }
            _ => unreachable!("all that may happen"),
        }
    }
    Added { sums: ended, said, never_freed: live.len() }
}

fn of(stats: &Stats) -> [u64; 4] {
    [stats.peak_bytes as u64, stats.total_bytes, stats.total_blocks, stats.live_bytes as u64]
}

/// Threads that allocate in requests of all depths, resize and free each other's blocks, and are refused, while the
/// requests end.
fn random_program(seed: u64) -> HashMap<String, Stats> {
    const THREADS: usize = 3;
    let mut stats = HashMap::new();
    let shared: Mutex<Vec<Buffer>> = Mutex::default();
    for round in 0..6 {
        let limited = request().name(format!("{seed} outer {round}")).limit_bytes(3 << 20).begin().unwrap();
        let inner = limited.run(|| request().name(format!("{seed} inner {round}")).strategy(System).begin()).unwrap();
        let deep = inner.run(|| request().name(format!("{seed} deep {round}")).limit_bytes(250_000).begin()).unwrap();
        let alone = request().root().name(format!("{seed} alone {round}")).begin().unwrap();
        let handlers: [Handler; 4] = [limited.handler(), inner.handler(), deep.handler(), alone.handler()];
        let handles = [limited.handle(), inner.handle(), deep.handle(), alone.handle()];
        // Certain, where the threads begin after the requests' ends.
        assert!(Buffer::zeroed_in(deep.handler(), 300_000).is_err(), "beyond its limit");
        let begun = Barrier::new(THREADS + 1);
        thread::scope(|scope| {
            for number in 0..THREADS {
                let (shared, begun, handles) = (&shared, &begun, &handles);
                scope.spawn(move || {
                    let mut random = Random::new(seed * 100 + round * 10 + number as u64);
                    let (mut own, mut charges) = (Vec::new(), Vec::new());
                    begun.wait();
                    for _ in 0..200 {
                        let on = random.below(4);
                        match random.below(9) {
                            0..=3 => {
                                let bytes = [1 + random.below(3000), 300_000, 1 + random.below(100_000)];
                                own.extend(Buffer::zeroed_in(handlers[on], bytes[random.below(3)]));
                            }
                            4 => own.extend(Buffer::with_capacity_in(handlers[on], 1 + random.below(5000))),
                            5 if !own.is_empty() => {
                                let at = random.below(own.len());
                                let _ = own[at].resize(1 + random.below(400_000));
                                if random.below(2) == 0 {
                                    let _ = own[at].shrink_to_fit();
                                }
                            }
                            6 if !own.is_empty() => {
                                let buffer = own.swap_remove(random.below(own.len()));
                                shared.lock().unwrap().push(buffer);
                            }
                            7 => {
                                let mut shared = shared.lock().unwrap();
                                if !shared.is_empty() {
                                    let at = random.below(shared.len());
                                    own.push(shared.swap_remove(at));
                                }
                            }
                            8 => match random.below(2) {
                                0 => charges.extend(handles[on].charge(random.below(50_000))),
                                _ => drop(charges.pop()),
                            },
                            _ => drop(own.pop()),
                        }
                    }
                    shared.lock().unwrap().extend(own.into_iter().step_by(2));
                });
            }
            begun.wait();
            for request in [deep, alone, limited, inner] {
                let name = request.name().into_owned();
                stats.insert(name, request.end().stats);
            }
        });
    }
    stats
}

#[test]
fn a_recordings_events_add_up_to_what_the_accounts_say() {
    let _turn = in_turn();
    for seed in 0..4 * times() as u64 {
        let folder = Folder::new("sums");
        let recorder = record(folder.file(), everything()).unwrap();
        let stats = random_program(seed);
        recorder.stop().unwrap();
        let recording = Recording::open(folder.file()).unwrap();
        assert!(!recording.is_cut_off(), "seed {seed}");
        assert_eq!(recording.skipped(), 0, "seed {seed}");
        let added = added(&recording);
        assert_eq!(added.never_freed, 0, "seed {seed}");
        assert_eq!(added.sums.len(), stats.len(), "seed {seed}");
        for (name, stats) in &stats {
            let (sums, said) = (added.sums[name], added.said[name]);
            assert_eq!(sums, said, "seed {seed}, request {name}");
            let Sums { peak_bytes, total_bytes, blocks, live_bytes, .. } = said;
            assert_eq!([peak_bytes, total_bytes, blocks, live_bytes], of(stats), "seed {seed}, request {name}");
        }
        let refused: u64 = added.sums.values().map(|sums| sums.refused).sum();
        assert!(refused > 0, "seed {seed}: the limits refused something");
    }
}

#[test]
fn an_event_takes_few_bytes_of_the_file() {
    let _turn = in_turn();
    let folder = Folder::new("bytes");
    let recorder = record(folder.file(), everything()).unwrap();
    random_program(99);
    recorder.stop().unwrap();
    let recording = Recording::open(folder.file()).unwrap();
    let events = all_of(&recording).count() as u64;
    assert!(recording.header().file_bytes < events * 16, "{} bytes, {events} events", recording.header().file_bytes);
}

#[test]
#[cfg(not(windows))]
fn what_a_process_did_before_it_rests_is_written() {
    let _turn = in_turn();
    let folder = Folder::new("rests");
    let recorder = record(folder.file(), everything()).unwrap();
    let request = request().root().name("route").begin().unwrap();
    drop(Buffer::zeroed_in(request.handler(), 5000).unwrap());
    request.end();
    let until = Instant::now() + Duration::from_secs(30);
    while all_of(&Recording::open(folder.file()).unwrap()).count() < 4 && Instant::now() < until {
        thread::sleep(Duration::from_millis(20));
    }
    assert_eq!(all_of(&Recording::open(folder.file()).unwrap()).count(), 4);
    recorder.stop().unwrap();
}

/// The thread that writes may have taken events when the recording is stopped: they are in the file all the same.
#[test]
fn nothing_is_lost_where_a_recording_ends_while_it_is_written() {
    let _turn = in_turn();
    for round in 0..20 * times() as u64 {
        let folder = Folder::new("ends");
        let recorder = record(folder.file(), everything()).unwrap();
        for _ in 0..8 {
            request().root().name("route").begin().unwrap().end();
        }
        thread::sleep(Duration::from_millis(75 + round * 3));
        recorder.stop().unwrap();
        let recording = Recording::open(folder.file()).unwrap();
        assert_eq!((all_of(&recording).count(), recording.is_cut_off()), (16, false));
    }
}

/// A thread that has filled a buffer may not have written it yet: it is in the file before the recording ends.
#[test]
fn nothing_is_lost_where_a_recording_ends_while_threads_fill_it() {
    let _turn = in_turn();
    for round in 0..100 * times() as u64 {
        let folder = Folder::new("filled");
        let recorder = record(folder.file(), everything()).unwrap();
        let shared = request().root().name("shared").strategy(System).begin().unwrap();
        let (is_over, made) = (AtomicBool::new(false), AtomicU64::new(0));
        thread::scope(|scope| {
            for _ in 0..4 {
                let (handler, is_over, made) = (shared.handler(), &is_over, &made);
                scope.spawn(move || {
                    while !is_over.load(Relaxed) {
                        drop(Buffer::zeroed_in(handler, 100).unwrap());
                        made.fetch_add(1, Relaxed);
                    }
                });
            }
            while made.load(Relaxed) < 3000 + 70 * round {
                thread::yield_now();
            }
            recorder.stop().unwrap();
            is_over.store(true, Relaxed);
        });
        let recording = Recording::open(folder.file()).unwrap();
        // They are numbered in the order in which they are noted.
        let made = all_of(&recording).filter_map(|event| match event.what {
            What::Allocate { block, .. } => Some(block),
            _ => None,
        });
        let made: Vec<u64> = made.collect();
        assert!(made.is_sorted_by(|one, next| next - one == 1), "a part is missing");
        assert!(made.len() >= 3000 && !recording.is_cut_off());
    }
}

#[test]
fn escapes_are_noted_when_they_end_elsewhere() {
    let _turn = in_turn();
    let folder = Folder::new("escapes");
    let recorder = record(folder.file(), everything()).unwrap();
    let request = request().root().name("route").strategy(System).begin().unwrap();
    let escaped = Buffer::zeroed_in(request.handler(), 5000).unwrap();
    request.end();
    thread::spawn(move || drop(escaped)).join().unwrap();
    recorder.stop().unwrap();
    let recording = Recording::open(folder.file()).unwrap();
    let events: Vec<Event> = all_of(&recording).collect();
    let [begin, made, end, freed] = events[..] else { panic!("{events:?}") };
    let What::Begin { name, handler, parent: 0 } = begin.what else { panic!("{begin:?}") };
    assert_eq!(recording.names()[name as usize], "route");
    assert_eq!(recording.handlers()[handler as usize], "System");
    let What::Allocate { block, bytes: 5000, align, zeroed: true } = made.what else { panic!("{made:?}") };
    assert!(align >= 16);
    let What::End { sums, .. } = end.what else { panic!("{end:?}") };
    assert_eq!((sums.live_bytes, sums.peak_bytes, sums.blocks), (5000, 5000, 1));
    assert_eq!(freed.what, What::Free { block });
    assert_eq!(freed.request, made.request);
    assert_ne!(freed.thread, made.thread);
}

/// A refusal is the asking request's, which counts it, and tells whose limit it was.
#[test]
fn a_refusal_tells_whose_limit_it_was() {
    let _turn = in_turn();
    let folder = Folder::new("refused");
    let recorder = record(folder.file(), everything()).unwrap();
    let budget = Budget::new("tenant", Some(2_000_000));
    let outer = request().root().name("outer").limit_bytes(1_000_000).budget(&budget).begin().unwrap();
    let middle = outer.run(|| request().name("middle").strategy(System).begin()).unwrap();
    let inner = middle.run(|| request().name("inner").limit_bytes(500_000).begin()).unwrap();
    let alone = request().root().name("alone").budget(&budget).begin().unwrap();
    assert!(Buffer::zeroed_in(inner.handler(), 600_000).is_err(), "its own limit");
    assert!(Buffer::zeroed_in(middle.handler(), 1_100_000).is_err(), "that of the outer one");
    let full = Buffer::zeroed_in(outer.handler(), 900_000).unwrap();
    assert!(inner.handle().charge(200_000).is_err(), "that of the outermost one");
    assert!(Buffer::zeroed_in(alone.handler(), 1_200_000).is_err(), "the budget's");
    drop(full);
    for one in [inner, middle, outer, alone] {
        one.end();
    }
    recorder.stop().unwrap();
    let recording = Recording::open(folder.file()).unwrap();
    let mut names = HashMap::from([(0, "none")]);
    let mut found = Vec::new();
    for event in all_of(&recording) {
        match event.what {
            What::Begin { name, .. } => drop(names.insert(event.request, &recording.names()[name as usize])),
            What::Refused { bytes, by } => found.push((names[&event.request], bytes, names[&by])),
            _ => {}
        }
    }
    let expected = [
        ("inner", 600_000, "inner"),
        ("middle", 1_100_000, "outer"),
        ("inner", 200_000, "outer"),
        ("alone", 1_200_000, "none"),
    ];
    assert_eq!(found, expected);
    let added = added(&recording);
    for (name, refused) in [("inner", 2), ("middle", 1), ("outer", 0), ("alone", 1)] {
        assert_eq!((added.sums[name].refused, added.said[name].refused), (refused, refused), "{name}");
    }
    let routes = routes(&recording).unwrap();
    let of = |name: &str| routes.iter().find(|route| route.name == name).unwrap();
    assert_eq!(of("outer").refused_by.iter().collect::<Vec<_>>(), [(&"inner".to_owned(), &1), (&"outer".into(), &2)]);
    assert!(of("alone").refused_by.is_empty() && of("alone").refused_requests == 1);
}

#[test]
fn blocks_of_a_recording_that_is_over_are_freed_as_ever() {
    let _turn = in_turn();
    let folder = Folder::new("over");
    let recorder = record(folder.file(), everything()).unwrap();
    let request = request().root().name("long").begin().unwrap();
    let before = Buffer::zeroed_in(request.handler(), 100).unwrap();
    recorder.stop().unwrap();
    let after = Buffer::zeroed_in(request.handler(), 50).unwrap();
    drop(before);
    assert_eq!(request.stats().live_bytes, 50);
    let recorder = record(folder.0.join("another"), everything()).unwrap();
    drop(after);
    assert_eq!(request.end().stats.live_bytes, 0);
    recorder.stop().unwrap();
    let recording = Recording::open(folder.0.join("another")).unwrap();
    assert_eq!(all_of(&recording).count(), 0, "it began before this one");
}

/// A thread that is gone is told: a replay of a server that has one for each request needs no more than there were.
#[test]
fn the_ends_of_threads_are_recorded() {
    let _turn = in_turn();
    let folder = Folder::new("threads");
    let recorder = record(folder.file(), everything()).unwrap();
    let serve = || {
        let request = request().root().name("route").begin().unwrap();
        drop(Buffer::zeroed_in(request.handler(), 100).unwrap());
        request.end();
    };
    // One that serves once and stays, and many that come and go.
    let (served, over) = (Barrier::new(2), Barrier::new(2));
    thread::scope(|threads| {
        threads.spawn(|| {
            serve();
            served.wait();
            over.wait();
        });
        served.wait();
        for _ in 0..50 {
            thread::spawn(serve).join().unwrap();
        }
        over.wait();
    });
    recorder.stop().unwrap();
    let recording = Recording::open(folder.file()).unwrap();
    assert_eq!(all_of(&recording).count(), 51 * 4, "an end is no event");
    let facts = Plan::new(&recording, None, false).unwrap().facts();
    assert_eq!((facts.threads, facts.threads_at_once), (51, 2));
}
