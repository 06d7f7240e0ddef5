//! Slots and who holds them. See the module's drawing; the argument for each step stands beside it.

use super::account::{Account, Refusal, Stats};
use crate::error::Error;
use crate::handler::entry::{Draft, Handler};
use crate::handler::name::Name;
use crate::handler::{handler, table, trampoline};
use crate::strategy::{Aligned, Arena, Budget, Fronted, LiveBlock, Pool, Strategy};
use crate::sync::{ForkLock, HeldAcrossFork, Locked};
use crate::trace;
use std::ffi::c_void;
use std::fmt;
use std::ptr::{NonNull, null_mut};
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

/// What a lease is taken with.
#[derive(Debug, Default)]
#[non_exhaustive]
pub struct Terms {
    /// For messages and metrics.
    pub name: Option<String>,
    /// The most bytes that may be alive at one time.
    pub limit_bytes: Option<usize>,
    /// What the request is charged to besides.
    pub budget: Option<Budget>,
    /// Where its blocks come from: an arena of its own where there is none.
    pub strategy: Option<Arc<dyn Strategy>>,
    /// The handler of the request around it, or any other handler, or none.
    pub outer: Option<Handler>,
}

/// A request's hold on a slot, or (past the ceiling) its place in the shared pool. Dropping it ends the request.
pub struct Lease {
    slot: Option<&'static Slot>,
    is_private: bool,
    account: Arc<Account>,
    /// Where a request past the ceiling goes.
    shared: Handler,
}

/// How many slots there are and what becomes of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct LeaseMetrics {
    /// Slots in the table.
    pub slots: usize,
    /// Those that the next requests will get.
    pub free: usize,
    /// How many requests there were.
    pub requests: u64,
    /// How many of them were past the ceiling and were served from the shared pool.
    pub overflowed: u64,
}

/// One handler whose memory and counters belong to one request at a time.
struct Slot {
    /// Leased, holders and blocks, see the module.
    state: AtomicU64,
    /// What blocks are made under now. Never NULL.
    running: AtomicPtr<Running>,
    /// What blocks were made under until the last request ended; dropped when the state is zero. Or NULL.
    retired: AtomicPtr<Running>,
    arena: Arc<Arena>,
    /// At how many blocks dead pages are given back the next time, after the end of a request.
    sweep_at: AtomicU64,
    /// In the list of free slots, or about to be.
    listed: AtomicBool,
    handler: OnceLock<Handler>,
}

const BLOCK: u64 = 1;
const HOLDER: u64 = 1 << 40;
const LEASED: u64 = 1 << 63;
/// Somebody is making a slot that nothing held ready for the next request.
const RECYCLING: u64 = 1 << 62;
const BLOCKS: u64 = HOLDER - 1;

/// Terms in force: where blocks come from, and who pays.
struct Running {
    blocks: Fronted<Arc<dyn Strategy>, Record>,
    account: Arc<Account>,
}

/// What stands in front of each block.
#[derive(Clone, Copy)]
struct Record {
    size_bytes: usize,
    /// Alive while the block is: see `Slot::recycle`.
    running: NonNull<Running>,
}

/// All slots of this process.
struct Slots {
    all: Locked<Vec<&'static Slot>>,
    free: Locked<Vec<&'static Slot>>,
    ceiling: AtomicUsize,
    requests: AtomicU64,
    overflowed: AtomicU64,
    /// What serves a slot between requests: the shared pool, without a limit. Immortal.
    idle: Running,
}

const CEILING: usize = 4096;
/// How many free slots keep pages with their memory for the next request.
const WARM_SLOTS: usize = 64;

fn slots() -> &'static Slots {
    static SLOTS: OnceLock<Arc<Slots>> = OnceLock::new();
    SLOTS.get_or_init(|| {
        let idle = Running {
            blocks: Fronted::new(Arc::new(Pool::shared().clone())),
            account: Arc::new(Account::new("after the end of requests", None, None, None)),
        };
        let slots = Arc::new(Slots {
            all: Locked::new(Vec::new()),
            free: Locked::new(Vec::new()),
            ceiling: AtomicUsize::new(CEILING),
            requests: AtomicU64::new(0),
            overflowed: AtomicU64::new(0),
            idle,
        });
        let holder: Arc<dyn HeldAcrossFork> = Arc::clone(&slots) as _;
        crate::sync::hold_across_fork(Arc::downgrade(&holder));
        slots
    })
}

