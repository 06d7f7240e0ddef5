//! Accounts: what a budget or a request counts, and how a charge reaches all accounts of a chain or none.
//!
//! The naive model is the specification: a chain is a set of accounts; a charge is taken where each of them has room, and
//! then each of them changes; else only the refusing one's `refused` does. To make that so between threads, a charge
//! holds the locks of all its accounts at once, from the youngest to the oldest ([`with_all`]); where one thread does all
//! the work this costs a few plain loads and stores.
//!
//! All numbers are atomics, so that one of them may be read without the lock; they are only changed under it.

use crate::error::Error;
use crate::sync::{AsOwnerLock, OwnerLock, with_all};
use std::borrow::Cow;
use std::slice;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};

/// No limit.
pub(crate) const UNLIMITED: usize = usize::MAX;

/// The largest block that an overdraft is granted to, in bytes.
pub(crate) const TINY_BYTES: usize = 1024;

/// In place of a block's bytes: no account has them.
pub(crate) const UNCOUNTED: usize = 0;

/// Numbers of one budget or one request.
#[derive(Debug)]
pub(crate) struct Account {
    /// Accounts that were made later have larger ones: the order of the locks.
    id: u64,
    /// None: `request`, with its number.
    name: Option<Box<str>>,
    lock: OwnerLock,
    limit_bytes: AtomicUsize,
    live_bytes: AtomicUsize,
    /// Promised to blocks that are being made: counts for the limit, and for nothing else.
    pending_bytes: AtomicUsize,
    peak_bytes: AtomicUsize,
    total_bytes: AtomicU64,
    live_blocks: AtomicUsize,
    total_blocks: AtomicU64,
    refused: AtomicU64,
    /// How many [`Budget`](super::Budget)s refer to it.
    pub(super) handles: AtomicUsize,
    kind: Kind,
    refusals: [Slip; REMEMBERED],
}

#[derive(Debug)]
enum Kind {
    Budget {
        /// Taken out when the account is dropped, so that no drop recurses.
        parent: Option<Arc<Account>>,
    },
    Request {
        ended: AtomicBool,
        /// Live blocks that this request itself made, counted or not.
        own_blocks: AtomicUsize,
        /// Bytes of those that are tiny: what may be an overdraft is measured by it.
        tiny_bytes: AtomicUsize,
        /// How far tiny blocks, its own and those of requests inside of it, may go beyond its limit.
        overdraft_bytes: usize,
        /// What it is charged to besides. Weak: a request that is over keeps nobody else's numbers alive.
        above: Box<[Weak<Account>]>,
    },
}

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
    /// How many requests for memory its own limit refused, or the request itself after its end.
    pub refused: u64,
    /// How far beyond its own limit it is: blocks of up to 1 KiB may be, or the limit was lowered, see
    /// [`Builder::overdraft_bytes`](crate::request::Builder::overdraft_bytes).
    pub overdraft_bytes: usize,
}

/// A charge that was refused.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Refusal {
    /// [`Error::BudgetExceeded`], with the budget whose limit it was, or [`Error::RequestEnded`].
    pub error: Error,
    /// Whether nothing was allocated in the request since.
    pub is_last: bool,
}

/// A refusal as it is told where it happens: numbers only.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Refused {
    /// Which account of the chain; [`ENDED`] where the request is over and serves no more.
    at: usize,
    limit_bytes: usize,
    in_use_bytes: usize,
    requested_bytes: usize,
}

const ENDED: usize = usize::MAX - 1;
/// In place of an account: the memory itself was refused, by the system or a strategy.
const NO_MEMORY: usize = usize::MAX - 2;

/// How many refusals a request remembers: more than one, as whoever cleans up after one may meet another.
const REMEMBERED: usize = 4;

/// Room for one refusal; `at_plus_one` is 0 where there is none.
#[derive(Debug, Default)]
struct Slip {
    at_plus_one: AtomicUsize,
    limit_bytes: AtomicUsize,
    in_use_bytes: AtomicUsize,
    requested_bytes: AtomicUsize,
    /// How many blocks were made before it.
    made_before: AtomicU64,
}

