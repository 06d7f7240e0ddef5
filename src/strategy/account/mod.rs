//! Accounts: what a budget or a request counts (this file), the chain of accounts that a charge goes to (`chain`), and
//! what a chain refused and why (`refused`, `refusals`). What a request reserves before it uses it: `reservation`.
//!
//! The specification is a naive model: a chain is a set of accounts. A charge is taken if each of them has room, and
//! then each changes; otherwise only the `refused` count of the refusing one does. To keep this true between threads, a
//! charge holds the locks of all its accounts at once, from the youngest to the oldest
//! ([`with_all`](crate::sync::with_all)). While one thread does all the work, this costs a few plain loads and stores.
//!
//! All numbers are atomics, so that a single one can be read without the lock. They are changed only under it. Small
//! blocks of a request change its own account only, within what those above have lent it (`credit`, `lending`).

mod above;
mod asking;
mod ceiling;
mod chain;
mod choice;
mod chosen;
mod counted;
mod cover;
mod credit;
mod few;
mod guarantee;
mod known;
mod lending;
mod lent;
mod limits;
mod made_room;
#[cfg(any(ctxalloc_whole, test))]
mod margin;
#[cfg_attr(not(feature = "python"), allow(dead_code, reason = "only the binding begins whole requests"))]
mod parts;
mod pending;
mod ready;
pub(crate) mod reclaimers;
pub(crate) mod reclaiming;
mod refusals;
mod refused;
mod reservation;
mod reserved;
mod small;
mod stats;
mod tabs;
mod uncounted;
#[cfg(ctxalloc_whole)]
mod whole;

pub(crate) use chain::{Chain, Own};
pub(crate) use chosen::Chosen;
pub use known::{BudgetNumbers, budgets, ready};
pub use made_room::{MadeRoom, made_room};
use parts::Parts;
#[cfg(feature = "python")]
pub(crate) use parts::WholeStats;
#[cfg(ctxalloc_whole)]
pub(crate) use parts::{WHOLE_REQUESTS, Weight};
pub(crate) use pending::Pending;
pub(crate) use refused::{Refusal, Refused};
pub(crate) use reserved::{OnRoom, on_room, shrank};
pub(crate) use small::Room;
pub use stats::Stats;
#[cfg(ctxalloc_whole)]
pub(crate) use whole::Force;

use super::pool::clock;
use crate::sync::{AsOwnerLock, OwnerLock};
use asking::Missing;
use few::Few;
use known::Listed;
use lent::{Credit, Lending};
use refused::{REMEMBERED, RefusalNote};
use reserved::Reservation;
use std::borrow::Cow;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

/// No limit.
pub(crate) const UNLIMITED: usize = usize::MAX;

/// Blocks of up to this many bytes may use an overdraft.
pub(crate) const TINY_BYTES: usize = 1024;

/// Blocks of up to this many bytes, scalars, may use an overdraft [`SCALARS_FACTOR`] times as large. NumPy does not
/// check whether it got their memory, so they must still be served long after arrays are refused, even where another
/// request has used up a shared budget.
pub(crate) const SCALAR_BYTES: usize = 32;
const SCALARS_FACTOR: usize = 16;

/// The size on record of a block that no account counts.
pub(crate) const UNCOUNTED: usize = 0;

/// Accounts, most often no more than these: a request below a tenant, a service and a process.
const NEAR: usize = 4;
type Accounts = Few<Arc<Account>, NEAR>;

/// How many requests and budgets a request may be inside of.
pub(crate) const MAX_DEPTH: usize = 4096;

