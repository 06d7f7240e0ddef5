//! `Context` as a value: run, wrap, copy, clone. PEP 567's `contextvars.Context`.

use crate::support::{blue, drop_probe, red};
use ctxalloc::{Context, current, default_handler, scope};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::thread;

fn panics(work: impl FnOnce()) {
    let outcome = catch_unwind(AssertUnwindSafe(work));
    assert!(outcome.is_err(), "it was meant to panic");
}

#[test]
fn an_empty_context_hides_the_callers_selection() {
    scope(red(), || {
        assert_eq!(Context::new().run(current), default_handler());
        assert_eq!(Context::default().run(current), default_handler());
        assert_eq!(current(), red());
    });
}

#[test]
fn run_returns_what_the_work_returns_even_borrows() {
    let text = String::from("lent");
    let mut context = Context::with_handler(red());
    let lent: &str = context.run(|| text.as_str());
    assert_eq!(lent, "lent");
}

#[test]
fn a_wrapped_closure_that_is_called_destroys_its_captures_inside() {
    let (probe, dropped) = drop_probe();
    Context::with_handler(red()).wrap(move || drop(probe))();
    assert_eq!(dropped.handler(), red());
    let (probe, dropped) = drop_probe();
    Context::with_handler(red()).wrap(move || {
        let _kept_to_the_end = &probe;
    })();
    assert_eq!(dropped.handler(), red());
}

#[test]
fn a_wrapped_closure_that_is_never_called_destroys_its_captures_inside() {
    let (probe, dropped) = drop_probe();
    let wrapped = Context::with_handler(red()).wrap(move || drop(probe));
    assert!(dropped.not_yet());
    thread::spawn(move || drop(wrapped)).join().expect("no panic");
    assert_eq!(dropped.handler(), red());
}

#[test]
fn a_wrapped_closure_that_panics_restores_its_caller() {
    let (probe, dropped) = drop_probe();
    let wrapped = Context::with_handler(red()).wrap(move || {
        let _probe = probe;
        resume_unwind(Box::new(()));
    });
    scope(blue(), || {
        panics(wrapped);
        assert_eq!(current(), blue());
    });
    assert_eq!(dropped.handler(), red());
}

#[test]
fn captures_that_panic_while_they_are_destroyed_restore_the_caller() {
    struct Bomb;
    impl Drop for Bomb {
        fn drop(&mut self) {
            assert_eq!(current(), red());
            resume_unwind(Box::new(()));
        }
    }
    let bomb = Bomb;
    let wrapped = Context::with_handler(red()).wrap(move || drop(bomb));
    scope(blue(), || {
        panics(|| drop(wrapped));
        assert_eq!(current(), blue());
    });
}

#[test]
fn a_context_shows_its_handler() {
    assert!(format!("{:?}", Context::with_handler(red())).contains("red"));
    assert!(format!("{:?}", Context::new()).contains("None"));
}
