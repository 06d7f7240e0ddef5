//! Reservations and the queue for room, against a naive model that works everything out anew after each step, and
//! against threads that all want the same room.
#![allow(clippy::unwrap_used, reason = "a test that unwraps nothing has failed")]

use ctxalloc::request::Admitting;
use ctxalloc::strategy::Budget;
use ctxalloc::{Buffer, Error, NoRoom, Request, request};
use std::future::Future;
use std::pin::Pin;
use std::sync::Barrier;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, Waker};
use std::thread;
use std::time::{Duration, Instant};

const MIB: usize = 1 << 20;

fn polled(admitting: &mut Admitting) -> Poll<Result<Request, Error>> {
    Pin::new(admitting).poll(&mut Context::from_waker(Waker::noop()))
}

fn ready(admitting: &mut Admitting) -> Result<Request, Error> {
    match polled(admitting) {
        Poll::Ready(answer) => answer,
        Poll::Pending => panic!("it waits"),
    }
}

/// What a future becomes, by a runner that was called: there is no such thing as "it will not come", so a lost wake-up
/// is one that does not come for very long.
fn soon(admitting: &mut Admitting) -> Result<Request, Error> {
    let began = Instant::now();
    loop {
        if let Poll::Ready(answer) = polled(admitting) {
            return answer;
        }
        assert!(began.elapsed() < Duration::from_secs(10), "a wake-up was lost");
        thread::yield_now();
    }
}

fn reason(answer: Result<Request, Error>) -> NoRoom {
    match answer {
        Err(Error::NoRoom { reason, .. }) => reason,
        other => panic!("{other:?}"),
    }
}

fn wanting(budget: &Budget, bytes: usize) -> Admitting {
    request().root().budget(budget).reserve_bytes(bytes).admit()
}

#[test]
fn blocks_come_out_of_the_reservation_first_and_the_end_returns_the_rest() {
    let process = Budget::new("process", Some(1000));
    let tenant = process.child("tenant", Some(800));
    let first = ready(&mut wanting(&tenant, 600)).unwrap();
    assert_eq!((tenant.in_use_bytes(), tenant.reserved_bytes(), process.reserved_bytes()), (0, 600, 600));
    let block = first.run(|| Buffer::zeroed(400)).unwrap();
    assert_eq!((tenant.in_use_bytes(), tenant.reserved_bytes(), process.reserved_bytes()), (400, 200, 200));
    let beyond = first.run(|| Buffer::zeroed(300)).unwrap();
    assert_eq!((tenant.in_use_bytes(), tenant.reserved_bytes()), (700, 0));
    assert!(first.run(|| Buffer::zeroed(101)).is_err(), "beyond it only while the budgets have room");
    drop(beyond);
    assert_eq!((process.in_use_bytes(), process.reserved_bytes()), (400, 200), "what it frees is reserved again");
    drop(first.end());
    assert_eq!((process.in_use_bytes(), process.reserved_bytes()), (400, 0));
    drop(block);
    assert_eq!((process.in_use_bytes(), process.reserved_bytes()), (0, 0));
}

#[test]
fn others_cannot_take_what_is_reserved() {
    let process = Budget::new("process", Some(1000));
    let patient = ready(&mut wanting(&process, 600)).unwrap();
    let greedy = request().root().budget(&process).begin().unwrap();
    let taken = greedy.run(|| Buffer::zeroed(400)).unwrap();
    assert!(greedy.run(|| Buffer::zeroed(1)).is_err());
    let block = patient.run(|| Buffer::zeroed(600)).unwrap();
    drop((taken, block));
}

#[test]
fn nobody_is_passed_at_a_budget_that_it_waits_for() {
    let process = Budget::new("process", Some(100));
    let tenants = ["a", "b"].map(|name| process.child(name, Some(60)));
    let of_a = ready(&mut wanting(&tenants[0], 50)).unwrap();
    let mut behind_a = wanting(&tenants[0], 20);
    assert!(polled(&mut behind_a).is_pending(), "tenant a has 10 left");
    let of_b = ready(&mut wanting(&tenants[1], 40)).unwrap();
    let mut large = wanting(&tenants[1], 20);
    assert!(polled(&mut large).is_pending(), "the process has 10 left");
    let mut small = wanting(&process, 1);
    assert!(polled(&mut small).is_pending(), "there is room for it, and somebody waits there already");
    assert_eq!((process.waiting(), tenants[0].waiting()), (3, 1));
    drop(of_a);
    let (behind_a, large) = (soon(&mut behind_a).unwrap(), soon(&mut large).unwrap());
    let small = soon(&mut small).unwrap();
    drop((of_b, behind_a, large, small));
    assert_eq!((process.reserved_bytes(), process.waiting()), (0, 0));
}

