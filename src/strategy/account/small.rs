//! Charges of small blocks by the thread that has the request's account to itself: no lock, no call, no reservation to
//! look at. Whatever is not so simple is left to `chain`.
//!
//! Only for the chain of a request, as `take_block` and `give_block_back` are. The functions of [`Account`] charge the
//! own account alone, within what those above have lent it. Those of [`Chain`] also charge a thread's tab, or all
//! accounts where this thread has all of them to itself.

use super::{Account, Chain, RELAXED};
use crate::sync::{Here, Section, enter_all_owned};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// The section in which a charge may follow, of the account's own numbers alone.
pub(crate) struct Room {
    section: Section,
    /// What is in use with it.
    live_bytes: usize,
}

impl Account {
    /// `take`, where there is room and no number overflows: see `looks_at_changes`.
    #[inline(always)]
    fn take_small(&self, live_bytes: usize, bytes: usize, blocks: usize) {
        if live_bytes > self.peak_bytes.load(RELAXED) {
            self.peak_bytes.store(live_bytes, RELAXED);
        }
        self.live_bytes.store(live_bytes, Ordering::Release); // as in `take`
        self.total_bytes.store(self.total_bytes.load(RELAXED).wrapping_add(bytes as u64), RELAXED);
        self.live_blocks.store(self.live_blocks.load(RELAXED).wrapping_add(blocks), RELAXED);
        self.total_blocks.store(self.total_blocks.load(RELAXED).wrapping_add(blocks as u64), RELAXED);
    }

    #[inline(always)]
    fn give_small(&self, bytes: usize) {
        debug_assert!(self.live_bytes.load(RELAXED) >= bytes, "an account was given back more than it had");
        debug_assert!(self.live_blocks.load(RELAXED) > 0, "an account was given back more than it had");
        self.live_bytes.store(self.live_bytes.load(RELAXED).wrapping_sub(bytes), RELAXED);
        self.live_blocks.store(self.live_blocks.load(RELAXED).wrapping_sub(1), RELAXED);
    }

    /// A block more that nobody counts, or a container, if this thread owns the account and has some of the request: so
    /// nothing that has ended begins again. False, and nothing was done, if not.
    #[inline(always)]
    #[must_use]
    pub(crate) fn add_another(&self) -> bool {
        self.change_own(1, 1)
    }

    /// One less, if this thread owns the account and it is not the last that it has of the request. False, and nothing
    /// was done, if not.
    #[inline(always)]
    #[must_use]
    pub(crate) fn remove_another(&self) -> bool {
        self.change_own(2, -1)
    }

    /// Whether the running thread owns it.
    #[inline]
    pub(crate) fn is_owned_by(&self, here: Here) -> bool {
        self.lock.is_owned_by(here)
    }

    /// A container more or less, on the running thread, of this account or a tab, while the request has not ended: so
    /// none is the first or the last one. False, and nothing was done, if that is not known.
    #[inline(always)]
    #[must_use]
    pub(crate) fn change_containers_by(&self, here: Here, by: isize) -> bool {
        let Some(section) = self.lock.enter_owned_by(here) else { return false };
        // Without a ceiling the request may have ended, or (of a tab: see `Tabs::enter`) be collected just now.
        let is_open = self.ceiling.load(RELAXED) > 0;
        if is_open {
            self.change_own_in(&section, by);
        }
        is_open
    }

    #[inline(always)]
    fn change_own(&self, least: usize, by: isize) -> bool {
        let Some(section) = self.lock.enter_owned() else { return false };
        let has_least = self.own_blocks.load(RELAXED) >= least;
        if has_least {
            self.change_own_in(&section, by);
        }
        has_least
    }

    #[inline(always)]
    pub(super) fn change_own_in(&self, _section: &Section, by: isize) {
        self.own_blocks.store(self.own_blocks.load(RELAXED).wrapping_add_signed(by), RELAXED);
    }

    /// Begins to charge a small block to this account alone: after it [`charged`](Self::charged) may follow, if this
    /// thread owns the account, there is room, and nothing else is to be looked at. As
    /// [`Chain::charge_small`], and without closures, since the compiler is not sure to inline those.
    #[inline(always)]
    pub(crate) fn begin_charge(&self, bytes: usize) -> Option<Room> {
        self.room_for(bytes, self.lock.enter_owned()?)
    }

    /// The same on the running thread, also for its tab.
    #[inline(always)]
    pub(crate) fn begin_charge_by(&self, here: Here, bytes: usize) -> Option<Room> {
        self.room_for(bytes, self.lock.enter_owned_by(here)?)
    }

    #[inline(always)]
    fn room_for(&self, bytes: usize, section: Section) -> Option<Room> {
        let live_bytes = self.live_bytes.load(RELAXED).checked_add(bytes)?;
        if live_bytes <= self.ceiling.load(RELAXED) { Some(Room { section, live_bytes }) } else { None }
    }

