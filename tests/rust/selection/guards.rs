//! Scopes for synchronous code: `scope`, `enter` and its guard, in order and out of it.

use crate::support::{blue, green, poll_once, red};
use ctxalloc::{Context, Error, WithHandler, current, default_handler, enter, reset, scope, set};
use std::panic::{catch_unwind, resume_unwind};
use std::pin::pin;

#[test]
fn a_scope_selects_for_its_work_and_restores_after_it() {
    let seen = scope(red(), || (current(), scope(green(), current), current()));
    assert_eq!(seen, (red(), green(), red()));
    assert_eq!(current(), default_handler());
    assert!(Context::copy_current().is_unset());
}

#[test]
fn a_scope_restores_when_its_work_panics() {
    scope(blue(), || {
        let outcome = catch_unwind(|| scope(red(), || scope(green(), || resume_unwind(Box::new(())))));
        assert!(outcome.is_err());
        assert_eq!(current(), blue());
    });
}

#[test]
fn a_scope_restores_whatever_its_work_selected() {
    scope(blue(), || {
        scope(red(), || drop(set(green())));
        assert_eq!(current(), blue());
    });
}

#[test]
fn a_token_used_after_its_scope_still_restores_what_it_saw() {
    let token = scope(red(), || set(green()));
    assert_eq!(current(), default_handler());
    assert_eq!(reset(&token), Ok(()));
    assert_eq!(current(), red(), "contextvars does the same");
}

#[test]
fn guards_left_out_of_order_restore_what_each_one_saw() {
    let outer = enter(red()); // saw nothing
    let inner = enter(green()); // saw red
    drop(outer);
    assert_eq!(current(), default_handler());
    drop(inner);
    assert_eq!(current(), red());
}

#[test]
fn a_guard_can_be_left_explicitly_and_tells_how_it_went() {
    let guard = enter(red());
    assert_eq!(guard.exit(), Ok(()));
    assert_eq!(current(), default_handler());
}

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

#[test]
fn a_guard_left_explicitly_in_another_context_says_so() {
    let guard = enter(red());
    let outcome = Context::with_handler(green()).run(|| (guard.exit(), current()));
    assert_eq!(outcome, (Err(Error::TokenForeign), green()));
}

#[test]
#[expect(clippy::await_holding_invalid_type, reason = "what it does there, in a future that has a context of its own")]
fn a_guard_held_across_an_await_selects_in_its_own_future_only() {
    let future = async {
        let guard = enter(red());
        crate::support::Yield(1).await;
        let inside = current();
        drop(guard);
        (inside, current())
    };
    let mut future = pin!(future.with_handler(green()));
    assert!(poll_once(future.as_mut()).is_pending());
    assert_eq!(current(), default_handler(), "between polls");
    assert_eq!(poll_once(future.as_mut()), std::task::Poll::Ready((red(), green())));
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
    let errors = errors_during(|| {
        let guard = enter(red());
        assert_eq!(Context::with_handler(green()).run(|| guard.exit()), Err(Error::TokenForeign));
    });
    assert_eq!(errors, 0);
}

#[test]
#[cfg(all(feature = "tracing", feature = "tokio"))]
fn a_guard_that_moves_between_local_tasks_is_reported_without_effect() {
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