#[test]
fn one_that_leaves_passes_its_turn_on_and_leaves_no_trace() {
    let process = Budget::new("process", Some(100));
    let held = ready(&mut wanting(&process, 60)).unwrap();
    let large = wanting(&process, 100);
    let mut small = wanting(&process, 40);
    assert!(polled(&mut small).is_pending());
    drop(large);
    let small = ready(&mut small).unwrap();
    let given = wanting(&process, 0);
    drop(given); // it had its reservation
    drop((held, small));
    assert_eq!((process.reserved_bytes(), process.waiting(), process.in_use_bytes()), (0, 0, 0));
}

#[test]
fn each_reason_not_to_wait_is_told() {
    let process = Budget::new("process", Some(100));
    assert_eq!(reason(ready(&mut wanting(&process, 101))), NoRoom::NeverFits);
    let over_its_own = request().root().budget(&process).limit_bytes(10).reserve_bytes(11).admit_blocking();
    assert_eq!(reason(over_its_own), NoRoom::NeverFits);
    let held = ready(&mut wanting(&process, 60)).unwrap();
    assert_eq!(reason(request().root().budget(&process).reserve_bytes(50).begin()), NoRoom::Busy);
    let patient = request().root().budget(&process).reserve_bytes(50).timeout(Duration::from_millis(5));
    assert_eq!(reason(patient.admit_blocking()), NoRoom::TimedOut);
    process.set_max_waiting(1);
    let waits = wanting(&process, 50);
    assert_eq!(reason(ready(&mut wanting(&process, 50))), NoRoom::QueueIsFull);
    let inside = held.run(|| request().reserve_bytes(70).admit_blocking());
    assert_eq!(reason(inside), NoRoom::InsideOfAnother, "it would wait for itself");
    drop(waits);
    process.set_limit_bytes(Some(70));
    let mut never = wanting(&process, 70);
    assert!(polled(&mut never).is_pending());
    process.set_limit_bytes(Some(65));
    assert_eq!(reason(soon(&mut never)), NoRoom::NeverFits, "since the limit was lowered");
}

#[test]
fn a_reservation_inside_comes_out_of_the_one_around_it() {
    let process = Budget::new("process", Some(100));
    let outer = ready(&mut wanting(&process, 100)).unwrap();
    let inner = outer.run(|| request().reserve_bytes(60).admit_blocking()).unwrap();
    let block = inner.run(|| Buffer::zeroed(70)).unwrap(); // beyond its own, within the outer one's
    assert_eq!((process.in_use_bytes(), process.reserved_bytes()), (70, 30));
    assert_eq!(reason(outer.run(|| request().reserve_bytes(31).begin())), NoRoom::Busy);
    drop(outer);
    assert_eq!((process.in_use_bytes(), process.reserved_bytes()), (70, 0), "only what is in use outlives it");
    drop(block);
    assert_eq!((process.in_use_bytes(), process.reserved_bytes()), (0, 60), "the inner one's is its own now");
    drop(inner);
    assert_eq!((process.in_use_bytes(), process.reserved_bytes()), (0, 0));
}

fn named(answer: Result<Request, Error>) -> String {
    match answer {
        Err(Error::NoRoom { budget, .. }) => budget,
        other => panic!("{other:?}"),
    }
}

#[test]
fn the_error_names_the_account_without_room_for_its_own_part() {
    let process = Budget::new("process", Some(100));
    let tenant = process.child("tenant", Some(100));
    let outer = ready(&mut wanting(&tenant, 60)).unwrap();
    let others = process.charge(40).unwrap();
    // Beyond the reservation around it are 10 bytes, for which the tenant has room.
    assert_eq!(named(outer.run(|| request().reserve_bytes(70).begin())), "process");
    drop(others);
    let others = tenant.charge(35).unwrap();
    assert_eq!(named(outer.run(|| request().reserve_bytes(70).begin())), "tenant", "the nearest of two");
    drop((outer, others));
}

