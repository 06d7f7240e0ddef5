//! `set` and `reset`, and the `Token` between them. PEP 567's rules, checked at run time as in Python.

use super::current::{Identity, restore, select};
use crate::error::Error;
use crate::handler::{Handler, Held, default_handler};
use std::cell::Cell;
use std::fmt;

/// Restores the selection before one [`set`](super::set): once, in the same context.
///
/// [`reset`] borrows it instead of consuming it, because a token that was refused in a foreign context stays valid in
/// its own (PEP 567). It may be sent to other threads and tasks, where `reset` refuses it.
#[must_use = "without its token the previous selection cannot be restored; `drop` it if that is meant"]
pub struct Token {
    old: Option<Handler>,
    /// The same handler, held until it is selected again.
    held: Cell<Option<Held>>,
    context: Identity,
    used: Cell<bool>,
}

impl Token {
    fn new(old: Option<Held>, context: Identity) -> Self {
        Self { old: old.as_ref().map(Held::handler), held: Cell::new(old), context, used: Cell::new(false) }
    }

    /// The previous selection; `None` if nothing was selected in the context.
    #[must_use]
    pub fn old_handler(&self) -> Option<Handler> {
        self.old
    }

    /// Whether it was used for a [`reset`].
    #[must_use]
    pub fn is_used(&self) -> bool {
        self.used.get()
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Token").field("old", &self.old).field("used", &self.used.get()).finish_non_exhaustive()
    }
}

/// Selects a handler in the running context. `None` selects the default.
///
/// Returns a [`Token`] that restores the previous selection ([`reset`]). Dropping the token keeps the new
/// selection, as in Python.
///
/// What is still selected when its thread ends is let go of by a thread-local destructor of ours. A request's handler
/// that a later destructor selects, and does not [`reset`], keeps that request's account until the process ends.
///
/// ```
/// use ctxalloc::{current, handler, reset, set};
///
/// let before = current();
/// let token = set(handler("aligned64"));
/// assert_eq!(current().name(), "aligned64");
/// reset(&token)?;
/// assert_eq!(current(), before);
/// # Ok::<(), ctxalloc::Error>(())
/// ```
#[inline]
pub fn set(handler: impl Into<Option<Handler>>) -> Token {
    let (old, identity) = select(Held::on(handler.into().unwrap_or_else(default_handler)));
    Token::new(old, identity)
}

/// Restores the selection before the `set` that returned this token, whatever was selected since and in whatever order
/// tokens are used.
///
/// # Errors
/// [`Error::TokenUsed`] the second time; [`Error::TokenForeign`] in another context than the token's own. Nothing
/// changes then, and a foreign token stays valid in its own context.
///
/// ```
/// use ctxalloc::{Context, Error, handler, reset, set};
///
/// let token = set(handler("aligned64"));
/// let elsewhere = Context::copy_current().run(|| reset(&token));
/// assert_eq!(elsewhere, Err(Error::TokenForeign));
/// assert_eq!(reset(&token), Ok(()));
/// assert_eq!(reset(&token), Err(Error::TokenUsed));
/// ```
#[inline]
pub fn reset(token: &Token) -> Result<(), Error> {
    if token.used.get() {
        return Err(Error::TokenUsed);
    }
    let mut old = token.held.take();
    if !restore(&mut old, token.context) {
        token.held.set(old);
        return Err(Error::TokenForeign);
    }
    token.used.set(true);
    Ok(())
}
