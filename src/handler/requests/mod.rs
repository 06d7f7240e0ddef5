//! Requests: each gets a handler, an account and memory of its own, and all of that is released when nothing can reach
//! it any more.
//!
//! ```text
//!   Handler ── generation ──► Slot  (type-stable, immortal, recycled)       what C sees: PyDataMem_Handler { name, ctx, .. }
//!                              │ holders, generation
//!                              └──► State (one request's own)               account chain, memory, what happens after its end
//! ```
//! A slot is held by capsules, contexts, guards, containers, and by its blocks; the request itself holds it until its
//! end. Each of these is one of its `holders`. When the last one lets go, the state is dropped, the generation is
//! incremented, and the slot is free for another request. A [`Handler`] carries the generation that it was made for:
//! one that outlived its request is recognised by that, and refused. Nothing that an ended request left behind ever
//! reaches another one.

mod aside;
pub(super) mod chunks;
pub(super) mod ended;
mod external;
mod list;
pub(crate) mod on_chosen;
mod prepared;
mod slot;
mod small;
mod state;
#[cfg(ctxalloc_whole)]
mod ticket;
mod unseen;
pub(crate) mod victims;
#[cfg(ctxalloc_whole)]
mod whole;

#[cfg(feature = "python")]
pub(crate) use crate::strategy::account::WholeStats;
pub use external::ExternalCharge;
pub(crate) use list::gauges;
pub use list::{Present, present};
pub(crate) use prepared::Prepared;
pub(super) use slot::at_struct;
pub use state::AfterEnd;
#[cfg(feature = "python")]
pub(crate) use state::record_bytes;
#[cfg(ctxalloc_whole)]
pub(crate) use ticket::{Tickets, give_tickets};
#[cfg(ctxalloc_whole)]
pub(crate) use whole::{Charged, Payer, charge, handler_at, is_live, is_refused, payer_of, ticket_of};

use super::heap::{HeapRecord, HeapStats, Record};
use super::held::Held;
use super::process::table;
use super::word::Handler;
use crate::counters::{self, History, Sample};
use crate::error::Error;
use crate::recording::Sums;
use crate::strategy::account::{Chain, Refusal, Stats};
use crate::strategy::{Budget, LiveBlock, Strategy};
use crate::unattributed::{is_active, unattributed};
use ended::Ended;
use on_chosen::OnChosen;
use slot::Slot;
use std::borrow::Cow;
use std::fmt;
use std::ops::Deref;
use std::sync::Arc;
use unseen::Outside;

/// What a request is begun with.
#[derive(Debug, Default)]
#[non_exhaustive]
pub(crate) struct Terms {
    /// For messages and metrics; a number of its own where there is none.
    pub name: Option<Arc<str>>,
    /// The most bytes that may be alive at one time.
    pub limit_bytes: Option<usize>,
    /// By how many bytes blocks of up to 1 KiB may together exceed each limit. The limit of a request around
    /// it that grants no overdraft is never exceeded.
    pub overdraft_bytes: usize,
    /// What the request is charged to besides.
    pub budget: Option<Budget>,
    /// Where its blocks come from: the shared pool where there is none.
    pub strategy: Option<Arc<dyn Strategy>>,
    /// The handler of the request around it, or any other handler, or none.
    pub outer: Option<Handler>,
    /// What becomes of work that goes on after it.
    pub after_end: AfterEnd,
    /// The most bytes of Rust's heap that may be alive at one time.
    pub heap_limit_bytes: Option<usize>,
    /// Whether more than that is refused.
    pub heap_refuses: bool,
    /// Whether to measure by how much the process grows beside its pools: two looks at the system, each some
    /// microseconds.
    pub measure_unseen: bool,
    /// Whether it counts and limits native memory and Python objects too. Whoever sets it has seen to it that these are
    /// reported (`src/whole`).
    pub is_whole: bool,
    /// Whether it will most likely be used on the thread that begins it: cheaper there, and dearer elsewhere.
    pub is_of_this_thread: bool,
    /// How many bytes of everything above are reserved for it from its beginning.
    pub reserve_bytes: Option<usize>,
    /// What is called when it is chosen to make room for others.
    pub on_chosen: Option<OnChosen>,
    /// Whether that is found out by what requests of its name needed lately. It has a limit then.
    pub reserves_by_history: bool,
    /// How many of its name may wait.
    pub max_waiting: Option<usize>,
    /// Whether metrics leave it out: it stands for one that got no reservation, and does nothing.
    pub is_uncounted: bool,
}

/// The overdraft of requests that are begun in Python, in bytes. NumPy crashes where the memory of some scalars is
/// refused (it does not check what `PyArray_FromScalar` returns), so only larger blocks may be refused.
#[cfg(feature = "python")]
pub(crate) const OVERDRAFT_BYTES: usize = 64 << 10;

