//! What a user supplied (a pool's source, a strategy, a waker, a subscriber of `tracing`) may panic; we go on. A leaf:
//! imports no layer.

use std::mem::forget;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// What `work` answers; `None` if it panicked, which the panic hook has reported.
#[inline]
pub(crate) fn survived<R>(work: impl FnOnce() -> R) -> Option<R> {
    match catch_unwind(AssertUnwindSafe(work)) {
        Ok(answer) => Some(answer),
        Err(payload) => {
            forget_payload(payload);
            None
        }
    }
}

/// Drops what a panic carried, which may panic in turn: that is leaked, or this might never end.
#[cold]
fn forget_payload(payload: Box<dyn std::any::Any + Send>) {
    if let Err(another) = catch_unwind(AssertUnwindSafe(|| drop(payload))) {
        forget(another);
    }
}
