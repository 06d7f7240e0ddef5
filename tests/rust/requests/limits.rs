//! Limits, overdrafts and budgets: what is charged, to whom, and who is refused.

use super::{alone, begin, error, none_is_present};
use ctxalloc::request::charge_current;
use ctxalloc::strategy::Budget;
use ctxalloc::{Buffer, Error, request};

#[test]
fn a_limit_refuses_and_the_report_says_whose_it_was() {
    let _alone = alone();
    let tenant = Budget::new("tenant", Some(3000));
    let request = request().name("upload").limit_bytes(2000).budget(&tenant).begin().unwrap();
    let kept = request.run(|| Buffer::zeroed(1500)).unwrap();
    assert!(request.run(|| Buffer::zeroed(501)).is_err());
    assert_eq!(tenant.in_use_bytes(), 1500);
    let own = request.budget();
    let report = request.end();
    let expected = error!(BudgetExceeded {
        budget: "upload",
        budget_id: own.id(),
        of_request: true,
        limit_bytes: 2000,
        in_use_bytes: 1500,
        held_bytes: 1500,
        requested_bytes: 501,
        chosen_for: None::<String>
    });
    assert_eq!(format!("{:?}", report.refusal.unwrap()), expected);
    assert_eq!(report.stats.refused, 1);
    drop(kept);
    assert_eq!(tenant.in_use_bytes(), 0);
}

#[test]
fn limits_hold_after_a_hundred_thousand_escapes() {
    let _alone = alone();
    let count = if cfg!(miri) { 100 } else { 100_000 };
    let kept: Vec<_> = (0..count).map(|_| begin().run(|| Buffer::zeroed(80).unwrap())).collect();
    let limited = request().limit_bytes(1000).begin().unwrap();
    assert!(limited.run(|| Buffer::zeroed(50 << 20)).is_err());
    assert!(limited.run(|| Buffer::zeroed(1001)).is_err());
    drop(limited.run(|| Buffer::zeroed(1000).unwrap()));
    assert_eq!((limited.stats().peak_bytes, limited.stats().refused), (1000, 2));
    drop((kept, limited));
    assert!(none_is_present());
}

#[test]
fn three_levels_down_a_limit_holds_and_the_sums_are_right() {
    let _alone = alone();
    let elsewhere = Budget::new("elsewhere", None);
    let a = request().name("a").limit_bytes(1 << 20).begin().unwrap();
    let b = a.run(|| request().budget(&elsewhere).begin().unwrap());
    let c = b.run(begin);
    let block = c.run(|| Buffer::zeroed(1 << 20).unwrap());
    assert_eq!((a.stats().live_bytes, a.stats().live_blocks), (1 << 20, 1));
    assert_eq!(elsewhere.in_use_bytes(), 1 << 20);
    let refused = c.run(|| Buffer::zeroed(1)).unwrap_err();
    assert!(matches!(refused, Error::BudgetExceeded { budget, .. } if budget == "a"));
    assert_eq!((a.stats().refused, b.stats().refused, c.stats().refused), (1, 0, 0));
    drop(block);
}

#[test]
fn a_diamond_charges_what_is_shared_once() {
    let _alone = alone();
    let tenant = Budget::new("tenant", None);
    let (left, right) = (tenant.child("left", None), tenant.child("right", None));
    let outer = request().budget(&left).begin().unwrap();
    let inner = outer.run(|| request().budget(&right).begin().unwrap());
    let block = inner.run(|| Buffer::zeroed(1000).unwrap());
    for budget in [&tenant, &left, &right, &outer.budget(), &inner.budget()] {
        assert_eq!((budget.in_use_bytes(), budget.peak_bytes()), (1000, 1000), "{budget:?}");
    }
    let twice = outer.run(|| request().budget(&tenant).begin().unwrap());
    let other = twice.run(|| Buffer::zeroed(10).unwrap());
    assert_eq!(tenant.in_use_bytes(), 1010);
    drop((block, other));
    assert_eq!(tenant.in_use_bytes(), 0);
}

#[test]
fn what_was_refused_was_never_alive() {
    let _alone = alone();
    let tenant = Budget::new("tenant", Some(1000));
    let request = request().budget(&tenant).begin().unwrap();
    request.run(|| {
        Buffer::zeroed(50_000_000).unwrap_err();
        Buffer::zeroed(usize::MAX >> 2).unwrap_err();
    });
    assert_eq!((tenant.peak_bytes(), request.stats().peak_bytes, request.stats().total_bytes), (0, 0, 0));
    let unlimited = begin();
    unlimited.run(|| Buffer::zeroed(1 << 60)).unwrap_err(); // the system's refusal
    assert_eq!((unlimited.stats().peak_bytes, unlimited.stats().total_bytes), (0, 0));
}

