//! Reservations, guarantees and the queue for room: their rules one by one, and threads that all want the same room.
//! `room/programs.rs` compares random programs with the naive model of `room/model.rs`.
#![allow(clippy::unwrap_used, reason = "a test that unwraps nothing has failed")]

#[path = "room/cancelled.rs"]
mod cancelled;
#[path = "room/in_vain.rs"]
mod in_vain;
#[path = "room/mixed.rs"]
mod mixed;
#[path = "room/model.rs"]
mod model;
#[path = "room/overtaking.rs"]
mod overtaking;
#[path = "room/programs.rs"]
mod programs;
#[path = "room/promised.rs"]
mod promised;
#[path = "../../src/random.rs"]
mod random;
#[path = "room/reclaimers.rs"]
mod reclaimers;
#[path = "room/victims.rs"]
mod victims;

use ctxalloc::request::Admitting;
use ctxalloc::strategy::Budget;
use ctxalloc::{Buffer, Error, NoRoom, Request, request};
use random::Random;
use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Barrier, Mutex};
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

fn until(what: &str, is_so: impl Fn() -> bool) {
    let began = Instant::now();
    while !is_so() {
        assert!(began.elapsed() < Duration::from_secs(10), "not in ten seconds: {what}");
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

fn number(variable: &str) -> Option<u64> {
    std::env::var(variable).ok().and_then(|number| number.parse().ok())
}

/// How often the work of `make test` is done.
fn times() -> usize {
    number("CTXALLOC_STRESS").map_or(1, |times| times as usize)
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
                let mut random = Random::new(number * 77 + 1);
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
    // Whom the queue tells is counted right after that, by the thread that told it.
    until("they are counted", || {
        let snapshot = ctxalloc::metrics::snapshot().unwrap();
        let series = |name: &str| snapshot.series.iter().find(|series| series.name == name).unwrap();
        let (waited, late) = (series("listed first"), series("listed late"));
        (waited.waited_micros.count(), waited.timed_out, waited.turned_away) == (1, 0, 0)
            && (late.requests, late.timed_out, late.turned_away) == (0, 1, 1)
    });
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
fn reclaimers_are_asked_again_while_somebody_waits() {
    let budget = Budget::new("budget", Some(100));
    let cache: Arc<Mutex<Vec<_>>> = Arc::default();
    let dropped = Arc::clone(&cache);
    let reclaimer = budget.add_reclaimer(0, move |_| dropped.lock().unwrap().clear());
    let first = request().root().budget(&budget).reserve_bytes(50).begin().unwrap();
    let held = budget.charge(50).unwrap();
    let mut waits = wanting(&budget, 60);
    assert!(polled(&mut waits).is_pending(), "nothing can be dropped yet");
    cache.lock().unwrap().push(held); // from now on it can
    drop(first);
    drop(soon(&mut waits).unwrap());
    assert!(reclaimer.remove());
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
