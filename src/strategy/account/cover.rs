//! Which reservations a chain draws on, and who waits for room in an account. What it is all for: `reservation.rs`.

use super::reserved::{Cover, Covers, NOBODY};
use super::{Account, Accounts, Kind, RELAXED};
use std::cmp::Reverse;
use std::collections::HashSet;
use std::sync::atomic::AtomicUsize;
use std::sync::{Arc, Weak};

impl Account {
    /// Whether a charge to this account goes to `other` too.
    fn is_below(&self, other: &Arc<Self>) -> bool {
        match &self.kind {
            Kind::Request { above, .. } => above.iter().any(|above| Weak::as_ptr(above) == Arc::as_ptr(other)),
            Kind::Budget { parent } => {
                // A parent is older than what is below it.
                let mut above = with_parents(parent.as_ref()).take_while(|above| above.id >= other.id);
                above.any(|above| above.id == other.id)
            }
        }
    }

    /// The accounts above a request that has a reservation and has not ended.
    fn above_reservation(&self) -> &[Weak<Self>] {
        match &self.kind {
            Kind::Request { above, .. } if self.reservation.is_some() && !self.has_ended() => above,
            _ => &[],
        }
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

/// A budget, and those above it up to one that is below a request.
pub(super) fn with_parents(budget: Option<&Arc<Account>>) -> impl Iterator<Item = &Arc<Account>> {
    std::iter::successors(budget, |account| match &account.kind {
        Kind::Budget { parent } => parent.as_ref(),
        Kind::Request { .. } => None, // whose chain a budget below it has as its own
    })
}

/// What comes out of a reservation is charged to everything that the reservation was taken from: adds the accounts
/// above those of these requests that have one and have not ended. Some may be there more than once afterwards.
pub(super) fn add_above_reservations(accounts: &mut Accounts) {
    if accounts.iter().all(|account| account.above_reservation().is_empty()) {
        return;
    }
    accounts.sort_unstable_by_key(|account| Reverse(account.id));
    let (mut known, mut found) = (HashSet::new(), Vec::<Arc<Account>>::new());
    for account in accounts.iter() {
        // Where it is above a younger one of these, this was done when that one began: what is above it is known too.
        // So of requests inside of each other only the innermost is looked through.
        if !known.contains(&Arc::as_ptr(account)) {
            let fresh = account.above_reservation().iter().filter(|above| known.insert(above.as_ptr()));
            found.extend(fresh.filter_map(Weak::upgrade));
        }
    }
    accounts.extend(found);
}

/// What the reservations of these accounts, the youngest first, mean to each of them; `None` where there is none. The
/// first is below all others.
pub(super) fn covers_of(accounts: &[Arc<Account>]) -> Option<Covers> {
    let (own, above) = accounts.split_first().filter(|(_, above)| !above.is_empty())?;
    if above.iter().all(|account| account.reservation.is_none()) {
        own.reservation.as_ref()?;
        if let Some(covers) = Covers::own(accounts.len()) {
            return Some(covers);
        }
    }
    let mut covers = vec![Cover { under: NOBODY, is_drawn_on: false }; accounts.len()];
    let mut drawn_on: Vec<usize> = Vec::new();
    for (at, account) in accounts.iter().enumerate().filter(|(_, account)| account.reservation.is_some()) {
        // Only those that are around each other: a block comes out of one reservation, not of two side by side.
        if drawn_on.last().is_none_or(|&below| accounts[below].is_below(account)) {
            covers[at].is_drawn_on = true;
            drawn_on.push(at);
        }
    }
    // The outermost first: of requests inside of each other it is the one just inside.
    let mut left = accounts.len() - 1;
    for &below in drawn_on.iter().rev() {
        each_above(accounts, below, |at| {
            if covers[at].under == NOBODY {
                covers[at].under = u32::try_from(below).unwrap_or(NOBODY);
                left -= 1;
            }
        });
        if left == 0 {
            break;
        }
    }
    Some(Covers::Each(covers.into()))
}

/// The positions of the accounts above one of these. Both are in the same order, so it is one walk through them.
fn each_above(accounts: &[Arc<Account>], below: usize, mut found: impl FnMut(usize)) {
    let mut at = below + 1;
    let mut look_for = |above: *const Account, number: &dyn Fn() -> Option<u64>| {
        let is_it = |at: usize| accounts.get(at).is_some_and(|account| Arc::as_ptr(account) == above);
        if !is_it(at)
            && let Some(number) = number()
        {
            at += accounts[at..].iter().take_while(|account| account.id > number).count();
        }
        if is_it(at) {
            found(at);
            at += 1;
        }
    };
    match &accounts[below].kind {
        Kind::Request { above, .. } => {
            above.iter().for_each(|above| look_for(above.as_ptr(), &|| above.upgrade().map(|account| account.id)))
        }
        Kind::Budget { parent } => {
            with_parents(parent.as_ref()).for_each(|account| look_for(Arc::as_ptr(account), &|| Some(account.id)));
        }
    }
}

#[cfg(all(test, not(any(ctxalloc_loom, miri))))]
mod tests {
    use super::super::chain::Chain;
    use super::{Account, Accounts, Arc, Cover, Kind, NOBODY, RELAXED, Weak, add_above_reservations, covers_of};
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    /// By looking through each account for each other one.
    fn naive_covers(accounts: &[Arc<Account>]) -> Vec<(u32, bool)> {
        let mut covers = vec![(NOBODY, false); accounts.len()];
        let mut last: Option<usize> = None;
        for (at, account) in accounts.iter().enumerate().filter(|(_, account)| account.reservation.is_some()) {
            if last.is_some_and(|last| !accounts[last].is_below(account)) {
                continue;
            }
            covers[at].1 = true;
            for above in (at + 1..accounts.len()).filter(|&above| account.is_below(&accounts[above])) {
                covers[above].0 = u32::try_from(at).expect("a few");
            }
            last = Some(at);
        }
        covers
    }

    fn naive_above(accounts: &[Arc<Account>]) -> BTreeSet<u64> {
        let above = |account: &Arc<Account>| match &account.kind {
            Kind::Request { above, .. } if account.reservation.is_some() && !account.has_ended() => {
                above.iter().filter_map(Weak::upgrade).map(|account| account.id).collect()
            }
            _ => Vec::new(),
        };
        accounts.iter().map(|account| account.id).chain(accounts.iter().flat_map(above)).collect()
    }

    proptest! {
        #![proptest_config(ProptestConfig {
            cases: 500, failure_persistence: None, ..ProptestConfig::default()
        })]