/// How many slots there may be; requests past it are served from the shared pool.
#[must_use]
pub fn ceiling() -> usize {
    slots().ceiling.load(Ordering::Relaxed)
}

/// Sets how many slots there may be, 4096 unless you say otherwise. Slots that are there stay.
pub fn set_ceiling(slots_most: usize) {
    slots().ceiling.store(slots_most, Ordering::Relaxed);
}

/// How many slots there are, and how many requests there were.
#[must_use]
pub fn metrics() -> LeaseMetrics {
    let slots = slots();
    LeaseMetrics {
        slots: slots.all.with(|all| all.len()),
        free: slots.free.with(|free| free.len()),
        requests: slots.requests.load(Ordering::Relaxed),
        overflowed: slots.overflowed.load(Ordering::Relaxed),
    }
}

impl Slots {
    /// A slot that is leased from now on; nothing past the ceiling.
    fn lease(&'static self) -> Option<&'static Slot> {
        while let Some(slot) = self.free.with(Vec::pop) {
            // From here on a recycling may list it again. Whoever still has the slot selected may have made a block
            // just now; then the end of that block lists it.
            slot.listed.store(false, Ordering::Release);
            if slot.state.compare_exchange(0, LEASED, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
                return Some(slot);
            }
            slot.list_if_free(self);
        }
        let number = self.all.with(|all| all.len());
        (number < self.ceiling.load(Ordering::Relaxed)).then(|| self.grow(number))
    }

    /// One slot more, leased.
    fn grow(&'static self, number: usize) -> &'static Slot {
        let slot: &'static Slot = Box::leak(Box::new(Slot {
            state: AtomicU64::new(LEASED),
            running: AtomicPtr::new(self.idle_pointer()),
            retired: AtomicPtr::new(null_mut()),
            arena: Arc::new(Arena::over(Pool::shared())),
            sweep_at: AtomicU64::new(0),
            listed: AtomicBool::new(false),
            handler: OnceLock::new(),
        }));
        // Racing threads try the next number, and so does a user who took such a name.
        let registered = (number..).find_map(|number| {
            let name = format!("request slot {number}");
            let name = Name::new(&name).expect("short, and without a NUL");
            table::table().register(Draft::of_slot(name, slot, hold)).ok()
        });
        let (handler, _) = registered.expect("there is always another number");
        slot.handler.get_or_init(|| handler);
        self.all.with(|all| all.push(slot));
        slot
    }

    fn idle_pointer(&'static self) -> *mut Running {
        std::ptr::from_ref(&self.idle).cast_mut()
    }
}

impl HeldAcrossFork for Slots {
    fn for_each_lock(&self, visit: &mut dyn FnMut(&ForkLock)) {
        visit(self.all.lock());
        visit(self.free.lock());
    }
}

impl Lease {
    /// Takes a slot on these terms.
    ///
    /// # Errors
    /// [`Error::BadAlignment`] where the strategy aligns its blocks to less than 16 bytes.
    pub fn take(terms: Terms) -> Result<Self, Error> {
        if let Some(strategy) = &terms.strategy
            && strategy.alignment() < ALIGN
        {
            return Err(Error::BadAlignment { align: strategy.alignment(), least: ALIGN, most: Aligned::MOST });
        }
        let slots = slots();
        let number = slots.requests.fetch_add(1, Ordering::Relaxed);
        let outer = terms.outer.and_then(|outer| {
            let _held = Hold::on(outer)?; // its terms stay while we look at them
            let running = Slot::behind(outer)?.running();
            // A request that is over is around nothing any more: its slot serves from the shared pool.
            (!std::ptr::eq(running, &raw const slots.idle)).then(|| Arc::clone(&running.account))
        });
        let name = terms.name.unwrap_or_else(|| format!("request {number}"));
        let account = Arc::new(Account::new(&name, terms.limit_bytes, terms.budget.as_ref(), outer));
        let slot = slots.lease();
        match slot {
            Some(slot) => slot.begin(terms.strategy, &account),
            None => {
                slots.overflowed.fetch_add(1, Ordering::Relaxed);
                trace::past_the_ceiling(&name, slots.ceiling.load(Ordering::Relaxed));
            }
        }
        Ok(Self { slot, is_private: slot.is_some(), account, shared: handler("pool").expect("built in") })
    }

