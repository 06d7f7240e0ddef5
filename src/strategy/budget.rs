//! Budgets: limits in bytes, in a tree; and `Budgeted`, the strategy that keeps one.
//!
//! A charge goes up the tree and is taken back whole where one level refuses. Each level is one atomic number: no
//! lock, and exact, so the children's sum is the parent's when nothing is under way.

use super::front::Fronted;
use super::{LiveBlock, Strategy};
use crate::error::Error;
use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

/// A limit in bytes, perhaps under another one: request under tenant under process.
///
/// Cheap to clone: clones are the same budget.
///
/// ```
/// use ctxalloc::strategy::Budget;
///
/// let process = Budget::new("process", Some(1 << 30));
/// let tenant = process.child("tenant", Some(1 << 20));
/// tenant.charge(1 << 19)?;
/// assert_eq!((tenant.in_use_bytes(), process.in_use_bytes()), (1 << 19, 1 << 19));
/// assert!(tenant.charge(1 << 20).is_err()); // and nothing was charged anywhere
/// tenant.refund(1 << 19);
/// assert_eq!(process.in_use_bytes(), 0);
/// # Ok::<(), ctxalloc::Error>(())
/// ```
#[derive(Clone)]
pub struct Budget {
    node: Arc<Node>,
}

struct Node {
    name: String,
    /// `usize::MAX` where there is none.
    limit_bytes: usize,
    parent: Option<Budget>,
    in_use: AtomicUsize,
    peak: AtomicUsize,
    refused: AtomicU64,
}

impl Budget {
    /// A budget of its own. `limit_bytes: None` only counts.
    #[must_use]
    pub fn new(name: &str, limit_bytes: Option<usize>) -> Self {
        Self::under(None, name, limit_bytes)
    }

    /// A budget under this one: what is charged to it is charged here too.
    #[must_use]
    pub fn child(&self, name: &str, limit_bytes: Option<usize>) -> Self {
        Self::under(Some(self.clone()), name, limit_bytes)
    }

    fn under(parent: Option<Self>, name: &str, limit_bytes: Option<usize>) -> Self {
        let node = Node {
            name: name.to_owned(),
            limit_bytes: limit_bytes.unwrap_or(usize::MAX),
            parent,
            in_use: AtomicUsize::new(0),
            peak: AtomicUsize::new(0),
            refused: AtomicU64::new(0),
        };
        Self { node: Arc::new(node) }
    }

    /// Takes `bytes` from this budget and from every one above it, or from none.
    ///
    /// # Errors
    /// [`Error::BudgetExceeded`] with the name, limit and use of the budget that has no room.
    pub fn charge(&self, bytes: usize) -> Result<(), Error> {
        let refusal = |budget: &Self| {
            budget.node.refused.fetch_add(1, Ordering::Relaxed);
            Error::BudgetExceeded {
                budget: budget.node.name.clone(),
                limit_bytes: budget.node.limit_bytes,
                in_use_bytes: budget.in_use_bytes(),
                requested_bytes: bytes,
            }
        };
        let mut charged = self;
        loop {
            if !charged.node.take(bytes) {
                self.refund_up_to(Some(charged), bytes);
                return Err(refusal(charged));
            }
            match &charged.node.parent {
                Some(parent) => charged = parent,
                None => return Ok(()),
            }
        }
    }

    /// Gives `bytes` that were charged back, to this budget and every one above it.
    pub fn refund(&self, bytes: usize) {
        self.refund_up_to(None, bytes);
    }

    /// Refunds this budget and those above it, as far as `end`, which was not charged.
    fn refund_up_to(&self, end: Option<&Self>, bytes: usize) {
        let mut next = Some(self);
        while let Some(budget) = next
            && end.is_none_or(|end| !Arc::ptr_eq(&end.node, &budget.node))
        {
            // Relaxed: a number, and what it counts is handed on by others.
            let before = budget.node.in_use.fetch_sub(bytes, Ordering::Relaxed);
            debug_assert!(before >= bytes, "budget '{}' was given back more than it was charged", budget.node.name);
            next = budget.node.parent.as_ref();
        }
    }

