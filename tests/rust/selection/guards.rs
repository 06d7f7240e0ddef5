//! Guards that are forgotten, or go in a context that is not theirs.

use crate::support::{green, red};
use ctxalloc::{Context, current, enter};

#[test]
fn a_guard_that_is_forgotten_keeps_the_selection() {
    std::mem::forget(enter(red()));
    assert_eq!(current(), red());
}

#[test]
fn a_guard_dropped_in_another_context_changes_nothing_there() {
    let guard = enter(red());
    let mut other = Context::with_handler(green());
    other.run(|| drop(guard));
    assert_eq!(other.handler(), green());
    assert_eq!(current(), red(), "its own context was not left");
}

/// Counts the crate's error events on this thread while `work` runs.
#[cfg(feature = "tracing")]
fn errors_during(work: impl FnOnce()) -> usize {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use tracing::span::{Attributes, Id, Record};
    use tracing::subscriber::Interest;
    use tracing::{Event, Level, Metadata, Subscriber};

    struct Counter(Arc<AtomicUsize>);
    impl Subscriber for Counter {
        fn register_callsite(&self, _: &'static Metadata<'static>) -> Interest {
            Interest::sometimes()
        }
        fn enabled(&self, metadata: &Metadata<'_>) -> bool {
            metadata.target() == "ctxalloc" && *metadata.level() == Level::ERROR
        }
        fn event(&self, _: &Event<'_>) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
        fn new_span(&self, _: &Attributes<'_>) -> Id {
            Id::from_u64(1)
        }
        fn record(&self, _: &Id, _: &Record<'_>) {}
        fn record_follows_from(&self, _: &Id, _: &Id) {}
        fn enter(&self, _: &Id) {}
        fn exit(&self, _: &Id) {}
    }

    let count = Arc::new(AtomicUsize::new(0));
    crate::support::hearing::hearing(Counter(Arc::clone(&count)), work);
    count.load(Ordering::SeqCst)
}

#[test]
#[cfg(feature = "tracing")]
fn a_guard_dropped_in_another_context_is_reported() {
    let errors = errors_during(|| {
        drop(enter(red())); // in its own: nothing to report
        let guard = enter(red());
        Context::with_handler(green()).run(|| drop(guard));
    });
    assert_eq!(errors, 1);
}

#[test]
#[cfg(feature = "tracing")]
fn a_guard_that_was_told_is_not_reported_as_well() {
    use ctxalloc::Error;
    let errors = errors_during(|| {
        let guard = enter(red());
        assert_eq!(Context::with_handler(green()).run(|| guard.exit()), Err(Error::TokenForeign));
    });
    assert_eq!(errors, 0);
}

#[test]
#[cfg(all(feature = "tracing", feature = "tokio"))]
fn a_guard_that_moves_between_local_tasks_is_reported_without_effect() {
    use ctxalloc::WithHandler;
    let errors = errors_during(|| {
        let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
        tokio::task::LocalSet::new().block_on(&runtime, async {
            let (give, take) = tokio::sync::oneshot::channel();
            let other = ctxalloc::task::spawn_local(
                async move {
                    drop(take.await.expect("a guard comes"));
                    current()
                }
                .with_handler(green()),
            );
            let owner = ctxalloc::task::spawn_local(async move {
                assert!(give.send(enter(red())).is_ok());
                tokio::task::yield_now().await;
                current()
            });
            assert_eq!(other.await.expect("no panic"), green(), "the other task's context is as it was");
            assert_eq!(owner.await.expect("no panic"), red(), "and so is the owner's: the guard was never left");
        });
    });
    assert_eq!(errors, 1);
}
