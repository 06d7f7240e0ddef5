//! Budgets, which are limits in bytes in a tree. `Budgeted`, beside it, is the strategy that charges one.

use super::account::{Account, Chain, UNLIMITED, reclaimers};
use crate::error::Error;
use crate::unattributed::unattributed;
use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// A limit in bytes, perhaps below another one: request below tenant below process.
///
/// A charge goes to the budget and to every one above it, once each. If one of them has no room, the charge is refused
/// and changes nothing except that budget's count of [`refused`](Self::refused) charges. Clones are the same budget,
/// and cloning is cheap.
///
/// ```
/// use ctxalloc::strategy::Budget;
///
/// let process = Budget::new("process", Some(1 << 30));
/// let tenant = process.child("tenant", Some(1 << 20));
/// let charge = tenant.charge(1 << 19)?;
/// assert_eq!((tenant.in_use_bytes(), process.in_use_bytes()), (1 << 19, 1 << 19));
/// assert!(tenant.charge(1 << 20).is_err()); // and nothing was charged anywhere
/// drop(charge);
/// assert_eq!(process.in_use_bytes(), 0);
/// # Ok::<(), ctxalloc::Error>(())
/// ```
pub struct Budget {
    account: Arc<Account>,
}

/// Bytes charged to a [`Budget`] and to those above it. Dropping it gives them back.
#[derive(Debug)]
#[must_use = "dropping it gives the bytes back"]
pub struct Charge {
    chain: Chain,
    bytes: usize,
}

impl Charge {
    /// How many bytes are charged.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        self.chain.give_back(self.bytes, 0);
    }
}

impl Budget {
    /// A budget below no other. With `limit_bytes: None` it only counts.
    #[must_use]
    pub fn new(name: &str, limit_bytes: Option<usize>) -> Self {
        Self::of(Account::of_budget(name, limit_bytes, None))
    }

    /// A budget below this one: what is charged to it is charged to this one too.
    #[must_use]
    pub fn child(&self, name: &str, limit_bytes: Option<usize>) -> Self {
        Self::of(Account::of_budget(name, limit_bytes, Some(Arc::clone(&self.account))))
    }

    /// A budget below this one to which this one guarantees `guarantee_bytes`: nobody else gets these, whether it uses
    /// them or not, so that nothing that is charged to it is refused because of others while it has no more in use. It
    /// may have more, up to its limit, while those above have room. A guarantee of 0 is one that may be raised later.
    ///
    /// What is guaranteed counts as reserved ([`reserved_bytes`](Self::reserved_bytes)) in this budget, and comes out
    /// of what this one is guaranteed itself. It lasts for as long as anything can be charged to the new budget.
    ///
    /// ```
    /// use ctxalloc::strategy::Budget;
    ///
    /// let process = Budget::new("process", Some(1000));
    /// let patient = process.guaranteed_child("patient", None, 400)?;
    /// let greedy = process.child("greedy", None);
    /// let _taken = greedy.charge(600)?;
    /// assert!(greedy.charge(1).is_err()); // the rest is promised
    /// let _kept = patient.charge(400)?;
    /// # Ok::<(), ctxalloc::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`set_guarantee_bytes`](Self::set_guarantee_bytes).
    pub fn guaranteed_child(
        &self,
        name: &str,
        limit_bytes: Option<usize>,
        guarantee_bytes: usize,
    ) -> Result<Self, Error> {
        let child = Self::of(Account::of_guaranteed_budget(name, limit_bytes, Arc::clone(&self.account)));
        child.set_guarantee_bytes(guarantee_bytes)?;
        Ok(child)
    }

    /// How many bytes the budget above guarantees to it; `None` if it was not made with a guarantee.
    #[must_use]
    pub fn guarantee_bytes(&self) -> Option<usize> {
        self.account.guarantee_bytes()
    }

    /// Changes the guarantee of a budget that was made with one. A limit that is lowered below guarantees, its own or
    /// those of budgets below, keeps them.
    ///
    /// # Errors
    /// Nothing has changed then. [`Error::GuaranteesExceedLimit`] where a budget above cannot guarantee so much beside
    /// its other guarantees; [`Error::NoRoom`] (`Busy`) where it could, but others use these bytes now: try again when
    /// they have given them back; [`Error::BadOption`] where it is more than the own limit, or the budget was made
    /// without a guarantee.
    pub fn set_guarantee_bytes(&self, guarantee_bytes: usize) -> Result<(), Error> {
        self.account.set_guarantee_bytes(guarantee_bytes)
    }

