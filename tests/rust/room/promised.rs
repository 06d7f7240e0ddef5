//! Guarantees as allocations meet them: what is told of one that they keep room from, and who is never refused for
//! others, whatever it counts besides arrays.

use super::{polled, ready, request, wanting};
use ctxalloc::strategy::Budget;
use ctxalloc::{Buffer, Error, NoRoom, Request};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

/// How much of the limit is guaranteed to others, by the refusal of so many bytes.
fn kept(own: &Request, bytes: usize) -> usize {
    match own.run(|| Buffer::zeroed(bytes)) {
        Err(Error::BudgetExceeded { guaranteed_bytes, .. }) => guaranteed_bytes,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_refusal_tells_what_is_guaranteed_to_others() {
    let process = Budget::new("process", Some(1000));
    let promised = process.guaranteed_child("promised", None, 600).unwrap();
    let tenant = process.child("tenant", None);
    let own = request().root().budget(&tenant).begin().unwrap();
    let held = own.run(|| Buffer::zeroed(300)).unwrap();
    assert_eq!(kept(&own, 200), 600);
    let text = own.run(|| Buffer::zeroed(200)).unwrap_err().to_string();
    let expected = "budget 'process' has no room for 200 more bytes: 900 of its 1000 are in use, of which 600 are \
                    guaranteed to others";
    assert!(text.starts_with(expected), "{text}");
    // Used or not: it is theirs.
    let theirs = promised.charge(600).unwrap();
    assert_eq!(kept(&own, 200), 600);
    drop((theirs, promised));
    assert_eq!(kept(&own, 800), 0);
    drop(held);
}

#[test]
fn what_is_guaranteed_to_oneself_is_not_kept_from_one() {
    let process = Budget::new("process", Some(1000));
    let division = process.guaranteed_child("division", None, 500).unwrap();
    let team = division.guaranteed_child("team", None, 300).unwrap();
    let beside = division.guaranteed_child("beside", None, 100).unwrap();
    let other = process.guaranteed_child("other", None, 200).unwrap();
    let own = request().root().budget(&team).begin().unwrap();
    // 500 of the division's, of which 100 are kept for the budget beside, and what nobody is guaranteed.
    assert_eq!(kept(&own, 800), 300, "the other one's 200, and the 100 beside");
    assert!(own.run(|| Buffer::zeroed(700)).is_ok());
    let reserving = request().root().budget(&team).reserve_bytes(250).begin().unwrap();
    assert_eq!(kept(&reserving, 800), 300, "its reservation is a part of what it needs");
    let inner = reserving.run(|| request().reserve_bytes(200).begin()).unwrap();
    assert_eq!(kept(&inner, 701), 300);
    drop((beside, other));
    assert_eq!(kept(&inner, 1001), 0);
}

/// Looks at the queue again and again, while somebody changes guarantees, with one who waits.
fn looks_while(budget: &Budget, bytes: usize, change: impl Fn() + Sync) {
    let full = Budget::new("full", Some(1));
    let _one = full.charge(1).unwrap();
    let mut waits = wanting(budget, bytes);
    let is_over = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            while !is_over.load(Ordering::Relaxed) {
                change();
            }
        });
        let unexpected = (0..if cfg!(miri) { 10 } else { 50_000 }).find_map(|_| {
            drop(wanting(&full, 1)); // whoever has to wait looks at the queue
            Some(polled(&mut waits)).filter(std::task::Poll::is_ready)
        });
        is_over.store(true, Ordering::Relaxed);
        assert!(unexpected.is_none(), "{unexpected:?}");
    });
}

#[test]
fn a_guarantee_that_is_not_given_sends_nobody_away() {
    let process = Budget::new("process", Some(1000));
    let asks = process.guaranteed_child("asks", None, 0).unwrap();
    let held = process.charge(700).unwrap();
    // With these 450 the 600 could never be had. But they are not given: others use them.
    looks_while(&process, 600, || {
        let busy = asks.set_guarantee_bytes(450);
        assert!(matches!(busy, Err(Error::NoRoom { reason: NoRoom::Busy, .. })), "{busy:?}");
    });
    drop(held);
}

#[test]
fn a_guarantee_that_grows_sends_nobody_of_its_budget_away() {
    let process = Budget::new("process", Some(1000));
    let tenant = process.guaranteed_child("tenant", None, 100).unwrap();
    let held = process.charge(400).unwrap();
    let mut fits = wanting(&tenant, 600);
    drop(ready(&mut fits).unwrap());
    let more = process.charge(1).unwrap();
    looks_while(&tenant, 700, || {
        tenant.set_guarantee_bytes(500).unwrap();
        tenant.set_guarantee_bytes(100).unwrap();
    });
    drop((held, more));
}
