//! Scopes that end by themselves: `scope` for a closure, `Guard` for a block of code.

use super::current::{Identity, restore, select};
use crate::error::Error;
use crate::handler::{Handler, Held};
use crate::trace;
use std::marker::PhantomData;

/// Runs `work` with `handler` selected in the running context, and then restores the previous selection, also if it
/// panics.
///
/// ```
/// use ctxalloc::{current, handler, scope};
///
/// let aligned = handler("aligned64").expect("built in");
/// assert_eq!(scope(aligned, || current()), aligned);
/// assert_ne!(current(), aligned);
/// ```
#[inline]
pub fn scope<R>(handler: Handler, work: impl FnOnce() -> R) -> R {
    let _guard = enter(handler);
    work()
}

/// Selects `handler` in the running context until the guard is dropped.
///
/// For synchronous code. Do not hold it across an await; futures have
/// [`.with_handler()`](super::WithHandler::with_handler).
///
/// ```
/// use ctxalloc::{current, default_handler, enter, handler};
///
/// let aligned = handler("aligned64").expect("built in");
/// {
///     let _scope = enter(aligned);
///     assert_eq!(current(), aligned);
/// }
/// assert_eq!(current(), default_handler());
/// ```
#[inline]
pub fn enter(handler: Handler) -> Guard {
    let (old, context) = select(Held::on(handler));
    Guard { old, context, not_send: PhantomData }
}

/// A scope that lasts as long as this value. It is not `Send`, since it belongs to its context.
///
/// Each guard restores the selection that it replaced, in whatever order guards are dropped, as tokens do. A guard that
/// is dropped in another context (by a future that holds it across an await on a `LocalSet`) changes nothing there and
/// emits a `tracing` error event; [`exit`](Self::exit) returns an error instead.
///
/// A future that may move between threads cannot hold one across an await:
///
/// ```compile_fail
/// fn may_move<F: Future + Send>(_: F) {}
/// # let aligned = ctxalloc::handler("aligned64").expect("built in");
/// may_move(async move {
///     let _guard = ctxalloc::enter(aligned);
///     std::future::ready(()).await;
/// });
/// ```
#[derive(Debug)]
#[must_use = "the scope ends where the guard is dropped"]
pub struct Guard {
    /// The previous selection, held until it is selected again.
    old: Option<Held>,
    context: Identity,
    not_send: PhantomData<*const ()>,
}

impl Guard {
    /// Ends the scope.
    ///
    /// # Errors
    /// [`Error::TokenForeign`] in another context than the one it was entered in, where nothing changes.
    pub fn exit(self) -> Result<(), Error> {
        let (context, mut guard) = (self.context, std::mem::ManuallyDrop::new(self));
        let mut old = guard.old.take();
        if restore(&mut old, context) { Ok(()) } else { Err(Error::TokenForeign) }
    }
}

impl Drop for Guard {
    #[inline]
    fn drop(&mut self) {
        if !restore(&mut self.old, self.context) {
            trace::guard_left_elsewhere(&super::current().name());
        }
    }
}
