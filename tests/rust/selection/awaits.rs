//! Rule 4: a set lasts across every await, also when the task moves to another thread; between polls the thread's own
//! context is untouched. Migration is forced: by hand, and on tokio by occupying the other workers.

use crate::support::{Yield, block_on, blue, green, migrate, on_every_runtime, poll_once, red};
use ctxalloc::{Context, WithHandler, current, default_handler, scope, set};
use futures::stream::{self, Stream, StreamExt};
use std::pin::pin;
use std::task::Poll;
use std::thread;

#[test]
fn a_set_lasts_across_every_await() {
    on_every_runtime(|| {
        async {
            for handler in [green(), blue(), red()] {
                drop(set(handler));
                for _ in 0..3 {
                    tokio::task::yield_now().await;
                    assert_eq!(current(), handler);
                }
            }
        }
        .in_current_handler()
    });
}

#[test]
fn a_set_lasts_when_each_poll_is_on_another_thread() {
    let work = async {
        let mut seen = vec![current()];
        Yield(1).await;
        drop(set(green()));
        seen.push(current());
        Yield(1).await;
        seen.push(current());
        seen.push(with_a_context_of_its_own().await);
        seen.push(current());
        seen
    };
    let (seen, threads) = migrate(work.with_handler(red()));
    assert_eq!(seen, [red(), green(), green(), blue(), green()]);
    assert!(threads.len() >= 4);
}

fn with_a_context_of_its_own() -> impl Future<Output = ctxalloc::Handler> {
    async {
        Yield(1).await;
        current()
    }
    .with_handler(blue())
}

#[test]
fn between_polls_the_threads_own_context_is_untouched() {
    let mut future = pin!(
        async {
            drop(set(green()));
            Yield(2).await;
        }
        .with_handler(red())
    );
    assert!(poll_once(future.as_mut()).is_pending());
    assert!(Context::copy_current().is_unset());
    scope(blue(), || {
        assert!(poll_once(future.as_mut()).is_pending());
        assert_eq!(current(), blue());
        assert_eq!(future.handler(), green());
        assert!(poll_once(future.as_mut()).is_ready());
        assert_eq!(current(), blue());
    });
}

#[test]
fn a_poll_that_panics_restores_the_thread() {
    let mut future = pin!(
        async {
            drop(set(green()));
            std::panic::resume_unwind(Box::new(()));
        }
        .with_handler(red())
    );
    scope(blue(), || {
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| poll_once(future.as_mut())));
        assert!(outcome.is_err());
        assert_eq!(current(), blue());
    });
}

#[test]
fn two_futures_polled_in_turn_on_one_thread_do_not_see_each_other() {
    let select_and_yield = |handler| async move {
        drop(set(handler));
        Yield(1).await;
        current()
    };
    let mut one = pin!(select_and_yield(red()).in_current_handler());
    let mut two = pin!(select_and_yield(green()).in_current_handler());
    assert!(poll_once(one.as_mut()).is_pending());
    assert!(poll_once(two.as_mut()).is_pending());
    assert_eq!(poll_once(one.as_mut()), Poll::Ready(red()));
    assert_eq!(poll_once(two.as_mut()), Poll::Ready(green()));
    assert_eq!(current(), default_handler());
}

#[test]
fn a_scoped_future_inside_of_another_one_returns_to_it() {
    let seen = block_on(
        async {
            let inner = async {
                Yield(1).await;
                current()
            };
            let inner = inner.with_handler(green()).await;
            (inner, current())
        }
        .with_handler(red()),
    );
    assert_eq!(seen, (green(), red()));
}

#[test]
fn the_context_is_copied_when_a_future_is_wrapped_not_when_polled() {
    let future = scope(red(), || async { current() }.in_current_handler());
    assert_eq!(scope(green(), || block_on(future)), red());
    // Without the wrapper it is polled in whatever context the poller has.
    let future = scope(red(), || async { current() });
    assert_eq!(scope(green(), || block_on(future)), green());
}

#[test]
#[should_panic(expected = "polled after it was complete")]
fn polling_a_complete_future_says_so() {
    let mut future = pin!(async {}.with_handler(red()));
    assert!(poll_once(future.as_mut()).is_ready());
    let _ = poll_once(future.as_mut());
}

