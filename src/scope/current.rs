//! The thread-local state: the running context's selection and identity.

use crate::handler::{Handler, Held, default_handler, selected};
use std::cell::Cell;
use std::num::NonZeroU64;
use std::sync::atomic::{AtomicU64, Ordering};

/// What one context carries. Nothing selected means the default handler.
pub(super) struct State {
    /// Held, so that a request's handler stays valid while it is selected.
    pub(super) selected: Option<Held>,
    /// Assigned at the first `set` in the context, since most contexts never need one.
    pub(super) identity: Option<Identity>,
}

/// A number that no other context of this process ever has.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Identity(NonZeroU64);

impl State {
    pub(super) const EMPTY: Self = Self { selected: None, identity: None };
}

thread_local! {
    // In a cell of its own beside that of `handler::selected`: on most processors it is slow to read as a whole what
    // was written word by word (a failed store-to-load forwarding).
    static IDENTITY: Cell<Option<Identity>> = const { Cell::new(None) };
    /// This thread's unused identities: the next one, and how many are left.
    static IDENTITIES: Cell<(u64, u64)> = const { Cell::new((0, 0)) };
}

/// Replaces the running context's state and returns the old one.
#[inline]
pub(super) fn replace(state: State) -> State {
    State { selected: selected::replace(state.selected), identity: IDENTITY.replace(state.identity) }
}

/// If the running context is `context`, takes `old` and selects it again. Returns whether it is.
#[inline]
pub(super) fn restore(old: &mut Option<Held>, context: Identity) -> bool {
    let own = IDENTITY.get() == Some(context);
    if own {
        drop(selected::replace(old.take()));
    }
    own
}

/// The running context's selection.
#[inline]
pub(super) fn selection() -> Option<Held> {
    selected::held()
}

/// Selects a handler; returns the previous selection and the running context's identity.
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
    /// A new identity. Threads draw them in blocks, so that requests on different threads share no counter.
    #[cold]
    fn new() -> Self {
        const BLOCK: u64 = 1024;
        static DRAWN: AtomicU64 = AtomicU64::new(1);
        let (next, left) = match IDENTITIES.get() {
            // Relaxed: the numbers need only differ. There are 2^54 blocks, which never run out.
            (_, 0) => (DRAWN.fetch_add(BLOCK, Ordering::Relaxed), BLOCK),
            drawn => drawn,
        };
        IDENTITIES.set((next + 1, left - 1));
        Self(NonZeroU64::new(next).expect("the count starts at one"))
    }
}

/// The handler of the running context: that of this thread, or of the task being polled on it.
///
/// If nothing is selected, this is [`default_handler`]. It may be called in thread-local destructors.
#[inline]
#[must_use]
pub fn current() -> Handler {
    selected::get().unwrap_or_else(default_handler)
}
