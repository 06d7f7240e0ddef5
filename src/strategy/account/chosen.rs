//! Requests that were chosen to make room for others:
//! `docs/decisions/0042-reclaimers-and-victims-are-for-those-who-wait.md`.
//! This file knows for whom; `choice.rs` has the mark.

use crate::sync::{ForkLock, HeldAcrossFork, Locked, Made, held_across_fork};
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

/// Notes for whom a request was chosen; returns what was noted before.
pub(super) fn note(id: u64, chosen: Arc<Chosen>) -> Option<Arc<Chosen>> {
    all().0.with(|all| all.insert(id, chosen))
}

/// For whom it was chosen last.
pub(super) fn of(id: u64) -> Option<Arc<Chosen>> {
    all().0.with(|all| all.get(&id).cloned())
}

/// For an account that is being dropped.
pub(super) fn forget(id: u64) {
    drop(all().0.with(|all| all.remove(&id)));
}
