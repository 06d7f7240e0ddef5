//! `hearing`: work with a subscriber of its own, beside threads that have none.

use std::sync::OnceLock;
use tracing::span::{Attributes, Id, Record};
use tracing::subscriber::{Interest, with_default};
use tracing::{Dispatch, Event, Metadata, Subscriber};

/// Hears nothing, and lets no call site be silenced for good.
struct Undecided;

impl Subscriber for Undecided {
    fn register_callsite(&self, _: &'static Metadata<'static>) -> Interest {
        Interest::sometimes()
    }
    fn enabled(&self, _: &Metadata<'_>) -> bool {
        false
    }
    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }
    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn event(&self, _: &Event<'_>) {}
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}

/// Runs `work` with this subscriber on this thread. A call site is asked about once, by the thread that comes first;
/// and while tracing knows of one subscriber only, that thread answers by its own, which it may not have: then nobody
/// ever hears of the site. So there are two that nobody has, from the first use on.
pub(crate) fn hearing<R>(subscriber: impl Subscriber + Send + Sync + 'static, work: impl FnOnce() -> R) -> R {
    static OTHERS: OnceLock<[Dispatch; 2]> = OnceLock::new();
    OTHERS.get_or_init(|| [Dispatch::new(Undecided), Dispatch::new(Undecided)]);
    with_default(subscriber, work)
}