/// A request that was begun, and what is known of it after its end. Dropping it ends the request.
pub(crate) struct Begun {
    /// Until the end.
    held: Option<Held>,
    seen: Seen,
    /// Where what it needed is added at the end.
    history: Option<Arc<History>>,
    is_uncounted: bool,
    outside: Option<Outside>,
    /// From the end on.
    unseen_growth_bytes: Option<i64>,
}

/// A request's handler and accounts, for whoever began it or carries it, also after its end: `Begun` and
/// `RequestHandle` are this and a hold. It keeps only the numbers alive.
#[derive(Clone)]
pub(crate) struct Seen {
    handler: Handler,
    chain: Arc<Chain>,
}

/// Counts of requests, and of their slots.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct RequestCounts {
    /// How many were begun.
    pub begun: u64,
    /// How many are present: not ended, or still reachable by blocks, tasks, capsules.
    pub present: usize,
    /// Slots that were made, 512 bytes each: as many as requests were ever present at one time, rounded up to chunks of
    /// 64 and more (threads that run out of slots at one time may each make a chunk).
    pub slots: usize,
}

/// How many requests there are, and were.
#[must_use]
pub fn request_counts() -> RequestCounts {
    let (slots, free) = slot::counts();
    RequestCounts { begun: unseen::begun(), present: slots - free, slots }
}

/// The request that pays for what is not arrays in a request inside of this one, which does not count that itself.
fn payer_around(outer: &Held) -> Option<Held> {
    let state = Slot::behind(outer.handler())?.state();
    if state.counts_whole() { Some(outer.clone()) } else { state.payer.clone() }
}

impl Begun {
    /// Whether metrics leave it out.
    #[cfg(feature = "python")]
    pub(crate) fn is_uncounted(&self) -> bool {
        self.is_uncounted
    }

    /// By how many bytes the process grew beside its pools from the beginning to the end: what the request's work
    /// allocated in other ways, less what was freed. `None` before the end, unless it was to be measured, or if another
    /// request was open, or a root was begun, meanwhile.
    #[must_use]
    pub(crate) fn unseen_growth_bytes(&self) -> Option<i64> {
        self.unseen_growth_bytes
    }

    /// The last refusals, which may have led to what ended the request; the youngest first, and each is returned once.
    #[must_use]
    pub(crate) fn take_refusals(&self) -> Vec<Refusal> {
        self.seen.chain.take_refusals()
    }

    /// Its live blocks, where its strategy knows them ([`Tracked`](crate::strategy::Tracked)); those of requests inside
    /// of it are theirs. A strategy that several requests share lists the blocks of all of them.
    #[must_use]
    pub(crate) fn live_blocks(&self) -> Option<Vec<LiveBlock>> {
        Held::try_on(self.seen.handler).and_then(|held| Slot::behind(held.handler())?.state().memory.live_blocks())
    }

    /// A handle on it, for others.
    #[must_use]
    pub(crate) fn handle(&self) -> RequestHandle {
        let held = self.held.clone().or_else(|| Held::try_on(self.seen.handler));
        RequestHandle { _held: held, seen: self.seen.clone() }
    }

    /// Ends the request; its numbers at that moment, which stay readable and go on to change with what is alive. A
    /// second time only reads them.
    pub(crate) fn end(&mut self) -> Stats {
        self.end_with(true)
    }

    /// [`end`](Self::end), where what is alive may not have escaped: it is counted by
    /// [`record_escapes`](Self::record_escapes) later.
    #[cfg(feature = "python")]
    pub(crate) fn end_open(&mut self) -> Stats {
        self.end_with(false)
    }

    /// Counts what has escaped of a request that was ended by [`end_open`](Self::end_open).
    #[cfg(feature = "python")]
    pub(crate) fn record_escapes(&self, blocks: usize, bytes: usize) {
        if blocks > 0 {
            counters::record_escapes(self.seen.chain.own().given_name(), blocks as u64, bytes as u64);
        }
    }