/// Relaxed everywhere: the locks order what has to be ordered; who reads one number without them reads just that.
const RELAXED: Ordering = Ordering::Relaxed;

fn add(number: &AtomicUsize, change: usize) {
    number.store(number.load(RELAXED).wrapping_add(change), RELAXED);
}

fn subtract(number: &AtomicUsize, change: usize) {
    let before = number.load(RELAXED);
    debug_assert!(before >= change, "an account was given back more than it had");
    number.store(before.saturating_sub(change), RELAXED);
}

fn count(number: &AtomicU64, change: u64) {
    number.store(number.load(RELAXED).wrapping_add(change), RELAXED);
}

impl Account {
    fn new(name: Option<&str>, limit_bytes: Option<usize>, kind: Kind, lock: OwnerLock) -> Self {
        static IDS: AtomicU64 = AtomicU64::new(0);
        Self {
            id: IDS.fetch_add(1, RELAXED),
            name: name.map(Into::into),
            lock,
            limit_bytes: AtomicUsize::new(limit_bytes.unwrap_or(UNLIMITED)),
            live_bytes: AtomicUsize::new(0),
            pending_bytes: AtomicUsize::new(0),
            peak_bytes: AtomicUsize::new(0),
            total_bytes: AtomicU64::new(0),
            live_blocks: AtomicUsize::new(0),
            total_blocks: AtomicU64::new(0),
            refused: AtomicU64::new(0),
            handles: AtomicUsize::new(0),
            kind,
            refusals: std::array::from_fn(|_| Slip::default()),
        }
    }

    /// The account of a budget.
    pub(super) fn of_budget(name: &str, limit_bytes: Option<usize>, parent: Option<Arc<Self>>) -> Arc<Self> {
        Arc::new(Self::new(Some(name), limit_bytes, Kind::Budget { parent }, OwnerLock::new()))
    }

