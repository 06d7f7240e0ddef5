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
    /// How many requests for memory its own limit refused.
    pub refused: u64,
    /// How far beyond its limit it is: blocks of up to 1 KiB may be, see
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

const ENDED: usize = usize::MAX;

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
    fn has_room_for(&self, bytes: usize, overdraft_bytes: usize) -> bool {
        let in_use = self.live_bytes.load(RELAXED).saturating_add(self.pending_bytes.load(RELAXED));
        let limit = self.limit_bytes.load(RELAXED).saturating_add(overdraft_bytes);
        in_use.checked_add(bytes).is_some_and(|sum| sum <= limit)
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
        let (limit_bytes, in_use_bytes) = (self.limit_bytes(), self.live_bytes());
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

/// `account` and everything that a charge to it reaches, added to `found`, perhaps more than once. What ended requests
/// were charged to is left out, unless somebody else holds it.
fn reach(account: &Arc<Account>, found: &mut Vec<Arc<Account>>) {
    let mut next = Some(Arc::clone(account));
    while let Some(account) = next.take() {
        match &account.kind {
            Kind::Budget { parent } => next = parent.clone(),
            Kind::Request { ended, above, .. } => {
                if ended.load(RELAXED) {
                    return;
                }
                for above in above.iter().filter_map(Weak::upgrade) {
                    inherit(&above, found);
                }
            }
        }
        found.push(account);
    }
}

/// What a request that begins inside of another one takes over of that one's chain: requests that are not over, and
/// budgets that somebody holds, with what is above those.
fn inherit(account: &Arc<Account>, found: &mut Vec<Arc<Account>>) {
    match &account.kind {
        Kind::Request { ended, .. } if ended.load(RELAXED) => {}
        Kind::Request { .. } => found.push(Arc::clone(account)),
        Kind::Budget { .. } if account.handles.load(RELAXED) == 0 => {}
        Kind::Budget { .. } => reach(account, found),
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
        budget: Option<&super::Budget>,
        outer: Option<&Self>,
        is_of_this_thread: bool,
    ) -> Result<Self, Error> {
        let mut above = Vec::new();
        if let Some(budget) = budget {
            reach(budget.account(), &mut above);
        }
        for account in outer.map_or(&[][..], |outer| outer.accounts()) {
            inherit(account, &mut above);
        }
        let above = as_set(above);
        if above.len() >= MAX_DEPTH {
            return Err(Error::NestedTooDeep { max: MAX_DEPTH });
        }
        let kind = Kind::Request {
            ended: AtomicBool::new(false),
            own_blocks: AtomicUsize::new(0),
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

    pub(crate) fn own(&self) -> &Arc<Account> {
        &self.own
    }

    #[inline]
    fn accounts(&self) -> &[Arc<Account>] {
        if self.all.is_empty() { slice::from_ref(&self.own) } else { &self.all }
    }

    #[inline]
    fn check(&self, bytes: usize, overdraft_bytes: usize) -> Result<(), Refused> {
        let accounts = self.accounts();
        match accounts.iter().position(|account| !account.has_room_for(bytes, overdraft_bytes)) {
            None => Ok(()),
            Some(at) => Err(accounts[at].refuse(at, bytes)),
        }
    }

    /// Takes a charge, from all accounts or from none. `overdraft_bytes` may be used beyond each limit.
    pub(crate) fn take(&self, bytes: usize, blocks: usize, overdraft_bytes: usize) -> Result<(), Refused> {
        with_all(self.accounts(), || {
            self.check(bytes, overdraft_bytes)?;
            self.accounts().iter().for_each(|account| account.take(bytes, blocks));
            Ok(())
        })
    }

    /// Takes a charge that was taken before back.
    pub(crate) fn give_back(&self, bytes: usize, blocks: usize) {
        with_all(self.accounts(), || self.accounts().iter().for_each(|account| account.give_back(bytes, blocks)));
    }

    /// Sets bytes aside for a block that is about to be made; [`commit`](Self::commit) or [`cancel`](Self::cancel) follows.
    pub(crate) fn reserve(&self, bytes: usize, overdraft_bytes: usize) -> Result<(), Refused> {
        with_all(self.accounts(), || {
            self.check(bytes, overdraft_bytes)?;
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
    fn request(&self) -> (&AtomicBool, &AtomicUsize) {
        match &self.own.kind {
            Kind::Request { ended, own_blocks, .. } => (ended, own_blocks),
            Kind::Budget { .. } => unreachable!("only requests' chains are asked"),
        }
    }

    /// Whether the request is over.
    #[inline]
    pub(crate) fn has_ended(&self) -> bool {
        self.own.has_ended()
    }

    /// [`take`](Self::take) for a block that is there; says whether it was taken, and remembers a refusal. `first` is called
    /// where the block is the only one of a request that is over, before anybody can know of it.
    #[inline]
    pub(crate) fn take_block(&self, bytes: usize, overdraft_bytes: usize, first: impl FnOnce()) -> bool {
        if self.all.is_empty() {
            // The plain case, without a loop: most requests are in no other one and have no budget.
            return self.own.lock.with(|| {
                if !self.own.has_room_for(bytes, overdraft_bytes) {
                    self.write_down(self.own.refuse(0, bytes));
                    return false;
                }
                self.own.take(bytes, 1);
                self.add_own(first);
                true
            });
        }
        with_all(&self.all, || {
            if let Some(at) = self.all.iter().position(|account| !account.has_room_for(bytes, overdraft_bytes)) {
                self.write_down(self.all[at].refuse(at, bytes));
                return false;
            }
            self.all.iter().for_each(|account| account.take(bytes, 1));
            self.add_own(first);
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
            self.add_own(first);
        });
    }

    /// A block that is counted nowhere, and keeps the request's state all the same.
    pub(crate) fn add_uncounted(&self, first: impl FnOnce()) {
        self.own.lock.with(|| self.add_own(first));
    }

    #[inline]
    fn add_own(&self, first: impl FnOnce()) {
        let (ended, own_blocks) = self.request();
        let before = own_blocks.load(RELAXED);
        own_blocks.store(before + 1, RELAXED);
        if before == 0 && ended.load(RELAXED) {
            first();
        }
    }

    /// Gives the charge of a block back; says whether it was the last one of a request that is over.
    #[inline]
    #[must_use]
    pub(crate) fn give_block_back(&self, bytes: usize) -> bool {
        if self.all.is_empty() {
            return self.own.lock.with(|| {
                self.own.give_back(bytes, 1);
                self.remove_own()
            });
        }
        with_all(&self.all, || {
            self.all.iter().for_each(|account| account.give_back(bytes, 1));
            self.remove_own()
        })
    }

    /// The end of a block that was counted nowhere, as [`give_block_back`](Self::give_block_back).
    #[must_use]
    pub(crate) fn remove_uncounted(&self) -> bool {
        self.own.lock.with(|| self.remove_own())
    }

    #[inline]
    fn remove_own(&self) -> bool {
        let (ended, own_blocks) = self.request();
        let left = own_blocks.load(RELAXED) - 1;
        own_blocks.store(left, RELAXED);
        left == 0 && ended.load(RELAXED)
    }

    /// Ends the request: its numbers at that moment, and whether blocks of it are alive.
    pub(crate) fn end(&self) -> (Stats, bool) {
        let (ended, own_blocks) = self.request();
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
        let at_plus_one = if refused.at == ENDED { ENDED } else { refused.at + 1 };
        slips[0].fill(&refused, at_plus_one, self.own.total_blocks.load(RELAXED));
    }

    /// The last refusals, the youngest first; told once.
    pub(crate) fn take_refusals(&self) -> Vec<Refusal> {
        self.refusals(|slip| slip.at_plus_one.swap(0, RELAXED))
    }

    /// The youngest refusal of so many bytes; or the last one, if nothing was allocated since.
    pub(crate) fn refusal_of(&self, requested_bytes: Option<usize>) -> Option<Error> {
        let all = self.refusals(|slip| slip.at_plus_one.load(RELAXED));
        let fits = |refusal: &Refusal| match (&refusal.error, requested_bytes) {
            (
                Error::BudgetExceeded { requested_bytes, .. } | Error::RequestEnded { requested_bytes, .. },
                Some(bytes),
            ) => *requested_bytes == bytes,
            _ => refusal.is_last,
        };
        all.into_iter().find(fits).map(|refusal| refusal.error)
    }

    fn refusals(&self, at_plus_one: impl Fn(&Slip) -> usize) -> Vec<Refusal> {
        let (found, made) = self.own.lock.with(|| {
            let found: [_; REMEMBERED] = std::array::from_fn(|number| {
                let slip = &self.own.refusals[number];
                (at_plus_one(slip), slip.read(), slip.made_before.load(RELAXED))
            });
            (found, self.own.total_blocks.load(RELAXED))
        });
        // Texts are memory too: not under the lock.
        let there = found.into_iter().filter(|&(at_plus_one, ..)| at_plus_one != 0);
        there
            .map(|(at_plus_one, refused, before)| {
                let at = if at_plus_one == ENDED { ENDED } else { at_plus_one - 1 };
                Refusal { error: self.error(Refused { at, ..refused }), is_last: before == made }
            })
            .collect()
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