    /// The handler to select for the request. It is the request's while the lease lasts.
    #[must_use]
    pub fn handler(&self) -> Handler {
        self.slot.and_then(|slot| slot.handler.get().copied()).unwrap_or(self.shared)
    }

    /// Whether it got a slot: past the ceiling nothing is counted or limited.
    #[must_use]
    pub fn is_private(&self) -> bool {
        self.is_private
    }

    /// Its name.
    #[must_use]
    pub fn name(&self) -> &str {
        self.account.budget.name()
    }

    /// Its numbers; those of requests inside of it are part of them.
    #[must_use]
    pub fn stats(&self) -> Stats {
        self.account.stats()
    }

    /// Its own budget: the limit it was given, under what it is charged to.
    #[must_use]
    pub fn budget(&self) -> &Budget {
        &self.account.budget
    }

    /// Why the last request for memory was refused, if a budget refused one; told once.
    #[must_use]
    pub fn take_refusal(&self) -> Option<Error> {
        self.account.take_refusal()
    }

    /// The last refusals that may have led to what ended the request, the youngest first; told once.
    #[must_use]
    pub fn take_refusals(&self) -> Vec<Refusal> {
        self.account.take_refusals()
    }

    /// Its live blocks, where its strategy knows them ([`Tracked`](crate::strategy::Tracked)); those of requests inside of
    /// it are theirs. A strategy that several requests share lists the blocks of all of them.
    #[must_use]
    pub fn live_blocks(&self) -> Option<Vec<LiveBlock>> {
        self.slot.and_then(Strategy::live_blocks)
    }

    /// Ends the request; its numbers at that moment, which stay readable and go on to change with what is alive. A second
    /// time only reads them.
    pub fn end(&mut self) -> Stats {
        let stats = self.stats();
        if let Some(slot) = self.slot.take() {
            slot.end();
        }
        stats
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.end();
    }
}

impl fmt::Debug for Lease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lease").field("name", &self.name()).field("handler", &self.handler().name()).finish()
    }
}