    pub(crate) fn name(&self) -> Cow<'_, str> {
        match &self.name {
            Some(name) => Cow::Borrowed(name),
            None => format!("request {}", self.id).into(),
        }
    }

    /// A number that no other account has.
    pub(crate) fn number(&self) -> u64 {
        self.id
    }

    pub(crate) fn limit_bytes(&self) -> usize {
        self.limit_bytes.load(RELAXED)
    }

    /// From the next charge on.
    pub(super) fn set_limit_bytes(&self, limit_bytes: usize) {
        self.lock.with(|| self.limit_bytes.store(limit_bytes, RELAXED));
    }

    pub(crate) fn live_bytes(&self) -> usize {
        self.live_bytes.load(RELAXED)
    }

    pub(super) fn peak_bytes(&self) -> usize {
        self.peak_bytes.load(RELAXED)
    }

    pub(super) fn refused(&self) -> u64 {
        self.refused.load(RELAXED)
    }

    /// What this account is charged to besides, one step up: a budget's parent, or a request's nearest account.
    pub(super) fn parent(&self) -> Option<Arc<Self>> {
        match &self.kind {
            Kind::Budget { parent } => parent.clone(),
            Kind::Request { above, .. } => above.iter().filter_map(Weak::upgrade).find(|account| !account.has_ended()),
        }
    }

    /// Whether it is a request's, and that is over: it cannot be a parent any more.
    fn has_ended(&self) -> bool {
        match &self.kind {
            Kind::Budget { .. } => false,
            Kind::Request { ended, .. } => ended.load(RELAXED),
        }
    }

    /// All numbers, of one moment.
    pub(crate) fn stats(&self) -> Stats {
        self.lock.with(|| self.numbers())
    }

    fn numbers(&self) -> Stats {
        let live_bytes = self.live_bytes.load(RELAXED);
        Stats {
            live_bytes,
            live_blocks: self.live_blocks.load(RELAXED),
            peak_bytes: self.peak_bytes.load(RELAXED),
            total_bytes: self.total_bytes.load(RELAXED),
            total_blocks: self.total_blocks.load(RELAXED),
            refused: self.refused.load(RELAXED),
            overdraft_bytes: live_bytes.saturating_sub(self.limit_bytes.load(RELAXED)),
        }
    }

    #[inline]
    fn has_room_for(&self, bytes: usize) -> bool {
        let in_use = self.live_bytes.load(RELAXED).saturating_add(self.pending_bytes.load(RELAXED));
        in_use.checked_add(bytes).is_some_and(|sum| sum <= self.limit_bytes.load(RELAXED))
    }

    /// Whether a tiny block may go beyond this limit: everywhere but in strict requests.
    #[cold]
    fn lets_tiny_blocks_pass(&self) -> bool {
        match &self.kind {
            Kind::Budget { .. } => true,
            Kind::Request { overdraft_bytes, .. } => *overdraft_bytes > 0,
        }
    }

    /// Counts a charge that all accounts of the chain have room for.
    #[inline]
    fn take(&self, bytes: usize, blocks: usize) {
        let live = self.live_bytes.load(RELAXED) + bytes;
        self.live_bytes.store(live, RELAXED);
        if live > self.peak_bytes.load(RELAXED) {
            self.peak_bytes.store(live, RELAXED);
        }
        count(&self.total_bytes, bytes as u64);
        if blocks > 0 {
            add(&self.live_blocks, blocks);
            count(&self.total_blocks, blocks as u64);
        }
    }

    #[inline]
    fn give_back(&self, bytes: usize, blocks: usize) {
        subtract(&self.live_bytes, bytes);
        subtract(&self.live_blocks, blocks);
    }

    #[cold]
    fn refuse(&self, at: usize, requested_bytes: usize) -> Refused {
        count(&self.refused, 1);
        // What is set aside is in use as far as the limit goes.
        let in_use_bytes = self.live_bytes() + self.pending_bytes.load(RELAXED);
        let limit_bytes = self.limit_bytes();
        Refused { at, limit_bytes, in_use_bytes, requested_bytes }
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
        // One after the other: budgets may be a million deep.
        let mut next = match &mut self.kind {
            Kind::Budget { parent } => parent.take(),
            Kind::Request { .. } => None,
        };
        while let Some(account) = next {
            next = Arc::into_inner(account).and_then(|mut account| match &mut account.kind {
                Kind::Budget { parent } => parent.take(),
                Kind::Request { .. } => None,
            });
        }
    }
}

/// `account` and everything that a charge to it reaches, added to `found`, perhaps more than once. It was named by its
/// user, and so counts even if it is that of a request that is over.
fn reach(account: &Arc<Account>, found: &mut Vec<Arc<Account>>) {
    let mut next = Some(Arc::clone(account));
    while let Some(account) = next.take() {
        match &account.kind {
            Kind::Budget { parent } => next = parent.clone(),
            Kind::Request { .. } => reach_above(&account, found),
        }
        found.push(account);
    }
}

/// What a request is charged to besides, as far as [`take_over`] goes.
fn reach_above(request: &Account, found: &mut Vec<Arc<Account>>) {
    let Kind::Request { above, .. } = &request.kind else { return };
    above.iter().filter_map(Weak::upgrade).for_each(|account| take_over(&account, found));
}

/// A request that is not over, or a budget that somebody holds, with what is above that.
fn take_over(account: &Arc<Account>, found: &mut Vec<Arc<Account>>) {
    match &account.kind {
        Kind::Request { ended, .. } if !ended.load(RELAXED) => found.push(Arc::clone(account)),
        Kind::Budget { .. } if account.handles.load(RELAXED) > 0 => reach(account, found),
        _ => {}
    }
}

/// What a request that begins where one is over takes over from those around that one: all that each of them is charged to.
/// Nothing of what is over itself: whoever still carries it has only been left with it.
fn inherit(account: &Arc<Account>, found: &mut Vec<Arc<Account>>) {
    if let Kind::Request { ended, .. } = &account.kind
        && !ended.load(RELAXED)
    {
        reach_above(account, found);
        found.push(Arc::clone(account));
    }
}

