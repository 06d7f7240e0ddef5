//! Rule 1: a new OS thread starts with the default handler. Rule 3 for threads: `ctxalloc::thread::spawn` copies.

use crate::support::{drop_probe, red};
use ctxalloc::{Context, current, scope};
use std::thread;

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
