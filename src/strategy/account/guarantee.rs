//! Guarantees: what a budget promises to one below it, as a standing reservation
//! (`docs/decisions/0041-a-guarantee-is-a-standing-reservation.md`).

use super::chain::Chain;
use super::reserved::{Reservation, room_came, room_shrank};
use super::{Account, Kind, RELAXED, add, subtract};
use crate::error::{Error, NoRoom};
use crate::sync::with_all;
use crate::unattributed::unattributed;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

/// Why a guarantee was not changed. First the position of the account that is the reason.
enum Refusal {
    /// What it has promised, and what it would have to promise besides.
    Promised(usize, usize, usize),
    /// How much it would have to keep, which others use.
    Borrowed(usize, usize),
}

fn bad(guarantee_bytes: usize, expected: &'static str) -> Error {
    Error::BadOption { option: "guarantee_bytes", value: guarantee_bytes.to_string(), expected }
}

impl Account {
    /// A budget to which its parent guarantees memory: nothing yet.
    pub(in crate::strategy) fn of_guaranteed_budget(
        name: &str,
        limit_bytes: Option<usize>,
        parent: Arc<Self>,
    ) -> Arc<Self> {
        Self::listed_budget(name, limit_bytes, Some(parent), Some(Reservation::default()))
    }

    /// How many bytes its parent guarantees to it; `None` if it was not made so.
    pub(in crate::strategy) fn guarantee_bytes(&self) -> Option<usize> {
        match self.kind {
            Kind::Budget { .. } => self.reservation.as_ref().map(|promised| promised.bytes.load(RELAXED)),
            Kind::Request { .. } => None,
        }
    }

    /// What it guarantees to budgets below it.
    pub(super) fn promised_bytes(&self) -> usize {
        self.promised_bytes.load(RELAXED)
    }

    /// What of a growth below a budget that it is idle but for its promises reaches the one above.
    fn passes_on_when_idle(&self, bytes: usize) -> usize {
        let (guaranteed, promised) = (self.guarantee_bytes().unwrap_or_default(), self.promised_bytes());
        guaranteed.max(promised.saturating_add(bytes)) - guaranteed.max(promised)
    }

    /// Changes what its parent guarantees to it.
    pub(in crate::strategy) fn set_guarantee_bytes(self: &Arc<Self>, bytes: usize) -> Result<(), Error> {
        let (Kind::Budget { parent: Some(parent) }, Some(own)) = (&self.kind, &self.reservation) else {
            return Err(bad(bytes, "a budget that was made with a guarantee, of which 0 is one"));
        };
        if bytes > self.limit_bytes() {
            return Err(bad(bytes, "a number of bytes up to the budget's own limit"));
        }
        let all = Chain::of_budget(self);
        if all.accounts().iter().any(|account| account.is_of_request()) {
            return Err(bad(bytes, "a budget that is below no request's, which may end before it"));
        }
        let above = Chain::of_budget(parent);
        let changed = with_all(all.accounts(), || {
            let before = own.bytes.load(RELAXED);
            if let Some(refusal) = above.promise(self.promised_bytes(), before, bytes) {
                return Err(refusal);
            }
            let covered = own.covered_bytes.load(RELAXED);
            let (was, is) = (before.max(covered), bytes.max(covered));
            if let Some(at) = above.refusing_now(is.saturating_sub(was)) {
                // Promised back: what was asked for is as little as what there was, so it fits.
                above.promise(self.promised_bytes(), bytes, before);
                return Err(Refusal::Borrowed(at, is - was));
            }
            above.add_pending_each(is.saturating_sub(was));
            above.subtract_pending_each(was.saturating_sub(is));
            own.bytes.store(bytes, RELAXED);
            // Less of it, too, may be too little for one that waits to draw on it.
            Ok((bytes != before, all.accounts().iter().any(|account| account.is_wanted())))
        });
        fence(Ordering::SeqCst); // as in `set_limit_bytes`
        match changed {
            Ok((true, _)) if all.accounts().iter().any(|account| account.is_waited_for()) => room_shrank(),
            Ok((_, true)) => room_came(), // whoever waits may draw on it, or on what it no longer keeps
            Ok(_) => {}
            Err(Refusal::Promised(at, promised_bytes, more_bytes)) => {
                let account = &above.accounts()[at];
                return Err(Error::GuaranteesExceedLimit {
                    budget: account.name().into_owned(),
                    budget_id: account.number(),
                    limit_bytes: account.limit_bytes(),
                    guaranteed_bytes: promised_bytes,
                    requested_bytes: more_bytes,
                });
            }
            Err(Refusal::Borrowed(at, requested_bytes)) => {
                let account = &above.accounts()[at];
                return Err(Error::NoRoom {
                    budget: account.name().into_owned(),
                    budget_id: account.number(),
                    of_request: account.is_of_request(),
                    limit_bytes: account.limit_bytes(),
                    in_use_bytes: account.live_bytes().saturating_add(account.pending_bytes()),
                    requested_bytes,
                    guaranteed_bytes: account.promised_bytes(),
                    reason: NoRoom::Busy,
                });
            }
        }
        Ok(())
    }