/// The youngest first, each once.
fn as_set(mut accounts: Vec<Arc<Account>>) -> Box<[Arc<Account>]> {
    accounts.sort_unstable_by_key(|account| std::cmp::Reverse(account.id));
    accounts.dedup_by_key(|account| account.id);
    accounts.into()
}

/// The accounts that a charge goes to, each once.
#[derive(Debug)]
pub(crate) struct Chain {
    /// The one that is charged directly.
    own: Arc<Account>,
    /// All of them, the youngest first; empty where there is no other.
    all: Box<[Arc<Account>]>,
}

/// How many requests may be one inside of the other.
pub(crate) const MAX_DEPTH: usize = 4096;

impl Chain {
    /// What a budget's charges go to.
    pub(super) fn of_budget(budget: &Arc<Account>) -> Self {
        let mut found = Vec::new();
        reach(budget, &mut found);
        Self::with(Arc::clone(budget), found)
    }

    /// A new request's: charged to `budget`, and inside of the request that charges `outer`.
    ///
    /// # Errors
    /// [`Error::NestedTooDeep`].
    pub(crate) fn of_request(
        name: Option<&str>,
        limit_bytes: Option<usize>,
        overdraft_bytes: usize,
        budget: Option<&super::Budget>,
        outer: Option<&Self>,
        is_of_this_thread: bool,
    ) -> Result<Self, Error> {
        let mut above = Vec::new();
        if let Some(budget) = budget {
            reach(budget.account(), &mut above);
        }
        match outer {
            // All that it is charged to itself.
            Some(outer) if !outer.has_ended() => {
                outer.accounts().iter().for_each(|account| take_over(account, &mut above))
            }
            Some(outer) => outer.accounts().iter().for_each(|account| inherit(account, &mut above)),
            None => {}
        }
        let above = as_set(above);
        if above.len() >= MAX_DEPTH {
            return Err(Error::NestedTooDeep { max: MAX_DEPTH });
        }
        let kind = Kind::Request {
            ended: AtomicBool::new(false),
            own_blocks: AtomicUsize::new(0),
            tiny_bytes: AtomicUsize::new(0),
            overdraft_bytes,
            above: above.iter().map(Arc::downgrade).collect(),
        };
        let lock = if is_of_this_thread { OwnerLock::new_owned() } else { OwnerLock::new() };
        let own = Arc::new(Account::new(name, limit_bytes, kind, lock));
        Ok(Self::with(own, above.into_vec()))
    }

    fn with(own: Arc<Account>, mut above: Vec<Arc<Account>>) -> Self {
        if above.iter().all(|account| account.id == own.id) {
            return Self { own, all: Box::default() };
        }
        above.push(Arc::clone(&own));
        Self { own, all: as_set(above) }
    }

    /// Whether charges go to this account too.
    pub(super) fn reaches(&self, account: &Arc<Account>) -> bool {
        self.accounts().iter().any(|own| Arc::ptr_eq(own, account))
    }

    pub(crate) fn own(&self) -> &Arc<Account> {
        &self.own
    }

    #[inline]
    fn accounts(&self) -> &[Arc<Account>] {
        if self.all.is_empty() { slice::from_ref(&self.own) } else { &self.all }
    }

    /// Who has no room, if anybody: of the youngest first.
    #[inline]
    fn without_room(&self, bytes: usize, is_tiny: bool) -> Option<usize> {
        let at = self.accounts().iter().position(|account| !account.has_room_for(bytes))?;
        if is_tiny { self.without_overdraft(bytes) } else { Some(at) }
    }

    /// The same where the block may use the overdraft of its request.
    #[cold]
    fn without_overdraft(&self, bytes: usize) -> Option<usize> {
        let Kind::Request { tiny_bytes, overdraft_bytes, .. } = &self.own.kind else { return Some(0) };
        let is_within = tiny_bytes.load(RELAXED) + bytes <= *overdraft_bytes;
        let refuses =
            |account: &Arc<Account>| !(account.has_room_for(bytes) || is_within && account.lets_tiny_blocks_pass());
        self.accounts().iter().position(refuses)
    }

