//! What is known of a request while it goes on and after its end: `Seen`, for whoever began it, and `RequestHandle`,
//! for whoever carries its handler.

use super::slot::Slot;
use crate::error::Error;
use crate::handler::heap::{HeapRecord, HeapStats};
use crate::handler::held::Held;
use crate::handler::word::Handler;
use crate::strategy::Budget;
#[cfg(feature = "python")]
use crate::strategy::account::WholeStats;
use crate::strategy::account::{Chain, Stats};
use crate::unattributed::is_active;
use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;

/// A request's handler and accounts, for whoever began it or carries it, also after its end: `Begun` and
/// `RequestHandle` are this and a hold. It keeps only the numbers alive.
#[derive(Clone)]
pub(crate) struct Seen {
    pub(super) handler: Handler,
    pub(super) chain: Arc<Chain>,
}

impl Seen {
    /// The handler to select for the request.
    #[must_use]
    pub(crate) fn handler(&self) -> Handler {
        self.handler
    }

    /// Its name.
    #[must_use]
    pub(crate) fn name(&self) -> Cow<'_, str> {
        self.chain.own().name()
    }

    /// The name that it was given, if any.
    #[cfg(feature = "python")]
    #[must_use]
    pub(crate) fn given_name(&self) -> Option<&str> {
        self.chain.own().given_name()
    }

    /// What Rust's heap holds for it; `None` if the program's allocator does not count, or nothing is left of the
    /// request.
    #[must_use]
    pub(crate) fn heap(&self) -> Option<HeapStats> {
        let held = Held::try_on(self.handler)?;
        Slot::behind(held.handler())?.state().heap.as_ref().map(HeapRecord::stats)
    }

    /// [`Error::BudgetExceeded`] if Rust's heap held more for it than its limit allows.
    #[must_use]
    pub(crate) fn heap_exceeded(&self) -> Option<Error> {
        let held = Held::try_on(self.handler)?;
        let exceeded = Slot::behind(held.handler())?.state().heap.as_ref()?.exceeded()?;
        let (limit_bytes, in_use_bytes, requested_bytes) = exceeded;
        Some(Error::BudgetExceeded {
            budget: self.name().into_owned(),
            budget_id: self.chain.own().number(),
            of_request: true,
            limit_bytes,
            in_use_bytes,
            held_bytes: in_use_bytes,
            requested_bytes,
            chosen_for: None,
            guaranteed_bytes: 0,
        })
    }

    /// The last refusal, unless something was allocated in it since.
    #[must_use]
    pub(crate) fn last_refusal(&self) -> Option<Error> {
        self.chain.refusal_of(None)
    }

    /// Its numbers so far; those of requests inside of it are part of them.
    #[must_use]
    pub(crate) fn stats(&self) -> Stats {
        let stats = self.chain.own().stats();
        // From the end on they are among the account's.
        let refused_by_heap = if is_active() && !self.has_ended() { self.refused_by_heap() } else { 0 };
        Stats { refused: stats.refused + refused_by_heap, ..stats }
    }

    /// Whether blocks are alive in it: a moment's answer.
    #[cfg(feature = "python")]
    #[must_use]
    pub(crate) fn has_live_blocks(&self) -> bool {
        self.chain.own().has_live_blocks()
    }

    /// Whether it was chosen to make room for another request.
    #[cfg(feature = "python")]
    #[must_use]
    pub(crate) fn was_chosen(&self) -> bool {
        self.chain.own().was_chosen()
    }

    fn refused_by_heap(&self) -> u64 {
        let state = Held::try_on(self.handler).and_then(|held| {
            let heap = Slot::behind(held.handler())?.state().heap.as_ref()?;
            Some(heap.refusals())
        });
        state.unwrap_or(0)
    }

    /// Whether it was refused memory, by its own limit or by one above.
    #[cfg(feature = "python")]
    #[must_use]
    pub(crate) fn was_refused(&self) -> bool {
        self.chain.refusals_so_far() > 0
    }

    /// What it holds beside arrays; `None` unless it counts that.
    #[cfg(feature = "python")]
    #[must_use]
    pub(crate) fn whole(&self) -> Option<WholeStats> {
        self.chain.whole_stats()
    }

    /// [`Error::BudgetExceeded`] for blocks that were given beyond a limit, since their callers do not survive a
    /// refusal: told once, or (`again`) once more while it holds more than a limit allows.
    #[cfg(feature = "python")]
    #[must_use]
    pub(crate) fn overdraft(&self, again: bool) -> Option<Error> {
        self.chain.whole.as_ref()?; // nothing else is given beyond a limit
        self.chain.overdraft(again && self.chain.is_overdrawn())
    }

    /// Whether there is one that nobody was told of.
    #[cfg(ctxalloc_whole)]
    #[must_use]
    pub(crate) fn is_untold(&self) -> bool {
        self.chain.whole.as_ref().is_some_and(|parts| parts.is_untold())
    }

    #[cfg(ctxalloc_whole)]
    #[must_use]
    pub(crate) fn imports_around(&self) -> usize {
        self.chain.whole.as_ref().map_or(0, |parts| parts.imports_around())
    }

    /// It was begun within so many calls that import a module: those give it nothing.
    #[cfg(ctxalloc_whole)]
    pub(crate) fn note_imports_around(&self, calls: usize) {
        self.chain.whole.iter().for_each(|parts| parts.note_imports_around(calls));
    }

    /// Its own budget: the limit it was given, under what it is charged to.
    #[must_use]
    pub(crate) fn budget(&self) -> Budget {
        Budget::of(Arc::clone(self.chain.own()))
    }

    /// How many bytes are reserved for it.
    #[must_use]
    pub(crate) fn reserved_bytes(&self) -> usize {
        self.chain.reserved_bytes()
    }

    /// Whether it has ended.
    #[must_use]
    pub(crate) fn has_ended(&self) -> bool {
        self.chain.has_ended()
    }
}

