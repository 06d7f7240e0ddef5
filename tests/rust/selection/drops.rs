//! Rule 5: whatever ends a scoped future – completion, cancellation, a runtime's end – its destructors run inside its
//! context, on whatever thread that happens, and the thread is as before.

use crate::support::{DropProbe, Yield, block_on, blue, drop_probe, green, poll_once, red};
use ctxalloc::{Buffer, Context, WithHandler, current, default_handler, scope, set};
use std::future::pending;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::pin::pin;
use std::thread;
use tokio::runtime::Builder;

/// Selects green, then holds the probe for ever.
async fn hold(probe: DropProbe) {
    drop(set(green()));
    let _probe = probe;
    pending::<()>().await;
}

#[test]
fn a_future_that_is_complete_is_destroyed_in_its_context() {
    // The probe is in the future itself, not in a local: it goes when the future does, after its last statement.
    struct Holds(#[expect(dead_code, reason = "held for its destructor")] DropProbe);
    impl Future for Holds {
        type Output = ();
        fn poll(self: std::pin::Pin<&mut Self>, _: &mut std::task::Context<'_>) -> std::task::Poll<()> {
            std::task::Poll::Ready(())
        }
    }
    let (probe, dropped) = drop_probe();
    let mut future = pin!(Holds(probe).with_handler(red()));
    assert!(poll_once(future.as_mut()).is_ready());
    assert_eq!(dropped.handler(), red(), "at completion, not when the wrapper goes");
}

#[test]
fn a_cancelled_future_is_destroyed_in_its_context_as_it_selected() {
    let (probe, dropped) = drop_probe();
    let mut future = Box::pin(hold(probe).with_handler(red()));
    assert!(poll_once(future.as_mut()).is_pending());
    scope(blue(), || {
        drop(future);
        assert_eq!(current(), blue());
    });
    assert_eq!(dropped.handler(), green());
}

#[test]
fn a_future_that_was_never_polled_is_destroyed_in_its_context() {
    let (probe, dropped) = drop_probe();
    drop(hold(probe).with_handler(red()));
    assert_eq!(dropped.handler(), red());
}

#[test]
fn a_future_dropped_on_a_foreign_thread_is_destroyed_in_its_context() {
    let (probe, dropped) = drop_probe();
    let mut future = Box::pin(hold(probe).with_handler(red()));
    assert!(poll_once(future.as_mut()).is_pending());
    let thread = thread::spawn(move || {
        drop(set(blue()));
        drop(future);
        (thread::current().id(), current())
    });
    let (there, left) = thread.join().expect("no panic");
    assert_eq!(dropped.wait(), (green(), there));
    assert_eq!(left, blue());
}

#[test]
fn a_stream_is_destroyed_in_its_context_at_its_end_or_before() {
    use futures::stream::{self, StreamExt};
    let (probe, dropped) = drop_probe();
    let mut ends = pin!(
        stream::iter([1])
            .chain(stream::poll_fn(move |_| {
                let _owned = &probe;
                std::task::Poll::Ready(None)
            }))
            .with_handler(red())
    );
    assert_eq!(block_on(ends.next()), Some(1));
    assert!(dropped.not_yet());
    assert_eq!(block_on(ends.next()), None);
    assert_eq!(dropped.handler(), red());

    let (probe, dropped) = drop_probe();
    drop(stream::once(hold(probe)).with_handler(red()));
    assert_eq!(dropped.handler(), red());
}

#[test]
fn a_branch_that_select_drops_is_destroyed_in_its_context() {
    let (probe, dropped) = drop_probe();
    block_on(async {
        tokio::select! {
            biased;
            () = hold(probe).with_handler(red()) => {}
            () = Yield(1) => {}
        }
    });
    assert_eq!(dropped.handler(), green());
}

/// Panics when it is destroyed, after a look around.
struct Bomb(ctxalloc::Handler);

impl Drop for Bomb {
    fn drop(&mut self) {
        assert_eq!(current(), self.0);
        resume_unwind(Box::new("bang"));
    }
}

#[test]
fn a_destructor_that_panics_on_cancellation_restores_the_thread() {
    let mut future = Box::pin(
        async {
            let _bomb = Bomb(red());
            pending::<()>().await;
        }
        .with_handler(red()),
    );
    assert!(poll_once(future.as_mut()).is_pending());
    scope(blue(), || {
        let payload = catch_unwind(AssertUnwindSafe(|| drop(future))).expect_err("it panics");
        assert_eq!(payload.downcast_ref(), Some(&"bang"));
        assert_eq!(current(), blue());
    });
}

#[test]
fn a_destructor_that_panics_on_completion_runs_once_and_restores() {
    struct Holds(#[expect(dead_code, reason = "held for its destructor")] Bomb);
    impl Future for Holds {
        type Output = ();
        fn poll(self: std::pin::Pin<&mut Self>, _: &mut std::task::Context<'_>) -> std::task::Poll<()> {
            std::task::Poll::Ready(())
        }
    }
    scope(blue(), || {
        let mut future = Box::pin(Holds(Bomb(red())).with_handler(red()));
        let outcome = catch_unwind(AssertUnwindSafe(|| poll_once(future.as_mut())));
        assert!(outcome.is_err());
        assert_eq!(current(), blue());
        drop(future); // nothing is left to destroy, or the bomb would go off once more
    });
}

#[test]
fn a_future_that_panicked_is_destroyed_in_its_context() {
    let (probe, dropped) = drop_probe();
    let mut future = Box::pin(
        async move {
            let _probe = probe;
            resume_unwind(Box::new(()));
        }
        .with_handler(red()),
    );
    assert!(catch_unwind(AssertUnwindSafe(|| poll_once(future.as_mut()))).is_err());
    assert_eq!(dropped.handler(), red());
}

#[test]
fn an_output_is_destroyed_by_whoever_has_it() {
    let (probe, dropped) = drop_probe();
    let output = block_on(async move { probe }.with_handler(red()));
    assert!(dropped.not_yet());
    scope(blue(), || drop(output));
    assert_eq!(dropped.handler(), blue());
}

#[test]
fn an_aborted_task_is_destroyed_in_its_context() {
    for started in [true, false] {
        let (probe, dropped) = drop_probe();
        let runtime = Builder::new_current_thread().build().expect("a runtime");
        runtime.block_on(async {
            let task = tokio::spawn(hold(probe).with_handler(red()));
            if started {
                tokio::task::yield_now().await;
            }
            task.abort();
            assert!(task.await.expect_err("aborted").is_cancelled());
        });
        assert_eq!(dropped.handler(), if started { green() } else { red() }, "started: {started}");
    }
}

#[test]
fn a_task_aborted_from_another_thread_is_destroyed_in_its_context() {
    let (probe, dropped) = drop_probe();
    let runtime = Builder::new_multi_thread().worker_threads(2).build().expect("a runtime");
    let (sender, receiver) = tokio::sync::oneshot::channel();
    let task = runtime.spawn(
        async move {
            sender.send(()).expect("somebody listens");
            hold(probe).await;
        }
        .with_handler(red()),
    );
    runtime.block_on(receiver).expect("it runs");
    let abort = task.abort_handle();
    thread::spawn(move || abort.abort()).join().expect("no panic");
    assert!(runtime.block_on(task).expect_err("aborted").is_cancelled());
    assert_eq!(dropped.handler(), green());
}

#[test]
fn a_runtime_that_shuts_down_destroys_its_tasks_in_their_contexts() {
    for runtime in [
        Builder::new_current_thread().build().expect("a runtime"),
        Builder::new_multi_thread().worker_threads(2).build().expect("a runtime"),
    ] {
        let (first, polled) = drop_probe();
        let (sender, receiver) = tokio::sync::oneshot::channel();
        runtime.spawn(
            async move {
                sender.send(()).expect("somebody listens");
                hold(first).await;
            }
            .with_handler(red()),
        );
        runtime.block_on(receiver).expect("it runs");
        scope(blue(), || {
            drop(runtime);
            assert_eq!(current(), blue());
        });
        assert_eq!(polled.handler(), green());
    }
}

#[test]
fn a_task_that_never_ran_is_destroyed_in_its_context_at_shutdown() {
    let runtime = Builder::new_current_thread().build().expect("a runtime");
    let (probe, dropped) = drop_probe();
    runtime.spawn(hold(probe).with_handler(red()));
    drop(runtime);
    assert_eq!(dropped.handler(), red());
}

#[cfg(feature = "tokio")]
mod with_tokio {
    use super::{hold, runtime_with_one_blocking_thread};
    use crate::support::{blue, drop_probe, green, red};
    use ctxalloc::task::{self, JoinSet};
    use ctxalloc::{current, scope};
    use std::sync::mpsc::channel;
    use std::thread;
    use tokio::runtime::Builder;

    #[test]
    fn a_join_set_dropped_elsewhere_destroys_its_tasks_in_their_contexts() {
        let runtime = Builder::new_multi_thread().worker_threads(2).build().expect("a runtime");
        let (probe, dropped) = drop_probe();
        let (sender, receiver) = tokio::sync::oneshot::channel();
        let tasks = runtime.block_on(async move {
            let mut tasks = JoinSet::new();
            scope(red(), || {
                tasks.spawn(async move {
                    sender.send(()).expect("somebody listens");
                    hold(probe).await;
                })
            });
            receiver.await.expect("it runs");
            tasks
        });
        let thread = thread::spawn(move || scope(blue(), || (drop(tasks), current())));
        assert_eq!(thread.join().expect("no panic"), ((), blue()));
        assert_eq!(dropped.handler(), green());
    }

    #[test]
    fn a_blocking_closure_that_is_never_called_is_destroyed_in_its_context() {
        let runtime = runtime_with_one_blocking_thread();
        let (release, released) = channel::<()>();
        let (sender, receiver) = channel();
        let occupier = runtime.spawn_blocking(move || {
            sender.send(()).expect("the test listens");
            let _gone = released.recv();
        });
        receiver.recv().expect("the only thread of the pool is taken");
        let (probe, dropped) = drop_probe();
        let closure = scope(red(), || task::spawn_blocking_on(move || drop(probe), runtime.handle()));
        closure.abort();
        drop(release);
        let outcome = runtime.block_on(async { (occupier.await, closure.await) });
        outcome.0.expect("no panic");
        assert!(outcome.1.expect_err("aborted before it began").is_cancelled());
        assert_eq!(dropped.handler(), red());
    }
}

#[cfg(feature = "tokio")]
fn runtime_with_one_blocking_thread() -> tokio::runtime::Runtime {
    Builder::new_current_thread().max_blocking_threads(1).build().expect("a runtime")
}

#[test]
fn a_destructor_may_select_allocate_and_run_scoped_work() {
    struct Busy;
    impl Drop for Busy {
        fn drop(&mut self) {
            assert_eq!(current(), red());
            let buffer = Buffer::zeroed(100).expect("100 bytes");
            assert_eq!(buffer.handler(), red());
            drop(set(green()));
            assert_eq!(block_on(async { current() }.in_current_handler()), green());
            assert_eq!(Context::with_handler(blue()).run(current), blue());
            assert_eq!(current(), green());
        }
    }
    let mut future = Box::pin(
        async {
            let _busy = Busy;
            pending::<()>().await;
        }
        .with_handler(red()),
    );
    assert!(poll_once(future.as_mut()).is_pending());
    drop(future);
    assert_eq!(current(), default_handler());
}