impl Slot {
    /// The slot behind a handler, if it is one of this copy of the crate's.
    fn behind(handler: Handler) -> Option<&'static Self> {
        let entry = handler.entry();
        (entry.hold.is_some() && entry.made_here()).then(|| {
            // SAFETY: only `Draft::of_slot` fills `hold`, for slots, and this copy of the crate knows their layout.
            unsafe { trampoline::strategy(handler.functions().ctx) }
        })
    }

    /// What blocks are made under now.
    fn running(&self) -> &Running {
        // Acquire pairs with the Releases in `begin` and `end`.
        let running = self.running.load(Ordering::Acquire);
        // SAFETY: never NULL. Callers hold the slot; what stood here when or after they took hold is retired at the
        // earliest then, and dropped only when nothing holds the slot.
        unsafe { &*running }
    }

    fn begin(&'static self, strategy: Option<Arc<dyn Strategy>>, account: &Arc<Account>) {
        let upstream = strategy.unwrap_or_else(|| Arc::clone(&self.arena) as Arc<dyn Strategy>);
        let running = Box::new(Running { blocks: Fronted::new(upstream), account: Arc::clone(account) });
        self.running.store(Box::into_raw(running), Ordering::Release);
    }

    fn end(&'static self) {
        // From here on new blocks are the shared pool's. Those who are just making one under the old terms hold the
        // slot, so the terms outlive them.
        let old = self.running.swap(slots().idle_pointer(), Ordering::AcqRel);
        let before = self.retired.swap(old, Ordering::AcqRel);
        debug_assert!(before.is_null(), "a slot is leased once at a time");
        let escapes = self.state.load(Ordering::Relaxed) & BLOCKS;
        if escapes != 0 {
            self.arena.release_dead_pages();
        }
        self.sweep_at.store(escapes / 2, Ordering::Relaxed);
        self.let_go(LEASED);
    }

    /// Gives dead pages back once more when half of the escapes went: not at each of them, and few times in all. For
    /// the one that is about to let a block go.
    #[cold]
    fn sweep(&self, state: u64) {
        let left = (state & BLOCKS).saturating_sub(1);
        let at = self.sweep_at.load(Ordering::Relaxed);
        let swept = |at| self.sweep_at.compare_exchange(at, left / 2, Ordering::Relaxed, Ordering::Relaxed).is_ok();
        if left > 0 && left <= at && swept(at) {
            self.arena.release_dead_pages();
        }
    }

    /// Takes part of the state back; whoever takes the last part recycles the slot.
    fn let_go(&'static self, part: u64) {
        // AcqRel: the recycling sees everything that was done by those who let go before.
        if self.state.fetch_sub(part, Ordering::AcqRel) == part {
            self.recycle();
        }
    }

    /// Nothing held the slot a moment ago: its terms go, its memory goes, and it is listed.
    #[cold]
    fn recycle(&'static self) {
        // Claimed, so that it is done by one at a time and never beside a lease. Who comes too late (a straggler made
        // a block, or the slot was recycled and leased by others meanwhile) leaves it to the next one to let go.
        if self.state.compare_exchange(0, RECYCLING, Ordering::AcqRel, Ordering::Relaxed).is_err() {
            return;
        }
        let retired = self.retired.swap(null_mut(), Ordering::AcqRel);
        if !retired.is_null() {
            // SAFETY: made by `begin`. No block was made under it that is still alive, and nobody is making one: they
            // would hold the slot. Who takes hold now sees the idle terms, which `end` put there before it let go.
            drop(unsafe { Box::from_raw(retired) });
        }
        self.arena.reset();
        if slots().free.with(|free| free.len()) >= WARM_SLOTS {
            self.arena.trim(); // after a peak: it will not be wanted soon, the free ones are taken from the other end
        }
        if self.state.fetch_sub(RECYCLING, Ordering::AcqRel) == RECYCLING {
            self.list_if_free(slots());
        }
    }

    fn list_if_free(&'static self, slots: &Slots) {
        if self.state.load(Ordering::Acquire) == 0 && !self.listed.swap(true, Ordering::AcqRel) {
            slots.free.with(|free| free.push(self));
        }
    }

    fn make(&'static self, size_bytes: usize, zeroed: bool) -> Option<NonNull<u8>> {
        // Acquire: what is read below was there when the slot was held.
        self.state.fetch_add(BLOCK, Ordering::Acquire);
        let running = self.running();
        let made = running.account.charge(size_bytes).and_then(|()| {
            let record = Record { size_bytes, running: NonNull::from(running) };
            let block = running.blocks.allocate(size_bytes, zeroed, record);
            match block {
                Some(_) => running.account.made(size_bytes),
                None => running.account.refund(size_bytes),
            }
            block
        });
        if made.is_none() {
            self.let_go(BLOCK);
        }
        made
    }
}

/// # Safety
/// - `block` is a live block of a slot.
unsafe fn terms_of<'a>(block: NonNull<u8>) -> (usize, &'a Running) {
    // SAFETY: every block of a slot has such a record in front.
    let record = unsafe { Fronted::<Arc<dyn Strategy>, Record>::read(block) };
    // SAFETY: the terms live while the block does.
    (record.size_bytes, unsafe { record.running.as_ref() })
}

// SAFETY: blocks are those of the terms' strategy, behind a record (`Fronted`), and go back to it by that record.
unsafe impl Strategy for Slot {
    /// What every strategy that a request may be given promises: see `Draft::of_slot`.
    fn alignment(&self) -> usize {
        ALIGN
    }

    fn allocate(&self, size_bytes: usize) -> Option<NonNull<u8>> {
        self.immortal().make(size_bytes, false)
    }

    fn allocate_zeroed(&self, size_bytes: usize) -> Option<NonNull<u8>> {
        self.immortal().make(size_bytes, true)
    }

