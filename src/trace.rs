//! Reports of what no return value can say: `tracing` events of the target `ctxalloc`. Without the feature `tracing` they cost
//! nothing. A leaf: imports no layer. (Reports of blocks to Python's tracemalloc are the handler layer's.)

/// A guard was dropped in another context than its own, so nothing was restored.
#[cold]
pub(crate) fn guard_left_elsewhere(handler: &str) {
    #[cfg(feature = "tracing")]
    tracing::error!(
        target: "ctxalloc",
        handler,
        "a scope guard was dropped in another context than it was entered in: nothing was restored; \
         use `.with_handler()` for futures instead of a guard across an await"
    );
    #[cfg(not(feature = "tracing"))]
    let _ = handler;
}

/// A strategy panicked inside a handler's entry point; the caller saw NULL.
#[cold]
pub(crate) fn strategy_panicked(operation: &'static str) {
    #[cfg(feature = "tracing")]
    tracing::error!(target: "ctxalloc", operation, "a strategy panicked; its caller was given a failure");
    #[cfg(not(feature = "tracing"))]
    let _ = operation;
}

/// An environment variable has an invalid value; the default is used.
#[cold]
pub(crate) fn bad_setting(error: &crate::error::Error) {
    #[cfg(feature = "tracing")]
    tracing::warn!(target: "ctxalloc", %error, "a setting was ignored");
    #[cfg(not(feature = "tracing"))]
    let _ = error;
}

/// A handler was registered.
pub(crate) fn registered(name: &str) {
    #[cfg(feature = "tracing")]
    tracing::debug!(target: "ctxalloc", name, "handler registered");
    #[cfg(not(feature = "tracing"))]
    let _ = name;
}

/// A strategy was given a block that it did not make, or found a block damaged. Nothing was freed twice.
#[cold]
pub(crate) fn misuse(report: &str) {
    #[cfg(feature = "tracing")]
    tracing::error!(target: "ctxalloc", report, "memory was misused");
    #[cfg(not(feature = "tracing"))]
    let _ = report;
}

/// The system refused something that a strategy needs for a block; the caller was given a failure.
#[cold]
pub(crate) fn system_refused(strategy: &'static str, error: &std::io::Error, advice: &'static str) {
    #[cfg(feature = "tracing")]
    tracing::error!(target: "ctxalloc", strategy, %error, advice, "the system refused a block");
    #[cfg(not(feature = "tracing"))]
    let _ = (strategy, error, advice);
}
