//! What accounts know of loans: what each has lent (`lending` does it), and what a request has borrowed (`credit`).

use std::cell::UnsafeCell;
use std::panic::RefUnwindSafe;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize};

/// To how many requests an account lends at a time, at first and at most. A request that waits for something does not
/// give its loan back: where there is no room for one more, all of them are called in.
pub(super) const FIRST_LOANS: usize = 4;
pub(super) const MAX_LOANS: usize = 64;

/// How many charges of a request go to all its accounts before it borrows: most requests make few small blocks.
const FIRST: u32 = 2;

/// The numbers of an account that its owner changes on credit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Counted {
    pub(super) live_bytes: usize,
    pub(super) total_bytes: u64,
    pub(super) live_blocks: usize,
    pub(super) total_blocks: u64,
    /// Of a tab.
    pub(super) own_blocks: usize,
}

/// What `B`, another account, may use.
#[derive(Debug)]
pub(super) struct Loan<B> {
    pub(super) borrower: Arc<B>,
    pub(super) bytes: usize,
    /// What the borrower's numbers were. They change under the lock of this account, and on credit.
    pub(super) before: Counted,
}

/// What an account has lent. Changed under its lock.
#[derive(Debug)]
pub(super) struct Lending<B> {
    /// The sum of all loans.
    pub(super) bytes: AtomicUsize,
    /// How many there are.
    pub(super) count: AtomicUsize,
    /// How many there is room for. Most accounts never lend.
    pub(super) room: AtomicUsize,
    loans: UnsafeCell<Vec<Loan<B>>>,
}

// SAFETY: `loans` is reached under the account's lock only (`Lending::loans`), the rest is atomic.
#[allow(unsafe_code, reason = "a cell under the account's lock")]
unsafe impl<B: Send + Sync> Sync for Lending<B> {}

// A panic under the lock leaves whole loans: they are put in and taken out, and nothing in between panics.
impl<B> RefUnwindSafe for Lending<B> {}

impl<B> Lending<B> {
    pub(super) fn none() -> Self {
        Self {
            bytes: AtomicUsize::new(0),
            count: AtomicUsize::new(0),
            room: AtomicUsize::new(0),
            loans: UnsafeCell::new(Vec::new()),
        }
    }

    /// # Safety
    /// - the caller holds the account's lock as long as it has the reference, and has no other one.
    #[allow(unsafe_code, reason = "a cell under the account's lock")]
    #[allow(clippy::mut_from_ref, reason = "as for a lock's cell")]
    pub(super) unsafe fn loans(&self) -> &mut Vec<Loan<B>> {
        // SAFETY: nobody else reaches it (this function's contract).
        unsafe { &mut *self.loans.get() }
    }
}

/// What a request knows of its loans. Changed under its lock.
#[derive(Debug)]
pub(super) struct Credit {
    /// Whether accounts above may have loans of it. They may have been called in meanwhile, by some of them or by all.
    pub(super) borrows: AtomicBool,
    /// For how many charges more it does not borrow.
    pub(super) wait: AtomicU32,
    /// Whether another account is below it, for ever.
    pub(super) is_above_others: AtomicBool,
    /// Of a tab: the number of its request's account.
    pub(super) tab_of: Option<u64>,
}

impl Credit {
    pub(super) fn none() -> Self {
        Self {
            borrows: AtomicBool::new(false),
            wait: AtomicU32::new(FIRST),
            is_above_others: AtomicBool::new(false),
            tab_of: None,
        }
    }

    pub(super) fn of_tab(request: u64) -> Self {
        Self { tab_of: Some(request), ..Self::none() }
    }
}
