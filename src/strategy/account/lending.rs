//! What an account lends to a request below it: bytes that the request may use without telling the account.
//! `docs/decisions/0052-accounts-lend-to-requests.md` says why, and why all numbers stay exact.
//!
//! A request uses what it was lent by changing its own numbers only, up to its `ceiling`. What it used is the
//! difference between these and what they were when the loan was made. Under the account's lock, always:
//!
//! - it has lent nothing that would be a new peak, or more than the limit, if all of it were used;
//! - it lends nothing while somebody waits for room in it, or while it has a floor: those look at each change;
//! - whoever has to know its numbers calls the loans in ([`recall`]), and no request has any then.

use super::lent::{Counted, FIRST_LOANS, Loan, MAX_LOANS};
use super::{Account, RELAXED, add, subtract};
use crate::sync::{wait_for_brief_sections, with_all};
use crate::unattributed::unattributed;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// The least that is worth the work, and the most, so that something is left for others.
const MIN_LOAN: usize = 128;
const MAX_LOAN: usize = 1 << 20;

/// Calls in what these accounts have lent: afterwards their numbers are what they say. Whether there was anything.
/// Under the locks of these accounts.
pub(super) fn recall(accounts: &[Arc<Account>]) -> bool {
    recall_each(accounts.iter().map(|account| &**account))
}

/// Runs `work` under the locks of these accounts, none of which has lent anything then.
pub(super) fn with_exact<R>(accounts: &[Arc<Account>], work: impl FnOnce() -> R) -> R {
    with_all(accounts, || {
        recall(accounts);
        work()
    })
}

#[inline]
fn recall_each<'a>(accounts: impl Iterator<Item = &'a Account> + Clone) -> bool {
    let lends = accounts.clone().any(Account::lends);
    if lends {
        recall_lenders(accounts.filter(|account| account.lends()));
    }
    lends
}

#[cold]
fn recall_lenders<'a>(lenders: impl Iterator<Item = &'a Account> + Clone) {
    let loans = || lenders.clone().flat_map(Account::loans);
    // Of one that is inside of it nobody knows where: it ends by itself, and the next one finds that nothing is lent.
    loans().for_each(|loan| loan.borrower.ceiling.store(0, RELAXED));
    wait_for_brief_sections(loans().map(|loan| &loan.borrower.lock));
    lenders.for_each(Account::collect_all);
}

/// All of it under the account's lock.
impl Account {
    /// Whether anything of it is lent.
    #[inline]
    pub(super) fn lends(&self) -> bool {
        self.lending.count.load(RELAXED) > 0
    }

    /// Whether anything of it is lent: for one who has not its lock.
    pub(super) fn may_lend(&self) -> bool {
        self.lending.count.load(Ordering::Acquire) > 0
    }

    /// How many bytes of it are lent, at most some of which are in use.
    #[inline]
    pub(super) fn lent_bytes(&self) -> usize {
        self.lending.bytes.load(RELAXED)
    }

    #[allow(unsafe_code, reason = "a cell under the account's lock")]
    fn loans(&self) -> impl Iterator<Item = &Loan<Self>> {
        // SAFETY: under the account's lock, and whoever looks at them changes none meanwhile.
        unsafe { self.lending.loans() }.iter()
    }

    /// [`recall`] of this one.
    pub(super) fn call_in(&self) -> bool {
        recall_each(std::iter::once(self))
    }

    fn counted(&self) -> Counted {
        Counted {
            live_bytes: self.live_bytes.load(RELAXED),
            total_bytes: self.total_bytes.load(RELAXED),
            live_blocks: self.live_blocks.load(RELAXED),
            total_blocks: self.total_blocks.load(RELAXED),
            own_blocks: self.own_blocks.load(RELAXED),
        }
    }

    /// What its numbers are with what the borrower used of a loan, which may be less than nothing.
    fn counted_with(&self, loan: &Loan<Self>) -> Counted {
        let (own, before, now) = (self.counted(), loan.before, loan.borrower.counted());
        let is_tab = loan.borrower.is_tab_of(self);
        Counted {
            live_bytes: own.live_bytes.wrapping_add(now.live_bytes.wrapping_sub(before.live_bytes)),
            total_bytes: own.total_bytes.saturating_add(now.total_bytes.saturating_sub(before.total_bytes)),
            live_blocks: own.live_blocks.wrapping_add(now.live_blocks.wrapping_sub(before.live_blocks)),
            total_blocks: own.total_blocks.saturating_add(now.total_blocks.saturating_sub(before.total_blocks)),
            own_blocks: match now.own_blocks.wrapping_sub(before.own_blocks) {
                change if is_tab => own.own_blocks.wrapping_add(change),
                _ => own.own_blocks,
            },
        }
    }

    /// Counts what the borrower used of it. Nobody uses it any more. While others are not collected, it may be that
    /// they have made what this one gave back: then numbers are below 0, and wrap.
    fn collect(&self, loan: &Loan<Self>) {
        let counted = self.counted_with(loan);
        self.total_bytes.store(counted.total_bytes, RELAXED);
        self.live_blocks.store(counted.live_blocks, RELAXED);
        self.total_blocks.store(counted.total_blocks, RELAXED);
        self.live_bytes.store(counted.live_bytes, RELAXED);
        self.own_blocks.store(counted.own_blocks, RELAXED);
        subtract(&self.lending.bytes, loan.bytes);
        // Release: who finds no loan, without the lock, finds what was collected (`live_bytes`).
        self.lending.count.store(self.lending.count.load(RELAXED) - 1, Ordering::Release);
        self.set_ceiling();
    }

