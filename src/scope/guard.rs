//! Scopes that end by themselves: `scope` for a closure, `Guard` for a block.

use super::current::{Identity, restore, select};
use crate::error::Error;
use crate::handler::{Handler, Held};
use crate::trace;
use std::marker::PhantomData;

/// Runs `work` with `handler` selected in the running context, and restores the old selection after it, also
/// when it panics.
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

/// Selects `handler` in the running context until the guard goes.
///
/// For a stretch of synchronous code. Do not hold it across an await: futures have
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

/// A scope that lasts as long as this value; not `Send`, for it belongs to its context.
///
/// Guards that go in another order than they came restore what each one saw, as tokens do. One that goes in
/// another context (a future that holds it across an await, on a `LocalSet`) changes nothing there and reports
/// an error event of `tracing`; [`exit`](Self::exit) tells instead.
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
    /// Held until it is selected again.
    old: Option<Held>,
    context: Identity,
    not_send: PhantomData<*const ()>,
}

impl Guard {
    /// Ends the scope and says whether it could.
    ///
    /// # Errors
    /// [`Error::TokenForeign`] in another context than the one it was entered in; nothing changed there.
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
