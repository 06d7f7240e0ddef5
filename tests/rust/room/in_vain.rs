//! Who is held up by whom. Who waits in vain, because a limit was lowered or something guaranteed to others, is told at
//! once, wherever it stands; and who waits for its tenant's limit holds up nobody of another tenant.

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
fn who_waits_for_its_tenants_limit_holds_up_no_other_tenant() {
    let process = Budget::new("process", Some(150));
    let (flood, patient) = (process.child("flood", Some(50)), process.child("patient", None));
    let (of_flood, of_patient) = (flood.charge(40).unwrap(), patient.charge(85).unwrap());
    let mut large = wanting(&flood, 30); // of its tenant's 50 are 10 left, of the process's 150 are 25
    assert!(polled(&mut large).is_pending());
    let small = ready(&mut wanting(&patient, 10)).unwrap();
    drop(of_flood); // now it waits for the process, or has its room
    let large = soon(&mut large).unwrap();
    drop((of_patient, small, large));
    assert_eq!((process.in_use_bytes(), process.reserved_bytes(), process.waiting()), (0, 0, 0));
}

#[test]
fn who_waits_for_the_process_at_last_is_passed_by_nobody() {
    let process = Budget::new("process", Some(150));
    let (flood, patient) = (process.child("flood", Some(50)), process.child("patient", None));
    let (of_flood, of_patient) = (flood.charge(40).unwrap(), patient.charge(85).unwrap());
    let full = Budget::new("full", Some(1));
    let _one = full.charge(1).unwrap();
    let mut large = wanting(&flood, 50);
    assert!(polled(&mut large).is_pending());
    let more = patient.charge(20).unwrap();
    drop(of_flood); // its tenant's limit is no obstacle any more, and 45 of the process are left
    drop(wanting(&full, 1)); // who has to wait has the queue looked at
    let mut small = wanting(&patient, 1);
    assert!(polled(&mut large).is_pending() && polled(&mut small).is_pending());
    drop(more);
    drop((soon(&mut large).unwrap(), soon(&mut small).unwrap()));
    drop(of_patient);
}

#[test]
fn nobody_gets_in_by_a_guarantee_ahead_of_an_older_one() {
    let process = Budget::new("process", Some(1000));
    let tenant = process.guaranteed_child("tenant", None, 0).unwrap();
    let held = process.charge(600).unwrap();
    let mut older = wanting(&tenant, 500);
    assert!(polled(&mut older).is_pending());
    tenant.set_guarantee_bytes(300).unwrap();
    let mut newer = wanting(&tenant, 200); // fits into the guarantee
    assert!(polled(&mut newer).is_pending(), "it would use up what the older one waits to draw on");
    drop(held);
    drop((soon(&mut older).unwrap(), soon(&mut newer).unwrap()));
    assert_eq!((process.reserved_bytes(), process.waiting()), (300, 0), "what is guaranteed");
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