    #[allow(unsafe_code, reason = "a cell under the account's lock")]
    fn collect_all(&self) {
        // SAFETY: under the account's lock; what is done with a loan reaches no others.
        let loans = unsafe { self.lending.loans() };
        loans.drain(..).for_each(|loan| self.collect(&loan));
        debug_assert!(self.live_bytes.load(RELAXED) <= self.peak_bytes(), "more was used than was lent");
    }

    /// Counts what this request, or tab, used of it; under the request's own lock too.
    #[allow(unsafe_code, reason = "a cell under the account's lock")]
    pub(super) fn collect_from(&self, borrower: &Self) {
        if !self.lends() {
            return;
        }
        // SAFETY: under the account's lock; what is done with the loan reaches no others.
        let loans = unsafe { self.lending.loans() };
        let Some(at) = loans.iter().position(|loan| std::ptr::eq(&*loan.borrower, borrower)) else { return };
        let with = self.counted_with(&loans[at]);
        if [with.live_bytes, with.live_blocks, with.own_blocks].iter().any(|&number| number > isize::MAX as usize) {
            self.call_in();
        } else {
            self.collect(&loans.swap_remove(at));
        }
    }

    /// Makes room for one more loan, if it has too few by now. Outside of all locks.
    #[allow(unsafe_code, reason = "a cell under the account's lock")]
    pub(super) fn make_room_for_loan(&self) {
        let room = self.lending.room.load(RELAXED);
        if room == MAX_LOANS || self.lending.count.load(RELAXED) < room {
            return;
        }
        let _unattributed = unattributed();
        let mut fresh = Vec::with_capacity((4 * room).clamp(FIRST_LOANS, MAX_LOANS));
        self.lock.with(|| {
            // SAFETY: under the account's lock.
            let loans = unsafe { self.lending.loans() };
            if loans.capacity() < fresh.capacity() {
                fresh.append(loans);
                std::mem::swap(loans, &mut fresh);
                self.lending.room.store(loans.capacity().min(MAX_LOANS), RELAXED);
            }
        }); // what was there before is freed after it
    }

    /// How many bytes it can lend to a request to which it lends nothing.
    pub(super) fn lendable_bytes(&self) -> usize {
        if self.lending.room.load(RELAXED) == 0 || self.is_wanted() || self.floor_bytes.load(RELAXED) > 0 {
            return 0;
        }
        if self.lending.count.load(RELAXED) == self.lending.room.load(RELAXED) {
            self.call_in();
        }
        let in_use = self.live_bytes.load(RELAXED) + self.lent_bytes();
        let below_peak = self.peak_bytes().saturating_sub(in_use);
        let below_limit = self.enforced_bytes.load(RELAXED).saturating_sub(in_use.saturating_add(self.pending_bytes()));
        let bytes = below_peak.min(below_limit);
        if bytes < MIN_LOAN { 0 } else { bytes.min(MAX_LOAN) }
    }

    /// Lends so many bytes, which [`lendable_bytes`](Self::lendable_bytes) said, to a request. Under its lock too.
    #[allow(unsafe_code, reason = "a cell under the account's lock")]
    pub(super) fn lend(&self, borrower: &Arc<Self>, bytes: usize) {
        let loan = Loan { borrower: Arc::clone(borrower), bytes, before: borrower.counted() };
        // SAFETY: under the account's lock.
        let loans = unsafe { self.lending.loans() };
        debug_assert!(loans.len() < loans.capacity(), "nothing is allocated under a lock");
        loans.push(loan);
        add(&self.lending.bytes, bytes);
        // Release: who finds a loan, without the lock, takes the lock.
        self.lending.count.store(self.lending.count.load(RELAXED) + 1, Ordering::Release);
        self.set_ceiling();
    }

    /// Its live bytes, with what is lent and used. The loans stay.
    pub(super) fn live_bytes_with_loans(&self) -> usize {
        let used =
            |loan: &Loan<Self>| loan.borrower.live_bytes.load(Ordering::Acquire).wrapping_sub(loan.before.live_bytes);
        self.loans().fold(self.live_bytes.load(RELAXED), |sum, loan| sum.wrapping_add(used(loan)))
    }

    /// Calls its loans in if a growth by so many bytes would break what they rely on.
    #[inline]
    pub(super) fn call_in_for_growth(&self, bytes: usize) {
        if self.lends() && self.has_lent_too_much_for(bytes) {
            self.call_in();
        }
    }

    #[cold]
    fn has_lent_too_much_for(&self, bytes: usize) -> bool {
        let live = self.live_bytes.load(RELAXED).saturating_add(self.lent_bytes()).saturating_add(bytes);
        live > self.peak_bytes() || live.saturating_add(self.pending_bytes()) > self.enforced_bytes.load(RELAXED)
    }
}