    unsafe fn resize(&self, block: NonNull<u8>, new_size_bytes: usize) -> Option<NonNull<u8>> {
        // SAFETY: a live block, says the caller.
        let (old_size_bytes, running) = unsafe { terms_of(block) };
        let growth = new_size_bytes.saturating_sub(old_size_bytes);
        running.account.charge(growth)?;
        // SAFETY: a live block, says the caller.
        let Some(moved) = (unsafe { running.blocks.resize(block, new_size_bytes) }) else {
            running.account.refund(growth);
            return None;
        };
        let record = Record { size_bytes: new_size_bytes, running: NonNull::from(running) };
        // SAFETY: live, just resized.
        unsafe { Fronted::<Arc<dyn Strategy>, Record>::write(moved, record) };
        running.account.refund(old_size_bytes.saturating_sub(new_size_bytes));
        running.account.grew(growth);
        Some(moved)
    }

    unsafe fn release(&self, block: NonNull<u8>) {
        // SAFETY: a live block, says the caller.
        let (size_bytes, running) = unsafe { terms_of(block) };
        // SAFETY: given up, says the caller.
        unsafe { running.blocks.release(block) };
        running.account.refund(size_bytes);
        running.account.released();
        let state = self.state.load(Ordering::Relaxed);
        if state & LEASED == 0 {
            self.sweep(state);
        }
        self.immortal().let_go(BLOCK); // last: the terms may go with it
    }

    fn trim(&self) -> usize {
        // Between requests: a few pages that are kept for the next one, and what lies between escapes.
        if self.state.load(Ordering::Relaxed) & LEASED == 0 { self.arena.trim() } else { 0 }
    }

    /// Those of the request that has it now.
    fn live_blocks(&self) -> Option<Vec<LiveBlock>> {
        self.state.fetch_add(HOLDER, Ordering::Acquire);
        let blocks = self.running().blocks.live_blocks();
        self.immortal().let_go(HOLDER);
        blocks
    }
}

/// The least that a strategy must align to for a request to be given it.
const ALIGN: usize = 16;

impl Slot {
    fn immortal(&self) -> &'static Self {
        // SAFETY: slots are only made by `Slots::grow`, which leaks them.
        unsafe { &*std::ptr::from_ref(self) }
    }
}

impl fmt::Debug for Slot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Request").finish()
    }
}

/// A context's or a capsule's hold on a slot: while it lives, the slot is not given to another request.
#[derive(Debug)]
pub(crate) struct Hold {
    handler: Handler,
}

/// Takes a hold (`true`) or lets one go: how another copy of this crate reaches a slot. Part of the table's layout.
pub(in crate::handler) type HoldFunction = unsafe extern "C" fn(ctx: *mut c_void, take: bool);

/// # Safety
/// - `ctx` is that of a slot's functions; a hold is let go once for each that was taken.
pub(in crate::handler) unsafe extern "C" fn hold(ctx: *mut c_void, take: bool) {
    // SAFETY: a slot, says the caller; slots are immortal.
    let slot: &'static Slot = unsafe { trampoline::strategy(ctx) };
    if take {
        slot.state.fetch_add(HOLDER, Ordering::Acquire);
    } else {
        slot.let_go(HOLDER);
    }
}

impl Hold {
    /// A hold on the slot behind `handler`; nothing for a handler that is none.
    #[inline]
    pub(crate) fn on(handler: Handler) -> Option<Self> {
        let function = handler.entry().hold?;
        // SAFETY: the context of the functions beside it.
        unsafe { function(handler.functions().ctx, true) };
        Some(Self { handler })
    }

    /// The hold as a pointer, for C to keep.
    #[cfg(feature = "python")]
    pub(crate) fn into_pointer(self) -> NonNull<c_void> {
        std::mem::ManuallyDrop::new(self).handler.into_pointer()
    }

    /// The hold that [`into_pointer`](Self::into_pointer) turned into this.
    ///
    /// # Safety
    /// - `pointer` is from `into_pointer`, and given here once.
    #[cfg(feature = "python")]
    pub(crate) unsafe fn from_pointer(pointer: NonNull<c_void>) -> Self {
        // SAFETY: the pointer is that of a handler, says the caller.
        Self { handler: unsafe { Handler::from_pointer(pointer) } }
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        if let Some(function) = self.handler.entry().hold {
            // SAFETY: the context of the functions beside it; taken by `on`, let go once.
            unsafe { function(self.handler.functions().ctx, false) };
        }
    }
}
