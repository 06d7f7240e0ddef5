//! Limits, overdrafts and budgets: what is charged, to whom, and who is refused.

use super::{alone, begin, none_is_present};
use ctxalloc::request::charge_current;
use ctxalloc::strategy::Budget;
use ctxalloc::{Buffer, Error, request};

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
