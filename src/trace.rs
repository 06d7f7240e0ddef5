//! Reports of what no return value can say: `tracing` events of the target `ctxalloc`. Without the feature `tracing`
//! they cost nothing. A leaf: imports no layer. (Reports of blocks to Python's tracemalloc are the handler layer's.)

#[cfg(feature = "tracing")]
use crate::survived::survived;
#[cfg(feature = "tracing")]
use crate::unattributed::unattributed;
#[cfg(feature = "tracing")]
use std::cell::Cell;

/// Runs `tell`, unless this thread is inside of one that `telling` marks: a subscriber may allocate, and be refused
/// memory too. Should it panic, the panic hook has told so and we go on: an event is told from inside of allocators,
/// which callers would take for failed. What it allocates is no request's, whose heap may be at its limit.
#[cfg(feature = "tracing")]
fn once(telling: &'static std::thread::LocalKey<Cell<bool>>, tell: impl FnOnce()) {
    if !telling.replace(true) {
        let _unattributed = unattributed();
        survived(tell);
        telling.set(false);
    }
}

/// Tells an event of the target `ctxalloc`.
#[cfg(feature = "tracing")]
fn told(tell: impl FnOnce()) {
    thread_local! {
        static TELLING: Cell<bool> = const { Cell::new(false) };
    }
    once(&TELLING, tell);
}

/// A guard was dropped in another context than its own, so nothing was restored.
#[cold]
pub(crate) fn guard_left_elsewhere(handler: &str) {
    #[cfg(feature = "tracing")]
    told(|| {
        tracing::error!(
            target: "ctxalloc",
            handler,
            "a scope guard was dropped in another context than it was entered in: nothing was restored; \
             use `.with_handler()` for futures instead of a guard across an await"
        )
    });
    #[cfg(not(feature = "tracing"))]
    let _ = handler;
}

/// A strategy panicked inside a handler's entry point; the caller saw NULL.
#[cold]
pub(crate) fn strategy_panicked(operation: &'static str) {
    #[cfg(feature = "tracing")]
    told(|| tracing::error!(target: "ctxalloc", operation, "a strategy panicked; its caller was given a failure"));
    #[cfg(not(feature = "tracing"))]
    let _ = operation;
}

/// An environment variable has an invalid value; the default is used.
#[cold]
pub(crate) fn bad_setting(error: &crate::error::Error) {
    #[cfg(feature = "tracing")]
    told(|| tracing::warn!(target: "ctxalloc", %error, "a setting was ignored"));
    #[cfg(not(feature = "tracing"))]
    let _ = error;
}

/// A handler was registered.
pub(crate) fn registered(name: &str) {
    #[cfg(feature = "tracing")]
    told(|| tracing::debug!(target: "ctxalloc", name, "handler registered"));
    #[cfg(not(feature = "tracing"))]
    let _ = name;
}

/// A strategy was given a block that it did not make, or found a block damaged. Nothing was freed twice.
#[cold]
pub(crate) fn misuse(report: &str) {
    #[cfg(feature = "tracing")]
    told(|| tracing::error!(target: "ctxalloc", report, "memory was misused"));
    #[cfg(not(feature = "tracing"))]
    let _ = report;
}

/// The system refused something that a strategy needs for a block; the caller was given a failure.
#[cold]
pub(crate) fn system_refused(strategy: &'static str, error: &std::io::Error, advice: &'static str) {
    #[cfg(feature = "tracing")]
    told(|| tracing::error!(target: "ctxalloc", strategy, %error, advice, "the system refused a block"));
    #[cfg(not(feature = "tracing"))]
    let _ = (strategy, error, advice);
}

/// The CUDA driver refused something that no return value can carry; nothing was freed.
#[cold]
#[cfg(feature = "cuda")]
pub(crate) fn driver_refused(error: &crate::error::Error) {
    #[cfg(feature = "tracing")]
    told(|| tracing::error!(target: "ctxalloc", %error, "the CUDA driver refused"));
    #[cfg(not(feature = "tracing"))]
    let _ = error;
}

/// A reclaimer of a budget failed, and was passed over.
#[cold]
pub(crate) fn reclaimer_failed(budget: &str, why: &'static str) {
    #[cfg(feature = "tracing")]
    tracing::warn!(target: "ctxalloc", budget, why, "a reclaimer was asked in vain");
    #[cfg(not(feature = "tracing"))]
    let _ = (budget, why);
}

/// A request was chosen to make room for one that waits.
#[cold]
pub(crate) fn chosen(request: &str, error: &crate::error::Error) {
    #[cfg(feature = "tracing")]
    tracing::warn!(target: "ctxalloc", request, %error, "a request was chosen to make room");
    #[cfg(not(feature = "tracing"))]
    let _ = (request, error);
}

/// The function `on_chosen` of a request panicked.
#[cold]
pub(crate) fn on_chosen_panicked(request: &str) {
    #[cfg(feature = "tracing")]
    tracing::error!(target: "ctxalloc", request, "`on_chosen` panicked");
    #[cfg(not(feature = "tracing"))]
    let _ = request;
}

/// Memory was refused by a budget, or because a request has ended.
#[cold]
pub(crate) fn refused(error: &crate::error::Error) {
    #[cfg(feature = "tracing")]
    told(|| tracing::warn!(target: "ctxalloc", %error, "memory was refused"));
    #[cfg(not(feature = "tracing"))]
    let _ = error;
}