    #[inline]
    fn check(&self, bytes: usize, is_tiny: bool) -> Result<(), Refused> {
        match self.without_room(bytes, is_tiny) {
            None => Ok(()),
            Some(at) => Err(self.accounts()[at].refuse(at, bytes)),
        }
    }

    /// Takes a charge, from all accounts or from none.
    pub(crate) fn take(&self, bytes: usize, blocks: usize) -> Result<(), Refused> {
        with_all(self.accounts(), || {
            self.check(bytes, false)?;
            self.accounts().iter().for_each(|account| account.take(bytes, blocks));
            Ok(())
        })
    }

    /// Takes a charge that was taken before back.
    pub(crate) fn give_back(&self, bytes: usize, blocks: usize) {
        with_all(self.accounts(), || self.accounts().iter().for_each(|account| account.give_back(bytes, blocks)));
    }

    /// Sets bytes aside for a block that is about to be made; [`commit`](Self::commit) or [`cancel`](Self::cancel) follows.
    pub(crate) fn reserve(&self, bytes: usize, is_tiny: bool) -> Result<(), Refused> {
        with_all(self.accounts(), || {
            self.check(bytes, is_tiny)?;
            self.accounts().iter().for_each(|account| add(&account.pending_bytes, bytes));
            Ok(())
        })
    }

    /// What was set aside is not wanted after all: nothing has changed.
    pub(crate) fn cancel(&self, bytes: usize) {
        with_all(self.accounts(), || {
            self.accounts().iter().for_each(|account| subtract(&account.pending_bytes, bytes));
        });
    }

    /// The charge for what was set aside.
    pub(crate) fn commit(&self, bytes: usize, blocks: usize) {
        with_all(self.accounts(), || {
            for account in self.accounts() {
                subtract(&account.pending_bytes, bytes);
                account.take(bytes, blocks);
            }
        });
    }

    /// The error for a refusal of this chain.
    #[cold]
    pub(crate) fn error(&self, refused: Refused) -> Error {
        let Refused { at, limit_bytes, in_use_bytes, requested_bytes } = refused;
        match self.accounts().get(at) {
            Some(account) => Error::BudgetExceeded {
                budget: account.name().into_owned(),
                limit_bytes,
                in_use_bytes,
                requested_bytes,
            },
            None => Error::RequestEnded { request: self.own.name().into_owned(), requested_bytes },
        }
    }
}

/// What only the chain of a request does: it knows when the request is over, and remembers what was refused.
impl Chain {
    #[inline]
    fn request(&self) -> (&AtomicBool, &AtomicUsize, &AtomicUsize) {
        match &self.own.kind {
            Kind::Request { ended, own_blocks, tiny_bytes, .. } => (ended, own_blocks, tiny_bytes),
            Kind::Budget { .. } => unreachable!("only requests' chains are asked"),
        }
    }

    /// A block has another size from now on.
    pub(crate) fn resized(&self, old_bytes: usize, new_bytes: usize) {
        let (_, _, tiny_bytes) = self.request();
        if old_bytes <= TINY_BYTES || new_bytes <= TINY_BYTES {
            self.own.lock.with(|| {
                add(tiny_bytes, if new_bytes <= TINY_BYTES { new_bytes } else { 0 });
                subtract(tiny_bytes, if old_bytes <= TINY_BYTES { old_bytes } else { 0 });
            });
        }
    }

    /// Whether tiny blocks of the request may go beyond limits.
    pub(crate) fn has_overdraft(&self) -> bool {
        matches!(self.own.kind, Kind::Request { overdraft_bytes: 1.., .. })
    }

