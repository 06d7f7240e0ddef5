//! Which reservations a chain draws on, and who waits for room in an account. What it is all for: `reservation.rs`.

use super::reserved::{Cover, NOBODY};
use super::{Account, Kind, RELAXED};
use std::sync::atomic::AtomicUsize;
use std::sync::{Arc, Weak};

impl Account {
    /// Whether a charge to this account goes to `other` too.
    fn is_below(&self, other: &Arc<Self>) -> bool {
        match &self.kind {
            Kind::Request { above, .. } => above.iter().any(|above| Weak::as_ptr(above) == Arc::as_ptr(other)),
            Kind::Budget { parent } => {
                let above = std::iter::successors(parent.as_ref(), |account| match &account.kind {
                    Kind::Budget { parent } => parent.as_ref(),
                    Kind::Request { .. } => None, // whose chain a budget below it has as its own
                });
                // A parent is older than what is below it.
                above.take_while(|above| above.id >= other.id).any(|above| above.id == other.id)
            }
        }
    }

    /// The accounts above a request that has a reservation and has not ended, for requests inside of it.
    pub(super) fn above_reservation(&self) -> impl Iterator<Item = Arc<Self>> {
        let above: &[_] = match &self.kind {
            Kind::Request { above, .. } if self.reservation.is_some() && !self.has_ended() => above,
            _ => &[],
        };
        above.iter().filter_map(Weak::upgrade)
    }

    /// Whether somebody waits for room in it. Under its lock.
    #[inline]
    pub(crate) fn is_wanted(&self) -> bool {
        self.wanted.load(RELAXED)
    }

    /// For the queue: nobody waits for it any more.
    pub(crate) fn is_wanted_no_more(&self) {
        self.wanted.store(false, RELAXED);
    }

    /// How many wait for room in it, or in one below it.
    pub(crate) fn waiting(&self) -> &AtomicUsize {
        &self.waiting
    }

    /// How many may.
    pub(crate) fn max_waiting(&self) -> &AtomicUsize {
        &self.max_waiting
    }
}

/// What the reservations of these accounts mean to each of them; `None` where there is none.
pub(super) fn covers_of(accounts: &[Arc<Account>]) -> Option<Box<[Cover]>> {
    if accounts.len() < 2 || accounts.iter().all(|account| account.reservation.is_none()) {
        return None;
    }
    let mut covers = vec![Cover { under: NOBODY, is_drawn_on: false }; accounts.len()];
    let mut last: Option<usize> = None;
    for (at, account) in accounts.iter().enumerate().filter(|(_, account)| account.reservation.is_some()) {
        // Only those that are around each other: a block comes out of one reservation, not of two side by side.
        if last.is_some_and(|last| !accounts[last].is_below(account)) {
            continue;
        }
        covers[at].is_drawn_on = true;
        for above in (at + 1..accounts.len()).filter(|&above| account.is_below(&accounts[above])) {
            covers[above].under = u32::try_from(at).unwrap_or(NOBODY);
        }
        last = Some(at);
    }
    Some(covers.into())
}
