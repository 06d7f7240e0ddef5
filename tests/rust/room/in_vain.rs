//! Who is held up by whom. Who waits in vain, because a limit was lowered or something guaranteed to others, is told at
//! once, wherever it stands. That nobody is passed, and who holds up nobody, the random programs hold (`programs.rs`).

use super::{polled, ready, reason, soon, wanting};
use ctxalloc::strategy::Budget;
use ctxalloc::{NoRoom, request};

#[test]
fn a_tenants_lowered_limit_tells_who_waits_for_the_process() {
    let process = Budget::new("process", Some(100));
    let (tenant, other) = (process.child("tenant", Some(90)), process.child("other", None));
    let held = process.charge(40).unwrap();
    let (mut large, mut small) = (wanting(&tenant, 80), wanting(&other, 10));
    assert!(polled(&mut large).is_pending() && polled(&mut small).is_pending());
    tenant.set_limit_bytes(Some(50));
    assert_eq!(reason(soon(&mut large)), NoRoom::NeverFits);
    drop(soon(&mut small).unwrap());
    drop(held);
    assert_eq!((process.in_use_bytes(), process.reserved_bytes(), process.waiting()), (0, 0, 0));
}

#[test]
fn whoever_is_not_the_first_of_its_budget_is_told_too() {
    let process = Budget::new("process", Some(100));
    let held = process.charge(60).unwrap();
    let (mut first, mut second) = (wanting(&process, 50), wanting(&process, 90));
    assert!(polled(&mut first).is_pending() && polled(&mut second).is_pending());
    process.set_limit_bytes(Some(80));
    assert_eq!(reason(soon(&mut second)), NoRoom::NeverFits);
    assert!(polled(&mut first).is_pending(), "it has to wait, and will have its room");
    drop(held);
    drop(soon(&mut first).unwrap());
}

#[test]
fn what_is_guaranteed_to_others_tells_who_waits_for_its_own_tenant() {
    let process = Budget::new("process", Some(1000));
    let (tenant, patient) = (process.child("tenant", Some(700)), process.guaranteed_child("patient", None, 0).unwrap());
    let held = tenant.charge(100).unwrap();
    let mut waits = wanting(&tenant, 650);
    assert!(polled(&mut waits).is_pending());
    patient.set_guarantee_bytes(400).unwrap();
    assert_eq!(reason(soon(&mut waits)), NoRoom::NeverFits);
    drop(held);
    drop(ready(&mut wanting(&tenant, 600)).unwrap());
}

#[test]
fn what_comes_out_of_a_guarantee_fits_below_a_lower_limit() {
    let process = Budget::new("process", Some(100));
    let tenant = process.guaranteed_child("tenant", None, 96).unwrap();
    process.set_limit_bytes(Some(40));
    let request = ready(&mut wanting(&tenant, 60)).unwrap();
    assert_eq!(reason(ready(&mut wanting(&tenant, 97))), NoRoom::NeverFits);
    drop(request);
}

#[test]
fn a_reservation_by_history_is_no_more_than_its_budgets_can_ever_give() {
    let process = Budget::new("process", Some(500_000));
    let terms = || request().root().name("in vain").budget(&process).limit_bytes(1_000_000).reserve_auto();
    let first = terms().admit_blocking().unwrap();
    assert_eq!(process.reserved_bytes(), 500_000);
    drop(first);
}