    /// Its name, for messages.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.node.name
    }

    /// Its limit, if it has one.
    #[must_use]
    pub fn limit_bytes(&self) -> Option<usize> {
        Some(self.node.limit_bytes).filter(|&limit| limit != usize::MAX)
    }

    /// What is charged now.
    #[must_use]
    pub fn in_use_bytes(&self) -> usize {
        self.node.in_use.load(Ordering::Relaxed)
    }

    /// The most that was ever charged at one time.
    #[must_use]
    pub fn peak_bytes(&self) -> usize {
        self.node.peak.load(Ordering::Relaxed)
    }

    /// How many charges this budget refused (not those that one above it refused).
    #[must_use]
    pub fn refused(&self) -> u64 {
        self.node.refused.load(Ordering::Relaxed)
    }

    /// Whether `other` is this budget or one above it.
    #[must_use]
    pub fn is_under(&self, other: &Self) -> bool {
        std::iter::successors(Some(self), |budget| budget.parent()).any(|budget| budget.is(other))
    }

    /// Whether `other` is this very budget.
    #[must_use]
    pub fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.node, &other.node)
    }

    /// A number that no other budget has while this one lives.
    #[cfg(feature = "python")]
    pub(crate) fn identity(&self) -> usize {
        Arc::as_ptr(&self.node).addr()
    }

    /// The budget it is under.
    #[must_use]
    pub fn parent(&self) -> Option<&Self> {
        self.node.parent.as_ref()
    }
}

impl Node {
    fn take(&self, bytes: usize) -> bool {
        let fits = |in_use: usize| in_use.checked_add(bytes).filter(|&sum| sum <= self.limit_bytes);
        // Relaxed: see `refund_up_to`. No charge is ever seen that is not within the limit.
        match self.in_use.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fits) {
            Ok(before) => {
                if before + bytes > self.peak.load(Ordering::Relaxed) {
                    self.peak.fetch_max(before + bytes, Ordering::Relaxed);
                }
                true
            }
            Err(_) => false,
        }
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

/// Charges a [`Budget`] for each block of `upstream`, by the bytes that were asked for, and refuses what it has no
/// room for.
///
/// Each block costs a record more, not charged: 8 bytes, rounded up to the upstream's alignment.
///
/// ```
/// use ctxalloc::{Buffer, register, strategy::{Budget, Budgeted, System}};
///
/// let tenant = Budget::new("tenant", Some(1000));
/// let handler = register("tenant", Budgeted::new(System, tenant.clone()))?;
/// let kept = Buffer::zeroed_in(handler, 600)?;
/// assert!(Buffer::zeroed_in(handler, 600).is_err());
/// assert_eq!((tenant.in_use_bytes(), tenant.refused()), (600, 1));
/// drop(kept);
/// assert_eq!(tenant.in_use_bytes(), 0);
/// # Ok::<(), ctxalloc::Error>(())
/// ```
pub struct Budgeted<S> {
    blocks: Fronted<S, usize>,
    budget: Budget,
}

impl<S: Strategy> Budgeted<S> {
    /// `upstream`'s blocks, charged to `budget`.
    #[must_use]
    pub fn new(upstream: S, budget: Budget) -> Self {
        Self { blocks: Fronted::new(upstream), budget }
    }

    /// The budget.
    pub fn budget(&self) -> &Budget {
        &self.budget
    }

    fn make(&self, size_bytes: usize, zeroed: bool) -> Option<NonNull<u8>> {
        self.budget.charge(size_bytes).ok()?;
        let block = self.blocks.allocate(size_bytes, zeroed, size_bytes);
        if block.is_none() {
            self.budget.refund(size_bytes);
        }
        block
    }
}

// SAFETY: the blocks are the upstream's, moved behind a record of their own (`Fronted`); a charge refused is a failure
// before anything was made, and one taken for a block that could not be made is given back.
unsafe impl<S: Strategy> Strategy for Budgeted<S> {
    fn alignment(&self) -> usize {
        self.blocks.alignment()
    }

    fn allocate(&self, size_bytes: usize) -> Option<NonNull<u8>> {
        self.make(size_bytes, false)
    }

    fn allocate_zeroed(&self, size_bytes: usize) -> Option<NonNull<u8>> {
        self.make(size_bytes, true)
    }

