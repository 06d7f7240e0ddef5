//! Charges of small blocks by the thread that has the request's account to itself: no lock, no call, no reservation to
//! look at. Whatever is not so simple is left to `chain`.
//!
//! Only for the chain of a request, as `take_block` and `give_block_back` are. The functions of [`Account`] charge the
//! own account alone, within what those above have lent it. Those of [`Chain`] also charge a thread's tab, or all
//! accounts where this thread has all of them to itself.

use super::{Account, Chain, RELAXED, count};
use crate::sync::{Section, enter_all_owned};
use std::sync::Arc;
use std::sync::atomic::Ordering;

impl Account {
    /// `take`, where there is room and the number of blocks does not overflow: they are made one by one.
    #[inline(always)]
    fn take_small(&self, bytes: usize, blocks: usize) {
        let live = self.live_bytes.load(RELAXED).wrapping_add(bytes);
        if live > self.peak_bytes.load(RELAXED) {
            self.peak_bytes.store(live, RELAXED);
        }
        self.live_bytes.store(live, Ordering::Release); // as in `take`
        count(&self.total_bytes, bytes as u64); // what comes from elsewhere may be charged in any size
        self.live_blocks.store(self.live_blocks.load(RELAXED).wrapping_add(blocks), RELAXED);
        self.total_blocks.store(self.total_blocks.load(RELAXED).wrapping_add(blocks as u64), RELAXED);
    }

    #[inline(always)]
    fn give_small(&self, bytes: usize) {
        let (before, blocks) = (self.live_bytes.load(RELAXED), self.live_blocks.load(RELAXED));
        debug_assert!(before >= bytes && blocks > 0, "an account was given back more than it had");
        let live = before.wrapping_sub(bytes);
        self.live_bytes.store(live, RELAXED);
        if self.floor_bytes.load(RELAXED) > live {
            self.floor_bytes.store(live, RELAXED);
        }
        self.live_blocks.store(blocks.wrapping_sub(1), RELAXED);
    }

    /// Begins to charge a small block to this account alone: the section in which [`charged`](Self::charged) may
    /// follow, if this thread owns the account, there is room, and no other account has to know. As
    /// [`Chain::charge_small`], and without closures, since the compiler is not sure to inline those.
    #[inline(always)]
    pub(crate) fn begin_charge(&self, bytes: usize) -> Option<Section> {
        let section = self.lock.enter_owned()?;
        if self.has_credit_for(bytes) { Some(section) } else { None }
    }

    #[inline(always)]
    fn has_credit_for(&self, bytes: usize) -> bool {
        let Some(live) = self.live_bytes.load(RELAXED).checked_add(bytes) else { return false };
        let is_within = live <= self.enforced_bytes.load(RELAXED) && live <= self.ceiling.load(RELAXED);
        is_within && self.pending_bytes.load(RELAXED) == 0 // it seldom has any: no sum is worth while
    }

    /// `last` follows, within the same section.
    #[inline(always)]
    fn grow_in<R>(
        &self,
        _section: &Section,
        bytes: usize,
        blocks: usize,
        make: impl FnOnce() -> Option<R>,
        last: impl FnOnce(&Self),
    ) -> Option<R> {
        let made = make()?;
        self.take_small(bytes, blocks);
        last(self);
        Some(made)
    }

    /// Charges the block for which `_section` was begun. Whether it is the only one of a request that has ended.
    #[inline(always)]
    pub(crate) fn charged(&self, bytes: usize, _section: &Section) -> bool {
        self.take_small(bytes, 1);
        self.add_one()
    }

    /// [`Chain::give_small_back`] where no other account has to know; else `None`, and nothing has changed.
    #[inline(always)]
    #[must_use]
    pub(crate) fn give_small_back(&self, bytes: usize) -> Option<bool> {
        let section = self.lock.enter_owned()?;
        self.give_small_back_in(&section, bytes)
    }

    #[inline(always)]
    pub(super) fn give_small_back_in(&self, _section: &Section, bytes: usize) -> Option<bool> {
        if self.is_wanted() || self.ceiling.load(RELAXED) == 0 {
            return None;
        }
        self.give_small(bytes);
        Some(self.remove_own())
    }
}

impl Chain {
    /// Whether charges go the short way, as far as that never changes.
    pub(crate) fn is_plain(&self) -> bool {
        self.covers.is_none()
    }

    /// [`Account::begin_charge`] for this thread's tab.
    #[inline(always)]
    pub(crate) fn begin_charge_on_tab(&self, bytes: usize) -> Option<(&Account, Section)> {
        let (tab, section) = self.tabs.enter()?;
        if tab.has_credit_for(bytes) { Some((tab, section)) } else { None }
    }

