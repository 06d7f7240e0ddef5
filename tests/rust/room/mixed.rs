//! Threads, tokio's tasks, a reclaimer and an operator who changes limits, all at one process's budgets at once. What
//! each of them has is noted in a plain list, and after each step the sums of that list must fit.

use super::{Random, polled, request, times, wanting};
use ctxalloc::request::Admitting;
use ctxalloc::strategy::Budget;
use ctxalloc::{Buffer, Error, NoRoom, Request};
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::task::Poll;
use std::thread;
use std::time::{Duration, Instant};

const LIMIT: usize = 1000;
/// What is guaranteed to the patient tenant, which never wants more.
const PROMISED: usize = 300;
/// Nobody waits so long unless its wake-up was lost.
const FOR_EVER: Duration = Duration::from_secs(60);

#[derive(Clone)]
struct House {
    process: Budget,
    patient: Budget,
    others: [Budget; 2],
    /// By number: the budget (0: the patient tenant), and the bytes that are reserved for one that has begun.
    live: Arc<Mutex<Vec<(usize, usize)>>>,
    done: Arc<AtomicUsize>,
    /// What outlives its request, until another thread drops it: who keeps something while it waits may wait for
    /// itself.
    escaped: Arc<Mutex<Vec<Buffer>>>,
}

/// One that has begun, and stands in the list until it is about to end.
struct Living {
    request: Option<Request>,
    entry: (usize, usize),
    house: House,
}

impl Drop for Living {
    fn drop(&mut self) {
        let mut live = self.house.live.lock().unwrap();
        let at = live.iter().position(|entry| *entry == self.entry).expect("it was noted");
        live.swap_remove(at);
        drop(live);
        drop(self.request.take()); // after its entry is gone: the list never has more than there is
        self.house.done.fetch_add(1, Ordering::Relaxed);
    }
}

impl House {
    fn new() -> Self {
        let process = Budget::new("process", Some(LIMIT));
        let patient = process.guaranteed_child("patient", Some(2 * PROMISED), PROMISED).unwrap();
        let others = [process.child("b", Some(650)), process.guaranteed_child("c", Some(500), 100).unwrap()];
        let (live, done, escaped) = (Arc::default(), Arc::default(), Arc::default());
        Self { process, patient, others, live, done, escaped }
    }

    fn began(&self, request: Request, budget: usize, bytes: usize) -> Living {
        self.live.lock().unwrap().push((budget, bytes));
        self.check();
        Living { request: Some(request), entry: (budget, bytes), house: self.clone() }
    }

    /// No sum of what is reserved is above a limit, and what is promised is nobody else's.
    fn check(&self) {
        let live = self.live.lock().unwrap();
        let of = |budget: usize| live.iter().filter(|entry| entry.0 == budget).map(|entry| entry.1).sum::<usize>();
        let sum = of(0).max(PROMISED) + of(1) + of(2).max(100);
        assert!(sum <= LIMIT, "{sum}: {live:?}");
        assert!(of(1) <= 650 && of(2) <= 500, "{live:?}");
        assert!(self.process.peak_bytes() <= LIMIT, "{:?}", self.process);
    }
}

/// What one does with its request: within its reservation it is never refused, beyond it perhaps.
fn work(living: &Living, random: &mut Random) {
    let request = living.request.as_ref().expect("it has not ended");
    let bytes = living.entry.1;
    let block = request.run(|| Buffer::zeroed(bytes)).expect("it is reserved");
    let goes_beyond = random.below(3) == 0;
    if goes_beyond {
        match request.run(|| Buffer::zeroed(1 + random.below(200))) {
            Ok(beyond) if random.below(2) == 0 => living.house.escaped.lock().unwrap().push(beyond),
            Ok(_) => {}
            Err(Error::BudgetExceeded { .. }) => {}
            Err(error) => panic!("{error}"),
        }
    }
    drop(block);
    if !goes_beyond && bytes > 1 {
        let inner =
            request.run(|| super::request().reserve_bytes(bytes / 2).begin()).expect("it comes out of the outer");
        let block = inner.run(|| Buffer::zeroed(bytes / 2)).expect("it is reserved");
        drop((inner, block));
    }
    living.house.check();
}

/// What a request wants, or not: the limits change.
fn admitted(answer: Result<Request, Error>) -> Option<Request> {
    match answer {
        Ok(request) => Some(request),
        Err(Error::NoRoom { reason: NoRoom::TimedOut | NoRoom::QueueIsFull, .. }) => None,
        Err(error) => panic!("{error}"),
    }
}

fn on_a_thread(house: &House, seed: u64, lives: usize) {
    let mut random = Random::new(seed);
    for _ in 0..lives {
        let (which, bytes) = (random.below(2), 1 + random.below(250));
        let mut builder = request().root().budget(&house.others[which]).reserve_bytes(bytes);
        if random.below(3) == 0 {
            builder = builder.timeout(Duration::from_micros(random.below(500) as u64));
        }
        if random.below(9) == 0 {
            drop(builder.admit());
            continue;
        }
        let began = Instant::now();
        let request = admitted(builder.admit_blocking());
        assert!(began.elapsed() < FOR_EVER, "a wake-up was lost");
        if let Some(request) = request {
            work(&house.began(request, 1 + which, bytes), &mut random);
        }
    }
}

async fn in_a_task(house: House, seed: u64, lives: usize) {
    let mut random = Random::new(seed);
    for _ in 0..lives {
        let (which, bytes) = (random.below(2), 1 + random.below(250));
        let admitting = request().root().budget(&house.others[which]).reserve_bytes(bytes).admit();
        if random.below(4) == 0 {
            // Cancelled at whatever point it is.
            let patience = Duration::from_micros(random.below(300) as u64);
            let _ = tokio::time::timeout(patience, admitting).await;
            continue;
        }
        let request = tokio::time::timeout(FOR_EVER, admitting).await.expect("a wake-up was lost");
        let living = admitted(request).map(|request| house.began(request, 1 + which, bytes));
        if random.below(2) == 0 {
            tokio::task::yield_now().await;
        }
        if let Some(living) = living {
            work(&living, &mut random);
        }
    }
}

