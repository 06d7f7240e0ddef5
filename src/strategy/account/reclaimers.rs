//! Reclaimers: what users can drop when a budget is full, and who asks for it
//! (`docs/decisions/0042-reclaimers-and-victims-are-for-those-who-wait.md`).
//!
//! A refusal, and one that begins to wait, note at each account how much was missing, and wake the thread of
//! `reclaiming.rs`. It asks one after the other, under no lock. Where nobody has added any, a refusal is one load
//! dearer, and nothing else is.

use super::asking::Alone;
use super::reclaiming;
use super::{Account, Chain, RELAXED};
use crate::strategy::pool::{clock, trim_pools};
use crate::sync::{ForkLock, HeldAcrossFork, Locked, Made, held_across_fork};
use crate::trace;
use crate::unattributed::unattributed;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize};
use std::sync::{Arc, Weak};
use std::thread;
use std::time::Duration;

/// How long somebody waits before it looks again whether a reclaimer is free: no lock is held while one runs.
const AGAIN: Duration = Duration::from_micros(200);

/// What is asked to give memory back.
pub(crate) trait Reclaim: Send + Sync {
    /// Gives back what it can, best `wanted_bytes` or more. It may panic.
    fn ask(&self, wanted_bytes: usize);
    /// Nothing came back. Told once until something does.
    fn freed_nothing(&self, budget: &str, wanted_bytes: usize) {
        trace::reclaimer_failed(budget, "it gave nothing back");
        let _ = wanted_bytes;
    }
}

impl<F: Fn(usize) + Send + Sync> Reclaim for F {
    fn ask(&self, wanted_bytes: usize) {
        self(wanted_bytes);
    }
}

struct Reclaimer {
    /// By age.
    number: u64,
    order: i32,
    budget_id: u64,
    budget: Weak<Account>,
    reclaim: Box<dyn Reclaim>,
    alone: Alone,
    /// Whether the last one to ask got nothing.
    gave_nothing: AtomicBool,
}

struct All(Locked<Vec<Arc<Reclaimer>>>);

impl HeldAcrossFork for All {
    fn for_each_lock(&self, visit: &mut dyn FnMut(&ForkLock)) {
        visit(self.0.lock());
    }
}

fn all() -> &'static All {
    static ALL: Made<Arc<All>> = Made::new();
    ALL.get_or_make(|| held_across_fork(All(Locked::new(Vec::new()))))
}

/// How many there are.
static PRESENT: AtomicUsize = AtomicUsize::new(0);
/// How many there were.
static ADDED: AtomicU64 = AtomicU64::new(0);

/// Whether there are any.
pub(crate) fn are_there() -> bool {
    PRESENT.load(RELAXED) > 0
}

/// How many were ever added: one that has waited since before the last may ask once more.
pub(crate) fn added() -> u64 {
    ADDED.load(RELAXED)
}

/// Adds one to a budget's; its number.
pub(in crate::strategy) fn add(budget: &Arc<Account>, order: i32, reclaim: Box<dyn Reclaim>) -> u64 {
    let _unattributed = unattributed();
    reclaiming::on_drop(forget);
    let number = ADDED.fetch_add(1, RELAXED);
    let reclaimer = Arc::new(Reclaimer {
        number,
        order,
        budget_id: budget.id,
        budget: Arc::downgrade(budget),
        reclaim,
        alone: Alone::new(),
        gave_nothing: AtomicBool::new(false),
    });
    budget.reclaimers.fetch_add(1, RELAXED);
    all().0.with(|all| {
        let at = all.partition_point(|other| (other.order, other.number) < (order, number));
        all.insert(at, reclaimer);
        PRESENT.store(all.len(), RELAXED);
    });
    reclaiming::start(ask_for_what_is_missing);
    number
}

/// Has the thread ask for what is missing, and starts it where it is not there: in a child of `fork` it is not. Where
/// no thread can be started nobody is asked.
pub(crate) fn have_asked() {
    reclaiming::start(ask_for_what_is_missing);
    reclaiming::call();
}

/// Takes one out; false if it is not there. One that is being asked goes on.
pub(in crate::strategy) fn remove(number: u64) -> bool {
    let found = take_out(|reclaimer| reclaimer.number == number);
    let is_there = !found.is_empty();
    for budget in found.iter().filter_map(|found| found.budget.upgrade()) {
        budget.reclaimers.fetch_sub(1, RELAXED);
    }
    is_there // what was found is dropped here: it is somebody's code
}

/// For an account that is being dropped.
fn forget(budget_id: u64) {
    drop(take_out(|reclaimer| reclaimer.budget_id == budget_id));
}

fn take_out(is_one: impl Fn(&Reclaimer) -> bool) -> Vec<Arc<Reclaimer>> {
    let _unattributed = unattributed();
    all().0.with(|all| {
        let found = all.extract_if(.., |reclaimer| is_one(reclaimer)).collect();
        PRESENT.store(all.len(), RELAXED);
        found
    })
}