        #[test]
        fn reservations_mean_what_a_naive_look_says(
            steps in prop::collection::vec((0..8_u8, any::<usize>(), any::<usize>(), any::<bool>()), 1..40)
        ) {
            let (mut chains, mut budgets): (Vec<Chain>, Vec<Arc<Account>>) = (Vec::new(), Vec::new());
            for (what, outer, budget, reserves) in steps {
                // The latest one mostly, so that chains become long.
                let outer = if what < 4 { chains.last() } else { chains.get(outer % (chains.len() + 1)) };
                let budget = budgets.get(budget % (budgets.len() + 3));
                match what {
                    6 => {
                        let parent = outer.map_or_else(|| budget.cloned(), |outer| Some(Arc::clone(outer.own())));
                        let made = Account::of_budget("budget", None, parent);
                        made.handles.store(1, RELAXED);
                        budgets.push(made);
                        continue;
                    }
                    7 => {
                        if let Some(outer) = outer {
                            outer.end(false, 0);
                        }
                        continue;
                    }
                    _ => {}
                }
                let chain = Chain::of_request(None, None, 0, budget, outer, false, reserves).expect("not deep");
                let covers = covers_of(chain.accounts());
                if let Some(covers) = covers {
                    let covers: Vec<_> =
                        covers.iter().map(|&Cover { under, is_drawn_on }| (under, is_drawn_on)).collect();
                    prop_assert_eq!(covers, naive_covers(chain.accounts()));
                } else {
                    prop_assert!(naive_covers(chain.accounts()).iter().skip(1).all(|cover| cover.0 == NOBODY));
                }
                for chain in &chains {
                    let mut accounts: Accounts = chain.accounts().iter().cloned().collect();
                    let naive = naive_above(&accounts);
                    add_above_reservations(&mut accounts);
                    let found: BTreeSet<_> = accounts.iter().map(|account| account.id).collect();
                    prop_assert_eq!(found, naive);
                }
                chains.push(chain);
            }
        }
    }
}
