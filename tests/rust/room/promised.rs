//! Guarantees: what they keep and for whom, what is told of one that they keep room from, and who is never refused for
//! others, whatever it counts besides arrays.

use super::{polled, ready, request, soon, until, wanting};
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

/// Of a budget that nobody has any more. The queue's thread and a readiness probe (of another test) hold every budget
/// while they look.
fn ends_with_its_budget(above: &Budget) {
    until("a guarantee outlived its budget", || above.reserved_bytes() == 0);
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

#[test]
fn guarantees_that_do_not_fit_are_refused_with_what_does_not() {
    let process = Budget::new("process", Some(1000));
    let division = process.guaranteed_child("division", None, 500).unwrap();
    let team = division.guaranteed_child("team", None, 400).unwrap();
    assert_eq!(process.reserved_bytes(), 500, "the team's is part of the division's");
    let too_much = process.guaranteed_child("other", None, 501).unwrap_err();
    let text = "budget 'process' cannot guarantee 501 bytes more to budgets below it: 500 of its 1000 are guaranteed";
    assert!(too_much.to_string().starts_with(text), "{too_much}");
    let error = team.set_guarantee_bytes(1001).unwrap_err();
    assert!(matches!(error, Error::GuaranteesExceedLimit { requested_bytes: 501, .. }), "{error:?}");
    team.set_guarantee_bytes(1000).unwrap();
    assert_eq!((division.reserved_bytes(), process.reserved_bytes()), (1000, 1000), "beyond the division's own");
    team.set_guarantee_bytes(0).unwrap();
    assert_eq!((division.reserved_bytes(), process.reserved_bytes()), (0, 500));
    let borrowed = process.charge(300).unwrap();
    let busy = team.set_guarantee_bytes(701).unwrap_err();
    assert!(matches!(&busy, Error::NoRoom { budget, reason: NoRoom::Busy, .. } if budget == "process"), "{busy:?}");
    drop(borrowed);
    team.set_guarantee_bytes(701).unwrap();
    for budget in [&process, &process.child("plain", None)] {
        assert!(matches!(budget.set_guarantee_bytes(1), Err(Error::BadOption { .. })));
    }
    assert!(matches!(process.guaranteed_child("x", Some(1), 2), Err(Error::BadOption { .. })));
    let request = request().root().budget(&process).begin().unwrap();
    drop((division, team, request));
    ends_with_its_budget(&process);
    assert_eq!(process.in_use_bytes(), 0);
}

#[test]
fn what_others_are_guaranteed_can_never_be_reserved() {
    let process = Budget::new("process", Some(1000));
    let tenant = process.guaranteed_child("tenant", None, 400).unwrap();
    let never = ready(&mut wanting(&process, 601)).unwrap_err();
    let text = "601 bytes can never be reserved of 'process': of its 1000, 400 are guaranteed to others; reserve less";
    assert!(never.to_string().starts_with(text), "{never}");
    assert!(matches!(never, Error::NoRoom { reason: NoRoom::NeverFits, guaranteed_bytes: 400, .. }), "{never:?}");
    let beyond = ready(&mut wanting(&tenant, 1001)).unwrap_err();
    assert!(beyond.to_string().contains("whose limit is 1000; reserve less"), "its own guarantee: {beyond}");
    assert!(matches!(beyond, Error::NoRoom { guaranteed_bytes: 0, .. }), "{beyond:?}");
    drop(ready(&mut wanting(&process, 600)).unwrap());
    drop(ready(&mut wanting(&tenant, 1000)).unwrap());
    let held = process.charge(600).unwrap();
    let mut waits = wanting(&process, 600);
    assert!(polled(&mut waits).is_pending());
    drop(held);
    drop(soon(&mut waits).unwrap());
}

#[test]
fn a_guarantee_that_is_lowered_makes_room_for_those_who_wait() {
    let process = Budget::new("process", Some(100));
    let tenant = process.guaranteed_child("tenant", None, 60).unwrap();
    let held = process.charge(30).unwrap();
    let mut waits = wanting(&process, 40);
    assert!(polled(&mut waits).is_pending());
    tenant.set_guarantee_bytes(30).unwrap();
    drop((soon(&mut waits).unwrap(), held));
}

#[test]
fn what_is_guaranteed_and_idle_makes_nobody_unready() {
    let process = Budget::new("process", Some(100));
    let division = process.guaranteed_child("division", None, 60).unwrap();
    let team = division.guaranteed_child("team", None, 50).unwrap();
    let other = process.guaranteed_child("other", None, 36).unwrap();
    assert!(process.is_ready(), "96 are promised, and nothing is used");
    let charges = [team.charge(50).unwrap(), division.charge(10).unwrap(), other.charge(36).unwrap()];
    assert!(!process.is_ready());
    drop(charges);
    assert!(process.is_ready());
}