    /// For a budget that is being dropped: nothing is charged to it any more.
    pub(super) fn return_guarantee(&mut self) {
        let (Kind::Budget { parent: Some(parent) }, Some(own)) = (&self.kind, &self.reservation) else { return };
        let bytes = own.bytes.swap(0, RELAXED);
        if bytes == 0 {
            return;
        }
        let _unattributed = unattributed();
        let above = Chain::of_budget(parent);
        let is_wanted = with_all(above.accounts(), || {
            above.promise(0, bytes, 0);
            above.subtract_pending_each(bytes)
        });
        if is_wanted {
            room_came();
        }
    }
}

/// The chain of the budget that promises.
impl Chain {
    /// Changes what each of these budgets has promised, where the guarantee of one below that promises `below` itself
    /// changes; or none, if a limit is too small for what is added. Under the locks.
    fn promise(&self, below: usize, before: usize, after: usize) -> Option<Refusal> {
        let mut refusal = None;
        self.each_promise(before.max(below), after.max(below), |at, account, was, is| {
            let (promised, more) = (account.promised_bytes(), is.saturating_sub(was));
            if more > 0 && promised.saturating_add(more) > account.limit_bytes() && refusal.is_none() {
                refusal = Some(Refusal::Promised(at, promised, more));
            }
        });
        if refusal.is_none() {
            self.each_promise(before.max(below), after.max(below), |_, account, was, is| {
                add(&account.promised_bytes, is.saturating_sub(was));
                subtract(&account.promised_bytes, was.saturating_sub(is));
            });
        }
        refusal
    }

    /// For each of these budgets that the change reaches: what the one below counted as in its promises, and will.
    fn each_promise(&self, mut was: usize, mut is: usize, mut change: impl FnMut(usize, &Account, usize, usize)) {
        // A budget's chain is it and those above it, the youngest first: each is the parent of the one before.
        for (at, account) in self.accounts().iter().enumerate() {
            if was == is {
                return;
            }
            let (promised, own) = (account.promised_bytes(), account.guarantee_bytes().unwrap_or_default());
            change(at, account, was, is);
            (was, is) = (own.max(promised), own.max(promised.wrapping_sub(was).wrapping_add(is)));
        }
    }

    /// The position of the youngest account without room for `bytes` more. Under the locks.
    fn refusing_now(&self, bytes: usize) -> Option<usize> {
        if bytes == 0 { None } else { self.refusing(bytes, usize::MAX, false) }
    }

    /// Whether, and where, `bytes` more would not fit if nothing were in use but what is guaranteed, and what the
    /// requests around reserved. For [`never_fits`](Self::never_fits), where something is guaranteed.
    #[cold]
    pub(super) fn never_fits_beside_promises(&self, bytes: usize) -> Option<&Arc<Account>> {
        let find = |passed_on: &mut [usize]| {
            self.each_step_when_idle(bytes, true, passed_on, |at, step| {
                let account = &self.accounts()[at];
                (step > 0 && account.promised_bytes().saturating_add(step) > account.limit_bytes()).then_some(at)
            })
        };
        let mut passed_on = vec![bytes; self.accounts().len()]; // allocated under no lock
        find(&mut passed_on)?;
        // Somebody may be changing a guarantee, account by account, and take it back: what is said once and for all is
        // looked at in one moment.
        let at = with_all(self.accounts(), || find(&mut passed_on))?;
        Some(&self.accounts()[at])
    }

    /// How much of the limit of one of its accounts is guaranteed to others, beside `bytes` of this chain's, which come
    /// out of its own guarantees first. Under no lock of an account.
    pub(super) fn guaranteed_to_others(&self, at: usize, bytes: usize) -> usize {
        if self.accounts()[at].promised_bytes() == 0 {
            return 0;
        }
        let mut passed_on = vec![bytes; self.accounts().len()];
        let kept = with_all(self.accounts(), || {
            self.each_step_when_idle(bytes, false, &mut passed_on, |other, step| {
                let own = bytes.saturating_sub(step);
                (other == at).then(|| self.accounts()[at].promised_bytes().saturating_sub(own))
            })
        });
        kept.unwrap_or_default()
    }

    /// The same, of an account that is one of its own. Under no lock of an account.
    pub(crate) fn kept_for_others(&self, account: &Account, bytes: usize) -> usize {
        let at = self.accounts().iter().position(|own| own.number() == account.number());
        at.map_or(0, |at| self.guaranteed_to_others(at, bytes))
    }

    /// For each account, the youngest first: what of `bytes` more reaches it if nothing is in use but what is
    /// guaranteed, until `stop` returns something. `is_reserved`: what the requests of this chain reserved is in use
    /// too, and the bytes come out of that; else it is a part of the bytes. `passed_on`: as long as there are accounts.
    fn each_step_when_idle<R>(
        &self,
        bytes: usize,
        is_reserved: bool,
        passed_on: &mut [usize],
        stop: impl Fn(usize, usize) -> Option<R>,
    ) -> Option<R> {
        for (at, account) in self.accounts().iter().enumerate() {
            let under = self.covers.as_ref().map_or(usize::MAX, |covers| covers[at].under as usize);
            let step = passed_on.get(under).copied().unwrap_or(bytes);
            if let Some(found) = stop(at, step) {
                return Some(found);
            }
            passed_on[at] = match &account.kind {
                Kind::Budget { .. } => account.passes_on_when_idle(step),
                Kind::Request { .. } => {
                    let own = account.reservation.as_ref().filter(|_| is_reserved);
                    step.saturating_sub(own.map_or(0, |own| own.bytes.load(RELAXED)))
                }
            };
        }
        None
    }
}