#[test]
fn the_error_names_the_account_whose_queue_is_full() {
    let process = Budget::new("process", Some(100));
    let tenant = process.child("tenant", Some(10));
    process.set_max_waiting(1);
    let held = (process.charge(95).unwrap(), tenant.charge(5).unwrap());
    let waits = wanting(&process, 50);
    assert_eq!(named(ready(&mut wanting(&tenant, 10))), "process", "the tenant's queue is empty");
    drop((waits, held));
}

#[test]
fn room_comes_from_whatever_gives_it_back() {
    let process = Budget::new("process", Some(MIB));
    let request = request().root().budget(&process).begin().unwrap();
    let mut block = request.run(|| Buffer::zeroed(MIB)).unwrap();
    let mut waits = wanting(&process, 1000);
    assert!(polled(&mut waits).is_pending());
    block.resize(MIB - 1000).unwrap();
    drop(soon(&mut waits).unwrap());
    let charge = process.charge(1000).unwrap();
    let mut waits = wanting(&process, 1000);
    assert!(polled(&mut waits).is_pending());
    drop(charge);
    drop(soon(&mut waits).unwrap());
    let mut waits = wanting(&process, 1001);
    assert!(polled(&mut waits).is_pending());
    process.set_limit_bytes(None);
    drop(soon(&mut waits).unwrap());
    assert_eq!(process.waiting(), 0);
}

#[test]
fn a_thread_of_the_queue_that_sleeps_is_woken_by_what_is_given_back() {
    let process = Budget::new("process", Some(1000));
    let charge = process.charge(1000).unwrap();
    let mut waits = wanting(&process, 1000);
    // Longer than it stays awake by itself: nothing tells from outside that it sleeps.
    thread::sleep(Duration::from_millis(500));
    drop(charge);
    drop(soon(&mut waits).unwrap());
}

// The model.

struct Random(u64);

impl Random {
    fn below(&mut self, end: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) as usize % end
    }
}

struct ModelRequest {
    outer: Option<usize>,
    budget: usize,
    reserved: usize,
    limit: usize,
    /// Bytes of its own blocks.
    own: usize,
    has_ended: bool,
}

#[derive(Default)]
struct Model {
    /// Parents and limits.
    budgets: Vec<(Option<usize>, usize)>,
    requests: Vec<ModelRequest>,
    /// Number, budget, bytes: in the order in which they came.
    waiting: Vec<(usize, usize, usize)>,
    closed: Vec<usize>,
}

impl Model {
    fn above(&self, budget: usize) -> Vec<usize> {
        let mut found = vec![budget];
        while let Some(parent) = self.budgets[found[found.len() - 1]].0 {
            found.push(parent);
        }
        found
    }

    fn is_inside_of_an_ended_one(&self, request: usize) -> bool {
        let around = std::iter::successors(Some(request), |&request| self.requests[request].outer);
        around.into_iter().any(|request| self.requests[request].has_ended)
    }

    /// What a request uses, with those inside of it.
    fn used(&self, request: usize) -> usize {
        let inside = (0..self.requests.len()).filter(|&other| self.requests[other].outer == Some(request));
        self.requests[request].own + inside.map(|inside| self.counts_as(inside)).sum::<usize>()
    }

    /// What it counts as above.
    fn counts_as(&self, request: usize) -> usize {
        let reserved = if self.requests[request].has_ended { 0 } else { self.requests[request].reserved };
        reserved.max(self.used(request))
    }

    fn in_use(&self, budget: usize) -> usize {
        let is_root = |&request: &usize| {
            self.requests[request].outer.is_none() && self.above(self.requests[request].budget).contains(&budget)
        };
        (0..self.requests.len()).filter(is_root).map(|request| self.counts_as(request)).sum()
    }

    fn all_in_use(&self) -> Vec<usize> {
        let budgets = (0..self.budgets.len()).map(|budget| self.in_use(budget));
        budgets.chain((0..self.requests.len()).map(|request| self.used(request))).collect()
    }