/// Those there are, in their order.
fn present() -> Vec<Arc<Reclaimer>> {
    let _unattributed = unattributed();
    all().0.with(|all| all.clone())
}

/// Asks reclaimers of `full`, and of what is below it, until `wanted_bytes` came back; how many did. On this thread,
/// which holds no lock.
pub(in crate::strategy) fn reclaim(full: &Arc<Account>, wanted_bytes: usize) -> usize {
    trim_for(full);
    let before = given_back(full);
    let mut has_asked = false;
    for reclaimer in present() {
        let freed = given_back(full) - before;
        if freed >= wanted_bytes {
            break;
        }
        let Some(budget) = reclaimer.budget.upgrade() else { continue };
        let chain = Chain::of_budget(&budget);
        // What a budget gives back of its guarantee is kept for it: it would be asked in vain.
        if chain.reaches(full) && chain.gives_back(budget.live_bytes(), full) > 0 {
            reclaimer.ask(full, wanted_bytes - freed);
            has_asked = true;
        }
    }
    let freed = given_back(full) - before;
    if has_asked {
        full.count_reclaimed(freed);
    }
    freed
}

/// Bytes of blocks that an account ever got back.
fn given_back(account: &Account) -> usize {
    let stats = account.stats();
    usize::try_from(stats.total_bytes).unwrap_or(usize::MAX).saturating_sub(stats.live_bytes)
}

/// Warm memory is charged to no budget, so this makes room for the process and not in an account: for budgets below no
/// other, and at most once in a second.
fn trim_for(full: &Account) {
    static LAST: AtomicU64 = AtomicU64::new(0);
    let now = u64::try_from(clock::now().as_millis()).unwrap_or(u64::MAX);
    let is_root = full.parent().is_none() && !full.is_of_request();
    let last = LAST.load(RELAXED);
    if is_root && now.saturating_sub(last) >= 1000 && LAST.compare_exchange(last, now, RELAXED, RELAXED).is_ok() {
        trim_pools();
    }
}

impl Reclaimer {
    /// Asks it, after whoever is asking now. A reclaimer that asks others does not wait: they might wait for it.
    fn ask(&self, full: &Account, wanted_bytes: usize) {
        let waits = || {
            let waits = !reclaiming::is_inside();
            if waits {
                thread::sleep(AGAIN);
            }
            waits
        };
        let asked = self.alone.ask(waits, || {
            let before = given_back(full);
            (before, reclaiming::inside(|| catch_unwind(AssertUnwindSafe(|| self.reclaim.ask(wanted_bytes)))))
        });
        let Some((before, answer)) = asked else { return };
        let freed_nothing = given_back(full) == before;
        let was_told = self.gave_nothing.swap(freed_nothing, RELAXED);
        if answer.is_err() {
            trace::reclaimer_failed(&full.name(), "it panicked");
        } else if freed_nothing && !was_told {
            let _ = catch_unwind(AssertUnwindSafe(|| self.reclaim.freed_nothing(&full.name(), wanted_bytes)));
        }
    }
}

/// For the thread: asks for what was missing.
fn ask_for_what_is_missing() {
    let mut full: Vec<Arc<Account>> = Vec::new();
    for budget in present().iter().filter_map(|reclaimer| reclaimer.budget.upgrade()) {
        let chain = Chain::of_budget(&budget);
        full.extend(chain.accounts().iter().filter(|account| account.missing.is_any()).cloned());
    }
    for account in full {
        let wanted_bytes = account.missing.take(); // 0 where it is in the list once more
        if wanted_bytes > 0 {
            reclaim(&account, wanted_bytes);
        }
    }
}

impl Chain {
    /// How many bytes `account` would get back if `bytes` were given back to this chain.
    pub(crate) fn gives_back(&self, bytes: usize, account: &Account) -> usize {
        let Some(at) = self.accounts().iter().position(|other| other.id == account.id) else { return 0 };
        self.passes_back(bytes, at)
    }

    /// Notes how much an account lacks for `bytes` more, and has reclaimers asked for it by their thread. For a charge
    /// that was refused, under no lock: it allocates nothing, and does not wait.
    #[inline]
    pub(super) fn miss(&self, at: usize, bytes: usize) {
        if are_there() {
            self.miss_slowly(at, bytes);
        }
    }

    #[cold]
    fn miss_slowly(&self, at: usize, bytes: usize) {
        let Some(account) = self.accounts().get(at) else { return };
        let missing = account.live_bytes().saturating_add(account.pending_bytes()).saturating_add(bytes);
        account.missing.note(missing.saturating_sub(account.limit_bytes()));
        reclaiming::call();
    }

    /// The same for a reservation that has no room now. Whether anybody is to be asked: by [`have_asked`].
    pub(crate) fn miss_reservation(&self, bytes: usize) -> bool {
        are_there() && self.note_missing(bytes)
    }
}
