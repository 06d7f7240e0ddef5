//! Tabs: what each thread counts of a request that several threads use.
//!
//! A lock that a second thread has taken is shared for ever, so no thread charges such a request alone. Instead each
//! has an account of its own below it, whose lock it owns, and which borrows from the request and from all accounts
//! above (`lending`). Its numbers count only as differences. A block may be freed on another thread's tab than it was
//! made on, so they begin in the middle of what a number can be. The tab of a thread that has ended, and what it has
//! borrowed, is the next thread's.

use super::few::Few;
use super::lent::Credit;
use super::{Account, Kind, OwnerLock, RELAXED};
use crate::sync::{Here, Once, Section};
use crate::unattributed::unattributed;
use std::array;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::time::Duration;

/// How many threads may have one, and at how many places a thread looks for its own.
const MAX_TABS: usize = 32;
const LOOKS: usize = 8;

/// What a tab's numbers begin with: no request has so much of anything.
const MIDDLE: usize = 1 << (usize::BITS - 2);

/// The tabs of one request, at places that depend on the thread's record: who has that of an ended thread finds that
/// one's tab in its own place, and is its owner already.
#[derive(Debug)]
pub(super) struct Tabs(Once<[Once<Arc<Account>>; MAX_TABS]>);

impl Tabs {
    pub(super) const fn none() -> Self {
        Self(Once::new())
    }

    #[inline]
    pub(super) fn are_there(&self) -> bool {
        self.0.get().is_some()
    }

    /// How many threads have one, or had.
    pub(super) fn count(&self) -> usize {
        self.0.get().map_or(0, |places| places.iter().filter(|place| place.get().is_some()).count())
    }

    /// This thread's, if it has one.
    #[inline]
    pub(super) fn here(&self) -> Option<&Arc<Account>> {
        self.places()?.map_while(Once::get).find(|tab| tab.lock.is_owned_here())
    }

    /// The same, in a section of its lock, if it has borrowed something: who collects the loan collects whatever
    /// changes in the section.
    #[inline(always)]
    pub(super) fn enter(&self) -> Option<(&Account, Section)> {
        let places = self.0.get()?;
        let here = Here::now()?;
        let first: &Account = places[here.number() % MAX_TABS].get()?;
        let Some(section) = first.lock.enter_owned_by(here) else { return self.enter_another() };
        if first.ceiling.load(RELAXED) > 0 { Some((first, section)) } else { None }
    }

    #[cold]
    #[inline(never)]
    fn enter_another(&self) -> Option<(&Account, Section)> {
        let own = self.places()?.map_while(Once::get).find_map(|tab| Some((&**tab, tab.lock.enter_owned()?)));
        own.filter(|(tab, _section)| tab.ceiling.load(RELAXED) > 0)
    }

    /// Where this thread looks for its own, or for room for one: the first that is empty, or the last.
    #[inline]
    fn places(&self) -> Option<impl Iterator<Item = &Once<Arc<Account>>>> {
        let places = self.0.get()?; // most requests have none
        let first = Here::now()?.number();
        Some((first..first + LOOKS).map(|place| &places[place % MAX_TABS]))
    }

    /// Makes one for this thread, unless it has one, inherits one, or there is no room for it. Outside of all locks.
    pub(super) fn make_here(&self, request: &Account) {
        let _unattributed = unattributed();
        if !self.are_there() {
            self.0.fill(array::from_fn(|_| Once::new()));
        }
        if self.here().is_none()
            && let Some(mut places) = self.places()
        {
            let _has_room = places.any(|place| match place.get() {
                Some(tab) => tab.lock.inherit(),
                None => place.fill(Account::tab(request)),
            });
        }
    }
}

impl Account {
    /// A tab of this thread's for a request.
    fn tab(request: &Self) -> Arc<Self> {
        let kind = Kind::Request {
            ended: AtomicBool::new(false),
            refusals: AtomicU64::new(0),
            begun: Duration::ZERO,
            overdraft_bytes: 0,
            above: Few::new(),
        };
        let mut tab = Self::new(None, None, kind, OwnerLock::new_owned(), None);
        tab.credit = Credit::of_tab(request.number());
        tab.ceiling.store(0, RELAXED);
        tab.live_bytes.store(MIDDLE, RELAXED);
        tab.live_blocks.store(MIDDLE, RELAXED);
        tab.own_blocks.store(MIDDLE, RELAXED);
        Arc::new(tab)
    }
}

#[cfg(all(test, not(any(ctxalloc_loom, miri))))]
mod tests {
    use super::super::lending::with_exact;
    use super::super::{Chain, RELAXED};
    use super::MAX_TABS;
    use crate::sync::Here;
    use std::sync::{Arc, Barrier};
    use std::thread;

    #[test]
    fn threads_in_turns_each_find_a_tab_in_their_own_place() {
        let chain = Chain::of_request(None, None, 0, None, None, true, false).expect("it is not inside of another one");
        let charge = || {
            assert!(chain.take_block(100, false, || ()));
            assert!(!chain.give_block_back(100));
        };
        let has_it_near = || {
            let here = Here::now().expect("it has charged a block");
            let places = chain.tabs.0.get().expect("two threads use it");
            let near = places[here.number() % MAX_TABS].get().expect("it has a tab");
            Arc::ptr_eq(near, chain.tabs.here().expect("it has a tab"))
        };
        charge();
        if !chain.own.lock.is_owned_here() {
            return; // without `membarrier` no thread owns a lock
        }
        for _ in 0..30 {
            let both = Barrier::new(2);
            let one = || {
                both.wait();
                (0..200).for_each(|_| charge());
                both.wait();
                assert!(has_it_near());
            };
            thread::scope(|scope| (0..2).for_each(|_| drop(scope.spawn(one))));
        }
        with_exact(chain.accounts(), || {
            assert_eq!((chain.own.live_bytes.load(RELAXED), chain.own.live_blocks.load(RELAXED)), (0, 0));
            assert_eq!(chain.own.total_blocks.load(RELAXED), 1 + 30 * 2 * 200);
        });
    }
}