    /// Does something, and takes it back if what grows by it exceeds a limit, or is closed to newcomers.
    fn try_to(&mut self, is_newcomer: bool, change: impl Fn(&mut Self, bool)) -> bool {
        let before = self.all_in_use();
        change(self, true);
        let limits: Vec<_> =
            self.budgets.iter().map(|budget| budget.1).chain(self.requests.iter().map(|r| r.limit)).collect();
        let after = self.all_in_use();
        let is_refused = (0..after.len()).any(|at| {
            after[at] > before.get(at).copied().unwrap_or_default()
                && (after[at] > limits[at] || (is_newcomer && self.closed.contains(&at)))
        });
        if is_refused {
            change(self, false);
        }
        !is_refused
    }

    /// Who gets room now.
    fn look(&mut self) -> Vec<(usize, usize, usize)> {
        let mut all = Vec::new();
        loop {
            let given = self.look_once();
            if given.is_empty() {
                return all;
            }
            all.extend(given);
        }
    }

    fn look_once(&mut self) -> Vec<(usize, usize, usize)> {
        let (mut closed, mut given) = (Vec::new(), Vec::new());
        for waiter in self.waiting.clone() {
            let (_, budget, bytes) = waiter;
            let above = self.above(budget);
            if bytes > 0 && above.iter().any(|budget| closed.contains(budget)) {
                continue;
            }
            let full: Vec<_> = above.into_iter().filter(|&b| self.in_use(b) + bytes > self.budgets[b].1).collect();
            if bytes == 0 || full.is_empty() {
                self.waiting.retain(|other| other != &waiter);
                self.requests.push(ModelRequest {
                    outer: None,
                    budget,
                    reserved: bytes,
                    limit: usize::MAX,
                    own: 0,
                    has_ended: false,
                });
                given.push(waiter);
            }
            closed.extend(full);
        }
        self.closed = closed;
        given
    }
}

