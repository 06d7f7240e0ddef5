//! A thread of ours goes on where what a user supplied panics, such as a pool's source.

use std::mem::forget;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// What `work` answers; `None` if it panicked, which the panic hook has reported.
pub(super) fn survived<R>(work: impl FnOnce() -> R) -> Option<R> {
    let payload = match catch_unwind(AssertUnwindSafe(work)) {
        Ok(answer) => return Some(answer),
        Err(payload) => payload,
    };
    // What the panic carried may panic in turn when it is dropped.
    if let Err(another) = catch_unwind(AssertUnwindSafe(|| drop(payload))) {
        forget(another);
    }
    None
}
