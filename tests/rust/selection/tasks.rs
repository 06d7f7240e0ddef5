//! Rule 3: starting a task copies the creator's context at the call. On every runtime, for every way to start one.

use crate::support::{Yield, blue, green, on_every_runtime, red};
use ctxalloc::task::{self, JoinSet};
use ctxalloc::{Context, WithHandler, current, default_handler, scope, set};
use tokio::runtime::{Builder, Handle, Runtime};
use tokio::sync::oneshot;
use tokio::task::LocalSet;

fn current_thread() -> Runtime {
    Builder::new_current_thread().build().expect("a runtime")
}

#[test]
fn a_spawned_task_has_a_copy_taken_at_the_call() {
    on_every_runtime(|| async {
        let (go, gate) = oneshot::channel();
        drop(set(red()));
        let child = task::spawn(async move {
            let before = current();
            gate.await.expect("the gate opens");
            (before, current())
        });
        drop(set(green())); // after the call; the child has perhaps not been polled yet
        go.send(()).expect("the child waits");
        assert_eq!(child.await.expect("no panic"), (red(), red()));
        assert_eq!(current(), green());
    });
}

#[test]
fn what_a_task_selects_is_not_seen_by_its_parent_nor_by_its_siblings() {
    on_every_runtime(|| async {
        drop(set(red()));
        let (go, gate) = oneshot::channel();
        let sibling = task::spawn(async move {
            gate.await.expect("the gate opens");
            current()
        });
        let child = task::spawn(async {
            drop(set(green()));
            Yield(2).await;
            current()
        });
        assert_eq!(child.await.expect("no panic"), green());
        go.send(()).expect("the sibling waits");
        assert_eq!(sibling.await.expect("no panic"), red());
        assert_eq!(current(), red());
    });
}

#[test]
fn a_task_started_under_a_scope_keeps_it_after_the_scope_is_left() {
    on_every_runtime(|| async {
        let child = scope(red(), || {
            task::spawn(async {
                Yield(3).await;
                current()
            })
        });
        assert_eq!(current(), default_handler());
        assert_eq!(child.await.expect("no panic"), red());
    });
}

#[test]
fn a_blocking_closure_has_a_copy_taken_at_the_call() {
    on_every_runtime(|| async {
        let (go, gate) = std::sync::mpsc::channel();
        drop(set(red()));
        let child = task::spawn_blocking(move || {
            gate.recv().expect("the gate opens");
            let before = current();
            drop(set(blue()));
            (before, current())
        });
        drop(set(green()));
        go.send(()).expect("the child waits");
        assert_eq!(child.await.expect("no panic"), (red(), blue()));
        // The pool's thread is as it was: the next closure sees nothing of the last one.
        assert_eq!(tokio::task::spawn_blocking(current).await.expect("no panic"), default_handler());
        assert_eq!(current(), green());
    });
}

#[test]
fn a_local_task_has_a_copy_taken_at_the_call() {
    LocalSet::new().block_on(&current_thread(), async {
        let outer = async {
            let child = task::spawn_local(async {
                let before = current();
                drop(set(blue()));
                Yield(1).await;
                (before, current())
            });
            drop(set(green()));
            (child.await.expect("no panic"), current())
        };
        assert_eq!(outer.with_handler(red()).await, ((red(), blue()), green()));
        assert_eq!(current(), default_handler());
    });
}

#[test]
fn tokios_own_functions_carry_nothing() {
    on_every_runtime(|| {
        async {
            assert_eq!(tokio::spawn(async { current() }).await.expect("no panic"), default_handler());
            assert_eq!(tokio::task::spawn_blocking(current).await.expect("no panic"), default_handler());
            let mut set = tokio::task::JoinSet::new();
            set.spawn(async { current() });
            assert_eq!(set.join_next().await.expect("one task").expect("no panic"), default_handler());
            assert_eq!(current(), red());
        }
        .with_handler(red())
    });
}

#[test]
fn a_plain_task_can_be_given_a_context_by_hand() {
    on_every_runtime(|| async {
        drop(set(red()));
        let carried = tokio::spawn(async { current() }.in_current_handler());
        let chosen = tokio::spawn(async { current() }.with_handler(green()));
        let mut context = Context::new();
        context.run(|| drop(set(blue())));
        let given = tokio::spawn(async { current() }.in_context(context));
        drop(set(None));
        let seen = (carried.await.expect("no panic"), chosen.await.expect("no panic"), given.await.expect("no panic"));
        assert_eq!(seen, (red(), green(), blue()));
    });
}