fn run_program(seed: u64, steps: usize) {
    let mut random = Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
    let mut model = Model::default();
    let mut budgets: Vec<Budget> = Vec::new();
    for number in 0..2 + random.below(5) {
        let limit = 200 + random.below(2000);
        let parent = if number == 0 { None } else { Some(random.below(number)) };
        let name = format!("budget {number}");
        budgets
            .push(parent.map_or_else(|| Budget::new(&name, Some(limit)), |at| budgets[at].child(&name, Some(limit))));
        model.budgets.push((parent, limit));
    }
    // By the model's numbers; `None` once it has ended.
    let mut requests: Vec<Option<Request>> = Vec::new();
    let mut blocks: Vec<(usize, Buffer)> = Vec::new();
    let mut waiting: Vec<(usize, Admitting)> = Vec::new();
    let mut numbers = 0;
    let full = Budget::new("full", Some(1));
    let _one = full.charge(1).unwrap();
    for step in 0..steps {
        let what = format!("seed {seed}, step {step}");
        let live: Vec<usize> = (0..requests.len()).filter(|&at| requests[at].is_some()).collect();
        match random.below(10) {
            0..=2 => {
                let (budget, bytes) = (random.below(budgets.len()), random.below(500));
                let mut admitting = wanting(&budgets[budget], bytes);
                if model.above(budget).iter().any(|&budget| bytes > model.budgets[budget].1) {
                    assert_eq!(reason(ready(&mut admitting)), NoRoom::NeverFits, "{what}");
                } else {
                    model.waiting.push((numbers, budget, bytes));
                    waiting.push((numbers, admitting));
                    numbers += 1;
                }
            }
            3 if !live.is_empty() => {
                let outer = live[random.below(live.len())];
                if model.is_inside_of_an_ended_one(outer) {
                    continue; // which a new one would not be inside of; `requests_model.rs` has those
                }
                let (bytes, limit) =
                    (random.below(300), if random.below(2) == 0 { usize::MAX } else { 300 + random.below(300) });
                let reserves = random.below(3) > 0;
                let inner = requests[outer].as_ref().unwrap().run(|| {
                    let builder = if limit == usize::MAX { request() } else { request().limit_bytes(limit) };
                    if reserves { builder.reserve_bytes(bytes).admit_blocking() } else { builder.begin() }
                });
                let reserved = if reserves { bytes } else { 0 };
                let budget = model.requests[outer].budget;
                let is_there = model.try_to(true, |model, adds| {
                    if adds {
                        model.requests.push(ModelRequest {
                            outer: Some(outer),
                            budget,
                            reserved,
                            limit,
                            own: 0,
                            has_ended: false,
                        });
                    } else {
                        model.requests.pop();
                    }
                });
                assert_eq!(inner.is_ok(), is_there, "{what}: {inner:?}");
                requests.extend(inner.ok().map(Some));
            }
            4..=5 if !live.is_empty() => {
                let at = live[random.below(live.len())];
                let bytes = 1 + random.below(400);
                let made = requests[at].as_ref().unwrap().run(|| Buffer::zeroed(bytes));
                let is_given = model.try_to(false, |model, adds| {
                    let own = &mut model.requests[at].own;
                    *own = if adds { *own + bytes } else { *own - bytes };
                });
                assert_eq!(made.is_ok(), is_given, "{what}: {made:?}");
                blocks.extend(made.ok().map(|made| (at, made)));
            }
            6 if !blocks.is_empty() => {
                let (at, block) = blocks.swap_remove(random.below(blocks.len()));
                model.requests[at].own -= block.len();
                drop(block);
            }
            7 if !live.is_empty() => {
                let at = live[random.below(live.len())];
                drop(requests[at].take());
                model.requests[at].has_ended = true;
            }
            8 if !waiting.is_empty() => {
                let (number, admitting) = waiting.remove(random.below(waiting.len()));
                model.waiting.retain(|other| other.0 != number);
                drop(admitting);
            }
            9 => {
                let at = random.below(budgets.len());
                // Never below what anybody waits for, which would be refused.
                let limit = 500 + random.below(2000);
                budgets[at].set_limit_bytes(Some(limit));
                model.budgets[at].1 = limit;
            }
            _ => {}
        }
        // Which accounts are closed is found out when the queue is looked at. Here that is after each step: somebody
        // comes who has to wait, at a budget of its own.
        let probe = wanting(&full, 1);
        for (number, ..) in model.look() {
            let at = waiting.iter().position(|waiter| waiter.0 == number).unwrap();
            let (_, mut admitting) = waiting.remove(at);
            // The look was taken on this thread.
            let Poll::Ready(answer) = polled(&mut admitting) else {
                panic!("{what}: {number} has room: {:?} {:?} {budgets:?}", model.waiting, model.budgets)
            };
            requests.push(Some(answer.unwrap_or_else(|error| panic!("{what}: {error}"))));
        }
        for (number, admitting) in &mut waiting {
            if let Poll::Ready(answer) = polled(admitting) {
                panic!("{what}: {number} must wait, and got {answer:?}:");
            }
        }
        drop(probe);
        for (at, budget) in budgets.iter().enumerate() {
            assert_eq!(budget.in_use_bytes() + budget.reserved_bytes(), model.in_use(at), "{what}: {budget:?}");
            let waits = model.waiting.iter().filter(|waiter| model.above(waiter.1).contains(&at)).count();
            assert_eq!(budget.waiting(), waits, "{what}: {budget:?}");
        }
        for (at, request) in requests.iter().enumerate().filter_map(|(at, request)| Some((at, request.as_ref()?))) {
            let live = |request: usize| {
                blocks.iter().filter(|block| block.0 == request).map(|block| block.1.len()).sum::<usize>()
            };
            let inside = |request: usize| {
                let mut outer = Some(request);
                while outer.is_some_and(|outer| outer != at) {
                    outer = model.requests[outer.unwrap()].outer;
                }
                outer.is_some()
            };
            let expected: usize = (0..model.requests.len()).filter(|&request| inside(request)).map(live).sum();
            assert_eq!(request.stats().live_bytes, expected, "{what}");
        }
    }
    drop((requests, blocks, waiting));
    for budget in &budgets {
        let left = (budget.in_use_bytes(), budget.reserved_bytes(), budget.waiting());
        assert_eq!(left, (0, 0, 0), "seed {seed}: something is left after all have ended");
    }
}

