//! What this thread does with room that came: it calls the runner, or looks by itself in a moment (`ending`).

use std::cell::Cell;

/// What a thread does when room came.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum When {
    /// It calls the runner.
    Call,
    /// It will look by itself.
    Keep,
    /// The same, and room came.
    Came,
}

thread_local! {
    static WHEN: Cell<When> = const { Cell::new(When::Call) };
}

/// Changes it; what it was.
pub(super) fn set(when: When) -> When {
    WHEN.replace(when)
}

/// Whether this thread looks at the queue by itself, in a moment. Called when room came.
pub(super) fn keeps() -> bool {
    let keeps = WHEN.get() != When::Call;
    if keeps {
        WHEN.set(When::Came);
    }
    keeps
}
