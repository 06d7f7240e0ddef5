//! Rule 3: starting a task copies the creator's context at the call. On every runtime, for every way to start one.

use crate::support::{Yield, blue, green, on_every_runtime, red};
use ctxalloc::task::{self, JoinSet};
use ctxalloc::{current, scope};
use tokio::runtime::{Builder, Handle, Runtime};
use tokio::sync::oneshot;
use tokio::task::LocalSet;

fn current_thread() -> Runtime {
    Builder::new_current_thread().build().expect("a runtime")
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
