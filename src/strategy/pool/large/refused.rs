//! Runs that were taken, and that the source did not commit or clear.

use super::Store;
use crate::strategy::pool::clock::now;
use crate::strategy::pool::extents::{MAX_RUNS, Run};

impl Store {
    /// Takes back a run that could not be cleared.
    pub(super) fn take_back(&mut self, run: Run) {
        self.live_bytes -= run.bytes();
        self.extents.give(run, now());
    }

    /// Takes back a run that could not be committed. If it was not emptied either, what was dirty is committed, and the
    /// rest of it is not.
    pub(super) fn take_back_uncommitted(&mut self, run: Run, emptied: bool, dirty: &[Run]) {
        self.live_bytes -= run.bytes();
        if emptied {
            return self.extents.give_empty(run);
        }
        if dirty.len() == MAX_RUNS {
            return; // the last one may have pages between that are not committed: they are nobody's any more
        }
        let mut at = run.first;
        for &part in dirty {
            self.give_empty_between(at, part.first);
            self.extents.give(part, now());
            at = part.first + part.pages;
        }
        self.give_empty_between(at, run.first + run.pages);
    }

    fn give_empty_between(&mut self, first: usize, end: usize) {
        if first < end {
            self.extents.give_empty(Run { first, pages: end - first });
        }
    }
}