    /// Charges the block for which this was begun. The request has not ended: none is the first one after its end.
    #[inline(always)]
    pub(crate) fn charged(&self, bytes: usize, room: Room) {
        self.take_small(room.live_bytes, bytes, 1);
        self.change_own_in(&room.section, 1);
        drop(room.section);
    }

    /// The same for what a block has grown by.
    #[inline(always)]
    pub(crate) fn grown(&self, bytes: usize, room: Room) {
        self.take_small(room.live_bytes, bytes, 0);
        drop(room.section);
    }

    /// `last` follows, within the same section.
    #[inline(always)]
    fn grow_in<R>(
        &self,
        room: Room,
        bytes: usize,
        blocks: usize,
        make: impl FnOnce() -> Option<R>,
        last: impl FnOnce(&Self),
    ) -> Option<R> {
        let made = make()?;
        self.take_small(room.live_bytes, bytes, blocks);
        last(self);
        drop(room.section);
        Some(made)
    }

    /// [`Chain::give_small_back`] where nothing else is to be looked at, and so no block is the last one of a request
    /// that has ended; false, and nothing has changed, where it is.
    #[inline(always)]
    #[must_use]
    pub(crate) fn give_small_back(&self, bytes: usize) -> bool {
        match self.lock.enter_owned() {
            Some(section) => self.give_small_back_in(&section, bytes),
            None => false,
        }
    }

    /// The same on the running thread, also for its tab.
    #[inline(always)]
    #[must_use]
    pub(crate) fn give_small_back_by(&self, here: Here, bytes: usize) -> bool {
        match self.lock.enter_owned_by(here) {
            Some(section) => self.give_small_back_in(&section, bytes),
            None => false,
        }
    }

    #[inline(always)]
    pub(super) fn give_small_back_in(&self, section: &Section, bytes: usize) -> bool {
        if self.ceiling.load(RELAXED) == 0 {
            return false;
        }
        self.give_small(bytes);
        self.change_own_in(section, -1);
        true
    }
}

impl Chain {
    /// Whether charges go the short way, as far as that never changes.
    pub(crate) fn is_plain(&self) -> bool {
        self.covers.is_none()
    }

    /// The account that this thread charges: the own one, or its tab.
    pub(crate) fn charged_here(&self) -> Option<&Account> {
        if self.own.lock.is_owned_here() { Some(&self.own) } else { self.tabs.here().map(|tab| &**tab) }
    }

    /// [`Account::begin_charge`] for this thread's tab.
    #[inline(always)]
    pub(crate) fn begin_charge_on_tab(&self, bytes: usize) -> Option<(&Account, Room)> {
        let (tab, section) = self.tabs.enter()?;
        Some((tab, tab.room_for(bytes, section)?))
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

    /// [`charge_small`](Self::charge_small) for what a block grows by, where the own account has no room for it.
    #[inline]
    pub(crate) fn charge_growth<R>(&self, bytes: usize, make: impl FnOnce() -> Option<R>) -> Option<R> {
        self.grow_elsewhere_by(bytes, 0, make, |_| ())
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
        if let Some(room) = self.own.begin_charge(bytes) {
            return self.own.grow_in(room, bytes, blocks, make, last);
        }
        self.grow_elsewhere_by(bytes, blocks, make, last)
    }

    /// The same where the own account alone has no room.
    #[inline(always)]
    fn grow_elsewhere_by<R>(
        &self,
        bytes: usize,
        blocks: usize,
        make: impl FnOnce() -> Option<R>,
        last: impl FnOnce(&Account),
    ) -> Option<R> {
        if let Some((tab, room)) = self.begin_charge_on_tab(bytes) {
            return tab.grow_in(room, bytes, blocks, make, last);
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
        accounts.iter().for_each(|account| account.take(bytes, blocks));
        last(&self.own);
        self.open_again();
        Some(made)
    }

    /// The queue says without the lock that nobody waits any more. Under the lock.
    pub(super) fn open_again(&self) {
        if self.is_alone() {
            self.own.set_ceiling();
        }
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
        if self.own.give_small_back(bytes) { Some(false) } else { self.give_back_elsewhere(bytes) }
    }

    /// The same where this thread's tab is enough; false if it is not.
    #[inline(always)]
    #[must_use]
    pub(crate) fn give_small_back_on_tab(&self, bytes: usize) -> bool {
        match self.tabs.enter() {
            Some((tab, section)) => tab.give_small_back_in(&section, bytes),
            None => false,
        }
    }

    #[inline(never)]
    fn give_back_elsewhere(&self, bytes: usize) -> Option<bool> {
        if self.give_small_back_on_tab(bytes) { Some(false) } else { self.give_back_to_all(bytes) }
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
        accounts.iter().for_each(|account| account.give_own_back(bytes, 1));
        self.open_again();
        Some(self.own.remove_own())
    }
}
