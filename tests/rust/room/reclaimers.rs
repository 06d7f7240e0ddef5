//! Who is asked to give memory back when a budget is full, and when.

use super::{polled, ready, reason, soon, until, wanting};
use ctxalloc::strategy::{Budget, Charge};
use ctxalloc::{Buffer, Error, NoRoom, request};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

/// What can be dropped.
#[derive(Clone, Default)]
struct Cache(Arc<Mutex<Vec<Charge>>>);

impl Cache {
    fn with(budget: &Budget, bytes: usize) -> Self {
        let cache = Self::default();
        cache.keep(budget.charge(bytes).unwrap());
        cache
    }

    fn keep(&self, charge: Charge) {
        self.0.lock().unwrap().push(charge);
    }

    fn drop_all(&self) {
        drop(std::mem::take(&mut *self.0.lock().unwrap()));
    }
}

#[test]
fn reclaimers_are_asked_in_order_until_enough_came_back() {
    let process = Budget::new("process", Some(1000));
    let (left, right) = (process.child("left", None), process.child("right", None));
    let asked: Arc<Mutex<Vec<(&str, usize)>>> = Arc::default();
    let add = |budget: &Budget, order, name, bytes| {
        let (cache, asked) = (Cache::with(budget, bytes), Arc::clone(&asked));
        budget.add_reclaimer(order, move |wanted| {
            asked.lock().unwrap().push((name, wanted));
            cache.drop_all();
        })
    };
    let take = || std::mem::take(&mut *asked.lock().unwrap());
    add(&left, 2, "last", 100);
    add(&right, 1, "second", 200);
    add(&right, 1, "third", 300);
    let gone = add(&process, 0, "gone", 1);
    add(&process, 0, "first", 50);
    assert!(gone.remove() && !gone.remove());
    assert_eq!(process.reclaim(240), 250);
    assert_eq!(take(), [("first", 240), ("second", 190)]);
    assert_eq!(left.reclaim(1), 100);
    assert_eq!(take(), [("last", 1)], "only its own");
    assert_eq!(process.reclaim(1000), 300, "there is no more");
    assert_eq!(take(), [("first", 1000), ("second", 1000), ("third", 1000)]);
    assert!(left.is_idle(), "a reclaimer charges nothing");
}

#[test]
fn one_that_fails_is_passed_over() {
    let process = Budget::new("process", Some(1000));
    let cache = Cache::with(&process, 500);
    process.add_reclaimer(0, |_| panic!("a reclaimer that fails"));
    process.add_reclaimer(1, |_| {});
    process.add_reclaimer(2, move |_| cache.drop_all());
    assert_eq!(process.reclaim(1), 500);
}

#[test]
fn who_uses_no_more_than_is_guaranteed_is_not_asked_for_others() {
    let process = Budget::new("process", Some(1000));
    let tenant = process.guaranteed_child("tenant", None, 400).unwrap();
    let cache = Cache::with(&tenant, 400);
    let kept = cache.clone();
    tenant.add_reclaimer(0, move |_| cache.drop_all());
    assert_eq!((process.reclaim(1), tenant.in_use_bytes()), (0, 400));
    assert_eq!(tenant.reclaim(1), 400, "for itself");
    kept.keep(tenant.charge(401).unwrap());
    assert_eq!(process.reclaim(1), 401, "it had borrowed");
}

#[test]
fn who_waits_gets_what_reclaimers_give_back() {
    let process = Budget::new("process", Some(1000));
    let tenant = process.child("tenant", None);
    let cache = Cache::with(&tenant, 900);
    let asked = Arc::new(AtomicUsize::new(0));
    let told = Arc::clone(&asked);
    tenant.add_reclaimer(0, move |wanted| {
        told.store(wanted, Ordering::Relaxed);
        assert_eq!(thread::current().name(), Some("ctxalloc-reclaim"));
        cache.drop_all();
    });
    let mut waits = wanting(&process, 600);
    drop(soon(&mut waits).unwrap());
    assert_eq!(asked.load(Ordering::Relaxed), 500);
}