#[test]
#[cfg_attr(miri, ignore = "the thread of the queue takes long there")]
fn random_programs_agree_with_the_model() {
    let times: u64 = std::env::var("CTXALLOC_STRESS").ok().and_then(|times| times.parse().ok()).unwrap_or(1);
    for seed in 0..400 * times {
        run_program(seed, 60);
    }
}

#[test]
#[cfg_attr(miri, ignore = "thousands of waits")]
fn threads_that_want_more_than_there_is_all_get_their_turn() {
    let process = Budget::new("process", Some(1000));
    let tenants = ["a", "b", "c"].map(|name| process.child(name, Some(700)));
    let (begin, admitted, left) = (Barrier::new(6), AtomicUsize::new(0), AtomicUsize::new(0));
    thread::scope(|scope| {
        for number in 0..6 {
            let (tenants, process, begin, admitted, left) = (&tenants, &process, &begin, &admitted, &left);
            scope.spawn(move || {
                let mut random = Random(number * 77 + 1);
                begin.wait();
                for _ in 0..500 {
                    let bytes = 1 + random.below(600);
                    let mut builder = request().root().budget(&tenants[random.below(3)]).reserve_bytes(bytes);
                    if random.below(4) == 0 {
                        builder = builder.timeout(Duration::from_micros(random.below(300) as u64));
                    }
                    if random.below(8) == 0 {
                        drop(builder.admit()); // at whatever point it is
                        continue;
                    }
                    match builder.admit_blocking() {
                        Ok(request) => {
                            assert!(process.in_use_bytes() <= 1000, "{process:?}");
                            let block = request.run(|| Buffer::zeroed(bytes)).expect("it is reserved");
                            admitted.fetch_add(1, Ordering::Relaxed);
                            drop((request, block));
                        }
                        Err(Error::NoRoom { reason: NoRoom::TimedOut, .. }) => {
                            left.fetch_add(1, Ordering::Relaxed);
                        }
                        Err(error) => panic!("{error}"),
                    }
                }
            });
        }
    });
    assert!(admitted.into_inner() > 0);
    for budget in tenants.iter().chain([&process]) {
        assert_eq!((budget.in_use_bytes(), budget.reserved_bytes(), budget.waiting()), (0, 0, 0));
        assert!(budget.peak_bytes() <= 1000);
    }
}

#[test]
#[cfg_attr(miri, ignore = "needs a runtime with threads")]
fn tasks_that_wait_are_woken_and_cancelled_ones_leave_nothing() {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_time().build().unwrap();
    let process = Budget::new("process", Some(1000));
    runtime.block_on(async {
        let tasks: Vec<_> = (0..200_usize)
            .map(|number| {
                let process = process.clone();
                tokio::spawn(async move {
                    let request = request().root().budget(&process).reserve_bytes(300 + number).admit().await.unwrap();
                    tokio::task::yield_now().await;
                    drop(request);
                })
            })
            .collect();
        for (number, task) in tasks.into_iter().enumerate() {
            if number % 3 == 0 {
                task.abort();
            }
            if let Err(error) = tokio::time::timeout(Duration::from_secs(20), task).await.expect("a wake-up was lost") {
                assert!(error.is_cancelled());
            }
        }
    });
    assert_eq!((process.in_use_bytes(), process.reserved_bytes(), process.waiting()), (0, 0, 0));
}

#[test]
fn a_reservation_by_history_falls_from_the_limit_to_what_is_needed() {
    let budget = Budget::new("budget", Some(100 * MIB));
    let one = || request().root().name("by history").budget(&budget).limit_bytes(40 * MIB).reserve_auto();
    for _ in 0..10 {
        let begun = one().begin().unwrap();
        assert_eq!(begun.reserved_bytes(), 40 * MIB);
        begun.run(|| Buffer::zeroed(MIB)).unwrap();
    }
    let begun = one().begin().unwrap();
    assert_eq!(begun.reserved_bytes(), MIB * 6 / 5);
    begun.run(|| Buffer::zeroed(30 * MIB)).unwrap(); // an estimate is no limit
    drop(begun);
    for _ in 0..10 {
        let refused = one().begin().unwrap();
        refused.run(|| Buffer::zeroed(41 * MIB)).unwrap_err();
    }
    assert_eq!(one().begin().unwrap().reserved_bytes(), 40 * MIB, "nobody knows what those would have needed");
    let error = request().root().reserve_auto().begin().unwrap_err();
    assert!(matches!(error, Error::BadOption { option: "reserve_bytes", .. }), "{error}");
}