#[test]
fn a_limit_that_is_changed_holds_from_the_next_charge() {
    let _alone = alone();
    let tenant = Budget::new("tenant", Some(1000));
    let request = request().budget(&tenant).begin().unwrap();
    let first = request.run(|| Buffer::zeroed(900).unwrap());
    tenant.set_limit_bytes(Some(500));
    assert!(request.run(|| Buffer::zeroed(1)).is_err());
    tenant.set_limit_bytes(None);
    drop(request.run(|| Buffer::zeroed(100_000).unwrap()));
    drop(first);
}

#[test]
fn bytes_from_elsewhere_are_charged_like_any_other() {
    let _alone = alone();
    assert!(charge_current(10).unwrap().is_none());
    let request = request().limit_bytes(1000).begin().unwrap();
    let charge = request.run(|| charge_current(900).unwrap().unwrap());
    assert_eq!((request.stats().live_bytes, request.stats().live_blocks), (900, 1));
    assert!(request.run(|| charge_current(101)).is_err());
    assert!(request.run(|| Buffer::zeroed(101)).is_err());
    let report = request.end();
    assert_eq!((report.escaped_bytes, report.stats.refused), (900, 2));
    assert_eq!(charge.bytes(), 900);
    drop(charge);
    assert!(none_is_present());
}

#[test]
fn a_tiny_block_may_use_the_overdraft_and_the_account_shows_it() {
    let _alone = alone();
    let request = request().limit_bytes(0).overdraft_bytes(1500).begin().unwrap();
    let tiny = request.run(|| Buffer::zeroed(1024).unwrap());
    assert_eq!(request.stats().overdraft_bytes, 1024);
    assert!(request.run(|| Buffer::zeroed(1025)).is_err(), "not tiny");
    assert!(request.run(|| Buffer::zeroed(500)).is_err(), "past the overdraft");
    let scalars: Vec<_> = request.run(|| (0..).map_while(|_| Buffer::zeroed(32).ok()).collect());
    assert_eq!(scalars.len(), (16 * 1500 - 1024) / 32, "scalars have sixteen times as much");
    drop((tiny, scalars));
    assert_eq!(request.end().stats.overdraft_bytes, 0);
}

#[test]
fn budgets_a_million_deep_are_charged_and_dropped() {
    let depth = if cfg!(miri) { 100 } else { 1_000_000 };
    let mut deep = Budget::new("0", None);
    let top = deep.clone();
    for _ in 0..depth {
        deep = deep.child("n", None);
    }
    let charge = deep.charge(10).unwrap();
    assert_eq!(top.in_use_bytes(), 10);
    drop(charge);
    assert_eq!(top.in_use_bytes(), 0);
}

#[test]
fn a_budget_is_idle_when_nothing_can_charge_it() {
    let _alone = alone();
    let budget = Budget::new("tenant", None);
    assert!(budget.is_idle());
    let below = budget.child("below", None);
    assert!(below.is_idle() && !budget.is_idle());
    drop(below);
    let open = request().budget(&budget).begin().unwrap();
    assert_eq!((budget.in_use_bytes(), budget.is_idle()), (0, false));
    let escaped = open.run(|| Buffer::zeroed(100)).unwrap();
    open.end();
    assert!(!budget.is_idle());
    drop(escaped);
    assert!(budget.is_idle());
    let ended = request().budget(&budget).begin().unwrap();
    let own = ended.budget();
    ended.end();
    assert!(!budget.is_idle(), "what charges an ended request's budget charges it too");
    drop(own);
    assert!(budget.is_idle());
    let charge = budget.charge(10).unwrap();
    assert!(!budget.is_idle());
    drop(charge);
    assert!(budget.is_idle());
}

#[test]
fn what_is_given_back_is_never_refused() {
    let _alone = alone();
    let tenant = Budget::new("tenant", None);
    let request = request().budget(&tenant).begin().unwrap();
    let mut block = request.run(|| Buffer::zeroed(100_000).unwrap());
    tenant.set_limit_bytes(Some(10));
    assert_eq!(tenant.overdraft_bytes(), 99_990);
    block.resize(50_000).unwrap();
    block.resize(10).unwrap();
    assert!(block.resize(11).is_err());
    assert_eq!(tenant.in_use_bytes(), 10);
}

