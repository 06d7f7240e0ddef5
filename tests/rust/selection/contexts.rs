//! `Context` as a value: run, wrap, copy, clone. PEP 567's `contextvars.Context`.

use crate::support::{blue, drop_probe, green, red};
use ctxalloc::{Context, Error, current, default_handler, enter, reset, scope, set};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::thread;

fn panics(work: impl FnOnce()) {
    let outcome = catch_unwind(AssertUnwindSafe(work));
    assert!(outcome.is_err(), "it was meant to panic");
}

#[test]
fn what_is_selected_in_a_context_stays_in_it() {
    let mut context = Context::new();
    assert_eq!(context.run(current), default_handler());
    context.run(|| drop(set(red())));
    assert_eq!(current(), default_handler());
    assert_eq!(context.handler(), red());
    assert_eq!(context.run(current), red(), "and is there the next time");
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
fn a_copy_is_taken_once_and_follows_nobody() {
    let copy = scope(red(), Context::copy_current);
    scope(green(), || assert_eq!(copy.handler(), red()));
    let mut clone = copy.clone();
    clone.run(|| drop(set(blue())));
    assert_eq!((copy.handler(), clone.handler()), (red(), blue()));
}

#[test]
fn a_clone_has_an_identity_of_its_own() {
    let mut original = Context::new();
    let token = original.run(|| set(red()));
    let mut clone = original.clone();
    assert_eq!(clone.run(|| reset(&token)), Err(Error::TokenForeign));
    assert_eq!(original.run(|| reset(&token)), Ok(()));
    assert_eq!((original.handler(), clone.handler()), (default_handler(), red()));
}

#[test]
fn a_panic_in_run_restores_the_thread_and_keeps_what_was_set() {
    let mut context = Context::with_handler(red());
    scope(blue(), || {
        panics(|| {
            context.run(|| {
                drop(set(green()));
                resume_unwind(Box::new(()));
            });
        });
        assert_eq!(current(), blue());
    });
    assert_eq!(context.handler(), green());
}

#[test]
fn contexts_nest_and_each_keeps_its_own() {
    let (mut outer, mut inner) = (Context::with_handler(red()), Context::with_handler(green()));
    outer.run(|| {
        inner.run(|| drop(set(blue())));
        assert_eq!(current(), red());
        drop(set(green()));
    });
    assert_eq!((outer.handler(), inner.handler()), (green(), blue()));
    assert_eq!(current(), default_handler());
}

#[test]
fn a_scope_left_open_in_a_context_is_closed_there_only() {
    let mut context = Context::with_handler(red());
    let guard = context.run(|| enter(green()));
    scope(blue(), || {
        assert_eq!(guard.exit(), Err(Error::TokenForeign));
        assert_eq!(current(), blue());
    });
    assert_eq!(context.handler(), green());
}

#[test]
fn run_returns_what_the_work_returns_even_borrows() {
    let text = String::from("lent");
    let mut context = Context::with_handler(red());
    let lent: &str = context.run(|| text.as_str());
    assert_eq!(lent, "lent");
}

#[test]
fn a_wrapped_closure_runs_in_the_context_wherever_it_is_called() {
    let wrapped = Context::with_handler(red()).wrap(|| {
        let before = current();
        drop(set(green()));
        before
    });
    assert_eq!(thread::spawn(wrapped).join().expect("no panic"), red());
    let wrapped = Context::with_handler(red()).wrap(current);
    assert_eq!(scope(blue(), || (wrapped(), current())), (red(), blue()));
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
