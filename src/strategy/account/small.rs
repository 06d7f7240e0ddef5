//! Charges of small blocks by the thread that has the chain's accounts to itself: no lock, no call, no reservation to
//! look at. Whatever is not so simple is left to `chain`.

use super::{Account, Chain, RELAXED};
use crate::sync::enter_all_owned;

impl Account {
    /// `take` for small blocks, of which so many that a sum of theirs overflowed would take centuries.
    #[inline(always)]
    fn take_small(&self, bytes: usize, blocks: usize) {
        let live = self.live_bytes.load(RELAXED).wrapping_add(bytes);
        self.live_bytes.store(live, RELAXED);
        if live > self.peak_bytes.load(RELAXED) {
            self.peak_bytes.store(live, RELAXED);
        }
        self.total_bytes.store(self.total_bytes.load(RELAXED).wrapping_add(bytes as u64), RELAXED);
        self.live_blocks.store(self.live_blocks.load(RELAXED).wrapping_add(blocks), RELAXED);
        self.total_blocks.store(self.total_blocks.load(RELAXED).wrapping_add(blocks as u64), RELAXED);
    }
}

/// Only for the chain of a request, as `take_block` and `give_block_back` are.
impl Chain {
    /// Whether charges go the short way, as far as that never changes.
    pub(crate) fn is_plain(&self) -> bool {
        self.covers.is_none()
    }

    /// Charges the block that `make` makes, if this thread owns all accounts and each has room; `None` if not, or where
    /// `make` has none: then nothing has changed. `make` is short and takes none of these locks. `first` is called under
    /// the lock if the request has ended and this is its only block.
    ///
    /// Only where [`is_plain`](Self::is_plain), as for all functions here.
    #[inline(always)]
    pub(crate) fn charge_small<R>(
        &self,
        bytes: usize,
        make: impl FnOnce() -> Option<R>,
        first: impl FnOnce(),
    ) -> Option<R> {
        self.grow_by(bytes, 1, make, || self.add_own(first))
    }

    /// [`charge_small`](Self::charge_small) for what a block grows by.
    #[inline]
    pub(crate) fn charge_growth<R>(&self, bytes: usize, make: impl FnOnce() -> Option<R>) -> Option<R> {
        self.grow_by(bytes, 0, make, || ())
    }

    #[inline(always)]
    fn grow_by<R>(
        &self,
        bytes: usize,
        blocks: usize,
        make: impl FnOnce() -> Option<R>,
        last: impl FnOnce(),
    ) -> Option<R> {
        debug_assert!(self.is_plain());
        let above = self.all.get(1..).unwrap_or_default(); // the own one is the youngest
        let _section = enter_all_owned(&self.own, above)?;
        let has_room = |account: &Account| account.has_room_for(bytes);
        if !has_room(&self.own) || !above.iter().all(|account| has_room(account)) {
            return None;
        }
        let made = make()?;
        self.own.take_small(bytes, blocks);
        above.iter().for_each(|account| account.take_small(bytes, blocks));
        last();
        Some(made)
    }

    /// Gives the charge of a block back, if this thread owns all accounts and nobody waits for room; else `None`, and
    /// nothing has changed. What it returns, and what follows, is as for `give_block_back`.
    #[inline(always)]
    #[must_use]
    pub(crate) fn give_small_back(&self, bytes: usize) -> Option<bool> {
        debug_assert!(self.is_plain());
        let above = self.all.get(1..).unwrap_or_default(); // the own one is the youngest
        let _section = enter_all_owned(&self.own, above)?;
        if self.own.is_wanted() || above.iter().any(|account| account.is_wanted()) {
            return None;
        }
        self.own.give_back(bytes, 1);
        above.iter().for_each(|account| account.give_back(bytes, 1));
        Some(self.remove_own())
    }
}