    /// Whether the request is inside of one that is not over.
    #[cold]
    pub(crate) fn is_inside_of_a_live_one(&self) -> bool {
        let is_live = |account: &&Arc<Account>| matches!(account.kind, Kind::Request { .. }) && !account.has_ended();
        self.accounts().iter().filter(|account| account.id != self.own.id).any(|account| is_live(&account))
    }

    /// Whether the request is over.
    #[inline]
    pub(crate) fn has_ended(&self) -> bool {
        self.own.has_ended()
    }

    /// [`take`](Self::take) for a block that is there; says whether it was taken, and remembers a refusal. `first` is called
    /// where the block is the only one of a request that is over, before anybody can know of it.
    #[inline]
    pub(crate) fn take_block(&self, bytes: usize, first: impl FnOnce()) -> bool {
        let is_tiny = bytes <= TINY_BYTES;
        if self.all.is_empty() {
            // The plain case, without a loop: most requests are in no other one and have no budget.
            return self.own.lock.with(|| {
                if let Some(at) = self.without_room(bytes, is_tiny) {
                    self.write_down(self.own.refuse(at, bytes));
                    return false;
                }
                self.own.take(bytes, 1);
                self.add_own(bytes, first);
                true
            });
        }
        with_all(&self.all, || {
            if let Some(at) = self.without_room(bytes, is_tiny) {
                self.write_down(self.all[at].refuse(at, bytes));
                return false;
            }
            self.all.iter().for_each(|account| account.take(bytes, 1));
            self.add_own(bytes, first);
            true
        })
    }

    /// [`commit`](Self::commit) for a block, as [`take_block`](Self::take_block).
    pub(crate) fn commit_block(&self, bytes: usize, first: impl FnOnce()) {
        with_all(self.accounts(), || {
            for account in self.accounts() {
                subtract(&account.pending_bytes, bytes);
                account.take(bytes, 1);
            }
            self.add_own(bytes, first);
        });
    }

    /// A block that is counted nowhere, and keeps the request's state all the same.
    pub(crate) fn add_uncounted(&self, first: impl FnOnce()) {
        self.own.lock.with(|| self.add_own(UNCOUNTED, first));
    }

    #[inline]
    fn add_own(&self, bytes: usize, first: impl FnOnce()) {
        let (ended, own_blocks, tiny_bytes) = self.request();
        if bytes <= TINY_BYTES {
            add(tiny_bytes, bytes);
        }
        let before = own_blocks.load(RELAXED);
        own_blocks.store(before + 1, RELAXED);
        if before == 0 && ended.load(RELAXED) {
            first();
        }
    }

    /// Gives the charge of a block back; says whether it was the last one of a request that is over. If not, nothing of the
    /// chain is touched after its own lock is let go, which is the last one: the request may end, and the chain be freed.
    #[inline]
    #[must_use]
    pub(crate) fn give_block_back(&self, bytes: usize) -> bool {
        if self.all.is_empty() {
            return self.own.lock.with(|| {
                self.own.give_back(bytes, 1);
                self.remove_own(bytes)
            });
        }
        with_all(&self.all, || {
            self.all.iter().for_each(|account| account.give_back(bytes, 1));
            self.remove_own(bytes)
        })
    }

    /// The end of a block that was counted nowhere, as [`give_block_back`](Self::give_block_back).
    #[must_use]
    pub(crate) fn remove_uncounted(&self) -> bool {
        self.own.lock.with(|| self.remove_own(UNCOUNTED))
    }

    #[inline]
    fn remove_own(&self, bytes: usize) -> bool {
        let (ended, own_blocks, tiny_bytes) = self.request();
        if bytes <= TINY_BYTES {
            subtract(tiny_bytes, bytes);
        }
        let left = own_blocks.load(RELAXED) - 1;
        own_blocks.store(left, RELAXED);
        left == 0 && ended.load(RELAXED)
    }

    /// Ends the request: its numbers at that moment, and whether blocks of it are alive.
    pub(crate) fn end(&self) -> (Stats, bool) {
        let (ended, own_blocks, _) = self.request();
        self.own.lock.with(|| {
            ended.store(true, RELAXED);
            (self.own.numbers(), own_blocks.load(RELAXED) > 0)
        })
    }

