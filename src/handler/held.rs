//! `Held`: keeps a handler valid. While one of these exists, the slot of its request is not recycled. A named handler
//! is always valid, and costs nothing to hold.

use super::entry::{HOLD_AGAIN, LET_GO, TRY_HOLD};
use super::process::table;
use super::word::Handler;

/// A handler, held.
#[derive(Debug, PartialEq, Eq)]
#[repr(transparent)]
pub(crate) struct Held(Handler);

impl Held {
    /// A hold on `handler`; where that is a request's of which nothing is left, on the handler that refuses everything.
    #[inline]
    pub(crate) fn on(handler: Handler) -> Self {
        Self::try_on(handler).unwrap_or_else(|| Self(table().ended()))
    }

    /// A hold on `handler`, unless it is a request's of which nothing is left.
    #[inline]
    pub(crate) fn try_on(handler: Handler) -> Option<Self> {
        (!handler.is_request() || call(handler, TRY_HOLD)).then(|| Self(handler))
    }

    /// Makes a hold that was forgotten a value again.
    ///
    /// # Safety
    /// - a hold on `handler` was counted, or forgotten ([`into_handler`](Self::into_handler)), and nobody else lets it
    ///   go.
    #[inline]
    pub(crate) unsafe fn assume(handler: Handler) -> Self {
        Self(handler)
    }

    /// The handler.
    #[inline]
    pub(crate) fn handler(&self) -> Handler {
        self.0
    }

    /// The handler, still held: [`assume`](Self::assume) makes the hold a value again.
    #[inline]
    pub(crate) fn into_handler(self) -> Handler {
        std::mem::ManuallyDrop::new(self).0
    }
}

/// Calls the hold function of a request's slot, whichever copy of the crate made it. Callers of [`HOLD_AGAIN`] and
/// [`LET_GO`] hold the slot.
#[inline]
fn call(request: Handler, what: u32) -> bool {
    let slot = request.place();
    let Some(function) = request.entry().hold else { return true };
    // SAFETY: a slot is immortal, and the function in its entry is its own; callers hold the slot where it says so.
    unsafe { function(slot.as_ptr().cast(), what, request.generation()) }
}

impl Clone for Held {
    #[inline]
    fn clone(&self) -> Self {
        if self.0.is_request() {
            call(self.0, HOLD_AGAIN);
        }
        Self(self.0)
    }
}

impl Drop for Held {
    #[inline]
    fn drop(&mut self) {
        if self.0.is_request() {
            call(self.0, LET_GO);
        }
    }
}
