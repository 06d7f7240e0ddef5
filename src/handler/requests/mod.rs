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
mod begun;
pub(super) mod chunks;
pub(super) mod ended;
mod external;
mod latest;
mod list;
pub(crate) mod on_chosen;
mod prepared;
mod seen;
mod slot;
mod small;
mod state;
#[cfg(ctxalloc_whole)]
mod ticket;
mod unseen;
pub(crate) mod victims;
#[cfg(ctxalloc_whole)]
mod whole;

pub(crate) use begun::Begun;
pub use external::ExternalCharge;
pub(super) use latest::Latest;
pub(crate) use list::gauges;
pub use list::{Present, present};
#[cfg(feature = "python")]
pub(crate) use prepared::OVERDRAFT_BYTES;
pub(crate) use prepared::{Prepared, Terms};
pub use seen::RequestHandle;
#[cfg(feature = "python")]
pub(crate) use seen::Seen;
pub(super) use slot::{Slot, at_struct};
pub use state::AfterEnd;
#[cfg(feature = "python")]
pub(crate) use state::record_bytes;
#[cfg(ctxalloc_whole)]
pub(crate) use ticket::{Tickets, give_tickets};
#[cfg(ctxalloc_whole)]
pub(crate) use whole::{
    Beyond, Charged, Handed, Payer, ask_for_imports, charge, handler_at, imports_around, is_counted, is_live,
    is_refused, is_untold, may_import, payer_of, tell_by_null, ticket_of,
};

use super::heap::Record;
use super::held::Held;
use super::process::table;
use super::word::Handler;
use crate::error::Error;
use ended::Ended;
use seen::chain_of;
use std::borrow::Cow;

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