    pub(crate) fn of(account: Arc<Account>) -> Self {
        account.handles.fetch_add(1, Ordering::Relaxed);
        Self { account }
    }

    pub(crate) fn account(&self) -> &Arc<Account> {
        &self.account
    }

    /// Charges `bytes` to this budget and to every one above it, until the [`Charge`] is dropped.
    ///
    /// # Errors
    /// [`Error::BudgetExceeded`] with the name, limit and use of the budget that has no room. Nothing is charged then.
    pub fn charge(&self, bytes: usize) -> Result<Charge, Error> {
        let _unattributed = unattributed(); // a heap at its limit could not tell of the refusal
        let chain = Chain::of_budget(&self.account);
        chain.tell_others(|_| false);
        match chain.take(bytes, 0) {
            Ok(()) => Ok(Charge { chain, bytes }),
            Err(refused) => Err(chain.error(refused)),
        }
    }

    /// Its name, as messages show it.
    #[must_use]
    pub fn name(&self) -> Cow<'_, str> {
        self.account.name()
    }

    /// Its limit in bytes; `None` if it only counts.
    #[must_use]
    pub fn limit_bytes(&self) -> Option<usize> {
        Some(self.account.limit_bytes()).filter(|&limit| limit != UNLIMITED)
    }

    /// Changes the limit, or removes it, from the next charge on. What is charged already stays charged, even if it is
    /// more than the new limit.
    pub fn set_limit_bytes(&self, limit_bytes: Option<usize>) {
        self.account.set_limit_bytes(limit_bytes.unwrap_or(UNLIMITED));
    }

    /// How many bytes are charged now.
    #[must_use]
    pub fn in_use_bytes(&self) -> usize {
        self.account.live_bytes()
    }

    /// How many bytes of it are reserved and not in use: by requests ([`Builder::reserve_bytes`]), by budgets below
    /// that it guarantees them to, and for blocks that are being made. They count towards the limit.
    ///
    /// [`Builder::reserve_bytes`]: crate::request::Builder::reserve_bytes
    #[must_use]
    pub fn reserved_bytes(&self) -> usize {
        self.account.pending_bytes()
    }

    /// How many requests wait for room in it, or in a budget below it.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.account.waiting().load(Ordering::Relaxed)
    }

    /// How many may wait: 1024 unless it was changed. One more is refused at once.
    pub fn set_max_waiting(&self, max_waiting: usize) {
        self.account.max_waiting().store(max_waiting, Ordering::Relaxed);
    }

    /// Adds what can give memory back: by dropping a cache, by writing something to a file. When this budget, or one
    /// above it, is full and somebody begins to wait for room or was refused memory, those of the full budget and of
    /// all below it are asked, one after the other, the lowest `order` first, until enough came back. They are told how
    /// many bytes are still missing. A budget that uses no more than it is guaranteed is not asked for others.
    ///
    /// They run on the thread `ctxalloc-reclaim`, or on one that calls [`reclaim`](Self::reclaim): never inside of an
    /// allocation, and under no lock. So an allocation that is refused has them asked for the next one; who must not be
    /// refused reserves ([`Builder::reserve_bytes`]) and waits. None is asked while it is being asked. One that panics,
    /// or after which nothing was given back, is reported (an event of `tracing` at WARN) and passed over. It must not
    /// wait for room itself, which is an error ([`NoRoom::InsideOfReclaimer`](crate::NoRoom::InsideOfReclaimer)).
    ///
    /// It stays until it is [removed](Reclaimer::remove), or nothing can be charged to the budget any more: so it
    /// should not own a handle of this budget.
    ///
    /// ```
    /// use ctxalloc::strategy::{Budget, Charge};
    /// use std::sync::{Arc, Mutex};
    ///
    /// let process = Budget::new("process", Some(1000));
    /// let cache: Arc<Mutex<Vec<Charge>>> = Arc::default();
    /// cache.lock().unwrap().push(process.charge(900)?);
    /// let dropped = Arc::clone(&cache);
    /// let reclaimer = process.add_reclaimer(0, move |_wanted_bytes| dropped.lock().unwrap().clear());
    /// assert_eq!(process.reclaim(500), 900);
    /// assert!(reclaimer.remove());
    /// # Ok::<(), ctxalloc::Error>(())
    /// ```
    ///
    /// [`Builder::reserve_bytes`]: crate::request::Builder::reserve_bytes
    pub fn add_reclaimer(&self, order: i32, reclaim: impl Fn(usize) + Send + Sync + 'static) -> Reclaimer {
        self.add_reclaim(order, Box::new(reclaim))
    }

    pub(crate) fn add_reclaim(&self, order: i32, reclaim: Box<dyn reclaimers::Reclaim>) -> Reclaimer {
        let number = reclaimers::add(&self.account, order, reclaim);
        Reclaimer { number }
    }

    /// How long somebody waits for room of this budget before a request is chosen to make some, and again, at
    /// least 100 ms, before the next one; `None`, the default: never. To the millisecond.
    ///
    /// It is the request that has most of this budget beyond what it reserved and what budgets below are guaranteed, if
    /// that is more than is waited for: so nobody at or below its guarantee, and nobody smaller than the one that
    /// waits. Its next allocation is refused with [`Error::BudgetExceeded`], which says for whom (`chosen_for`); blocks
    /// within its overdraft are not. It is refused once, and not at all if room comes before.
    /// [`Builder::on_chosen`](crate::request::Builder::on_chosen) hears of it at once.
    pub fn set_victims_after(&self, after: Option<Duration>) {
        self.account.set_victims_after(after);
    }

    /// How long somebody waits before a request is chosen to make room.
    #[must_use]
    pub fn victims_after(&self) -> Option<Duration> {
        self.account.victims_after()
    }

    /// How many requests were chosen to make room in it.
    #[must_use]
    pub fn victims(&self) -> u64 {
        self.account.made_room().victims
    }

    /// How many bytes came back to it while reclaimers ran ([`add_reclaimer`](Self::add_reclaimer)), its own and those
    /// of budgets below: of whatever was freed meanwhile.
    #[must_use]
    pub fn reclaimed_bytes(&self) -> u64 {
        self.account.made_room().reclaimed_bytes
    }

    /// Asks reclaimers now, on this thread, until `wanted_bytes` came back to this budget; how many did, of whatever
    /// was freed meanwhile. Warm memory of pools goes back first if there is no budget above (at most once in a
    /// second): it is charged to nobody, so that makes room in the machine only. Waits for reclaimers that somebody
    /// else is asking: not for a thread that runs other tasks.
    pub fn reclaim(&self, wanted_bytes: usize) -> usize {
        reclaimers::reclaim(&self.account, wanted_bytes)
    }

    /// How many may wait.
    #[must_use]
    pub fn max_waiting(&self) -> usize {
        self.account.max_waiting().load(Ordering::Relaxed)
    }

    /// Whether more requests should be sent here. Not from when 95 % of its limit are in use or reserved, or half as
    /// many wait as may; again from when at most 80 % are and nobody waits. Between the two it is what it was when
    /// somebody asked last, so that an answer does not change all the time.
    #[must_use]
    pub fn is_ready(&self) -> bool {
        self.account.is_ready()
    }

    /// Whether nothing is charged to it, reserved in it or waits for it, and nothing but this handle could change that:
    /// no request, not even one that has charged nothing yet, no budget of an ended request, no strategy, no budget
    /// below it and no clone. Who keeps budgets in a map may drop an idle one: the next of that name does not double
    /// what is there.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        // Whoever charges it, or waits, has a reference, or those of an ended request have a weak one. So these come
        // first: then no charge can come after them.
        const LISTED: usize = 1; // for `budgets()`
        let asked = self.account.reclaimers.load(Ordering::Relaxed); // each has a weak one, and charges nothing
        Arc::strong_count(&self.account) == 1
            && Arc::weak_count(&self.account) == LISTED + asked
            && self.in_use_bytes() == 0
            && self.reserved_bytes() == 0
    }

    /// By how many bytes it exceeds its limit, because the limit was lowered or requests used their overdrafts.
    #[must_use]
    pub fn overdraft_bytes(&self) -> usize {
        self.in_use_bytes().saturating_sub(self.account.limit_bytes())
    }

    /// The largest number of bytes charged at one time.
    #[must_use]
    pub fn peak_bytes(&self) -> usize {
        self.account.peak_bytes()
    }

    /// How many charges this budget refused. Refusals of a budget above it are counted there.
    #[must_use]
    pub fn refused(&self) -> u64 {
        self.account.refused()
    }

    /// Whether `other` is this budget, or is above it.
    #[must_use]
    pub fn is_under(&self, other: &Self) -> bool {
        Chain::of_budget(&self.account).reaches(&other.account)
    }

    /// Whether `other` is this very budget.
    #[must_use]
    pub fn same_budget(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.account, &other.account)
    }

    /// Its number, which no other budget has: [`Error::BudgetExceeded`] tells by it which one refused.
    #[must_use]
    pub fn id(&self) -> u64 {
        self.account.number()
    }

    /// The budget directly above it. For the budget of a [`Request`](crate::Request) this is the nearest one that the
    /// request is charged to besides its own.
    #[must_use]
    pub fn parent(&self) -> Option<Self> {
        self.account.parent().map(Self::of)
    }
}

