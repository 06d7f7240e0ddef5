//! How a request borrows from the accounts above it, and what it may do with that: `lending` has the other side.
//!
//! Only a request that has nothing below it borrows. So its own numbers change by its own blocks alone: on credit, or
//! under the locks of all its accounts. In the second case it gives back first what it has borrowed.

use super::lending::recall;
use super::{Account, Chain, Kind, RELAXED};
use crate::sync::with_all;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};

/// For how many charges a request does not ask again where nobody had anything to lend.
const AGAIN: u32 = 4;

/// What it borrows at least, if there is so much, beyond what it had in use at its own peak.
const STEP: usize = 16 << 10;
/// The same for one that counts the whole of itself: each sample of its small blocks stands for about one [`STEP`].
const WHOLE_STEP: usize = 16 * STEP;

/// For the account of a request.
impl Account {
    /// Whether accounts above may have loans of it.
    pub(super) fn borrows(&self) -> bool {
        self.credit.borrows.load(RELAXED)
    }

    /// Whether it, or a tab of it, should borrow now; if not, it was asked once more. Under its lock.
    pub(super) fn wants_to_borrow(&self) -> bool {
        let wait = self.credit.wait.load(RELAXED);
        if wait > 0 {
            self.credit.wait.store(wait - 1, RELAXED);
        }
        wait == 0
    }

    /// Whether its own numbers change by its own blocks alone, and on this thread.
    pub(super) fn may_borrow_itself(&self) -> bool {
        self.lock.is_owned_here() && !self.credit.is_above_others.load(RELAXED)
    }

    /// Whether it is a tab of this request.
    pub(super) fn is_tab_of(&self, request: &Self) -> bool {
        self.credit.tab_of == Some(request.number())
    }

    /// Gives back what these accounts, which are all above it, have lent it. Under all the locks.
    pub(super) fn give_loans_back(&self, above: &[Arc<Self>]) {
        if self.borrows() {
            self.ceiling.store(0, RELAXED);
            above.iter().for_each(|account| account.collect_from(self));
            self.credit.borrows.store(false, RELAXED);
        }
    }

    /// Another account will be below it: it borrows no more, for its numbers change by others' blocks too.
    pub(super) fn is_below_no_more(self: &Arc<Self>) {
        let Kind::Request { above, .. } = &self.kind else { return };
        // Acquire: pairs with the Release below.
        if above.is_empty() || self.credit.is_above_others.load(Ordering::Acquire) {
            return;
        }
        let accounts: Vec<Arc<Self>> =
            std::iter::once(Arc::clone(self)).chain(above.iter().filter_map(Weak::upgrade)).collect();
        with_all(&accounts, || {
            self.give_loans_back(&accounts[1..]);
            self.credit.is_above_others.store(true, Ordering::Release);
        });
    }
}

impl Chain {
    /// Runs `work` under the locks of all accounts, which have lent this chain's request nothing then, nor this
    /// thread's tab of it. To others they may have.
    #[inline]
    pub(super) fn with_accounts<R>(&self, work: impl FnOnce() -> R) -> R {
        with_all(self.accounts(), || {
            self.give_own_loans_back();
            work()
        })
    }

    /// Under the locks of all accounts.
    pub(super) fn give_own_loans_back(&self) {
        self.own.give_loans_back(self.accounts());
        if let Some(tab) = self.tabs.here() {
            tab.give_loans_back(self.accounts());
        }
    }

    /// Runs `work` at least under the own account's lock, when nothing is lent to it any more, nor to a tab of it.
    #[inline]
    pub(super) fn with_own_loans_back<R>(&self, work: impl FnOnce() -> R) -> R {
        // Most requests never borrow: then their own lock is enough. It may begin to meanwhile.
        let borrows = || self.own.borrows() || self.tabs.are_there();
        let mut work = Some(work);
        let mut run = || work.take().map(|work| work());
        let done = if borrows() { None } else { self.own.lock.with(|| if borrows() { None } else { run() }) };
        let with_all_back = || {
            self.with_accounts(|| {
                if self.tabs.are_there() {
                    recall(self.accounts());
                }
                run()
            })
        };
        done.or_else(with_all_back).expect("it ran in one of the two")
    }

    /// Before [`borrow`](Self::borrow), outside of the locks: what has to be allocated for it.
    #[inline]
    pub(super) fn ready_to_borrow(&self) {
        if self.own.credit.wait.load(RELAXED) == 0 && self.is_plain() && self.own.is_of_request() {
            self.make_ready_to_borrow();
        }
    }

    #[cold]
    fn make_ready_to_borrow(&self) {
        let lenders = if self.own.lock.is_shared() {
            self.tabs.make_here(&self.own);
            self.accounts()
        } else {
            self.above()
        };
        lenders.iter().for_each(|account| account.make_room_for_loan());
    }

    /// Borrows of all accounts above, if each has something to lend and this thread owns the request; where threads
    /// share it, for this thread's tab. Under the locks of all.
    pub(super) fn borrow(&self) {
        let own: &Arc<Account> = &self.own;
        self.open_again();
        if !self.is_plain() || !own.is_of_request() || !own.wants_to_borrow() {
            return;
        }
        let (borrower, lenders) = if own.may_borrow_itself() {
            (own, self.above())
        } else if let Some(tab) = self.tabs.here() {
            (tab, self.accounts())
        } else {
            return;
        };
        if lenders.is_empty() {
            return;
        }
        let bytes =
            if !own.looks_at_changes() { lenders.iter().map(|account| account.lendable_bytes()).min() } else { None };
        let Some(bytes) = bytes.filter(|&bytes| bytes > 0) else { return own.credit.wait.store(AGAIN, RELAXED) };
        let live = borrower.live_bytes.load(RELAXED);
        // As much as it needed before, and of what threads share no more than a part each: the rest is for others, who
        // would otherwise call it in.
        let step = if self.whole.is_some() { WHOLE_STEP } else { STEP };
        let needed = borrower.peak_bytes().saturating_sub(live).max(step);
        let bytes = needed.min(bytes / self.tabs.count().max(1));
        lenders.iter().for_each(|account| account.lend(borrower, bytes));
        borrower.ceiling.store((live + bytes).min(borrower.enforced_bytes.load(RELAXED)), RELAXED);
        borrower.credit.borrows.store(true, RELAXED);
    }
}