#[test]
fn branches_of_join_and_select_share_one_context() {
    on_every_runtime(|| {
        async {
            let (one, other) = tokio::join!(
                async {
                    drop(set(green()));
                    Yield(1).await;
                    current()
                },
                async {
                    Yield(1).await;
                    current()
                },
            );
            assert_eq!((one, other, current()), (green(), green(), green()));
            tokio::select! {
                () = async { drop(set(blue())); Yield(2).await } => {}
                () = std::future::pending() => {}
            }
            assert_eq!(current(), blue());
        }
        .with_handler(red())
    });
}

#[test]
fn branches_with_contexts_of_their_own_share_nothing() {
    on_every_runtime(|| async {
        let select_and_yield = |handler| async move {
            drop(set(handler));
            Yield(2).await;
            current()
        };
        let seen = tokio::join!(
            select_and_yield(red()).in_current_handler(),
            select_and_yield(green()).in_current_handler(),
            select_and_yield(blue()).in_current_handler(),
        );
        assert_eq!(seen, (red(), green(), blue()));
        assert_eq!(current(), default_handler());
    });
}

#[test]
fn a_stream_keeps_its_context_from_item_to_item() {
    let items = stream::unfold(0, |count| async move {
        let seen = current();
        drop(set([green(), blue(), red()][count % 3]));
        Yield(1).await;
        (count < 3).then_some((seen, count + 1))
    });
    let mut items = pin!(items.with_handler(red()));
    let mut seen = Vec::new();
    block_on(async {
        while let Some(item) = items.next().await {
            assert_eq!(current(), default_handler());
            seen.push(item);
        }
    });
    assert_eq!(seen, [red(), green(), blue()]);
    assert_eq!(items.size_hint(), (0, Some(0)));
    assert_eq!(block_on(items.next()), None, "a finished stream stays finished");
}

#[test]
fn a_stream_tells_how_long_it_is() {
    assert_eq!(stream::iter([1, 2, 3]).with_handler(red()).size_hint(), (3, Some(3)));
}

#[test]
fn a_stream_migrates_with_its_selection() {
    let items = stream::unfold(false, |selected| async move {
        if !selected {
            drop(set(green()));
        }
        Yield(1).await;
        Some((current(), true))
    });
    let mut items = Box::pin(items.with_handler(red()));
    let work = async move { [items.next().await, items.next().await, items.next().await] };
    let (seen, threads) = migrate(work);
    assert_eq!(seen, [Some(green()); 3]);
    assert_eq!(threads.len(), 4);
}

/// Occupies both workers of a runtime, lets go of the one that the task did not run on last, and so makes tokio move
/// the task: it has nowhere else to go.
#[test]
#[cfg_attr(miri, ignore = "tokio's workers under Miri take minutes; `migrate` forces the same there")]
fn a_set_lasts_when_tokio_moves_the_task_to_another_worker() {
    use std::sync::mpsc;
    use tokio::sync::mpsc as tokio_mpsc;

    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).build().expect("a runtime");
    let (go, mut gate) = tokio_mpsc::unbounded_channel::<()>();
    let (sender, receiver) = mpsc::channel();
    let traveller = async move {
        for handler in [red(), green(), blue()].into_iter().cycle() {
            drop(set(handler));
            sender.send(thread::current().id()).expect("the test listens");
            if gate.recv().await.is_none() {
                return;
            }
            assert_eq!(current(), handler);
        }
    };
    let task = runtime.spawn(traveller.with_handler(red()));
    let mut last = receiver.recv().expect("it runs");
    for _ in 0..20 {
        let (arrive, arrived) = mpsc::channel();
        let mut occupiers = Vec::new();
        for _ in 0..2 {
            let (release, released) = mpsc::channel::<()>();
            let arrive = arrive.clone();
            let occupier = runtime.spawn(async move {
                arrive.send(thread::current().id()).expect("the test listens");
                // Blocks the worker, on purpose.
                let _gone = released.recv();
            });
            let on = arrived.recv().expect("a worker is free");
            occupiers.push((on, release, occupier));
        }
        assert_ne!(occupiers[0].0, occupiers[1].0, "both workers are occupied");
        let elsewhere = occupiers.iter().position(|(on, ..)| *on != last).expect("there are two");
        let (on, release, occupier) = occupiers.swap_remove(elsewhere);
        go.send(()).expect("it waits");
        drop(release);
        let now = receiver.recv().expect("it runs on the worker that is free");
        assert_eq!(now, on);
        assert_ne!(now, last, "it moved");
        last = now;
        runtime.block_on(occupier).expect("no panic");
        for (_, release, occupier) in occupiers {
            drop(release);
            runtime.block_on(occupier).expect("no panic");
        }
    }
    drop(go);
    runtime.block_on(task).expect("the task saw its selection after each move");
}
