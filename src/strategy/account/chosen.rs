//! Requests that were chosen to make room for others:
//! `docs/decisions/0042-reclaimers-and-victims-are-for-those-who-wait.md`.
//!
//! A request that is chosen has no room in its own account: `enforced_bytes` is 0 then, and else its limit. So an
//! allocation looks at nothing more than it did; the refusal finds the mark, tells it once, and takes it off.

use super::{Account, RELAXED};
use crate::sync::{ForkLock, HeldAcrossFork, Locked, Made, held_across_fork};
use crate::unattributed::unattributed;
use std::collections::BTreeMap;
use std::sync::Arc;

/// For whom a request was chosen, and where.
#[derive(Debug)]
pub(crate) struct Chosen {
    pub(crate) budget: String,
    pub(crate) budget_id: u64,
    pub(crate) limit_bytes: usize,
    pub(crate) in_use_bytes: usize,
    /// Who waits there.
    pub(crate) chosen_for: String,
}

/// By the request's number, from its first choice until its account goes.
struct All(Locked<BTreeMap<u64, Arc<Chosen>>>);

impl HeldAcrossFork for All {
    fn for_each_lock(&self, visit: &mut dyn FnMut(&ForkLock)) {
        visit(self.0.lock());
    }
}

fn all() -> &'static All {
    static ALL: Made<Arc<All>> = Made::new();
    ALL.get_or_make(|| held_across_fork(All(Locked::new(BTreeMap::new()))))
}

impl Account {
    /// Chooses it: its next allocation is refused. False if it is chosen already, or has ended.
    pub(crate) fn choose(&self, chosen: Chosen) -> bool {
        let _unattributed = unattributed();
        let chosen = Arc::new(chosen);
        let is_fresh = self.lock.with(|| {
            let is_fresh = !self.is_chosen() && !self.has_ended();
            if is_fresh {
                self.is_chosen.store(true, RELAXED);
                self.enforced_bytes.store(0, RELAXED);
            }
            is_fresh
        });
        let _before = is_fresh.then(|| all().0.with(|all| all.insert(self.id, chosen)));
        if is_fresh {
            self.was_chosen.store(true, RELAXED);
        }
        is_fresh
    }

    /// Whether it is chosen, and was not told yet.
    pub(crate) fn is_chosen(&self) -> bool {
        self.is_chosen.load(RELAXED)
    }

    /// Takes the mark off again, where room came in another way.
    pub(crate) fn spare(&self) {
        self.lock.with(|| self.take_mark());
    }

    /// Takes the mark off; whether there was one. Under the lock.
    pub(super) fn take_mark(&self) -> bool {
        let was_chosen = self.is_chosen.swap(false, RELAXED);
        if was_chosen {
            self.enforced_bytes.store(self.limit_bytes(), RELAXED);
        }
        was_chosen
    }

    /// For whom it was chosen last.
    pub(super) fn chosen(&self) -> Option<Arc<Chosen>> {
        self.was_chosen.load(RELAXED).then(|| all().0.with(|all| all.get(&self.id).cloned()))?
    }
}

/// For an account that is being dropped.
pub(super) fn forget(id: u64) {
    drop(all().0.with(|all| all.remove(&id)));
}