/// What was added by [`Budget::add_reclaimer`]. Dropping it leaves it there.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Reclaimer {
    number: u64,
}

impl Reclaimer {
    /// Takes it out; false if it is not there any more. If it is being asked, that goes on.
    pub fn remove(self) -> bool {
        reclaimers::remove(self.number)
    }
}

impl Clone for Budget {
    fn clone(&self) -> Self {
        Self::of(Arc::clone(&self.account))
    }
}

impl Drop for Budget {
    fn drop(&mut self) {
        self.account.handles.fetch_sub(1, Ordering::Relaxed);
    }
}

impl fmt::Debug for Budget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Budget")
            .field("name", &self.name())
            .field("limit_bytes", &self.limit_bytes())
            .field("in_use_bytes", &self.in_use_bytes())
            .finish()
    }
}

#[cfg(test)]
mod tests {
    use super::Budget;
    use crate::error::Error;
    use std::thread;

    #[test]
    fn a_refusal_names_the_budget_and_its_numbers_and_charges_nobody() {
        let process = Budget::new("process", Some(1000));
        let tenant = process.child("tenant", Some(800));
        let request = tenant.child("request", None);
        let charge = request.charge(700).expect("room");
        let refused = request.charge(200).expect_err("no room for the tenant");
        let expected = Error::BudgetExceeded {
            budget: "tenant".into(),
            budget_id: tenant.id(),
            of_request: false,
            limit_bytes: 800,
            in_use_bytes: 700,
            held_bytes: 0,
            requested_bytes: 200,
            chosen_for: None,
            guaranteed_bytes: 0,
        };
        assert_eq!(refused, expected);
        for budget in [&process, &tenant, &request] {
            assert_eq!(budget.in_use_bytes(), 700, "{budget:?}");
        }
        assert_eq!((process.refused(), tenant.refused(), request.refused()), (0, 1, 0));
        request.charge(usize::MAX).expect_err("no overflow either");
        assert_eq!(request.peak_bytes(), 700, "what was refused was never alive");
        drop(charge);
        assert_eq!(process.in_use_bytes(), 0);
    }

    #[test]
    fn many_threads_never_exceed_the_limit_and_the_children_sum_up() {
        let parent = Budget::new("parent", Some(10_000));
        let children: Vec<_> = (0..4).map(|n| parent.child(&format!("child {n}"), Some(4000))).collect();
        let rounds = if cfg!(miri) { 50 } else { 20_000 };
        thread::scope(|scope| {
            for child in &children {
                scope.spawn(|| {
                    let mut held = Vec::new();
                    for round in 0..rounds {
                        let bytes = round * 37 % 1500;
                        held.extend(child.charge(bytes));
                        assert!(parent.in_use_bytes() <= 10_000 && child.in_use_bytes() <= 4000);
                        if round % 3 != 0 {
                            drop(held.pop());
                        }
                    }
                });
            }
        });
        assert_eq!((children.iter().map(Budget::in_use_bytes).sum::<usize>(), parent.in_use_bytes()), (0, 0));
        assert!(parent.peak_bytes() <= 10_000);
    }
}