    /// A refusal because the request is over.
    #[cold]
    pub(crate) fn refuse_after_end(&self, requested_bytes: usize) -> Refused {
        self.own.lock.with(|| self.own.refuse(ENDED, requested_bytes))
    }

    /// There was no memory: a refusal of as many bytes before has nothing to do with it.
    #[cold]
    pub(crate) fn remember_no_memory(&self, requested_bytes: usize) {
        self.remember(Refused { at: NO_MEMORY, limit_bytes: 0, in_use_bytes: 0, requested_bytes });
    }

    /// Keeps a refusal for whoever asks why there was no memory.
    #[cold]
    pub(crate) fn remember(&self, refused: Refused) {
        self.own.lock.with(|| self.write_down(refused));
    }

    /// The same, under the own account's lock.
    #[cold]
    fn write_down(&self, refused: Refused) {
        let slips = &self.own.refusals;
        for (to, from) in (1..REMEMBERED).rev().map(|number| (&slips[number], &slips[number - 1])) {
            to.fill(&from.read(), from.at_plus_one.load(RELAXED), from.made_before.load(RELAXED));
        }
        slips[0].fill(&refused, refused.at + 1, self.own.total_blocks.load(RELAXED));
    }

    /// The last refusals, the youngest first; told once.
    pub(crate) fn take_refusals(&self) -> Vec<Refusal> {
        let refusals = self.refusals(|slip| slip.at_plus_one.swap(0, RELAXED));
        refusals.into_iter().filter(|(refused, _)| refused.at != NO_MEMORY).map(|told| self.told(told)).collect()
    }

    /// The youngest refusal of so many bytes; or the last one, if nothing was allocated since.
    pub(crate) fn refusal_of(&self, requested_bytes: Option<usize>) -> Option<Error> {
        let all = self.refusals(|slip| slip.at_plus_one.load(RELAXED));
        let fits = |(refused, is_last): &(Refused, bool)| match requested_bytes {
            Some(bytes) => refused.requested_bytes == bytes,
            None => *is_last,
        };
        let found = all.into_iter().find(fits).filter(|(refused, _)| refused.at != NO_MEMORY);
        found.map(|told| self.told(told).error)
    }

    fn told(&self, (refused, is_last): (Refused, bool)) -> Refusal {
        Refusal { error: self.error(refused), is_last }
    }

    /// What was written down, the youngest first, and whether nothing was allocated since.
    fn refusals(&self, at_plus_one: impl Fn(&Slip) -> usize) -> Vec<(Refused, bool)> {
        let (found, made) = self.own.lock.with(|| {
            let found: [_; REMEMBERED] = std::array::from_fn(|number| {
                let slip = &self.own.refusals[number];
                (at_plus_one(slip), slip.read(), slip.made_before.load(RELAXED))
            });
            (found, self.own.total_blocks.load(RELAXED))
        });
        // Lists are memory too: not under the lock.
        let there = found.into_iter().filter(|&(at_plus_one, ..)| at_plus_one != 0);
        there.map(|(at, refused, before)| (Refused { at: at - 1, ..refused }, before == made)).collect()
    }
}

impl Slip {
    fn read(&self) -> Refused {
        Refused {
            at: 0,
            limit_bytes: self.limit_bytes.load(RELAXED),
            in_use_bytes: self.in_use_bytes.load(RELAXED),
            requested_bytes: self.requested_bytes.load(RELAXED),
        }
    }

    fn fill(&self, refused: &Refused, at_plus_one: usize, made_before: u64) {
        self.at_plus_one.store(at_plus_one, RELAXED);
        self.limit_bytes.store(refused.limit_bytes, RELAXED);
        self.in_use_bytes.store(refused.in_use_bytes, RELAXED);
        self.requested_bytes.store(refused.requested_bytes, RELAXED);
        self.made_before.store(made_before, RELAXED);
    }
}
