//! Reservations: what a request holds of the accounts above it before it uses it. A budget's guarantee is one too.
//!
//! Above itself, a request with a reservation counts as the larger of what it reserved and what it uses. So a change of
//! its use passes on only what goes beyond the reservation, and the accounts above take that from `pending_bytes` or
//! add it there: `live_bytes` changes everywhere by what was allocated.
//!
//! A chain may have several reservations below one account: those of requests inside of each other. Each passes its
//! change on to the next one around it, so an account changes by what the outermost one below it passes on. Which one
//! that is never changes, so [`Cover`] says it for each account of the chain.

use super::chain::Chain;
use super::lending::with_exact;
use super::reserved::{Change, Cover, NOBODY, Reservation, room_came};
use super::{Account, RELAXED, UNLIMITED, add, subtract};
use crate::sync::with_all;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;

/// How charges change the accounts of a chain. All of it under their locks.
impl Chain {
    fn reservation(&self, at: usize) -> &Reservation {
        self.accounts()[at].reservation.as_ref().expect("a chain draws on accounts that have one")
    }

    /// What the account at this position changes by: after [`prepare`](Self::prepare).
    fn step(&self, covers: &[Cover], at: usize, bytes: usize) -> usize {
        match covers[at].under {
            NOBODY => bytes,
            below => self.reservation(below as usize).step.load(RELAXED),
        }
    }

    /// Works out what each account changes by when the own one changes by `bytes`.
    fn prepare(&self, covers: &[Cover], change: Change, bytes: usize) {
        // From the youngest: each one's step is known before those above it ask for it.
        for (at, _) in covers.iter().enumerate().filter(|(_, cover)| cover.is_drawn_on) {
            let reservation = self.reservation(at);
            let passed_on = reservation.passes_on(change, self.step(covers, at, bytes));
            reservation.step.store(passed_on, RELAXED);
        }
    }

    /// The position of the youngest account in which `fits` fails for what it would grow by.
    pub(super) fn first_without(
        &self,
        covers: &[Cover],
        bytes: usize,
        fits: impl Fn(usize, usize) -> bool,
    ) -> Option<usize> {
        self.prepare(covers, Change::Growth, bytes);
        (0..covers.len()).find(|&at| {
            let step = self.step(covers, at, bytes);
            // What is reserved is there, even where a limit was lowered meanwhile.
            let is_reserved = step == 0 && bytes > 0 && at > 0;
            !is_reserved && !fits(at, step)
        })
    }

    /// Charges all accounts, which have room.
    pub(super) fn take_each(&self, bytes: usize, blocks: usize) {
        self.accounts().iter().for_each(|account| account.take(bytes, blocks));
        let Some(covers) = &self.covers else { return };
        self.prepare(covers, Change::Growth, bytes);
        self.change_each(covers, bytes, |account, step| account.subtract_pending(bytes - step), add);
    }

    /// Undoes [`give_back_each`](Self::give_back_each) of no block: nothing was made.
    #[cfg(ctxalloc_whole)]
    pub(super) fn put_back_each(&self, bytes: usize) {
        self.accounts().iter().for_each(|account| account.put_back(bytes));
        let Some(covers) = &self.covers else { return };
        self.prepare(covers, Change::Growth, bytes);
        self.change_each(covers, bytes, |account, step| account.subtract_pending(bytes - step), add);
    }

    /// Gives a charge back to all accounts. Returns whether one of them is wanted.
    #[inline]
    pub(super) fn give_back_each(&self, bytes: usize, blocks: usize) -> bool {
        let mut is_wanted = false;
        for account in self.accounts() {
            account.give_back(bytes, blocks);
            is_wanted |= account.is_wanted();
        }
        if let Some(covers) = &self.covers {
            self.prepare(covers, Change::Shrinkage, bytes);
            self.change_each(covers, bytes, |account, step| account.add_pending(bytes - step), subtract);
        }
        is_wanted
    }

    /// Adds bytes of a block that is being made.
    pub(super) fn add_pending_each(&self, bytes: usize) {
        let Some(covers) = &self.covers else {
            return self.accounts().iter().for_each(|account| account.add_pending(bytes));
        };
        self.prepare(covers, Change::Growth, bytes);
        self.change_each(covers, bytes, Account::add_pending, add);
    }

    /// Takes them off again. Returns whether an account is wanted.
    pub(super) fn subtract_pending_each(&self, bytes: usize) -> bool {
        match &self.covers {
            None => self.accounts().iter().for_each(|account| account.subtract_pending(bytes)),
            Some(covers) => {
                self.prepare(covers, Change::Shrinkage, bytes);
                self.change_each(covers, bytes, Account::subtract_pending, subtract);
            }
        }
        self.accounts().iter().any(|account| account.is_wanted())
    }

