//! What a pool has of large blocks, reached under its lock: those that live as a sum, and the memory of those that came
//! back.

use super::super::demand::Demand;
use super::super::extents::{Extents, Grain, Run};
use super::super::growing::Growing;
use crate::source::Pages;
use std::ptr::NonNull;
use std::time::Duration;

/// The number of blocks that are kept as they came back.
pub(super) const RECENT: usize = 8;

#[derive(Debug)]
pub(super) struct Store {
    /// The latest last. To the extents their pages are in use, neither free nor dirty.
    pub(super) recent: Vec<Recent>,
    pub(super) recent_bytes: usize,
    pub(super) extents: Extents,
    pub(super) growing: Growing,
    pub(super) live_bytes: usize,
    pub(super) demand: Demand,
    /// The bytes that could not be returned the last time: free runs smaller than the grain.
    pub(super) holes_bytes: usize,
    /// When the present moment ends, and old memory is looked for again.
    pub(super) look_again: Duration,
    /// The pool's [`Retention::warm_bytes`], once it was asked for.
    pub(super) warm_bytes: Option<usize>,
}

/// A block that came back and is kept as it is.
#[derive(Debug)]
pub(super) struct Recent {
    pub(super) block: NonNull<u8>,
    pub(super) run: Run,
    pub(super) since: Duration,
}

// SAFETY: the pool alone owns the block and reaches it under its lock.
unsafe impl Send for Recent {}

impl Recent {
    #[inline]
    fn fits(&self, pages: usize) -> bool {
        fits(self.run.pages, pages)
    }
}

/// Whether a block of so many pages serves one that needs fewer: one that is an eighth too large does.
#[inline]
pub(super) fn fits(run_pages: usize, pages: usize) -> bool {
    run_pages >= pages && run_pages - pages <= pages / 8
}

impl Store {
    /// Takes a block back.
    pub(super) fn put(&mut self, block: NonNull<u8>, run: Run, now: Duration) {
        self.recent.push(Recent { block, run, since: now });
        self.recent_bytes += run.bytes();
        let before_bytes = self.live_bytes;
        self.live_bytes -= run.bytes();
        self.demand.fall(before_bytes, self.live_bytes, now);
        if self.recent.len() > RECENT {
            self.join_recent();
        }
    }

    /// Begins another moment if the present one, an eighth of `decay`, is over.
    pub(super) fn turn(&mut self, now: Duration, decay: Duration) {
        if now >= self.look_again {
            let moment = decay / 8;
            self.demand.next_moment(now.saturating_sub(self.look_again) >= moment);
            self.look_again = now.saturating_add(moment);
        }
    }

    pub(super) fn lend(&mut self, run: Run) {
        self.live_bytes += run.bytes();
        self.demand.rise();
    }

    /// Returns memory to the system, if more is kept than `max_bytes`, or than the next peak is expected to need and
    /// some slack.
    pub(super) fn keep_within<P: Pages + ?Sized>(&mut self, source: &P, max_bytes: usize) {
        let ((wanted, slack), kept) = (self.wanted_and_slack(), self.kept_bytes());
        self.holes_bytes = self.holes_bytes.min(kept);
        if kept > max_bytes.min(wanted.saturating_add(slack)).max(self.holes_bytes) {
            self.join_recent();
            let left = wanted.min(max_bytes.saturating_sub(slack.min(max_bytes / 4)));
            self.extents.purge_down_to(source, left);
            let dirty = self.extents.dirty_bytes();
            self.holes_bytes = if dirty > left { dirty } else { 0 };
        }
    }

    /// How many bytes more may be kept before [`keep_within`](Self::keep_within) returns some.
    #[inline]
    pub(super) fn room_bytes(&self) -> usize {
        let (wanted, slack) = self.wanted_and_slack();
        wanted.saturating_add(slack).min(self.warm_bytes.unwrap_or(0)).saturating_sub(self.kept_bytes())
    }

    /// How many bytes the next peak is expected to need beyond those in use, and how many may be kept beyond that.
    #[inline]
    fn wanted_and_slack(&self) -> (usize, usize) {
        let expected = self.demand.bytes();
        (expected.saturating_sub(self.live_bytes), self.demand.slack_bytes(expected))
    }

    /// How many bytes are kept with their memory.
    #[inline]
    pub(super) fn kept_bytes(&self) -> usize {
        self.recent_bytes + self.extents.dirty_bytes()
    }

    /// Takes the latest of the recent blocks that is large enough and at most an eighth too large.
    pub(super) fn take_recent(&mut self, pages: usize) -> Option<Recent> {
        // A loop over one size finds the last one, for which nothing has to be moved.
        let found = match self.recent.pop_if(|last| last.fits(pages)) {
            Some(last) => last,
            None => self.recent.remove(self.recent.iter().rposition(|recent| recent.fits(pages))?),
        };
        self.recent_bytes -= found.run.bytes();
        Some(found)
    }

    /// Takes a run of exactly `pages`.
    pub(super) fn take<P: Pages + ?Sized>(&mut self, source: &P, pages: usize) -> Option<Run> {
        self.join_recent();
        if let Some(run) = self.extents.take(pages) {
            return Some(run);
        }
        if self.extents.grow(source, pages) { self.extents.take(pages) } else { None }
    }

    pub(super) fn join_recent(&mut self) {
        for Recent { run, since, .. } in self.recent.drain(..) {
            self.extents.give(run, since);
        }
        self.recent_bytes = 0;
    }

    pub(super) fn trim<P: Pages + ?Sized>(&mut self, source: &P) -> usize {
        self.join_recent();
        self.extents.purge(source, Duration::MAX, Grain::Page)
    }
}
