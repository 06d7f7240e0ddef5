//! Rule 4: a set lasts across every await, also when the task moves to another thread; between polls the thread's own
//! context is untouched. Migration is forced: by hand, and on tokio by occupying the other workers.

use crate::support::{Yield, block_on, blue, green, migrate, poll_once, red};
use ctxalloc::{Context, WithHandler, current, scope, set};
use futures::stream::{self, Stream, StreamExt};
use std::pin::pin;

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
#[should_panic(expected = "polled after it was complete")]
fn polling_a_complete_future_says_so() {
    let mut future = pin!(async {}.with_handler(red()));
    assert!(poll_once(future.as_mut()).is_ready());
    let _ = poll_once(future.as_mut());
}

#[test]
fn a_stream_tells_how_long_it_is_and_stays_finished() {
    let mut items = pin!(stream::iter([1, 2, 3]).with_handler(red()));
    assert_eq!(items.size_hint(), (3, Some(3)));
    assert_eq!(block_on(items.by_ref().collect::<Vec<_>>()), [1, 2, 3]);
    assert_eq!((items.size_hint(), block_on(items.next())), ((0, Some(0)), None));
}