/// It stays within what it is guaranteed: it is never refused, and never waits.
fn patiently(house: &House, seed: u64, is_over: &AtomicBool) {
    let mut random = Random::new(seed);
    while !is_over.load(Ordering::Relaxed) {
        let bytes = 1 + random.below(PROMISED);
        let begun = request().root().budget(&house.patient).reserve_bytes(bytes).begin();
        let living = house.began(begun.expect("within its guarantee"), 0, bytes);
        let own = living.request.as_ref().expect("it has not ended");
        let block = own.run(|| Buffer::zeroed(PROMISED)).expect("within its guarantee, and beyond its reservation");
        drop((block, living));
        thread::yield_now();
    }
}

/// Many waiters of one budget on one thread, which looks at them from the last to the first: where a later one has its
/// room, all before it have.
fn in_line(house: &House, seed: u64, is_over: &AtomicBool) {
    let mut random = Random::new(seed);
    let mut line: VecDeque<(Admitting, usize)> = VecDeque::new();
    while !is_over.load(Ordering::Relaxed) || !line.is_empty() {
        while line.len() < 8 && !is_over.load(Ordering::Relaxed) {
            let bytes = 1 + random.below(200);
            line.push_back((wanting(&house.others[0], bytes), bytes));
        }
        let mut has_room = false;
        let mut ready = Vec::new();
        for at in (0..line.len()).rev() {
            match polled(&mut line[at].0) {
                Poll::Ready(answer) => {
                    has_room = true;
                    ready.push((at, admitted(answer)));
                }
                Poll::Pending => assert!(!has_room, "one that came later was given room before it"),
            }
        }
        for (at, request) in ready {
            let (_, bytes) = line.remove(at).expect("it was there");
            drop(request.map(|request| house.began(request, 1, bytes)));
        }
        if random.below(5) == 0 {
            drop(line.remove(random.below(line.len().max(1))));
        }
        thread::yield_now();
    }
}

/// A cache that fills its tenant, and is dropped when that is full.
fn cache(house: &House) -> Arc<Mutex<Vec<Buffer>>> {
    let kept: Arc<Mutex<Vec<Buffer>>> = Arc::default();
    let dropped = Arc::clone(&kept);
    house.others[1].add_reclaimer(0, move |_| drop(std::mem::take(&mut *dropped.lock().unwrap())));
    kept
}

fn fill(house: &House, cache: &Mutex<Vec<Buffer>>, seed: u64, is_over: &AtomicBool) {
    let mut random = Random::new(seed);
    let own = request().root().budget(&house.others[1]).begin().unwrap();
    while !is_over.load(Ordering::Relaxed) {
        match own.run(|| Buffer::zeroed(1 + random.below(100))) {
            Ok(block) => cache.lock().unwrap().push(block),
            Err(_) => thread::sleep(Duration::from_micros(200)),
        }
        // Both limits are more than anybody waits for, so nobody can never have it.
        house.others[0].set_limit_bytes(Some(550 + random.below(100)));
        if cache.lock().unwrap().len() > 4 {
            cache.lock().unwrap().clear(); // a cache that drops what is old by itself
        }
        house.escaped.lock().unwrap().clear();
    }
    cache.lock().unwrap().clear();
    house.escaped.lock().unwrap().clear();
}

/// Ends those who go on for ever, where others panic too.
struct Ends<'a>(&'a AtomicBool);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

fn run(seed: u64, lives: usize) {
    let house = House::new();
    let (is_over, cache) = (AtomicBool::new(false), cache(&house));
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_time().build().unwrap();
    thread::scope(|scope| {
        let (house, is_over, cache) = (&house, &is_over, &cache);
        let ends = Ends(is_over);
        scope.spawn(move || patiently(house, seed + 1, is_over));
        scope.spawn(move || in_line(house, seed + 2, is_over));
        scope.spawn(move || fill(house, cache, seed + 3, is_over));
        let threads: Vec<_> =
            (0..2).map(|number| scope.spawn(move || on_a_thread(house, seed + 10 + number, lives / 4))).collect();
        runtime.block_on(async {
            let tasks: Vec<_> =
                (0..8).map(|number| tokio::spawn(in_a_task(house.clone(), seed + 20 + number, lives / 16))).collect();
            for task in tasks {
                task.await.expect("no panic");
            }
        });
        let joined: Vec<_> = threads.into_iter().map(thread::ScopedJoinHandle::join).collect();
        drop(ends);
        joined.into_iter().for_each(|joined| joined.expect("no panic"));
    });
    assert!(house.done.load(Ordering::Relaxed) > 0 && house.live.lock().unwrap().is_empty());
    let left = |budget: &Budget| (budget.in_use_bytes(), budget.reserved_bytes(), budget.waiting());
    assert_eq!(left(&house.process), (0, PROMISED + 100, 0), "something is charged after all have ended");
    for budget in house.others.iter().chain([&house.patient]) {
        assert_eq!(left(budget), (0, 0, 0), "{budget:?}");
    }
}

#[test]
#[cfg_attr(miri, ignore = "thousands of waits, and a runtime with threads")]
fn threads_and_tasks_at_once_keep_to_the_sums_of_a_list() {
    let times = times();
    for round in 0..times.div_ceil(20) {
        run(round as u64 * 1000 + 7, 2000 * times.min(20));
    }
}