/// A service's request has no account, and was answered with 500.
#[cfg(feature = "tower")]
#[cold]
pub(crate) fn no_request(error: &crate::error::Error) {
    #[cfg(feature = "tracing")]
    told(
        || tracing::error!(target: "ctxalloc", %error, "a request of the service could not be begun and was answered with 500"),
    );
    #[cfg(not(feature = "tracing"))]
    let _ = error;
}

/// The function `on_end` of a service panicked.
#[cfg(feature = "tower")]
#[cold]
pub(crate) fn on_end_panicked(request: &str) {
    #[cfg(feature = "tracing")]
    told(|| tracing::error!(target: "ctxalloc", request, "`on_end` panicked"));
    #[cfg(not(feature = "tracing"))]
    let _ = request;
}

/// A request's span, with its numbers once it has ended. Nothing without the feature `tracing`.
#[derive(Debug)]
pub(crate) struct RequestSpan {
    #[cfg(feature = "tracing")]
    span: tracing::Span,
}

/// What a request's span says at its end.
#[cfg_attr(not(feature = "tracing"), allow(dead_code, reason = "nobody reads it"))]
pub(crate) struct Numbers {
    pub(crate) peak_bytes: usize,
    pub(crate) total_blocks: u64,
    pub(crate) escaped: usize,
    pub(crate) refused: u64,
}

impl RequestSpan {
    /// `name` is asked only if somebody listens.
    pub(crate) fn new<'a>(name: impl FnOnce() -> std::borrow::Cow<'a, str>) -> Self {
        #[cfg(feature = "tracing")]
        let span = survived(|| {
            use tracing::field::Empty;
            tracing::debug_span!(
                target: "ctxalloc",
                "request",
                name = &*name(),
                peak_bytes = Empty,
                total_blocks = Empty,
                escaped = Empty,
                refused = Empty,
            )
        })
        .unwrap_or_else(tracing::Span::none);
        #[cfg(not(feature = "tracing"))]
        let _ = name;
        Self {
            #[cfg(feature = "tracing")]
            span,
        }
    }

    /// Says that more was asked of Rust's heap than its limit allows. At the request's end: where it happens, an
    /// allocator is at work, perhaps for a subscriber that holds its lock.
    #[cold]
    pub(crate) fn heap_exceeded(&self, error: &crate::error::Error, exceeded: u64, refused: u64) {
        #[cfg(feature = "tracing")]
        told(|| {
            tracing::warn!(
                target: "ctxalloc",
                parent: &self.span,
                %error,
                exceeded,
                refused,
                "the limit of a request's heap was exceeded"
            )
        });
        #[cfg(not(feature = "tracing"))]
        let _ = (error, exceeded, refused);
    }

    /// Says how it ended.
    pub(crate) fn record(&self, numbers: &Numbers) {
        #[cfg(feature = "tracing")]
        if !self.span.is_disabled() {
            survived(|| {
                self.span.record("peak_bytes", numbers.peak_bytes);
                self.span.record("total_blocks", numbers.total_blocks);
                self.span.record("escaped", numbers.escaped);
                self.span.record("refused", numbers.refused);
            });
        }
        #[cfg(not(feature = "tracing"))]
        let _ = numbers;
    }

    /// The span itself, to instrument something with it.
    #[cfg(feature = "tracing")]
    pub(crate) fn get(&self) -> &tracing::Span {
        &self.span
    }
}

#[cfg(feature = "tracing")]
impl Drop for RequestSpan {
    fn drop(&mut self) {
        let span = std::mem::replace(&mut self.span, tracing::Span::none());
        if !span.is_disabled() {
            survived(|| drop(span)); // the subscriber may close it now
        }
    }
}

/// The events of [`Traced`](crate::strategy::Traced). Blocks that a subscriber allocates while it handles such an event
/// make no events.
#[cfg(feature = "tracing")]
mod blocks {
    use std::cell::Cell;
    use std::ptr::NonNull;

    thread_local! {
        static TELLING: Cell<bool> = const { Cell::new(false) };
    }

    fn once(tell: impl FnOnce()) {
        // Where nobody listens for anything so fine, that is one look at a number.
        if tracing::Level::TRACE <= tracing::level_filters::LevelFilter::current() {
            super::once(&TELLING, || {
                if tracing::enabled!(target: "ctxalloc::blocks", tracing::Level::TRACE) {
                    tell();
                }
            });
        }
    }

    pub(crate) fn block(operation: &'static str, block: NonNull<u8>, size_bytes: usize) {
        once(|| tracing::trace!(target: "ctxalloc::blocks", operation, ?block, size_bytes));
    }

    pub(crate) fn resized(block: NonNull<u8>, moved: NonNull<u8>, size_bytes: usize) {
        once(|| tracing::trace!(target: "ctxalloc::blocks", operation = "resized", ?block, ?moved, size_bytes));
    }

    pub(crate) fn released(block: NonNull<u8>) {
        once(|| tracing::trace!(target: "ctxalloc::blocks", operation = "released", ?block));
    }

    pub(crate) fn no_block(size_bytes: usize) {
        once(|| tracing::trace!(target: "ctxalloc::blocks", operation = "refused", size_bytes));
    }
}
#[cfg(feature = "tracing")]
pub(crate) use blocks::{block, no_block, released, resized};