/// The numbers of one budget or one request.
#[derive(Debug)]
pub(crate) struct Account {
    /// Unique, and larger than those of all older accounts: it gives the order in which locks are taken.
    id: u64,
    /// `None` for a request without a name, which is called `request` with its number.
    name: Option<Arc<str>>,
    lock: OwnerLock,
    limit_bytes: AtomicUsize,
    /// The limit that holds: 0 for a request that is chosen to make room (`chosen.rs`), else `limit_bytes`.
    enforced_bytes: AtomicUsize,
    /// Without what was lent and used.
    live_bytes: AtomicUsize,
    /// Up to how many live bytes the owner of a request may charge it, and whether it may give back, without a look at
    /// anything else: see [`set_ceiling`](Self::set_ceiling). Changed under the lock; and set to 0 under that of an
    /// account above which calls its loan in.
    ceiling: AtomicUsize,
    /// Of a request: what it has borrowed.
    credit: Credit,
    lending: Lending<Account>,
    /// Reserved for blocks that are being allocated, and what requests below reserved and do not use. Counts towards
    /// the limit only.
    pending_bytes: AtomicUsize,
    /// What was in use when the limit was lowered below it, or when a request that refuses late work ended; else 0. It
    /// falls with what is in use. Tiny blocks may exceed it by the overdraft, as they may exceed the limit.
    floor_bytes: AtomicUsize,
    peak_bytes: AtomicUsize,
    total_bytes: AtomicU64,
    live_blocks: AtomicUsize,
    total_blocks: AtomicU64,
    /// Of a request: the live blocks of this request itself, counted or not, and its containers. It stands here, since
    /// each small block changes it.
    own_blocks: AtomicUsize,
    refused: AtomicU64,
    /// The number of [`Budget`](super::Budget) handles that refer to it.
    pub(super) handles: AtomicUsize,
    /// Whether somebody waits for room in it. Set and read under the lock; cleared by the queue.
    wanted: AtomicBool,
    /// How many wait in the queue for it, or for one below it, and how many may. The queue's.
    waiting: AtomicUsize,
    max_waiting: AtomicUsize,
    /// Whether it was full when somebody asked last: see [`is_ready`](Self::is_ready).
    was_full: AtomicBool,
    /// Of a request that was to have one, and of a budget to which its parent guarantees memory.
    reservation: Option<Reservation>,
    /// What budgets directly below are guaranteed, or guarantee to others. Changed under the lock.
    promised_bytes: AtomicUsize,
    /// How many bytes it lacked lately.
    missing: Missing,
    /// Whether it is to be refused memory once, and whether it ever was.
    is_chosen: AtomicBool,
    was_chosen: AtomicBool,
    /// How many milliseconds somebody waits for it before a request is chosen to make room; [`NEVER`].
    victims_after: AtomicU64,
    /// How many were, and how many bytes came back while reclaimers ran.
    victims: AtomicU64,
    reclaimed_bytes: AtomicU64,
    /// How many reclaimers it has.
    pub(super) reclaimers: AtomicUsize,
    /// Of a request: whether others are charged to it as to a budget, and not known to a recording as inside of it.
    includes_others: AtomicBool,
    kind: Kind,
    refusals: [RefusalNote; REMEMBERED],
}

/// How many requests may wait for a budget, unless it is told otherwise.
const MAX_WAITING: usize = 1024;

/// Instead of a number of milliseconds.
const NEVER: u64 = u64::MAX;

#[derive(Debug)]
enum Kind {
    Budget {
        /// Taken out when the account is dropped, to avoid a recursive drop.
        parent: Option<Arc<Account>>,
    },
    Request {
        /// Set by [`Chain::end`], under the lock, and never cleared.
        ended: AtomicBool,
        /// How often it was refused memory, by its own limit or by one above.
        refusals: AtomicU64,
        /// When it began, by the coarse clock.
        begun: Duration,
        /// By how many bytes tiny blocks, its own and those of requests inside, may exceed its limit; and its own the
        /// limit of each budget.
        overdraft_bytes: usize,
        /// The other accounts that it is charged to. Weak, so that an ended request does not keep them alive.
        above: Few<Weak<Account>, NEAR>,
    },
}

/// The locks order everything that must be ordered. Reading a single number without them needs no order.
const RELAXED: Ordering = Ordering::Relaxed;

fn add(number: &AtomicUsize, change: usize) {
    number.store(number.load(RELAXED).saturating_add(change), RELAXED);
}

fn subtract(number: &AtomicUsize, change: usize) {
    let before = number.load(RELAXED);
    debug_assert!(before >= change, "an account was given back more than it had");
    number.store(before.saturating_sub(change), RELAXED);
}

fn count(number: &AtomicU64, change: u64) {
    number.store(number.load(RELAXED).saturating_add(change), RELAXED);
}

impl Account {
    #[inline(always)]
    fn new(
        name: Option<Arc<str>>,
        limit_bytes: Option<usize>,
        kind: Kind,
        lock: OwnerLock,
        reservation: Option<Reservation>,
    ) -> Self {
        static IDS: AtomicU64 = AtomicU64::new(0);
        let is_alone = matches!(&kind, Kind::Request { above, .. } if above.is_empty());
        Self {
            id: IDS.fetch_add(1, RELAXED),
            name,
            lock,
            limit_bytes: AtomicUsize::new(limit_bytes.unwrap_or(UNLIMITED)),
            enforced_bytes: AtomicUsize::new(limit_bytes.unwrap_or(UNLIMITED)),
            live_bytes: AtomicUsize::new(0),
            ceiling: AtomicUsize::new(if is_alone { limit_bytes.unwrap_or(UNLIMITED) } else { 0 }),
            credit: Credit::none(),
            lending: Lending::none(),
            pending_bytes: AtomicUsize::new(0),
            floor_bytes: AtomicUsize::new(0),
            peak_bytes: AtomicUsize::new(0),
            total_bytes: AtomicU64::new(0),
            live_blocks: AtomicUsize::new(0),
            total_blocks: AtomicU64::new(0),
            own_blocks: AtomicUsize::new(0),
            refused: AtomicU64::new(0),
            handles: AtomicUsize::new(0),
            wanted: AtomicBool::new(false),
            waiting: AtomicUsize::new(0),
            max_waiting: AtomicUsize::new(MAX_WAITING),
            was_full: AtomicBool::new(false),
            reservation,
            promised_bytes: AtomicUsize::new(0),
            missing: Missing::new(),
            is_chosen: AtomicBool::new(false),
            was_chosen: AtomicBool::new(false),
            victims_after: AtomicU64::new(NEVER),
            victims: AtomicU64::new(0),
            reclaimed_bytes: AtomicU64::new(0),
            reclaimers: AtomicUsize::new(0),
            includes_others: AtomicBool::new(false),
            kind,
            refusals: std::array::from_fn(|_| RefusalNote::default()),
        }
    }

