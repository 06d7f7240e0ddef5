//! Rule 1: a new OS thread starts with the default handler. Rule 3 for threads: `ctxalloc::thread::spawn` copies.

use crate::support::{blue, drop_probe, green, red};
use ctxalloc::{Context, current, default_handler, scope, set};
use std::sync::mpsc::channel;
use std::thread;

#[test]
fn a_new_thread_starts_with_the_default_handler() {
    let seen = scope(red(), || thread::spawn(|| (current(), Context::copy_current().is_unset())).join());
    assert_eq!(seen.expect("no panic"), (default_handler(), true));
}

#[test]
fn a_scoped_thread_of_std_starts_with_the_default_handler() {
    let seen = scope(red(), || thread::scope(|threads| threads.spawn(current).join()));
    assert_eq!(seen.expect("no panic"), default_handler());
}

#[test]
fn a_thread_of_ctxalloc_starts_with_a_copy_of_its_creators_context() {
    let child = scope(red(), || ctxalloc::thread::spawn(current));
    assert_eq!(child.join().expect("no panic"), red());
}

#[test]
fn the_copy_is_taken_at_the_call_not_when_the_thread_runs() {
    let (go, gate) = channel();
    let child = scope(red(), || {
        let child = ctxalloc::thread::spawn(move || {
            gate.recv().expect("the gate opens");
            current()
        });
        drop(set(green())); // after the call, before the child looks
        child
    });
    go.send(()).expect("the child waits");
    assert_eq!(child.join().expect("no panic"), red());
}

#[test]
fn what_a_thread_selects_is_not_seen_by_its_creator_nor_by_its_siblings() {
    scope(red(), || {
        let (sender, receiver) = channel();
        let (go, gate) = channel();
        let sibling = ctxalloc::thread::spawn(move || {
            gate.recv().expect("the gate opens");
            current()
        });
        let child = ctxalloc::thread::spawn(move || {
            drop(set(green()));
            sender.send(()).expect("somebody listens");
            current()
        });
        receiver.recv().expect("the child selected");
        go.send(()).expect("the sibling waits");
        assert_eq!(child.join().expect("no panic"), green());
        assert_eq!(sibling.join().expect("no panic"), red());
        assert_eq!(current(), red());
    });
}

#[test]
fn what_its_creator_selects_later_is_not_seen_by_a_thread() {
    let (go, gate) = channel();
    let (sender, receiver) = channel();
    let child = scope(red(), || {
        ctxalloc::thread::spawn(move || {
            let before = current();
            sender.send(()).expect("somebody listens");
            gate.recv().expect("the gate opens");
            (before, current())
        })
    });
    receiver.recv().expect("the child runs");
    let seen = scope(blue(), || {
        go.send(()).expect("the child waits");
        child.join().expect("no panic")
    });
    assert_eq!(seen, (red(), red()));
}

#[test]
fn a_grandchild_copies_its_parent_not_its_grandparent() {
    let child = scope(red(), || {
        ctxalloc::thread::spawn(|| {
            drop(set(green()));
            ctxalloc::thread::spawn(current).join().expect("no panic")
        })
    });
    assert_eq!(child.join().expect("no panic"), green());
}

#[test]
fn a_thread_builder_and_scoped_threads_carry_a_wrapped_closure() {
    scope(red(), || {
        let work = Context::copy_current().wrap(current);
        let built = thread::Builder::new().name("built".into()).spawn(work).expect("a thread");
        assert_eq!(built.join().expect("no panic"), red());
        let borrowed = String::from("borrowed");
        thread::scope(|threads| {
            let child = threads.spawn(Context::copy_current().wrap(|| (current(), borrowed.len())));
            assert_eq!(child.join().expect("no panic"), (red(), 8));
        });
    });
}

#[test]
fn a_panic_in_a_thread_destroys_its_captures_inside_its_context() {
    let (probe, dropped) = drop_probe();
    let child = scope(red(), || {
        ctxalloc::thread::spawn(move || {
            let _probe = probe;
            std::panic::resume_unwind(Box::new("a panic without a message"));
        })
    });
    assert!(child.join().is_err());
    assert_eq!(dropped.handler(), red());
}
