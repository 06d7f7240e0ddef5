//! Which accounts a new request or budget is charged to, beside its own.

use super::cover::add_above_reservations;
use super::{Account, Accounts, Kind, RELAXED};
use std::sync::{Arc, Weak};

/// The accounts above a new request, the youngest first: those of `budget`, and of the request that it is inside of,
/// which is charged to the accounts of `outer`.
pub(super) fn above_request(budget: Option<&Arc<Account>>, outer: &[Arc<Account>], has_outer_ended: bool) -> Accounts {
    let mut above = Accounts::new();
    if let Some(budget) = budget {
        reach(budget, &mut above);
    }
    // All accounts that the outer request is charged to, itself included.
    let add = if has_outer_ended { inherit } else { take_over };
    outer.iter().for_each(|account| add(account, &mut above));
    if !above.is_empty() {
        add_above_reservations(&mut above);
        as_set(&mut above);
    }
    above
}

/// Adds `account` and every account that a charge to it goes to, perhaps more than once. The user named it, so it
/// counts even if its request has ended.
pub(super) fn reach(account: &Arc<Account>, found: &mut Accounts) {
    let mut next = Some(Arc::clone(account));
    while let Some(account) = next.take() {
        match &account.kind {
            Kind::Budget { parent } => next = parent.clone(),
            Kind::Request { .. } => reach_above(&account, found),
        }
        found.push(account);
    }
}

/// Adds the accounts above a request that [`take_over`] accepts.
fn reach_above(request: &Account, found: &mut Accounts) {
    let Kind::Request { above, .. } = &request.kind else { return };
    above.iter().filter_map(Weak::upgrade).for_each(|account| take_over(&account, found));
}

/// Adds the account of a live request, or of a budget with a handle together with the accounts above it.
fn take_over(account: &Arc<Account>, found: &mut Accounts) {
    match &account.kind {
        Kind::Request { ended, .. } if !ended.load(RELAXED) => found.push(Arc::clone(account)),
        Kind::Budget { .. } if account.handles.load(RELAXED) > 0 => reach(account, found),
        _ => {}
    }
}

/// For a request that begins inside an ended one: adds a live request around that one, with the accounts above it. The
/// ended request itself is not inherited, since whoever still carries it does so by accident.
fn inherit(account: &Arc<Account>, found: &mut Accounts) {
    if let Kind::Request { ended, .. } = &account.kind
        && !ended.load(RELAXED)
    {
        reach_above(account, found);
        found.push(Arc::clone(account));
    }
}

/// Sorts the accounts, the youngest first, each once.
pub(super) fn as_set(accounts: &mut Accounts) {
    accounts.sort_unstable_by_key(|account| std::cmp::Reverse(account.id));
    accounts.dedup_by_key(|account| account.id);
}
