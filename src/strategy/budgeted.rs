//! `Budgeted`, the strategy that charges a [`Budget`] with each block of another one.

use super::account::{Chain, Pending};
use super::prefixed::Prefixed;
use super::{Budget, LiveBlock, Strategy};
use std::fmt;
use std::ptr::NonNull;

/// Charges a [`Budget`] with the requested bytes of each block of `upstream`, and refuses blocks that it has no room
/// for.
///
/// Each block costs 8 more bytes, rounded up to the upstream's alignment, for a record. These are not charged.
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
    blocks: Prefixed<S, usize>,
    budget: Budget,
    chain: Chain,
}

impl<S: Strategy> Budgeted<S> {
    /// `upstream`'s blocks, charged to `budget`.
    #[must_use]
    pub fn new(upstream: S, budget: Budget) -> Self {
        let chain = Chain::of_budget(budget.account());
        chain.tell_others(|_| false);
        Self { blocks: Prefixed::new(upstream), budget, chain }
    }

    /// The budget that is charged.
    pub fn budget(&self) -> &Budget {
        &self.budget
    }

    fn make(&self, size_bytes: usize, zeroed: bool) -> Option<NonNull<u8>> {
        self.chain.reserve(size_bytes, size_bytes, false).ok()?;
        // Cancelled where the upstream refuses, or panics.
        let pending = Pending::new(&self.chain, size_bytes);
        let block = self.blocks.allocate(size_bytes, zeroed, size_bytes)?;
        pending.commit(1);
        Some(block)
    }
}

// SAFETY: the blocks are the upstream's, each behind a record (`Prefixed`). A refused charge is a failure before
// anything was allocated, and the charge for a block that could not be allocated is cancelled.
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
        // SAFETY: the block is live and from `blocks` (this function's contract).
        let old_size_bytes = unsafe { Prefixed::<S, usize>::read(block) };
        // Growth is charged before the resize, shrinkage given back after it: never is less charged than is in use.
        let growth = new_size_bytes.saturating_sub(old_size_bytes);
        if growth > 0 {
            self.chain.reserve(growth, new_size_bytes, false).ok()?;
        }
        let pending = Pending::new(&self.chain, growth);
        // SAFETY: the block is live and from `blocks`; the caller uses only the new pointer after success.
        let moved = unsafe { self.blocks.resize(block, new_size_bytes) }?;
        // SAFETY: `moved` is live and from `blocks`.
        unsafe { Prefixed::<S, usize>::write(moved, new_size_bytes) };
        pending.commit(0);
        self.chain.give_back(old_size_bytes.saturating_sub(new_size_bytes), 0);
        Some(moved)
    }

    unsafe fn release(&self, block: NonNull<u8>) {
        // SAFETY: the block is live and from `blocks` (this function's contract).
        let size_bytes = unsafe { Prefixed::<S, usize>::read(block) };
        let _given_back = GivenBack { chain: &self.chain, size_bytes };
        // SAFETY: the block is live, from `blocks`, and not used again (this function's contract).
        unsafe { self.blocks.release(block) };
    }

    fn is_read_after_release(&self) -> bool {
        self.blocks.upstream.is_read_after_release()
    }

    fn trim(&self) -> usize {
        self.blocks.upstream.trim()
    }

    fn live_blocks(&self) -> Option<Vec<LiveBlock>> {
        self.blocks.live_blocks()
    }
}

/// Gives back what a block was charged, also where its release panics: its user has given it up.
struct GivenBack<'a> {
    chain: &'a Chain,
    size_bytes: usize,
}

impl Drop for GivenBack<'_> {
    fn drop(&mut self) {
        self.chain.give_back(self.size_bytes, 1);
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
    use crate::strategy::live::Live;
    use crate::strategy::{System, conformance};

    #[test]
    fn budgeted_keeps_the_strategy_contract_and_ends_with_nothing_in_use() {
        let budget = Budget::new("all", None);
        conformance::check(Budgeted::new(System, budget.clone()));
        conformance::check_wrapper(|upstream| Budgeted::new(upstream, budget.clone()));
        assert_eq!(budget.in_use_bytes(), 0);
        assert!(budget.peak_bytes() > 0);
    }

    #[test]
    fn a_resize_charges_the_difference_and_a_refused_one_nothing() {
        let budget = Budget::new("b", Some(1000));
        let strategy = Budgeted::new(System, budget.clone());
        let mut block = Live::of(&strategy, 400);
        assert!(block.resize(900));
        assert_eq!(budget.in_use_bytes(), 900);
        assert!(!block.resize(1001));
        assert_eq!(budget.in_use_bytes(), 900);
        assert!(block.resize(100));
        assert_eq!(budget.in_use_bytes(), 100);
        block.release();
        assert_eq!(budget.in_use_bytes(), 0);
    }
}