    /// Charges the block that `make` makes, if this thread has an account to itself that has room; `None` if not, or
    /// where `make` has none: then nothing has changed. `make` is short and takes none of these locks. `first` is
    /// called under the lock if the request has ended and this is its only block.
    ///
    /// Only where [`is_plain`](Self::is_plain), as for all functions here.
    #[inline(always)]
    pub(crate) fn charge_small<R>(
        &self,
        bytes: usize,
        make: impl FnOnce() -> Option<R>,
        first: impl FnOnce(),
    ) -> Option<R> {
        self.grow_by(bytes, 1, make, |account| account.add_own(first))
    }

    /// The same where neither account of this thread has room.
    #[inline(always)]
    pub(crate) fn charge_small_to_all<R>(
        &self,
        bytes: usize,
        make: impl FnOnce() -> Option<R>,
        first: impl FnOnce(),
    ) -> Option<R> {
        self.grow_all_by(bytes, 1, make, |account| account.add_own(first))
    }

    /// [`charge_small`](Self::charge_small) for what a block grows by.
    #[inline]
    pub(crate) fn charge_growth<R>(&self, bytes: usize, make: impl FnOnce() -> Option<R>) -> Option<R> {
        self.grow_by(bytes, 0, make, |_| ())
    }

    /// `last` is called with the account that counts the request's own blocks.
    #[inline(always)]
    pub(super) fn grow_by<R>(
        &self,
        bytes: usize,
        blocks: usize,
        make: impl FnOnce() -> Option<R>,
        last: impl FnOnce(&Account),
    ) -> Option<R> {
        debug_assert!(self.is_plain());
        if let Some(section) = self.own.begin_charge(bytes) {
            return self.own.grow_in(&section, bytes, blocks, make, last);
        }
        if let Some((tab, section)) = self.begin_charge_on_tab(bytes) {
            return tab.grow_in(&section, bytes, blocks, make, last);
        }
        self.grow_all_by(bytes, blocks, make, last)
    }

    /// The same where this thread owns all accounts, and those above have lent nothing.
    #[inline(always)]
    fn grow_all_by<R>(
        &self,
        bytes: usize,
        blocks: usize,
        make: impl FnOnce() -> Option<R>,
        last: impl FnOnce(&Account),
    ) -> Option<R> {
        let accounts = self.accounts();
        let _section = enter_all_owned(accounts)?;
        let fits = |account: &Arc<Account>| !account.lends() && account.has_room_for(bytes);
        if self.own.borrows() || !accounts.iter().all(fits) || self.should_borrow() {
            return None;
        }
        let made = make()?;
        accounts.iter().for_each(|account| account.take_small(bytes, blocks));
        last(&self.own);
        Some(made)
    }

    /// Whether the next charge had better go the long way, on which the request may borrow. Under the own lock.
    fn should_borrow(&self) -> bool {
        !self.is_alone() && self.own.wants_to_borrow()
    }

    /// Gives the charge of a block back, if this thread has an account to itself and nobody waits for room; else
    /// `None`, and nothing has changed. What it returns, and what follows, is as for `give_block_back`.
    #[inline(always)]
    #[must_use]
    pub(crate) fn give_small_back(&self, bytes: usize) -> Option<bool> {
        self.own.give_small_back(bytes).or_else(|| self.give_back_elsewhere(bytes))
    }

    /// The same where this thread's tab is enough.
    #[inline(always)]
    #[must_use]
    pub(crate) fn give_small_back_on_tab(&self, bytes: usize) -> Option<bool> {
        let (tab, section) = self.tabs.enter()?;
        tab.give_small_back_in(&section, bytes)
    }

    #[inline(never)]
    fn give_back_elsewhere(&self, bytes: usize) -> Option<bool> {
        self.give_small_back_on_tab(bytes).or_else(|| self.give_back_to_all(bytes))
    }

    /// The same where neither the own account is nor a tab.
    #[inline(never)]
    #[must_use]
    pub(crate) fn give_back_to_all(&self, bytes: usize) -> Option<bool> {
        debug_assert!(self.is_plain());
        let accounts = self.accounts();
        let _section = enter_all_owned(accounts)?;
        let is_wanted = accounts.iter().any(|account| account.is_wanted());
        if is_wanted || self.own.borrows() || self.should_borrow() {
            return None;
        }
        accounts.iter().for_each(|account| account.give_small(bytes));
        Some(self.own.remove_own())
    }
}
