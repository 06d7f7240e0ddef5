//! `Chain`: the accounts that a charge goes to. It takes a charge from all of them or from none.

use super::above::{above_request, as_set, reach};
use super::cover::covers_of;
use super::lending::{recall, with_exact};
use super::refused::ENDED;
use super::reserved::{Cover, Covers, Reservation, room_came};
use super::tabs::Tabs;
use super::{Account, Accounts, Kind, MAX_DEPTH, OwnerLock, Parts, RELAXED, Refused, Stats, TINY_BYTES, count};
use crate::error::Error;
use crate::strategy::pool::clock;
use crate::sync::with_all;
use std::mem::ManuallyDrop;
use std::ops::Deref;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64};

/// The accounts that a charge goes to, each once.
#[derive(Debug)]
pub(crate) struct Chain {
    /// The account that is charged directly: the first of all, once more.
    pub(super) own: Own,
    /// All accounts, the youngest first. Never changes.
    all: Accounts,
    /// What reservations mean to each of them, if there are any.
    pub(super) covers: Option<Covers>,
    /// What threads count of a request that several of them use.
    pub(super) tabs: Tabs,
    /// What is not arrays, for a request that counts that too.
    pub(crate) whole: Option<Arc<Parts>>,
    /// The same of each account that does (its position among all), this one's own and those above.
    pub(super) wholes: Box<[(usize, Arc<Parts>)]>,
}

/// The first account of a chain, beside the chain's list, for whoever needs no other: no reference of its own.
#[derive(Debug)]
pub(crate) struct Own(ManuallyDrop<Arc<Account>>);

impl Own {
    /// # Safety
    /// - lives no longer than `accounts`, which do not change.
    #[allow(unsafe_code, reason = "a pointer beside its owner")]
    unsafe fn first_of(accounts: &[Arc<Account>]) -> Self {
        // SAFETY: a copy that is never dropped, of a reference that outlives it.
        Self(ManuallyDrop::new(unsafe { ptr::read(&raw const accounts[0]) }))
    }
}

impl Deref for Own {
    type Target = Arc<Account>;

    #[inline(always)]
    fn deref(&self) -> &Arc<Account> {
        &self.0
    }
}

/// As `Arc::new`, for what is large: that would make it on the stack and copy it.
#[inline(always)]
#[allow(unsafe_code, reason = "a value that is made where it stays")]
fn made_in_place<T>(make: impl FnOnce() -> T) -> Arc<T> {
    let place = Arc::<T>::new_uninit();
    // SAFETY: nobody else has the place; from here on the value is there.
    unsafe {
        Arc::as_ptr(&place).cast_mut().cast::<T>().write(make());
        place.assume_init()
    }
}

impl Chain {
    /// The chain of a budget.
    pub(in crate::strategy) fn of_budget(budget: &Arc<Account>) -> Self {
        let mut found = Accounts::new();
        reach(budget, &mut found);
        Self::with(Arc::clone(budget), found)
    }

    /// The chain of a new request: charged to `budget`, and inside the request with the chain `outer`. `reserves`:
    /// whether it is to have a reservation ([`admit`](Self::admit)).
    ///
    /// # Errors
    /// [`Error::NestedTooDeep`].
    pub(crate) fn of_request(
        name: Option<Arc<str>>,
        limit_bytes: Option<usize>,
        overdraft_bytes: usize,
        budget: Option<&Arc<Account>>,
        outer: Option<&Self>,
        is_of_this_thread: bool,
        reserves: bool,
    ) -> Result<Self, Error> {
        let around = outer.map_or(&[][..], Self::accounts);
        let above = above_request(budget, around, outer.is_some_and(Self::has_ended));
        if above.len() >= MAX_DEPTH {
            return Err(Error::NestedTooDeep { max: MAX_DEPTH });
        }
        above.iter().for_each(Account::is_below_no_more);
        let kind = Kind::Request {
            ended: AtomicBool::new(false),
            refusals: AtomicU64::new(0),
            begun: clock::now(),
            overdraft_bytes,
            above: above.iter().map(Arc::downgrade).collect(),
        };
        let lock = if is_of_this_thread { OwnerLock::new_owned() } else { OwnerLock::new() };
        let reservation = reserves.then(Reservation::default);
        let own = made_in_place(|| Account::new(name, limit_bytes, kind, lock, reservation));
        Ok(Self::with(own, above))
    }

