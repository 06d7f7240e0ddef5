//! Which request gives way where a budget is full and somebody waits for it.

use super::on_chosen::OnChosen;
use super::slot::{self, Slot};
use crate::error::Error;
use crate::strategy::account::{Account, Chain, Chosen};
use std::sync::Arc;

/// Chooses the request of which `full` would get back most, if that is more than `asker` wants of it: the largest goes
/// first, and what is guaranteed or reserved is nobody's to take. Its account, and what to call under no lock.
pub(crate) fn choose(full: &Account, asker: &Chain, bytes: usize) -> Option<(Arc<Account>, Option<OnChosen>, Error)> {
    let wanted_bytes = asker.wants(bytes, full);
    let above = asker.above().first().map(|account| account.name().into_owned());
    let mut largest: Option<(usize, u64, _)> = None;
    for held in slot::all() {
        let Some(state) = Slot::behind(held.handler()).map(Slot::state) else { continue };
        let own = state.chain.own();
        if state.chain.has_ended() || own.is_chosen() {
            continue;
        }
        let excess = state.chain.gives_back(own.live_bytes(), full);
        // Of one inside of another that holds nothing else, the inner one goes.
        let is_larger = largest.as_ref().is_none_or(|other| (excess, own.number()) > (other.0, other.1));
        if excess > wanted_bytes && is_larger {
            largest = Some((excess, own.number(), held));
        }
    }
    let (_, _, held) = largest?;
    let state = Slot::behind(held.handler()).map(Slot::state)?;
    let own = Arc::clone(state.chain.own());
    let who = match asker.own().given_name() {
        Some(name) => format!("request '{name}'"),
        None => asker.own().name().into_owned(),
    };
    let chosen = Chosen {
        budget: full.name().into_owned(),
        budget_id: full.number(),
        limit_bytes: full.limit_bytes(),
        in_use_bytes: full.live_bytes().saturating_add(full.pending_bytes()),
        chosen_for: format!("{who}, which waits for {bytes} bytes of '{}'", above.unwrap_or_default()),
    };
    let error = Error::BudgetExceeded {
        budget: chosen.budget.clone(),
        budget_id: chosen.budget_id,
        of_request: false,
        limit_bytes: chosen.limit_bytes,
        in_use_bytes: chosen.in_use_bytes,
        held_bytes: own.live_bytes(),
        requested_bytes: 0,
        chosen_for: Some(chosen.chosen_for.clone()),
        guaranteed_bytes: 0,
    };
    own.choose(chosen).then(|| (own, state.on_chosen.clone(), error))
}
