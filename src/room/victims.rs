//! What becomes of those who have waited long enough: a request that holds more is chosen to give way.

use super::queue::{self, Waiter};
use crate::handler::requests::victims::choose;
use crate::strategy::account::Account;
use crate::trace;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

/// Chooses a request that gives way to this waiter, if one holds more of the full account beyond what it is guaranteed.
/// Under no lock.
pub(super) fn choose_for(waiter: &Arc<Waiter>, full: &Arc<Account>) {
    let Some((victim, on_chosen, error)) = choose(full, waiter.chain(), waiter.bytes()) else { return };
    full.count_victim();
    trace::chosen(&victim.name(), &error);
    if let Some(spared) = queue::note_victim(waiter, &victim) {
        spared.spare(); // room came meanwhile
        return;
    }
    if let Some(on_chosen) = on_chosen
        && catch_unwind(AssertUnwindSafe(|| (on_chosen.0)(&error, &victim))).is_err()
    {
        trace::on_chosen_panicked(&victim.name());
    }
}
