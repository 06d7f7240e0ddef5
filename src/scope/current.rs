//! The thread-local itself: what the running context has selected, and who that context is.

use super::token::Token;
use crate::handler::{Handler, Held, default_handler, selected};
use std::cell::Cell;
use std::num::NonZeroU64;
use std::sync::atomic::{AtomicU64, Ordering};

/// What one context carries. Nothing selected means the default handler.
pub(super) struct State {
    /// Held: a request lives at least as long as it is selected somewhere.
    pub(super) selected: Option<Held>,
    /// Who this context is. Given at the first `set` in it: most contexts never need one.
    pub(super) identity: Option<Identity>,
}

/// A number that no other context of this process has or had.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Identity(NonZeroU64);

impl State {
    pub(super) const EMPTY: Self = Self { selected: None, identity: None };
}

thread_local! {
    // Beside what `handler::selected` has, in a cell of its own: what is written word by word and read as one is slow on
    // most processors.
    static IDENTITY: Cell<Option<Identity>> = const { Cell::new(None) };
    /// This thread's unused identities: the next one, and how many are left.
    static IDENTITIES: Cell<(u64, u64)> = const { Cell::new((0, 0)) };
}

/// Puts `state` in place of the running one and returns that.
#[inline]
pub(super) fn replace(state: State) -> State {
    State { selected: selected::replace(state.selected), identity: IDENTITY.replace(state.identity) }
}

/// Puts `old` back if the running context is `context`; says whether it is. Takes `old` if it is.
#[inline]
pub(super) fn restore(old: &mut Option<Held>, context: Identity) -> bool {
    let own = IDENTITY.get() == Some(context);
    if own {
        drop(selected::replace(old.take()));
    }
    own
}

/// What the running context has selected.
#[inline]
pub(super) fn selection() -> Option<Held> {
    selected::held()
}

/// Selects, and returns what was selected before and in which context this happened.
#[inline]
pub(super) fn select(handler: Held) -> (Option<Held>, Identity) {
    let identity = IDENTITY.get().unwrap_or_else(|| {
        let fresh = Identity::new();
        IDENTITY.set(Some(fresh));
        fresh
    });
    (selected::replace(Some(handler)), identity)
}

impl Identity {
    /// A fresh one. Threads draw them in blocks, so that no counter is shared on the way of a request.
    #[cold]
    fn new() -> Self {
        const BLOCK: u64 = 1024;
        static DRAWN: AtomicU64 = AtomicU64::new(1);
        let (next, left) = match IDENTITIES.get() {
            // Relaxed: the numbers only have to differ. 2^54 blocks last for ever.
            (_, 0) => (DRAWN.fetch_add(BLOCK, Ordering::Relaxed), BLOCK),
            drawn => drawn,
        };
        IDENTITIES.set((next + 1, left - 1));
        Self(NonZeroU64::new(next).expect("the count starts at one"))
    }
}

/// The handler of the running context: of this thread, or of the task that is being polled on it.
///
/// Without a selection, [`default_handler`]. Works in thread-local destructors too.
#[inline]
#[must_use]
pub fn current() -> Handler {
    selected::get().unwrap_or_else(default_handler)
}

/// Selects a handler for the running context only; `None` selects the default.
///
/// Returns the [`Token`] that puts the old selection back ([`reset`](super::reset)). Dropping the token keeps
/// the new one, as in Python.
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
