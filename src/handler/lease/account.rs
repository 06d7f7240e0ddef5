//! What a request has had: counters, and the budget it is charged to. They nest: an inner request's numbers are part of
//! the outer one's.

use crate::error::Error;
use crate::strategy::Budget;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, TryLockError};
use std::thread;

/// A request's numbers at one moment. Bytes are those that were asked for.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Stats {
    /// In blocks that are alive.
    pub live_bytes: usize,
    /// Blocks that are alive.
    pub live_blocks: usize,
    /// The most that was alive at one time.
    pub peak_bytes: usize,
    /// All that was ever allocated; a resize counts what it grew by.
    pub total_bytes: u64,
    /// How many blocks were ever made.
    pub total_blocks: u64,
    /// How many requests for memory its own limit refused.
    pub refused: u64,
}

/// A charge that was refused.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Refusal {
    /// [`Error::BudgetExceeded`], with the budget whose limit it was.
    pub error: Error,
    /// Whether nothing was allocated in the request since.
    pub is_last: bool,
}

/// How many refusals are remembered: more than one, as whoever cleans up after one may meet another.
const REMEMBERED: usize = 8;

/// How often the processor is yielded to a thread that looks at the refusals: it is done after some hundred nanoseconds.
const PATIENCE: usize = 10_000;

#[derive(Debug)]
pub(super) struct Account {
    /// The request's own node: counts always, limits where a limit was given.
    pub(super) budget: Budget,
    /// The request around it, if there is one.
    outer: Option<Arc<Account>>,
    /// Whether the outer budget is above the own one, so that charges get there by themselves.
    outer_is_above: bool,
    total_bytes: AtomicU64,
    total_blocks: AtomicU64,
    live_blocks: AtomicUsize,
    /// Each with the number of blocks that were made before it; the youngest last.
    /// Not waited for: see [`Account::with_refusals`].
    refusals: Mutex<Vec<(Error, u64)>>,
}

impl Account {
    /// An account inside of `outer`, charged to `budget` (or to the outer one's where there is none).
    pub(super) fn new(
        name: &str,
        limit_bytes: Option<usize>,
        budget: Option<&Budget>,
        outer: Option<Arc<Self>>,
    ) -> Self {
        let above = budget.or(outer.as_deref().map(|outer| &outer.budget));
        let own = match above {
            Some(above) => above.child(name, limit_bytes),
            None => Budget::new(name, limit_bytes),
        };
        let outer_is_above = outer.as_deref().is_none_or(|outer| own.is_under(&outer.budget));
        Self {
            budget: own,
            outer,
            outer_is_above,
            total_bytes: AtomicU64::new(0),
            total_blocks: AtomicU64::new(0),
            live_blocks: AtomicUsize::new(0),
            refusals: Mutex::new(Vec::new()),
        }
    }

    /// Charges `bytes` here, above and around, or nowhere.
    pub(super) fn charge(&self, bytes: usize) -> Option<()> {
        let charged = self.budget.charge(bytes).and_then(|()| match self.elsewhere() {
            Some(outer) => outer.budget.charge(bytes).inspect_err(|_| self.budget.refund(bytes)),
            None => Ok(()),
        });
        charged.map_err(|refusal| self.remember(refusal)).ok()
    }

    #[cold]
    fn remember(&self, refusal: Error) {
        let made = self.total_blocks.load(Ordering::Relaxed);
        let forgotten = self.with_refusals(|refusals| {
            let oldest = (refusals.len() == REMEMBERED).then(|| refusals.remove(0));
            refusals.push((refusal, made));
            oldest
        });
        drop(forgotten); // not under the lock: its text is memory too
    }

    /// Looks at the refusals, unless they are out of reach: a child of `fork` may find them held by a thread that is not
    /// there. It does without then; the failed allocation itself is told in any case.
    fn with_refusals<R>(&self, look: impl FnOnce(&mut Vec<(Error, u64)>) -> R) -> Option<R> {
        for _ in 0..PATIENCE {
            match self.refusals.try_lock() {
                Ok(mut refusals) => return Some(look(&mut refusals)),
                Err(TryLockError::Poisoned(poisoned)) => return Some(look(&mut poisoned.into_inner())),
                Err(TryLockError::WouldBlock) => thread::yield_now(),
            }
        }
        None
    }

    /// Gives `bytes` back everywhere.
    pub(super) fn refund(&self, bytes: usize) {
        self.budget.refund(bytes);
        if let Some(outer) = self.elsewhere() {
            outer.budget.refund(bytes);
        }
    }

    fn elsewhere(&self) -> Option<&Self> {
        self.outer.as_deref().filter(|_| !self.outer_is_above)
    }

    /// Counts a block that was made.
    pub(super) fn made(&self, bytes: usize) {
        // Relaxed, here and below: numbers that order nothing.
        for account in self.and_outer() {
            account.total_bytes.fetch_add(bytes as u64, Ordering::Relaxed);
            account.total_blocks.fetch_add(1, Ordering::Relaxed);
            account.live_blocks.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Counts what a block grew by.
    pub(super) fn grew(&self, bytes: usize) {
        for account in self.and_outer() {
            account.total_bytes.fetch_add(bytes as u64, Ordering::Relaxed);
        }
    }

    /// Counts a block that was released.
    pub(super) fn released(&self) {
        for account in self.and_outer() {
            account.live_blocks.fetch_sub(1, Ordering::Relaxed);
        }
    }

    fn and_outer(&self) -> impl Iterator<Item = &Self> {
        std::iter::successors(Some(self), |account| account.outer.as_deref())
    }

    /// Why the last charge was refused; told once.
    pub(super) fn take_refusal(&self) -> Option<Error> {
        self.take_refusals().into_iter().next().map(|refusal| refusal.error)
    }

    /// The last refusals, the youngest first; told once.
    pub(super) fn take_refusals(&self) -> Vec<Refusal> {
        let made = self.total_blocks.load(Ordering::Relaxed);
        let refusals = self.with_refusals(std::mem::take).unwrap_or_default();
        refusals.into_iter().rev().map(|(error, before)| Refusal { error, is_last: before == made }).collect()
    }

    pub(super) fn stats(&self) -> Stats {
        Stats {
            live_bytes: self.budget.in_use_bytes(),
            live_blocks: self.live_blocks.load(Ordering::Relaxed),
            peak_bytes: self.budget.peak_bytes(),
            total_bytes: self.total_bytes.load(Ordering::Relaxed),
            total_blocks: self.total_blocks.load(Ordering::Relaxed),
            refused: self.budget.refused(),
        }
    }
}
