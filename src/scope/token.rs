//! `Token`: what `set` gives and `reset` takes. PEP 567's rules, checked at run time as in Python.

use super::current::{Identity, restore};
use crate::error::Error;
use crate::handler::{Handler, Held};
use std::cell::Cell;
use std::fmt;

/// Puts back what was selected before one [`set`](super::set), once, in the same context.
///
/// It is borrowed, not consumed, by [`reset`]: a token that was refused in a foreign context stays good for its
/// own (PEP 567). It may travel to other threads and tasks; it is of no use there.
#[must_use = "without its token the old selection cannot be put back; `drop` it if that is meant"]
pub struct Token {
    old: Option<Handler>,
    /// The same, held until it is selected again.
    held: Cell<Option<Held>>,
    context: Identity,
    used: Cell<bool>,
}

impl Token {
    pub(super) fn new(old: Option<Held>, context: Identity) -> Self {
        Self { old: old.as_ref().map(Held::handler), held: Cell::new(old), context, used: Cell::new(false) }
    }

    /// What was selected before; nothing where the context had made no selection.
    #[must_use]
    pub fn old_handler(&self) -> Option<Handler> {
        self.old
    }

    /// Whether [`reset`] took it.
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

/// Puts back what was selected before the `set` that gave this token, whatever has been selected since and in
/// whatever order tokens are used.
///
/// # Errors
/// [`Error::TokenUsed`] the second time, [`Error::TokenForeign`] in another context than the token's own. Nothing
/// changes then, and a foreign token stays good for its own context.
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