#[test]
fn a_name_has_no_more_waiters_than_it_may() {
    let budget = Budget::new("budget", Some(100));
    let holder = ready(&mut wanting(&budget, 100)).unwrap();
    let one = |name: &str| request().root().name(name).budget(&budget).reserve_bytes(10).max_waiting(2).admit();
    let waiting = [one("crowded"), one("crowded")];
    assert_eq!(reason(ready(&mut one("crowded"))), NoRoom::QueueIsFull);
    let other = one("another name");
    assert_eq!(budget.waiting(), 3);
    drop(waiting);
    let mut again = one("crowded");
    drop((holder, other));
    soon(&mut again).unwrap();
}

#[test]
fn those_who_wait_are_listed_and_counted() {
    let budget = Budget::new("a listed budget", Some(100));
    let holder = ready(&mut wanting(&budget, 60)).unwrap();
    let named = |name: &str, bytes| request().root().name(name).budget(&budget).reserve_bytes(bytes);
    let mut first = named("listed first", 70).admit();
    let second = named("listed second", 10).timeout(Duration::from_secs(60)).admit();
    let all = ctxalloc::metrics::waits(usize::MAX);
    let listed: Vec<_> = all.iter().filter(|one| one.budget_id == budget.id()).collect();
    let shown = |at: usize| (listed[at].name.as_deref(), listed[at].reserve_bytes, listed[at].left.is_some());
    assert_eq!((shown(0), shown(1)), ((Some("listed first"), 70, false), (Some("listed second"), 10, true)));
    assert_eq!(listed[0].budget, "a listed budget");
    assert!(ctxalloc::metrics::snapshot().unwrap().processes[0].gauges.waiting_requests >= 2);
    drop(holder);
    drop(soon(&mut first).unwrap());
    drop(second);

    let holder = ready(&mut wanting(&budget, 100)).unwrap();
    let mut late = named("listed late", 1).timeout(Duration::ZERO).admit();
    assert_eq!(reason(soon(&mut late)), NoRoom::TimedOut);
    named("listed late", 1).begin().unwrap_err();
    drop(holder);
    let snapshot = ctxalloc::metrics::snapshot().unwrap();
    let series = |name: &str| snapshot.series.iter().find(|series| series.name == name).unwrap();
    let (waited, late) = (series("listed first"), series("listed late"));
    assert_eq!((waited.waited_micros.count(), waited.timed_out, waited.turned_away), (1, 0, 0));
    assert_eq!((late.requests, late.timed_out, late.turned_away), (0, 1, 1));
}

#[test]
fn a_budget_is_ready_again_only_when_it_has_room() {
    let budget = Budget::new("budget", Some(100));
    let charged = |bytes| budget.charge(bytes).unwrap();
    let most = charged(80);
    assert!(budget.is_ready());
    let more = charged(10);
    assert!(budget.is_ready(), "it was");
    let full = charged(5);
    assert!(!budget.is_ready());
    drop(full);
    assert!(!budget.is_ready(), "it was not");
    drop(more);
    assert!(budget.is_ready());
    budget.set_max_waiting(4);
    let waiting = [wanting(&budget, 50), wanting(&budget, 50)];
    assert!(!budget.is_ready(), "half as many wait as may");
    drop(waiting);
    assert!(budget.is_ready());
    drop(most);
}

#[test]
fn the_process_has_one_budget() {
    use ctxalloc::strategy::ProcessLimit;
    let process = Budget::process(ProcessLimit::Bytes(1 << 40)).unwrap();
    assert_eq!((&*process.name(), process.limit_bytes()), ("process", Some(1 << 40)));
    let again = Budget::process(ProcessLimit::Share(0.5)).unwrap();
    assert!(again.same_budget(&process));
    let half = process.limit_bytes().unwrap();
    assert!(half > 0 && half < 1 << 40);
    Budget::process(ProcessLimit::Auto).unwrap();
    assert!(process.limit_bytes().unwrap() > half);
}