/// A request as whoever carries its handler sees it: a task, a thread, a helper function. Keeps its numbers readable,
/// and its handler good, for as long as it lives.
#[derive(Clone)]
pub struct RequestHandle {
    _held: Option<Held>,
    pub(super) seen: Seen,
}

impl RequestHandle {
    /// One with a hold, if something is left of the request to hold.
    pub(super) fn new(held: Option<Held>, seen: Seen) -> Self {
        Self { _held: held, seen }
    }

    /// The request that a handler belongs to. None: the handler is no request's, or nothing of that request is left.
    #[must_use]
    pub fn from_handler(handler: Handler) -> Option<Self> {
        let held = Held::try_on(handler).filter(|held| held.handler().is_request())?;
        Some(Self { seen: Seen { handler, chain: chain_of(handler)? }, _held: Some(held) })
    }

    /// Its handler.
    #[must_use]
    pub fn handler(&self) -> Handler {
        self.seen.handler()
    }

    /// Its name.
    #[must_use]
    pub fn name(&self) -> Cow<'_, str> {
        self.seen.name()
    }

    /// Its numbers so far; those of requests inside of it are part of them.
    #[must_use]
    pub fn stats(&self) -> Stats {
        self.seen.stats()
    }

    /// Its own budget: what it may be given more of, and what a part of it may be charged to.
    #[must_use]
    pub fn budget(&self) -> Budget {
        self.seen.budget()
    }

    /// What Rust's heap holds for it. `None` unless a [`GlobalScoped`](crate::GlobalScoped) is the program's allocator.
    #[must_use]
    pub fn heap(&self) -> Option<HeapStats> {
        self.seen.heap()
    }

    /// [`Error::BudgetExceeded`] if Rust's heap held more for it than
    /// [`heap_limit_bytes`](crate::request::Builder::heap_limit_bytes), however much that is by now.
    #[must_use]
    pub fn heap_exceeded(&self) -> Option<Error> {
        self.seen.heap_exceeded()
    }

    /// Whether it has ended.
    #[must_use]
    pub fn has_ended(&self) -> bool {
        self.seen.has_ended()
    }

    /// The part that a [`Begun`] has too, for code that may have either.
    #[cfg(feature = "python")]
    pub(crate) fn seen(&self) -> &Seen {
        &self.seen
    }
}

impl fmt::Debug for RequestHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RequestHandle").field("name", &self.name()).field("stats", &self.stats()).finish()
    }
}

/// The accounts of a request's handler that somebody holds, of this copy of the crate.
pub(super) fn chain_of(handler: Handler) -> Option<Arc<Chain>> {
    Slot::behind(handler).map(|slot| Arc::clone(&slot.state().chain))
}
