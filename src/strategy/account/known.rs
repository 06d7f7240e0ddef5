//! A list of all budgets, for metrics and the live page.

use crate::sync::{ForkLock, HeldAcrossFork, Locked, Made, held_across_fork};
use crate::unattributed::unattributed;
use std::collections::BTreeMap;
use std::sync::{Arc, Weak};

/// A budget, as this file sees it.
pub(super) trait Listed: Send + Sync {
    fn listed(&self) -> BudgetNumbers;

    /// Its number, the number of the budget above it, by how many bytes it counts there, and how many of those are in
    /// use or reserved.
    fn counted_above(&self) -> (u64, Option<u64>, usize, usize);

    /// Whether it is ready, or below another one. `idle_bytes`: how much of it is guaranteed and not used.
    fn is_ready_root(&self, idle_bytes: usize) -> bool;
}

struct Known(Locked<BTreeMap<u64, Weak<dyn Listed>>>);

impl HeldAcrossFork for Known {
    fn for_each_lock(&self, visit: &mut dyn FnMut(&ForkLock)) {
        visit(self.0.lock());
    }
}

fn known() -> &'static Known {
    static KNOWN: Made<Arc<Known>> = Made::new();
    KNOWN.get_or_make(|| held_across_fork(Known(Locked::new(BTreeMap::new()))))
}

/// A budget's numbers at one moment.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct BudgetNumbers {
    /// Its number, which no other budget has.
    pub id: u64,
    /// The number of the budget above it.
    pub parent: Option<u64>,
    /// Its name.
    pub name: String,
    /// Its limit in bytes, if it has one.
    pub limit_bytes: Option<usize>,
    /// The bytes that are charged to it.
    pub in_use_bytes: usize,
    /// The largest value of `in_use_bytes` so far.
    pub peak_bytes: usize,
    /// How many charges it refused.
    pub refused: u64,
    /// The bytes that are reserved in it and not in use.
    pub reserved_bytes: usize,
    /// How many requests wait for room in it, or in a budget below it.
    pub waiting: usize,
    /// How many may.
    pub max_waiting: usize,
    /// How many requests were chosen to make room in it.
    pub victims: u64,
    /// How many bytes came back to it while reclaimers ran: its own, and those of budgets below.
    pub reclaimed_bytes: u64,
}

/// Adds a budget by its number, until it is removed.
pub(super) fn add(id: u64, budget: Weak<dyn Listed>) {
    let _unattributed = unattributed();
    if cfg!(ctxalloc_loom) {
        return; // the lock would outlive the model
    }
    known().0.with(|all| drop(all.insert(id, budget)));
}

/// For an account that is being dropped.
pub(super) fn remove(id: u64) {
    if cfg!(ctxalloc_loom) {
        return; // as above
    }
    // The last weak reference frees the memory: outside of the lock.
    drop(known().0.with(|all| all.remove(&id)));
}

/// Whether more requests should be sent to this process: for readiness probes. Every budget that is below no other one
/// is asked ([`Budget::is_ready`](crate::strategy::Budget::is_ready)); those of tenants are not, for a busy tenant
/// makes nobody else wait.
#[must_use]
pub fn ready() -> bool {
    let all: Vec<Arc<dyn Listed>> = known().0.with(|all| all.values().filter_map(Weak::upgrade).collect());
    let idle = idle_bytes(&all);
    // Each is asked: it may have to change its mind.
    all.iter().filter(|budget| !budget.is_ready_root(idle.get(&budget.counted_above().0).copied().unwrap_or(0))).count()
        == 0
}

/// How much of a budget is guaranteed to budgets below it and not used.
pub(super) fn idle_bytes_of(id: u64) -> usize {
    let all: Vec<Arc<dyn Listed>> = known().0.with(|all| all.values().filter_map(Weak::upgrade).collect());
    idle_bytes(&all).get(&id).copied().unwrap_or(0)
}

/// The same of each, by its number. A budget is younger than the one above it, and has the larger number.
fn idle_bytes(all: &[Arc<dyn Listed>]) -> BTreeMap<u64, usize> {
    let mut idle: BTreeMap<u64, usize> = BTreeMap::new();
    for budget in all.iter().rev() {
        let (id, parent, counted, used) = budget.counted_above();
        let below = idle.get(&id).copied().unwrap_or(0);
        if let Some(parent) = parent {
            *idle.entry(parent).or_default() += counted.saturating_sub(used.saturating_sub(below));
        }
    }
    idle
}

/// All budgets that somebody has or that have budgets below, the oldest first.
#[must_use]
pub fn budgets() -> Vec<BudgetNumbers> {
    // The last reference may be ours by then, and its drop takes the lock: not under it.
    let all: Vec<Arc<dyn Listed>> = known().0.with(|all| all.values().filter_map(Weak::upgrade).collect());
    all.iter().map(|budget| budget.listed()).collect()
}