#[test]
fn tasks_can_be_started_on_a_runtime_from_outside() {
    let runtime = Builder::new_multi_thread().worker_threads(1).build().expect("a runtime");
    let (task, blocking) = scope(red(), || {
        (task::spawn_on(async { current() }, runtime.handle()), task::spawn_blocking_on(current, runtime.handle()))
    });
    let seen = runtime.block_on(async { (task.await.expect("no panic"), blocking.await.expect("no panic")) });
    assert_eq!(seen, (red(), red()));
}

#[test]
fn a_join_set_copies_at_each_spawn() {
    on_every_runtime(|| async {
        let mut tasks = JoinSet::new();
        for handler in [red(), green(), blue()] {
            scope(handler, || {
                tasks.spawn(async move { (handler, current()) });
                tasks.spawn_blocking(move || (handler, current()));
                tasks.spawn_on(async move { (handler, current()) }, &Handle::current());
                tasks.spawn_blocking_on(move || (handler, current()), &Handle::current());
            });
        }
        assert_eq!(tasks.len(), 12);
        while let Some(outcome) = tasks.join_next().await {
            let (wanted, seen) = outcome.expect("no panic");
            assert_eq!(wanted, seen);
        }
        assert!(tasks.is_empty());
    });
}

#[test]
fn a_join_set_of_local_tasks_copies_at_each_spawn() {
    let local = LocalSet::new();
    let mut tasks = JoinSet::new();
    scope(red(), || tasks.spawn_local_on(async { (red(), current()) }, &local));
    local.block_on(&current_thread(), async {
        scope(green(), || tasks.spawn_local(async { (green(), current()) }));
        for (wanted, seen) in tasks.join_all().await {
            assert_eq!(wanted, seen);
        }
    });
}

#[test]
fn a_join_set_collected_from_futures_copies_the_context_of_the_collector() {
    on_every_runtime(|| async {
        let tasks: JoinSet<_> = scope(red(), || (0..3).map(|_| async { current() }).collect());
        assert_eq!(tasks.join_all().await, [red(); 3]);
    });
}

#[test]
fn a_join_set_is_tokios_in_everything_else() {
    on_every_runtime(|| async {
        let mut tasks = JoinSet::default();
        assert!(tasks.try_join_next().is_none() && tasks.join_next().await.is_none());
        let abort = tasks.spawn(std::future::pending::<u32>());
        abort.abort();
        assert!(tasks.join_next().await.expect("one task").expect_err("aborted").is_cancelled());
        let id = tasks.spawn(async { 7 }).id();
        let (joined, seven) = tasks.join_next_with_id().await.expect("one task").expect("no panic");
        assert_eq!((joined, seven), (id, 7));
        tasks.spawn(async { 8 });
        let eight = std::future::poll_fn(|cx| tasks.poll_join_next(cx)).await;
        assert_eq!(eight.expect("one task").expect("no panic"), 8);
        let (sender, receiver) = oneshot::channel();
        tasks.spawn(async move {
            sender.send(()).expect("somebody listens");
            9
        });
        receiver.await.expect("it runs on");
        while tasks.try_join_next_with_id().is_none() {
            tokio::task::yield_now().await;
        }
        tasks.spawn(std::future::pending());
        tasks.abort_all();
        assert!(tasks.join_next().await.expect("one task").is_err());
        tasks.spawn(std::future::pending());
        tasks.shutdown().await;
        let (sender, receiver) = oneshot::channel();
        tasks.spawn(async move {
            Yield(2).await;
            sender.send(()).expect("somebody listens");
            10
        });
        tasks.detach_all();
        drop(tasks);
        receiver.await.expect("a detached task runs to its end");
    });
}

#[test]
fn a_task_that_panics_leaves_its_worker_as_it_was() {
    let runtime = Builder::new_multi_thread().worker_threads(1).build().expect("a runtime");
    runtime.block_on(async {
        let child = scope(red(), || {
            task::spawn(async {
                drop(set(green()));
                std::panic::resume_unwind(Box::new(()));
            })
        });
        assert!(child.await.expect_err("it panicked").is_panic());
        let next = tokio::spawn(async { (current(), Context::copy_current().is_unset()) }); // there is one worker
        assert_eq!(next.await.expect("no panic"), (default_handler(), true));
    });
}