    /// `all`: those above `own`, the youngest first, or among them `own` too.
    #[allow(unsafe_code, reason = "a pointer beside its owner")]
    fn with(own: Arc<Account>, mut all: Accounts) -> Self {
        if all.first().is_none_or(|account| account.id < own.id) {
            all.push_first(own);
        } else {
            as_set(&mut all);
            debug_assert_eq!(all[0].id, own.id, "an account is younger than those above it");
        }
        // SAFETY: the chain has both, and changes neither.
        let own = unsafe { Own::first_of(&all) };
        let covers = if all.len() == 1 { None } else { covers_of(&all) };
        Self { own, all, covers, tabs: Tabs::none(), whole: None, wholes: Box::default() }
    }

    /// Tells the accounts of requests that they are charged for what a recording does not know as theirs, before that
    /// is done. `knows` of which it does, by their numbers.
    #[cold]
    pub(crate) fn tell_others(&self, knows: impl Fn(u64) -> bool) {
        for account in self.accounts().iter().filter(|account| account.is_of_request() && !knows(account.id)) {
            account.includes_others.store(true, RELAXED);
        }
    }

    /// Whether charges go to this account.
    pub(in crate::strategy) fn reaches(&self, account: &Arc<Account>) -> bool {
        self.accounts().iter().any(|own| Arc::ptr_eq(own, account))
    }

    pub(crate) fn own(&self) -> &Arc<Account> {
        &self.own
    }

    /// The same, for who has the chain beside it.
    ///
    /// # Safety
    /// - lives no longer than the chain.
    #[allow(unsafe_code, reason = "a pointer beside its owner")]
    pub(crate) unsafe fn own_again(&self) -> Own {
        // SAFETY: the list of a chain never changes, and goes with it (this function's contract).
        unsafe { Own::first_of(&self.all) }
    }

    #[inline]
    pub(super) fn accounts(&self) -> &[Arc<Account>] {
        &self.all
    }

    /// Whether the own account is the only one.
    #[inline]
    pub(super) fn is_alone(&self) -> bool {
        self.all.len() == 1
    }

    /// Whether all accounts have room; without their locks, whether they had a moment ago.
    #[inline]
    pub(crate) fn may_have_room(&self, bytes: usize) -> bool {
        let have_room = match &self.covers {
            None => self.have_room(bytes),
            Some(covers) => with_all(self.accounts(), || self.have_covered_room(covers, bytes)),
        };
        have_room || self.have_room_without_loans(bytes)
    }

    /// The same where what was lent is called in.
    fn have_room_without_loans(&self, bytes: usize) -> bool {
        let lend = self.accounts().iter().any(|account| account.may_lend());
        lend && with_exact(self.accounts(), || match &self.covers {
            None => self.have_room(bytes),
            Some(covers) => self.have_covered_room(covers, bytes),
        })
    }

    #[inline]
    fn have_room(&self, bytes: usize) -> bool {
        self.accounts().iter().all(|account| account.has_room_for(bytes))
    }

    fn have_covered_room(&self, covers: &[Cover], bytes: usize) -> bool {
        self.first_without(covers, bytes, |at, step| self.accounts()[at].has_room_for(step)).is_none()
    }

    /// The position of the youngest account that refuses `bytes` more for a block of `size_bytes`, if any. `is_late`:
    /// the request has ended, and refuses all but tiny blocks.
    #[inline]
    pub(super) fn refusing(&self, bytes: usize, size_bytes: usize, is_late: bool) -> Option<usize> {
        let has_room = || match &self.covers {
            None => self.have_room(bytes),
            Some(covers) => self.have_covered_room(covers, bytes),
        };
        if !is_late && has_room() {
            return None;
        }
        if recall(self.accounts()) && !is_late && has_room() {
            return None;
        }
        self.refusing_overdraft(bytes, size_bytes, is_late)
    }

    #[cold]
    fn refusing_overdraft(&self, bytes: usize, size_bytes: usize, is_late: bool) -> Option<usize> {
        let overdraft_bytes = self.overdraft_bytes();
        let may_exceed = |account: &Arc<Account>, bytes, is_late| {
            size_bytes <= TINY_BYTES
                && overdraft_bytes > 0
                && account.may_exceed(bytes, size_bytes, overdraft_bytes, is_late)
        };
        let refuses = |account: &Arc<Account>, bytes| {
            let is_late = is_late && Arc::ptr_eq(account, &self.own);
            (is_late || !account.has_room_for(bytes)) && !may_exceed(account, bytes, is_late)
        };
        match &self.covers {
            None => self.accounts().iter().position(|account| refuses(account, bytes)),
            Some(covers) => self.first_without(covers, bytes, |at, step| !refuses(&self.accounts()[at], step)),
        }
    }