    fn change_each(
        &self,
        covers: &[Cover],
        bytes: usize,
        pending: impl Fn(&Account, usize),
        covered: impl Fn(&AtomicUsize, usize),
    ) {
        for (at, account) in self.accounts().iter().enumerate() {
            let step = self.step(covers, at, bytes);
            pending(account, step);
            if covers[at].is_drawn_on {
                covered(&self.reservation(at).covered_bytes, step);
            }
        }
    }
}

/// For the queue: the chain of a request that is to have a reservation, and of which nobody knows yet.
impl Chain {
    /// The accounts that a reservation is taken from.
    pub(crate) fn above(&self) -> &[Arc<Account>] {
        // The own account is the youngest.
        self.accounts().get(1..).unwrap_or_default()
    }

    /// The lowest of their limits; `None`: there are none.
    pub(crate) fn least_limit_above(&self) -> Option<usize> {
        self.above().iter().map(|account| account.limit_bytes()).min()
    }

    /// The account that can never give so many bytes, however little is in use, if any.
    pub(crate) fn never_fits(&self, bytes: usize) -> Option<&Arc<Account>> {
        let (mut promises, mut draws) = (false, false);
        for account in self.accounts() {
            // What comes out of a guarantee does not reach those above it.
            if bytes > account.limit_bytes() && !draws || bytes == UNLIMITED {
                return Some(account);
            }
            promises |= account.promised_bytes() > 0;
            draws |= account.reservation.is_some() && !account.is_of_request();
        }
        if promises || draws { self.never_fits_beside_promises(bytes) } else { None }
    }

    /// Reserves `bytes` of all accounts above, or of none. `is_closed`: whether somebody waits there who comes first;
    /// such accounts, and those that have no room, are an obstacle if they would have to give anything. The position
    /// of the youngest that has no room is added to `full`, and it becomes wanted, where that is given: while a
    /// tenant's own limit stands in the way, nobody of another tenant waits behind it. So are those of budgets below an
    /// obstacle of whose guarantees it would have drawn, which others would use up meanwhile. Returns whether it was
    /// taken.
    pub(crate) fn admit(
        &self,
        bytes: usize,
        is_closed: impl Fn(&Account) -> bool,
        mut full: Option<&mut Vec<usize>>,
    ) -> bool {
        let Some(own) = &self.own.reservation else { return true };
        let Some(covers) = &self.covers else {
            own.bytes.store(bytes, RELAXED); // nobody is above
            return true;
        };
        if covers.is_own() && self.admit_at_once(own, bytes) {
            return true;
        }
        if let Some(full) = &mut full {
            full.reserve(covers.len()); // not under the locks
        }
        with_exact(self.above(), || {
            // The own reservation is empty: all of it is passed on.
            self.pass_on(covers, Change::Growth, bytes);
            let gives = |at: usize| self.step(covers, at, 0) > 0;
            let above = 1..covers.len();
            let mut want = |at: usize| {
                if let Some(full) = &mut full {
                    self.accounts()[at].wanted.store(true, RELAXED);
                    self.accounts()[at].set_ceiling();
                    full.push(at);
                }
            };
            if let Some(at) = above.clone().find(|&at| gives(at) && is_closed(&self.accounts()[at])) {
                self.guarantees_below(covers, at).for_each(want);
                return false;
            }
            let is_full = |&at: &usize| gives(at) && !self.accounts()[at].has_room_for(self.step(covers, at, 0));
            if let Some(youngest) = above.clone().find(is_full) {
                want(youngest);
                self.guarantees_below(covers, youngest).for_each(want);
                return false;
            }
            own.bytes.store(bytes, RELAXED);
            self.change_above(covers, Account::add_pending, add);
            true
        })
    }

    /// [`admit`](Self::admit) where each account above has room, and nobody waits there; else nothing has changed. Of
    /// a chain in which no other account has a reservation.
    fn admit_at_once(&self, own: &Reservation, bytes: usize) -> bool {
        let above = self.above();
        with_all(above, || {
            let is_free = above.iter().all(|account| !account.is_wanted() && account.has_room_for(bytes));
            if is_free {
                own.bytes.store(bytes, RELAXED);
                above.iter().for_each(|account| account.add_pending(bytes));
            }
            is_free
        })
    }

    /// The positions of the guarantees below this account that give a part of what is to be reserved.
    fn guarantees_below(&self, covers: &[Cover], at: usize) -> impl Iterator<Item = usize> {
        let below = |at: usize| Some(covers[at].under).filter(|&below| below != NOBODY && below > 0);
        let each = std::iter::successors(below(at), move |&at| below(at as usize)).map(|at| at as usize);
        each.filter(|&at| self.reservation(at).step.load(RELAXED) < self.step(covers, at, 0))
    }

