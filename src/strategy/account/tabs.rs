//! Tabs: what each thread counts of a request that several threads use.
//!
//! A lock that a second thread has taken is shared for ever, so no thread charges such a request alone. Instead each
//! has an account of its own below it, whose lock it owns, and which borrows from the request and from all accounts
//! above (`lending`). Its numbers count only as differences. A block may be freed on another thread's tab than it was
//! made on, so they begin in the middle of what a number can be.

use super::lent::Credit;
use super::{Account, Kind, OwnerLock, RELAXED};
use crate::sync::{Section, place_of_this_thread};
use crate::unattributed::unattributed;
use std::array;
use std::ptr::null_mut;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

/// How many threads may have one, and at how many places a thread looks for its own.
const MAX_TABS: usize = 32;
const LOOKS: usize = 8;

/// What a tab's numbers begin with: no request has so much of anything.
const MIDDLE: usize = 1 << (usize::BITS - 2);

/// A place that is filled once, before this goes.
#[derive(Debug)]
struct Once<T>(AtomicPtr<T>);

impl<T> Once<T> {
    const fn new() -> Self {
        Self(AtomicPtr::new(null_mut()))
    }

    #[inline]
    #[allow(unsafe_code, reason = "a box behind an atomic pointer")]
    fn get(&self) -> Option<&T> {
        // SAFETY: NULL, or a box that goes with this place. Acquire pairs with the exchange in `fill`.
        unsafe { self.0.load(Ordering::Acquire).as_ref() }
    }

    /// Fills it; false if it was filled before, or by another thread just now.
    #[allow(unsafe_code, reason = "a box of our own")]
    fn fill(&self, value: T) -> bool {
        let value = Box::into_raw(Box::new(value));
        let is_ours = self.0.compare_exchange(null_mut(), value, Ordering::AcqRel, Ordering::Relaxed).is_ok();
        if !is_ours {
            // SAFETY: made above, and seen by nobody.
            drop(unsafe { Box::from_raw(value) });
        }
        is_ours
    }
}

impl<T> Drop for Once<T> {
    #[allow(unsafe_code, reason = "a box behind an atomic pointer")]
    fn drop(&mut self) {
        let value = *self.0.get_mut();
        if !value.is_null() {
            // SAFETY: the box from `fill`, which nobody can reach any more.
            drop(unsafe { Box::from_raw(value) });
        }
    }
}

/// The tabs of one request, at places that depend on the thread.
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

    /// This thread's, if it has one.
    #[inline]
    pub(super) fn here(&self) -> Option<&Arc<Account>> {
        self.places()?.map_while(Once::get).find(|tab| tab.lock.is_owned_here())
    }

    /// The same, in a section of its lock.
    #[inline(always)]
    pub(super) fn enter(&self) -> Option<(&Account, Section)> {
        let places = self.0.get()?;
        let first: &Account = places[place_of_this_thread(MAX_TABS)?].get()?;
        match first.lock.enter_owned() {
            Some(section) => Some((first, section)),
            None => self.enter_another(),
        }
    }

    #[cold]
    #[inline(never)]
    fn enter_another(&self) -> Option<(&Account, Section)> {
        self.places()?.map_while(Once::get).find_map(|tab| Some((&**tab, tab.lock.enter_owned()?)))
    }

    /// Where this thread looks for its own, or for room for one: the first that is empty, or the last.
    #[inline]
    fn places(&self) -> Option<impl Iterator<Item = &Once<Arc<Account>>>> {
        let places = self.0.get()?; // most requests have none
        let first = place_of_this_thread(MAX_TABS)?;
        Some((first..first + LOOKS).map(|place| &places[place % MAX_TABS]))
    }

    /// Makes one for this thread, unless it has one or there is no room for it. Outside of all locks.
    pub(super) fn make_here(&self, request: &Account) {
        let _unattributed = unattributed();
        if !self.are_there() {
            self.0.fill(array::from_fn(|_| Once::new()));
        }
        if self.here().is_none()
            && let Some(mut places) = self.places()
        {
            let _has_room = places.any(|place| place.get().is_none() && place.fill(Account::tab(request)));
        }
    }
}

impl Account {
    /// A tab of this thread's for a request.
    fn tab(request: &Self) -> Arc<Self> {
        let kind = Kind::Request {
            ended: AtomicBool::new(false),
            own_blocks: AtomicUsize::new(MIDDLE),
            refusals: AtomicU64::new(0),
            begun: Duration::ZERO,
            overdraft_bytes: 0,
            above: Box::default(),
        };
        let mut tab = Self::new(None, None, kind, OwnerLock::new_owned());
        tab.credit = Credit::of_tab(request.number());
        tab.ceiling.store(0, RELAXED);
        tab.live_bytes.store(MIDDLE, RELAXED);
        tab.live_blocks.store(MIDDLE, RELAXED);
        Arc::new(tab)
    }
}
