//! `Ending`: one who ends a request where it holds no lock may look at the queue itself, and wake those who got room.
//!
//! Whoever frees memory elsewhere only calls the runner: it may hold locks, and wakers are somebody's code. But a thread
//! of Python that leaves a request has the GIL, which the runner would have to wait for.

use super::{here, runner};
use std::cell::Cell;
use std::mem;

/// What a thread does when room came.
#[derive(Clone, Copy, PartialEq, Eq)]
enum When {
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

/// Keeps the room that comes on this thread, until it looks; dropped before, the runner is called.
#[must_use = "who waits is looked at when it is told so"]
pub(crate) struct Ending(());

impl Ending {
    pub(crate) fn begin() -> Self {
        WHEN.set(When::Keep);
        Self(())
    }

    /// Gives the room that came to those who wait. Under no lock, where wakers may be called.
    pub(crate) fn look(self) {
        mem::forget(self);
        if WHEN.replace(When::Call) == When::Came {
            let (is_sooner, later) = here::give();
            later.run();
            if is_sooner {
                runner::call();
            }
        }
    }
}

impl Drop for Ending {
    fn drop(&mut self) {
        if WHEN.replace(When::Call) == When::Came {
            runner::call();
        }
    }
}

/// Whether this thread looks at the queue by itself, in a moment. Called when room came.
pub(super) fn keeps() -> bool {
    let keeps = WHEN.get() != When::Call;
    if keeps {
        WHEN.set(When::Came);
    }
    keeps
}
