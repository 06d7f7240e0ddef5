//! Futures and streams with a context of their own, on any executor.
//!
//! The context is swapped in before the inner poll and out after it. So a `set` inside lasts across awaits and
//! migrations, and the worker's own context does not change. The inner value is also dropped inside its context: on
//! completion or on cancellation, on any thread.

use super::context::Context;
use crate::handler::Handler;
use futures_core::Stream;
use pin_project::{pin_project, pinned_drop};
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context as TaskContext, Poll, ready};

/// Gives any future or stream a context of its own.
///
/// ```
/// use ctxalloc::{WithHandler, current, handler};
/// # let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
/// # runtime.block_on(async {
/// let aligned = handler("aligned64").expect("built in");
/// assert_eq!(async { current() }.with_handler(aligned).await, aligned);
///
/// // What is selected inside stays inside, and lasts across awaits.
/// let pool = handler("pool").expect("built in");
/// let work = async move {
///     drop(ctxalloc::set(pool));
///     std::future::ready(()).await;
///     current()
/// };
/// assert_eq!(work.with_handler(aligned).await, pool);
/// assert_eq!(current(), ctxalloc::default_handler());
/// # });
/// ```
///
/// A stream keeps its context from item to item. The branches of `join!` and `select!` are polled inside one future,
/// hence in that one's context.
pub trait WithHandler: Sized {
    /// Runs it in a context of its own in which `handler` is selected.
    #[must_use = "it does nothing until it is polled"]
    fn with_handler(self, handler: Handler) -> Scoped<Self> {
        self.in_context(Context::with_handler(handler))
    }

    /// Runs it in a copy of the running context, taken now: what `asyncio.create_task` does for a coroutine.
    #[must_use = "it does nothing until it is polled"]
    fn in_current_handler(self) -> Scoped<Self> {
        self.in_context(Context::copy_current())
    }

    /// Runs it in `context`, as `asyncio.create_task(..., context=context)` does.
    #[must_use = "it does nothing until it is polled"]
    fn in_context(self, context: Context) -> Scoped<Self> {
        Scoped { inner: Some(self), context }
    }
}

impl<T> WithHandler for T {}

/// A future or stream in a context of its own. See [`WithHandler`].
#[pin_project(PinnedDrop)]
#[must_use = "it does nothing until it is polled"]
pub struct Scoped<T> {
    /// `None` once it is complete.
    #[pin]
    inner: Option<T>,
    context: Context,
}

impl<T> Scoped<T> {
    /// The handler selected in its context now.
    #[must_use]
    pub fn handler(&self) -> Handler {
        self.context.handler()
    }
}

impl<F: Future> Future for Scoped<F> {
    type Output = F::Output;

    #[inline]
    fn poll(self: Pin<&mut Self>, cx: &mut TaskContext<'_>) -> Poll<F::Output> {
        let mut this = self.project();
        let _inside = this.context.swap_in();
        let inner = this.inner.as_mut().as_pin_mut().expect("a `Scoped` future was polled after it was complete");
        let output = ready!(inner.poll(cx));
        this.inner.set(None); // destructors of the future run in its context
        Poll::Ready(output)
    }
}

impl<S: Stream> Stream for Scoped<S> {
    type Item = S::Item;

    #[inline]
    fn poll_next(self: Pin<&mut Self>, cx: &mut TaskContext<'_>) -> Poll<Option<S::Item>> {
        let mut this = self.project();
        let _inside = this.context.swap_in();
        let Some(inner) = this.inner.as_mut().as_pin_mut() else { return Poll::Ready(None) };
        let item = ready!(inner.poll_next(cx));
        if item.is_none() {
            this.inner.set(None); // destructors of the stream run in its context
        }
        Poll::Ready(item)
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        self.inner.as_ref().map_or((0, Some(0)), Stream::size_hint)
    }
}

#[pinned_drop]
impl<T> PinnedDrop for Scoped<T> {
    fn drop(self: Pin<&mut Self>) {
        let mut this = self.project();
        if this.inner.is_some() {
            let _inside = this.context.swap_in();
            this.inner.set(None);
        }
    }
}

impl<T> fmt::Debug for Scoped<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Scoped").field("context", &self.context).finish_non_exhaustive()
    }
}
