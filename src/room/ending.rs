//! `Ending`: one who ends a request where it holds no lock may look at the queue itself, and wake those who got room.
//!
//! Whoever frees memory elsewhere only calls the runner: it may hold locks, and wakers are somebody's code. But a
//! thread of Python that leaves a request has the GIL, which the runner would have to wait for.

use super::kept::{self, When};
use super::{here, runner};
use std::mem;

/// Keeps the room that comes on this thread, until it looks; dropped before, the runner is called.
#[must_use = "who waits is looked at when it is told so"]
pub(crate) struct Ending(());

impl Ending {
    pub(crate) fn begin() -> Self {
        kept::set(When::Keep);
        Self(())
    }

    /// Gives the room that came to those who wait. Under no lock, where wakers may be called.
    pub(crate) fn look(self) {
        mem::forget(self);
        if kept::set(When::Call) == When::Came {
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
        if kept::set(When::Call) == When::Came {
            runner::call();
        }
    }
}