    #[cold]
    pub(super) fn refuse(&self, at: usize, bytes: usize, is_late: bool) -> Refused {
        let account = &self.accounts()[at];
        let refused = account.refuse(if is_late && Arc::ptr_eq(account, &self.own) { ENDED } else { at }, bytes);
        // Whatever is charged to the request is charged to all accounts of its chain, so it is part of what is in use
        // there.
        let held_bytes = match self.own.kind {
            Kind::Request { .. } => self.own.live_bytes.load(RELAXED),
            Kind::Budget { .. } => 0,
        };
        Refused { held_bytes, ..refused }
    }

    pub(super) fn check(&self, bytes: usize, size_bytes: usize, is_late: bool) -> Result<(), Refused> {
        self.refusing(bytes, size_bytes, is_late).map_or(Ok(()), |at| Err(self.refuse(at, bytes, is_late)))
    }

    /// Charges all accounts or none.
    pub(crate) fn take(&self, bytes: usize, blocks: usize) -> Result<(), Refused> {
        let taken = self.with_accounts(|| {
            self.check(bytes, usize::MAX, false)?;
            self.take_each(bytes, blocks);
            Ok(())
        });
        taken.inspect_err(|refused: &Refused| self.miss(refused.at, bytes))
    }

    /// Gives a charge back.
    pub(crate) fn give_back(&self, bytes: usize, blocks: usize) {
        if self.with_accounts(|| self.give_back_each(bytes, blocks)) {
            room_came();
        }
    }

    /// Reserves `bytes` for a block of `size_bytes` that is about to be made or resized; [`commit`](Self::commit) or
    /// [`cancel`](Self::cancel) follows.
    pub(crate) fn reserve(&self, bytes: usize, size_bytes: usize, is_late: bool) -> Result<(), Refused> {
        let reserved = self.with_accounts(|| {
            self.check(bytes, size_bytes, is_late)?;
            self.add_pending_each(bytes);
            Ok(())
        });
        reserved.inspect_err(|refused: &Refused| self.miss(refused.at, bytes))
    }

    /// Gives reserved bytes back: no number has changed then.
    pub(crate) fn cancel(&self, bytes: usize) {
        if with_all(self.accounts(), || self.subtract_pending_each(bytes)) {
            room_came();
        }
    }

    /// Turns reserved bytes into a charge.
    pub(crate) fn commit(&self, bytes: usize, blocks: usize) {
        self.with_accounts(|| {
            for account in self.accounts() {
                account.subtract_pending(bytes);
                account.take(bytes, blocks);
            }
        });
    }
}

/// Only for the account of a request.
impl Account {
    /// Counts a block of the request itself. `first` is called if the request has ended and this is its only block.
    #[inline]
    pub(super) fn add_own(&self, first: impl FnOnce()) {
        if self.add_one() {
            first();
        }
    }

    /// Counts a block of the request itself; whether the request has ended and this is its only block.
    #[inline(always)]
    pub(super) fn add_one(&self) -> bool {
        let before = self.own_blocks.load(RELAXED);
        self.own_blocks.store(before + 1, RELAXED);
        before == 0 && self.has_ended()
    }

    /// Counts one less; whether it was the last one of a request that has ended.
    #[inline(always)]
    pub(super) fn remove_own(&self) -> bool {
        let left = self.own_blocks.load(RELAXED) - 1;
        self.own_blocks.store(left, RELAXED);
        left == 0 && self.has_ended()
    }
}

/// Only for the chain of a request, which counts the request's own blocks and knows whether the request has ended.
impl Chain {
    /// By how many bytes tiny blocks of the request may exceed limits; 0 for a budget's chain.
    pub(crate) fn overdraft_bytes(&self) -> usize {
        match &self.own.kind {
            Kind::Request { overdraft_bytes, .. } => *overdraft_bytes,
            Kind::Budget { .. } => 0,
        }
    }

    /// Whether the request is inside another one that has not ended.
    #[cold]
    pub(crate) fn is_inside_of_a_live_one(&self) -> bool {
        let is_live = |account: &&Arc<Account>| matches!(account.kind, Kind::Request { .. }) && !account.has_ended();
        self.accounts().iter().filter(|account| account.id != self.own.id).any(|account| is_live(&account))
    }