#[test]
fn one_that_is_added_later_is_asked_too() {
    let process = Budget::new("process", Some(1000));
    let cache = Cache::with(&process, 900);
    process.add_reclaimer(0, |_| {});
    let mut waits = wanting(&process, 600);
    assert!(polled(&mut waits).is_pending());
    process.add_reclaimer(0, move |_| cache.drop_all());
    let another = wanting(&process, 1); // looks at the queue
    drop(soon(&mut waits).unwrap());
    drop(another);
}

#[test]
fn a_refused_allocation_has_them_asked_for_the_next() {
    let process = Budget::new("process", Some(1 << 20));
    let cache = Cache::with(&process, 1 << 20);
    let kept = cache.clone();
    process.add_reclaimer(0, move |_| cache.drop_all());
    let request = request().root().budget(&process).begin().unwrap();
    for bytes in [100, 500_000] {
        assert!(request.run(|| Buffer::zeroed(bytes)).is_err(), "nobody waits inside of an allocation");
        until("the cache is dropped", || process.in_use_bytes() == 0);
        kept.keep(process.charge(1 << 20).unwrap());
    }
    process.charge(1).unwrap_err();
    until("the cache is dropped", || process.in_use_bytes() == 0);
    kept.keep(process.charge(1 << 20).unwrap());
    let busy = ctxalloc::request().root().budget(&process).reserve_bytes(1).begin();
    assert_eq!(reason(busy), NoRoom::Busy);
    until("the cache is dropped", || process.in_use_bytes() == 0);
}

#[test]
fn a_reclaimer_is_asked_once_at_a_time_and_must_not_wait() {
    let process = Budget::new("process", Some(1000));
    let held = process.charge(1000).unwrap();
    let answers = Arc::new(Mutex::new(Vec::new()));
    let (own, told) = (process.clone(), Arc::clone(&answers));
    let reclaimer = process.add_reclaimer(0, move |_| {
        let inside = own.reclaim(1);
        let waits = request().root().budget(&own).reserve_bytes(1).admit_blocking();
        told.lock().unwrap().push((inside, reason(waits)));
    });
    process.reclaim(1);
    let first = answers.lock().unwrap()[0];
    assert_eq!(first, (0, NoRoom::InsideOfReclaimer));
    assert!(reclaimer.remove(), "it owns a handle of its budget");
    drop(held);
}

#[test]
fn what_a_reclaimer_owns_goes_with_its_budget() {
    let budget = Budget::new("b", None);
    let owned = Arc::new(());
    let kept = Arc::clone(&owned);
    let reclaimer = budget.add_reclaimer(0, move |_| {
        let _ = &kept;
    });
    drop(budget);
    until("the thread has let go of it", || Arc::strong_count(&owned) == 1);
    assert!(!reclaimer.remove());
}

#[test]
#[cfg_attr(miri, ignore = "thousands of waits")]
fn threads_that_reclaim_and_wait_at_once_all_get_their_turn() {
    let process = Budget::new("process", Some(1000));
    let cache = Cache::default();
    let dropped = cache.clone();
    process.add_reclaimer(0, move |_| dropped.drop_all());
    thread::scope(|scope| {
        for number in 0..4_usize {
            let (process, cache) = (&process, &cache);
            scope.spawn(move || {
                for round in 0..300 {
                    match (number + round) % 3 {
                        0 => process.charge(1 + round % 400).into_iter().for_each(|charge| cache.keep(charge)),
                        1 => drop(process.reclaim(300)),
                        _ => {
                            let wanted = request().root().budget(process).reserve_bytes(500 + round);
                            match wanted.timeout(Duration::from_secs(10)).admit_blocking() {
                                Ok(request) => drop(request),
                                // The cache was filled again after it had been asked for this one.
                                Err(Error::NoRoom { reason: NoRoom::TimedOut, .. }) => panic!("forgotten"),
                                Err(error) => panic!("{error}"),
                            }
                        }
                    }
                    assert!(process.in_use_bytes() <= 1000);
                }
                cache.drop_all();
            });
        }
    });
    cache.drop_all();
    drop(ready(&mut wanting(&process, 1000)).unwrap());
}
