//! `Context`: what a thread or a task carries, as a value. Python's `contextvars.Context`.

use super::current::{State, replace, selection};
use crate::handler::{Handler, Held, default_handler};
use std::fmt;
use std::marker::PhantomData;

/// A selection, and an identity that tokens remember.
///
/// [`copy_current`](Self::copy_current) is `contextvars.copy_context()`; [`run`](Self::run) is `Context.run`, whose
/// RuntimeError for a context that is running already is the borrow checker's here.
///
/// ```
/// use ctxalloc::{Context, current, handler, set};
///
/// let mut context = Context::copy_current();
/// context.run(|| drop(set(handler("aligned64")))); // stays in the context...
/// assert_eq!(context.handler().name(), "aligned64");
/// assert_ne!(current().name(), "aligned64"); // ...and does not leak out
/// ```
///
/// If a request's handler is selected in it, that handler stays valid as long as this value lives.
pub struct Context {
    state: State,
}

impl Context {
    /// A context in which nothing is selected.
    #[must_use]
    pub const fn new() -> Self {
        Self { state: State::EMPTY }
    }

    /// A copy of the running context: the same selection, an identity of its own.
    #[inline]
    #[must_use]
    pub fn copy_current() -> Self {
        Self::selecting(selection())
    }

    #[inline]
    fn selecting(selected: Option<Held>) -> Self {
        Self { state: State { selected, identity: None } }
    }

    /// A context in which `handler` is selected.
    #[must_use]
    pub fn with_handler(handler: Handler) -> Self {
        Self::selecting(Some(Held::on(handler)))
    }

    /// The handler selected in it.
    #[must_use]
    pub fn handler(&self) -> Handler {
        self.state.selected.as_ref().map_or_else(default_handler, Held::handler)
    }

    /// Whether nothing is selected in it.
    #[must_use]
    pub fn is_unset(&self) -> bool {
        self.state.selected.is_none()
    }

    /// Runs `work` in this context. What it selects stays in this context; afterwards the thread's own context is
    /// restored, also if `work` panics.
    ///
    /// A running context can be neither run again nor read. In Python that is a RuntimeError; here it does not compile:
    ///
    /// ```compile_fail,E0499
    /// let mut context = ctxalloc::Context::new();
    /// context.run(|| context.run(|| ()));
    /// ```
    /// ```compile_fail,E0502
    /// let mut context = ctxalloc::Context::new();
    /// context.run(|| drop(context.handler()));
    /// ```
    pub fn run<R>(&mut self, work: impl FnOnce() -> R) -> R {
        let _inside = self.swap_in();
        work()
    }

    /// Binds `work` to this context: for thread pools, callbacks, `std::thread::Builder`.
    ///
    /// If it is dropped without a call, its captures are dropped in the context too.
    pub fn wrap<R>(self, work: impl FnOnce() -> R) -> impl FnOnce() -> R {
        struct Bound<W> {
            context: Context,
            work: Option<W>,
        }
        impl<W> Drop for Bound<W> {
            fn drop(&mut self) {
                let Self { context, work } = self;
                context.run(|| drop(work.take()));
            }
        }
        let mut bound = Bound { context: self, work: Some(work) };
        move || {
            let Bound { context, work } = &mut bound;
            let work = work.take().expect("an FnOnce is called once");
            context.run(work)
        }
    }

    /// Makes this the thread's running context until the guard is dropped.
    #[inline]
    pub(super) fn swap_in(&mut self) -> Inside<'_> {
        self.state = replace(std::mem::replace(&mut self.state, State::EMPTY));
        Inside { context: self, not_send: PhantomData }
    }
}

/// While this lives, the context runs on this thread, and `context` holds the state that the thread had before.
pub(super) struct Inside<'a> {
    context: &'a mut Context,
    not_send: PhantomData<*const ()>,
}

impl Drop for Inside<'_> {
    #[inline]
    fn drop(&mut self) {
        let state = std::mem::replace(&mut self.context.state, State::EMPTY);
        self.context.state = replace(state);
    }
}

impl Clone for Context {
    /// The same selection, an identity of its own: Python's `Context.copy()`.
    fn clone(&self) -> Self {
        Self::selecting(self.state.selected.clone())
    }
}

impl Default for Context {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Debug for Context {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Context").field("handler", &self.state.selected.as_ref().map(Held::handler)).finish()
    }
}