    /// The account why `bytes` cannot be reserved now, if any: the youngest that has no room for what it would have to
    /// give of them, else the youngest that would have to give some and that somebody waits for.
    pub(crate) fn obstacle(&self, bytes: usize) -> Option<&Arc<Account>> {
        let (Some(_), Some(covers)) = (&self.own.reservation, &self.covers) else { return None };
        let at = with_exact(self.above(), || {
            self.pass_on(covers, Change::Growth, bytes);
            let gives = |at: &usize| self.step(covers, *at, 0) > 0;
            let is_full = |at: &usize| !self.accounts()[*at].has_room_for(self.step(covers, *at, 0));
            let above = || (1..covers.len()).filter(gives);
            above().find(is_full).or_else(|| above().find(|&at| self.accounts()[at].is_wanted()))
        });
        at.map(|at| &self.accounts()[at])
    }

    /// Notes at each account above how much it lacks for so many bytes; whether one lacks any.
    pub(super) fn note_missing(&self, bytes: usize) -> bool {
        let (Some(_), Some(covers)) = (&self.own.reservation, &self.covers) else { return false };
        with_exact(self.above(), || {
            self.pass_on(covers, Change::Growth, bytes);
            let mut lacks = false;
            for at in 1..covers.len() {
                let (account, step) = (&self.accounts()[at], self.step(covers, at, 0));
                if step > 0 && !account.has_room_for(step) {
                    let wanted = account.counted_bytes().saturating_add(step);
                    account.missing.note(wanted.saturating_sub(account.limit_bytes()));
                    lacks = true;
                }
            }
            lacks
        })
    }

    /// How many bytes of a reservation of `bytes` an account above would have to give.
    pub(crate) fn wants(&self, bytes: usize, account: &Account) -> usize {
        let (Some(_), Some(covers)) = (&self.own.reservation, &self.covers) else { return 0 };
        let Some(at) = self.accounts().iter().position(|other| other.id == account.id) else { return 0 };
        with_all(self.above(), || {
            self.pass_on(covers, Change::Growth, bytes);
            self.step(covers, at, 0)
        })
    }

    /// How many bytes the account at this position would get back if this chain gave `bytes` back.
    pub(super) fn passes_back(&self, bytes: usize, at: usize) -> usize {
        let Some(covers) = &self.covers else { return bytes };
        with_all(self.accounts(), || {
            self.prepare(covers, Change::Shrinkage, bytes);
            self.step(covers, at, bytes)
        })
    }

    /// Returns what the own reservation has left: the request has ended, or never began. A second time does nothing.
    pub(crate) fn return_reservation(&self) {
        self.return_reservation_and(|| ());
    }

    /// The same, and `work`, all of it under the locks that it needs: at least the own account's.
    pub(super) fn return_reservation_and<R>(&self, work: impl FnOnce() -> R) -> R {
        let (Some(own), Some(covers)) = (&self.own.reservation, &self.covers) else {
            return self.with_own_loans_back(work);
        };
        let (is_wanted, answer) = with_all(self.accounts(), || {
            let (reserved, covered) = (own.bytes.load(RELAXED), own.covered_bytes.load(RELAXED));
            own.bytes.store(0, RELAXED);
            let left = reserved.saturating_sub(covered);
            if covers.is_own() {
                self.above().iter().for_each(|account| account.subtract_pending(left));
            } else {
                self.pass_on(covers, Change::Shrinkage, left);
                self.change_above(covers, Account::subtract_pending, subtract);
            }
            (self.above().iter().any(|account| account.is_wanted()), work())
        });
        if is_wanted {
            room_came();
        }
        answer
    }

    /// How many bytes are reserved for the request.
    pub(crate) fn reserved_bytes(&self) -> usize {
        self.own.reservation.as_ref().map_or(0, |own| own.bytes.load(RELAXED))
    }

    /// [`prepare`](Self::prepare) where the own reservation itself changes by `bytes`.
    fn pass_on(&self, covers: &[Cover], change: Change, bytes: usize) {
        self.reservation(0).step.store(bytes, RELAXED);
        for (at, _) in covers.iter().enumerate().skip(1).filter(|(_, cover)| cover.is_drawn_on) {
            let reservation = self.reservation(at);
            reservation.step.store(reservation.passes_on(change, self.step(covers, at, 0)), RELAXED);
        }
    }

    /// Changes the accounts above by what [`pass_on`](Self::pass_on) worked out.
    fn change_above(&self, covers: &[Cover], pending: impl Fn(&Account, usize), covered: impl Fn(&AtomicUsize, usize)) {
        for at in 1..covers.len() {
            let step = self.step(covers, at, 0);
            pending(&self.accounts()[at], step);
            if covers[at].is_drawn_on {
                covered(&self.reservation(at).covered_bytes, step);
            }
        }
    }
}