    fn end_with(&mut self, counts_escapes: bool) -> Stats {
        let Some(held) = self.held.take() else { return self.stats() };
        let _unattributed = unattributed(); // dropped before `held`, with which code of the user's may end
        self.unseen_growth_bytes = self.outside.and_then(Outside::growth);
        let state = Slot::behind(held.handler()).map(Slot::state);
        let refuses_late = state.is_some_and(|state| state.after_end == AfterEnd::Refuse);
        let refused_by_heap = state.and_then(|state| state.heap.as_ref()).map_or(0, HeapRecord::refusals);
        let end = || self.seen.chain.end(refuses_late, refused_by_heap);
        let (stats, blocks_are_alive) = match state.and_then(|state| state.memory.noted()) {
            None => end(),
            Some(noted) => noted.end(|| {
                let (stats, blocks_are_alive) = end();
                let sums = sums_of(&stats, self.seen.chain.refusals_so_far() - refused_by_heap);
                ((stats, blocks_are_alive), sums)
            }),
        };
        self.seen.chain.end_the_whole();
        let sample = Sample {
            peak_bytes: stats.peak_bytes as u64,
            total_bytes: stats.total_bytes,
            refused: self.seen.chain.refusals_so_far(),
            escaped_blocks: if counts_escapes { stats.live_blocks as u64 } else { 0 },
            escaped_bytes: if counts_escapes { stats.live_bytes as u64 } else { 0 },
            whole: self.seen.chain.whole_stats().map(|whole| {
                [whole.array_at_peak_bytes, whole.native_at_peak_bytes, whole.object_at_peak_bytes]
                    .map(|part| part as u64)
            }),
        };
        if let Some(history) = &self.history {
            // Nobody knows how much one that was refused would have needed.
            let limit_bytes = self.seen.chain.own().limit_bytes();
            history.add(if sample.refused > 0 { limit_bytes } else { stats.peak_bytes });
        }
        if !self.is_uncounted && counters::record(self.seen.chain.own().given_name(), &sample) {
            counters::set_gauges(gauges());
        }
        if blocks_are_alive {
            // From now on its blocks own this hold: the release of the last one lets it go (`Slot::release`).
            std::mem::forget(held);
        }
        stats
    }
}

/// What a recording says of a request that has ended. Refusals are those of the request itself, without its heap's.
fn sums_of(stats: &Stats, refused: u64) -> Sums {
    Sums {
        peak_bytes: stats.peak_bytes as u64,
        total_bytes: stats.total_bytes,
        blocks: stats.total_blocks,
        live_bytes: stats.live_bytes as u64,
        refused,
    }
}

impl Deref for Begun {
    type Target = Seen;

    fn deref(&self) -> &Seen {
        &self.seen
    }
}

impl Drop for Begun {
    fn drop(&mut self) {
        if self.held.is_some() {
            self.end();
        }
    }
}

impl fmt::Debug for Begun {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Request").field("name", &self.name()).field("stats", &self.stats()).finish()
    }
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
        self.chain.overdraft(again && self.chain.is_overdrawn())
    }

    /// The last one, which is told with this.
    #[cfg(ctxalloc_whole)]
    #[must_use]
    pub(crate) fn last_overdraft(&self) -> Option<Error> {
        self.chain.overdraft(true)
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
    seen: Seen,
}

impl RequestHandle {
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

/// [`Slot::behind`], for `small`.
#[inline]
pub(super) fn slot_behind(handler: Handler) -> Option<&'static Slot> {
    Slot::behind(handler)
}

/// The heap record of a request's handler that somebody holds, of this copy of the crate.
#[inline]
pub(super) fn heap_of(handler: Handler) -> Option<&'static Record> {
    Some(Slot::behind(handler)?.state().heap.as_ref()?.get())
}

/// The accounts of a request's handler that somebody holds, of this copy of the crate.
fn chain_of(handler: Handler) -> Option<Arc<Chain>> {
    Slot::behind(handler).map(|slot| Arc::clone(&slot.state().chain))
}

/// Whether a request's handler could give so many bytes now: a look without the locks, which counts no refusal. True
/// for a handler that is no request's, whoever holds it.
pub(crate) fn may_have_room(handler: Handler, bytes: usize) -> bool {
    Slot::behind(handler).is_none_or(|slot| slot.state().may_have_room(bytes))
}

/// Why a request's handler had no memory: the last refusal of so many bytes, or the last thing that happened to it.
pub(super) fn refusal_of(handler: Handler, requested_bytes: Option<usize>) -> Option<Error> {
    if handler == table().ended() {
        return Some(gone(requested_bytes.unwrap_or_default()));
    }
    let held = Held::try_on(handler)?;
    chain_of(held.handler())?.refusal_of(requested_bytes)
}

/// Nothing is left of the request that was asked for memory.
#[cold]
pub(super) fn gone(requested_bytes: usize) -> Error {
    Error::RequestEnded { request: String::new(), requested_bytes }
}

/// What a request's handler is called.
#[cold]
pub(super) fn name_of(handler: Handler) -> Cow<'static, str> {
    let Some(held) = Held::try_on(handler) else { return Ended::NAME.into() };
    match chain_of(held.handler()) {
        Some(chain) => chain.own().name().into_owned().into(),
        // Another copy of this crate began it, and wrote its name where NumPy reads it.
        None => slot::name_in(held.handler()).into(),
    }
}