    /// An account for a budget.
    pub(crate) fn of_budget(name: &str, limit_bytes: Option<usize>, parent: Option<Arc<Self>>) -> Arc<Self> {
        Self::listed_budget(name, limit_bytes, parent, None)
    }

    fn listed_budget(
        name: &str,
        limit_bytes: Option<usize>,
        parent: Option<Arc<Self>>,
        reservation: Option<Reservation>,
    ) -> Arc<Self> {
        let kind = Kind::Budget { parent };
        let account = Self::new(Some(name.into()), limit_bytes, kind, OwnerLock::new(), reservation);
        if let Kind::Budget { parent: Some(parent) } = &account.kind {
            parent.is_below_no_more();
        }
        let budget = Arc::new(account);
        let listed: Arc<dyn Listed> = Arc::clone(&budget) as _;
        known::add(budget.id, Arc::downgrade(&listed));
        budget
    }

    pub(crate) fn name(&self) -> Cow<'_, str> {
        match &self.name {
            Some(name) => Cow::Borrowed(name),
            None => format!("request {}", self.id).into(),
        }
    }

    /// The name that it was given, if any.
    pub(crate) fn given_name(&self) -> Option<&str> {
        self.name.as_deref()
    }

    /// Its number, which no other account has.
    pub(crate) fn number(&self) -> u64 {
        self.id
    }

    pub(crate) fn limit_bytes(&self) -> usize {
        self.limit_bytes.load(RELAXED)
    }

    /// Whether somebody waits who would be charged to it, be it for its room or for another account's.
    fn is_waited_for(&self) -> bool {
        self.waiting.load(RELAXED) > 0
    }

    /// Not under its lock.
    pub(crate) fn live_bytes(&self) -> usize {
        if self.may_lend() {
            self.lock.with(|| self.live_bytes_with_loans())
        } else {
            self.live_bytes.load(Ordering::Acquire)
        }
    }

    /// Whether it has live blocks. Not under its lock.
    #[cfg(feature = "python")]
    #[inline]
    pub(crate) fn has_live_blocks(&self) -> bool {
        if self.may_lend() {
            return self.stats().live_blocks > 0;
        }
        self.live_blocks.load(RELAXED) > 0
    }

    pub(crate) fn peak_bytes(&self) -> usize {
        self.peak_bytes.load(RELAXED)
    }

    pub(crate) fn pending_bytes(&self) -> usize {
        self.pending_bytes.load(RELAXED)
    }

    pub(super) fn refused(&self) -> u64 {
        self.refused.load(RELAXED)
    }

    /// The next account that it is charged to: a budget's parent, or the nearest live one above a request.
    pub(crate) fn parent(&self) -> Option<Arc<Self>> {
        match &self.kind {
            Kind::Budget { parent } => parent.clone(),
            Kind::Request { above, .. } => above.iter().filter_map(Weak::upgrade).find(|account| !account.has_ended()),
        }
    }

    /// Whether it belongs to a request that has ended. Such an account cannot be a parent.
    pub(crate) fn has_ended(&self) -> bool {
        match &self.kind {
            Kind::Budget { .. } => false,
            Kind::Request { ended, .. } => ended.load(RELAXED),
        }
    }

    /// Whether a recording may lack some of what was charged to it: of its end this is asked once that has been, since
    /// who charges it says so first.
    pub(crate) fn includes_others(&self) -> bool {
        self.includes_others.load(RELAXED)
    }

    /// Whether it is a request's own.
    pub(crate) fn is_of_request(&self) -> bool {
        matches!(self.kind, Kind::Request { .. })
    }

    /// How long ago the request began, accurate to a few milliseconds. Zero for a budget.
    pub(crate) fn age(&self) -> Duration {
        match &self.kind {
            Kind::Budget { .. } => Duration::ZERO,
            Kind::Request { begun, .. } => clock::now().saturating_sub(*begun),
        }
    }

    /// What is in use and reserved, without what was lent: exact under the lock, once that is called in.
    #[inline]
    pub(super) fn counted_bytes(&self) -> usize {
        self.live_bytes.load(RELAXED).saturating_add(self.pending_bytes.load(RELAXED))
    }

    /// Whether it has room beside all that it has lent.
    #[inline]
    pub(crate) fn has_room_for(&self, bytes: usize) -> bool {
        let in_use = self.counted_bytes().saturating_add(self.lent_bytes());
        in_use.checked_add(bytes).is_some_and(|sum| sum <= self.enforced_bytes.load(RELAXED))
    }

    /// Whether `bytes` more for a tiny block of `size_bytes` may exceed its limit. `overdraft_bytes` is that of the
    /// block's request, which budgets go by. Where `is_late`, the limit is what was in use at the request's end.
    #[cold]
    fn may_exceed(&self, bytes: usize, size_bytes: usize, overdraft_bytes: usize, is_late: bool) -> bool {
        let overdraft_bytes = match &self.kind {
            Kind::Budget { .. } => overdraft_bytes,
            Kind::Request { overdraft_bytes, .. } => *overdraft_bytes,
        };
        let usable_bytes =
            if size_bytes <= SCALAR_BYTES { overdraft_bytes.saturating_mul(SCALARS_FACTOR) } else { overdraft_bytes };
        let limit_bytes = if is_late { 0 } else { self.limit_bytes() };
        let level = limit_bytes.max(self.floor_bytes.load(RELAXED));
        let in_use = self
            .live_bytes
            .load(RELAXED)
            .checked_add(self.pending_bytes.load(RELAXED))
            .and_then(|it| it.checked_add(bytes));
        // Without a limit the level is the largest number there is, beyond which nothing can be counted.
        overdraft_bytes > 0 && in_use.is_some_and(|in_use| in_use <= level.saturating_add(usable_bytes))
    }

    /// Adds a charge, which all accounts of the chain have room for, or which they have to bear.
    #[inline]
    fn take(&self, bytes: usize, blocks: usize) {
        self.call_in_for_growth(bytes);
        let live = self.live_bytes.load(RELAXED) + bytes;
        // Before the other: whoever reads the live bytes and then the peak, without the lock, finds that no less.
        if live > self.peak_bytes.load(RELAXED) {
            self.peak_bytes.store(live, RELAXED);
        }
        self.live_bytes.store(live, Ordering::Release);
        count(&self.total_bytes, bytes as u64);
        if self.total_bytes.load(RELAXED) > u64::MAX / 2 {
            self.set_ceiling();
        }
        if blocks > 0 {
            add(&self.live_blocks, blocks);
            count(&self.total_blocks, blocks as u64);
        }
    }

    #[inline]
    fn give_back(&self, bytes: usize, blocks: usize) {
        // A block of a tab's may be given back by another one.
        if self.live_bytes.load(RELAXED) < bytes || self.live_blocks.load(RELAXED) < blocks {
            self.call_in();
        }
        self.give_own_back(bytes, blocks);
    }

    /// The same where it counts the block itself: no loan of it is called in.
    #[inline]
    fn give_own_back(&self, bytes: usize, blocks: usize) {
        subtract(&self.live_bytes, bytes);
        self.lower_floor(self.live_bytes.load(RELAXED));
        subtract(&self.live_blocks, blocks);
    }

    /// Counts a refusal by this account, under its lock.
    #[cold]
    fn refuse(&self, at: usize, requested_bytes: usize) -> Refused {
        count(&self.refused, 1);
        // Reserved bytes count as in use here, as they do for the limit.
        let in_use_bytes = self.counted_bytes();
        let limit_bytes = self.limit_bytes();
        Refused { at, limit_bytes, in_use_bytes, held_bytes: 0, requested_bytes, is_chosen: self.take_mark() }
    }
}

impl AsOwnerLock for Arc<Account> {
    #[inline]
    fn owner_lock(&self) -> &OwnerLock {
        &self.lock
    }
}

impl Drop for Account {
    fn drop(&mut self) {
        if *self.was_chosen.get_mut() {
            chosen::forget(self.id);
        }
        if *self.reclaimers.get_mut() > 0 {
            reclaiming::forget(self.id);
        }
        if matches!(self.kind, Kind::Budget { .. }) {
            known::remove(self.id);
            self.return_guarantee();
        }
        // In a loop, since budgets may be a million deep.
        let mut next = match &mut self.kind {
            Kind::Budget { parent } => parent.take(),
            Kind::Request { .. } => None,
        };
        while let Some(account) = next {
            next = Arc::into_inner(account).and_then(|mut account| {
                account.return_guarantee();
                match &mut account.kind {
                    Kind::Budget { parent } => parent.take(),
                    Kind::Request { .. } => None,
                }
            });
        }
    }
}
