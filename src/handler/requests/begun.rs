//! `Begun`: a request that was begun, and how it ends.

use super::list::gauges;
use super::seen::{RequestHandle, Seen};
use super::slot::Slot;
use super::state::AfterEnd;
use super::unseen::Outside;
use crate::counters::{self, History, Sample};
use crate::handler::heap::HeapRecord;
use crate::handler::held::Held;
use crate::recording::Sums;
use crate::strategy::LiveBlock;
use crate::strategy::account::{Refusal, Stats};
use crate::unattributed::unattributed;
use std::fmt;
use std::ops::Deref;
use std::sync::Arc;

/// A request that was begun, and what is known of it after its end. Dropping it ends the request.
pub(crate) struct Begun {
    /// Until the end.
    pub(super) held: Option<Held>,
    pub(super) seen: Seen,
    /// Where what it needed is added at the end.
    pub(super) history: Option<Arc<History>>,
    pub(super) is_uncounted: bool,
    /// Where it is to be measured.
    pub(super) unseen: Option<Box<Unseen>>,
}

pub(super) struct Unseen {
    pub(super) before: Option<Outside>,
    /// From the end on.
    pub(super) growth_bytes: Option<i64>,
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
        self.unseen.as_ref().and_then(|unseen| unseen.growth_bytes)
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
        RequestHandle::new(held, self.seen.clone())
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
        if let Some(unseen) = &mut self.unseen {
            unseen.growth_bytes = unseen.before.and_then(Outside::growth);
        }
        let state = Slot::behind(held.handler()).map(Slot::state);
        let refuses_late = state.is_some_and(|state| state.after_end == AfterEnd::Refuse);
        let refused_by_heap = state.and_then(|state| state.heap.as_ref()).map_or(0, HeapRecord::refusals);
        let end = || self.seen.chain.end(refuses_late, refused_by_heap);
        let (stats, blocks_are_alive) = match state.and_then(|state| state.memory.noted()) {
            None => end(),
            Some(noted) => noted.end(|| {
                let (stats, blocks_are_alive) = end();
                let refused = self.seen.chain.refusals_so_far() - refused_by_heap;
                let includes_others = self.seen.chain.own().includes_others();
                ((stats, blocks_are_alive), Sums { refused, includes_others, ..stats.as_recorded() })
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
