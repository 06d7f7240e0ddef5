//! What becomes of those who have waited long enough: a request that holds more is chosen to give way.

use crate::handler::requests::victims::choose;
use crate::strategy::account::{Account, Chain};
use crate::trace;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

/// Chooses a request that gives way to one that waits for `bytes`, if one holds more of the full account beyond what it
/// is guaranteed. Under no lock. `note`: says of whom it is whether nobody waits for it any more.
pub(super) fn choose_for(chain: &Chain, bytes: usize, full: &Account, note: impl FnOnce(&Arc<Account>) -> bool) {
    let Some((victim, on_chosen, error)) = choose(full, chain, bytes) else { return };
    full.count_victim();
    trace::chosen(&victim.name(), &error);
    if note(&victim) {
        victim.spare(); // room came meanwhile
        return;
    }
    if let Some(on_chosen) = on_chosen
        && catch_unwind(AssertUnwindSafe(|| (on_chosen.0)(&error, &victim))).is_err()
    {
        trace::on_chosen_panicked(&victim.name());
    }
}