    /// Whether the request has ended.
    #[inline]
    pub(crate) fn has_ended(&self) -> bool {
        self.own.has_ended()
    }

    /// [`take`](Self::take) for a block that was allocated; returns whether it was taken, and remembers a refusal.
    /// `first` is called under the lock if the request has ended and this is its only block.
    #[inline]
    pub(crate) fn take_block(&self, bytes: usize, is_late: bool, first: impl Fn()) -> bool {
        if !is_late && self.is_plain() && self.charge_small(bytes, || Some(()), &first).is_some() {
            return true;
        }
        self.take_block_slowly(bytes, is_late, first)
    }

    #[inline(never)]
    fn take_block_slowly(&self, bytes: usize, is_late: bool, first: impl FnOnce()) -> bool {
        self.ready_to_borrow();
        let refused_at = self.with_accounts(|| {
            if let Some(at) = self.refusing(bytes, bytes, is_late) {
                self.note(self.refuse(at, bytes, is_late));
                return Some(at);
            }
            self.take_each(bytes, 1);
            self.add_own(first);
            self.borrow();
            None
        });
        refused_at.inspect(|&at| self.miss(at, bytes)).is_none()
    }

    /// [`commit`](Self::commit) for a block that was allocated; `first` is as for [`take_block`](Self::take_block).
    pub(crate) fn commit_block(&self, bytes: usize, first: impl FnOnce()) {
        self.with_accounts(|| {
            for account in self.accounts() {
                account.subtract_pending(bytes);
                account.take(bytes, 1);
            }
            self.add_own(first);
        });
    }

    #[inline]
    pub(super) fn add_own(&self, first: impl FnOnce()) {
        self.own.add_own(first);
    }

    /// Gives the charge of a block back; returns whether it was the last block of an ended request. If not, the chain
    /// is not accessed after its own lock is released (the last one), since another thread may then end the request and
    /// free it.
    #[inline]
    #[must_use]
    pub(crate) fn give_block_back(&self, bytes: usize) -> bool {
        if self.is_plain()
            && let Some(is_last) = self.give_small_back(bytes)
        {
            return is_last;
        }
        self.give_block_back_slowly(bytes)
    }

    #[inline(never)]
    fn give_block_back_slowly(&self, bytes: usize) -> bool {
        self.ready_to_borrow();
        let (is_wanted, is_last) = self.with_accounts(|| {
            let is_wanted = self.give_back_each(bytes, 1);
            self.borrow();
            (is_wanted, self.remove_own())
        });
        if is_wanted {
            room_came();
        }
        is_last
    }

    #[inline]
    pub(super) fn remove_own(&self) -> bool {
        if self.own.own_blocks.load(RELAXED) == 0 {
            self.own.call_in(); // a tab has made it
        }
        self.own.remove_own()
    }

    /// How often the request was refused memory so far, by its own limit or by one above.
    pub(crate) fn refusals_so_far(&self) -> u64 {
        match &self.own.kind {
            Kind::Request { refusals, .. } => refusals.load(RELAXED),
            Kind::Budget { .. } => 0,
        }
    }

    /// Whether it is inside of no other request that has not ended.
    pub(crate) fn is_root(&self) -> bool {
        self.is_alone() || !self.is_inside_of_a_live_one()
    }

    /// Whether blocks of the request itself are alive. A moment's answer.
    pub(crate) fn has_blocks(&self) -> bool {
        if self.own.may_lend() {
            self.own.lock.with(|| self.own.call_in());
        }
        self.own.own_blocks.load(RELAXED) > 0
    }

    /// Ends the request; returns its numbers at that moment, and whether it has live blocks. `refused_elsewhere`: how
    /// often it was refused memory that its accounts do not count.
    pub(crate) fn end(&self, refuses_late: bool, refused_elsewhere: u64) -> (Stats, bool) {
        let Kind::Request { ended, refusals, .. } = &self.own.kind else {
            unreachable!("called on the chains of requests only")
        };
        self.return_reservation_and(|| {
            ended.store(true, RELAXED);
            self.own.call_in();
            count(&self.own.refused, refused_elsewhere);
            count(refusals, refused_elsewhere);
            if refuses_late {
                self.own.floor_bytes.store(self.own.live_bytes.load(RELAXED), RELAXED);
            }
            self.own.set_ceiling();
            (self.own.numbers(), self.own.own_blocks.load(RELAXED) > 0)
        })
    }
}