#[test]
fn a_strict_request_has_no_overdraft_for_those_inside_of_it() {
    let _alone = alone();
    let strict = request().limit_bytes(0).begin().unwrap();
    let inner = strict.run(|| request().overdraft_bytes(1000).begin().unwrap());
    assert!(inner.run(|| Buffer::zeroed(1)).is_err());
    let tenant = Budget::new("tenant", Some(0));
    let (one, other) = (request().budget(&tenant), request().budget(&tenant));
    let [one, other] = [one, other].map(|request| request.overdraft_bytes(1000).begin().unwrap());
    let all = one.run(|| Buffer::zeroed(1000).unwrap());
    assert!(other.run(|| Buffer::zeroed(33)).is_err(), "no more beyond one limit, whoever asks");
    drop(other.run(|| Buffer::zeroed(32).expect("a scalar")));
    drop(all);
    drop(other.run(|| Buffer::zeroed(1000).unwrap()));
}

#[test]
fn blocks_within_the_limit_do_not_use_up_the_overdraft() {
    let _alone = alone();
    let request = request().limit_bytes(10_000).overdraft_bytes(2000).begin().unwrap();
    let rows: Vec<_> = request.run(|| (0..).map_while(|_| Buffer::zeroed(1000).ok()).collect());
    assert_eq!((rows.len(), request.stats().overdraft_bytes), (12, 2000));
    // A limit that is lowered counts from what is in use, so that scalars can still be had.
    request.budget().set_limit_bytes(Some(0));
    let more: Vec<_> = request.run(|| (0..).map_while(|_| Buffer::zeroed(1000).ok()).collect());
    assert_eq!((more.len(), request.stats().live_bytes), (2, 14_000));
    drop((rows, more));
    assert!(request.run(|| Buffer::zeroed(2001)).is_err(), "it falls with what is in use");
    assert!(request.run(|| Buffer::zeroed(1000)).is_ok());
}

#[test]
fn requests_inside_exceed_an_outer_limit_by_one_overdraft_together() {
    let _alone = alone();
    let tenant = Budget::new("tenant", Some(0));
    let outer = request().limit_bytes(0).overdraft_bytes(4000).budget(&tenant).begin().unwrap();
    let mut kept = Vec::new();
    for _ in 0..100 {
        let inner = outer.run(|| request().limit_bytes(0).overdraft_bytes(4000).begin().unwrap());
        kept.extend(inner.run(|| (0..10).filter_map(|_| Buffer::zeroed(1000).ok()).collect::<Vec<_>>()));
    }
    assert_eq!((kept.len(), tenant.overdraft_bytes(), outer.stats().overdraft_bytes), (4, 4000, 4000));
}

#[test]
fn nothing_from_elsewhere_is_nothing() {
    let _alone = alone();
    let request = begin();
    drop(request.run(|| charge_current(0).unwrap()));
    assert_eq!(request.end().escaped_blocks, 0);
    assert!(none_is_present());
}

#[test]
fn an_old_refusal_is_not_told_for_a_new_failure() {
    let _alone = alone();
    let request = request().limit_bytes(1000).begin().unwrap();
    let refused = request.run(|| Buffer::zeroed(1 << 60)).unwrap_err();
    assert!(matches!(refused, Error::BudgetExceeded { .. }));
    request.budget().set_limit_bytes(None);
    let failed = request.run(|| Buffer::zeroed(1 << 60)).unwrap_err();
    assert!(matches!(failed, Error::OutOfMemory { .. }), "{failed}");
    assert_eq!(request.end().refusal, Some(refused));
}

#[test]
fn numbers_end_at_the_largest_there_is() {
    let request = request().root().overdraft_bytes(64).begin().unwrap();
    let all = request.handle().charge(usize::MAX).unwrap();
    assert!(request.run(|| Buffer::zeroed(16)).is_err(), "nothing beyond it can be counted");
    assert_eq!(request.stats().live_bytes, usize::MAX);
    drop(all);
    let one = request.run(|| Buffer::zeroed(16)).unwrap();
    assert_eq!((request.stats().live_bytes, request.stats().total_bytes), (16, u64::MAX));
    drop(one);
}

#[test]
fn a_limit_of_the_heap_needs_an_allocator_that_counts() {
    let _alone = alone();
    let refused = request().heap_limit_bytes(1000).begin().unwrap_err();
    assert!(matches!(refused, Error::BadOption { option: "heap_limit_bytes", .. }), "{refused}");
    assert_eq!(request().begin().unwrap().heap(), None);
}