    unsafe fn resize(&self, block: NonNull<u8>, new_size_bytes: usize) -> Option<NonNull<u8>> {
        // SAFETY: a live block, says the caller.
        let old_size_bytes = unsafe { Fronted::<S, usize>::read(block) };
        // Growth is charged before, shrinkage given back after: the budget is never below what is in use.
        let growth = new_size_bytes.saturating_sub(old_size_bytes);
        self.budget.charge(growth).ok()?;
        // SAFETY: a live block, says the caller.
        let Some(moved) = (unsafe { self.blocks.resize(block, new_size_bytes) }) else {
            self.budget.refund(growth);
            return None;
        };
        // SAFETY: live, just resized.
        unsafe { Fronted::<S, usize>::write(moved, new_size_bytes) };
        self.budget.refund(old_size_bytes.saturating_sub(new_size_bytes));
        Some(moved)
    }

    unsafe fn release(&self, block: NonNull<u8>) {
        // SAFETY: a live block, says the caller.
        let size_bytes = unsafe { Fronted::<S, usize>::read(block) };
        // SAFETY: given up, says the caller.
        unsafe { self.blocks.release(block) };
        self.budget.refund(size_bytes);
    }

    fn trim(&self) -> usize {
        self.blocks.upstream.trim()
    }

    fn live_blocks(&self) -> Option<Vec<LiveBlock>> {
        self.blocks.live_blocks()
    }
}

impl<S: fmt::Debug> fmt::Debug for Budgeted<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut text = f.debug_struct("Budgeted");
        text.field("upstream", &self.blocks.upstream);
        if let Some(limit_bytes) = self.budget.limit_bytes() {
            text.field("limit_bytes", &limit_bytes);
        }
        text.finish()
    }
}

#[cfg(test)]
mod tests {
    use super::{Budget, Budgeted};
    use crate::error::Error;
    use crate::strategy::{Strategy, System, conformance};
    use std::thread;

    #[test]
    fn budgeted_keeps_the_strategy_contract_and_ends_with_nothing_in_use() {
        let budget = Budget::new("all", None);
        conformance::check(Budgeted::new(System, budget.clone()));
        assert_eq!(budget.in_use_bytes(), 0);
        assert!(budget.peak_bytes() > 0);
    }

    #[test]
    fn a_refusal_names_the_budget_and_its_numbers_and_charges_nobody() {
        let process = Budget::new("process", Some(1000));
        let tenant = process.child("tenant", Some(800));
        let request = tenant.child("request", None);
        request.charge(700).expect("room");
        let refused = request.charge(200).expect_err("no room for the tenant");
        let expected = Error::BudgetExceeded {
            budget: "tenant".into(),
            limit_bytes: 800,
            in_use_bytes: 700,
            requested_bytes: 200,
        };
        assert_eq!(refused, expected);
        for budget in [&process, &tenant, &request] {
            assert_eq!(budget.in_use_bytes(), 700, "{budget:?}");
        }
        assert_eq!((process.refused(), tenant.refused(), request.refused()), (0, 1, 0));
        request.charge(usize::MAX).expect_err("no overflow either");
        request.refund(700);
        assert_eq!(process.in_use_bytes(), 0);
    }

    #[test]
    fn a_resize_charges_the_difference_and_a_refused_one_nothing() {
        let budget = Budget::new("b", Some(1000));
        let strategy = Budgeted::new(System, budget.clone());
        let block = strategy.allocate(400).expect("room");
        // SAFETY: a live block of this strategy; here and below the newest pointer is used.
        let block = unsafe { strategy.resize(block, 900) }.expect("room");
        assert_eq!(budget.in_use_bytes(), 900);
        // SAFETY: as above.
        assert!(unsafe { strategy.resize(block, 1001) }.is_none());
        assert_eq!(budget.in_use_bytes(), 900);
        // SAFETY: as above.
        let block = unsafe { strategy.resize(block, 100) }.expect("smaller");
        assert_eq!(budget.in_use_bytes(), 100);
        // SAFETY: as above.
        unsafe { strategy.release(block) };
        assert_eq!(budget.in_use_bytes(), 0);
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
                        if child.charge(bytes).is_ok() {
                            held.push(bytes);
                        }
                        assert!(parent.in_use_bytes() <= 10_000 && child.in_use_bytes() <= 4000);
                        if round % 3 != 0
                            && let Some(bytes) = held.pop()
                        {
                            child.refund(bytes);
                        }
                    }
                });
            }
        });
        assert_eq!(children.iter().map(Budget::in_use_bytes).sum::<usize>(), parent.in_use_bytes());
        assert!(parent.peak_bytes() <= 10_000);
    }
}
