//! What Rust's own heap holds for each request: [`GlobalScoped`](crate::GlobalScoped) counts here.
//!
//! ```text
//!   block ── word before it ──► Record (immortal, recycled)  ◄── State (one request's own, while anybody can reach it)
//!                                   ▲ flush
//!   thread: Tally { owner, what it made and freed since }
//! ```
//! A thread counts for the request that is selected on it in a [`Tally`] of its own, without an atomic, and adds that to the
//! request's [`Record`] when it selects something else, and each time it has grown by [`QUANTUM`]. What a thread frees of
//! other requests goes to their records at once. Nothing here allocates, but for [`HeapRecord::new`].

use crate::sync::{ForkLock, HeldAcrossFork, Made, hold_across_fork};
use std::cell::Cell;
use std::ptr::{null, null_mut, without_provenance};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, AtomicUsize, Ordering};

/// By how many bytes a thread's tally grows before it is added to its request's record.
pub(crate) const QUANTUM: usize = 64 << 10;

/// What Rust's heap holds for a request, by the [global allocator](crate::GlobalScoped).
///
/// It is exact when no thread is at work in the request. What a thread does in it is added when the thread selects something
/// else (at the end of each poll of its future, for example), and whenever it has grown by 64 KiB.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct HeapStats {
    /// The bytes of live blocks, as they were asked for.
    pub live_bytes: usize,
    /// The number of live blocks.
    pub live_blocks: usize,
    /// The largest value of `live_bytes`; exact if one thread at a time works in the request.
    pub peak_bytes: usize,
    /// The bytes of all blocks ever allocated. A resize adds what it grew by.
    pub total_bytes: u64,
    /// The number of blocks ever allocated.
    pub total_blocks: u64,
    /// How many times more was asked for than its limit allows.
    pub exceeded: u64,
}

/// No limit.
const UNLIMITED: usize = usize::MAX;

/// In `live_blocks`: the request is gone.
/// - set: by `HeapRecord`'s drop, once, when no thread has the request selected, so no tally has anything for it.
/// - cannot be set while: a tally counts for the record. So the number beside it is exact from then on, and only falls.
const ENDED: u64 = 1 << 63;

/// The numbers of one request. Lives for ever, and is recycled when its request and all of its blocks are gone.
#[repr(align(128))]
pub(crate) struct Record {
    /// These two may be below zero for a moment, wrapped: a block may be freed elsewhere before its maker's tally is added.
    live_bytes: AtomicUsize,
    live_blocks: AtomicU64,
    peak_bytes: AtomicUsize,
    total_bytes: AtomicU64,
    total_blocks: AtomicU64,
    limit_bytes: AtomicUsize,
    /// Whether more than the limit is refused.
    refuses: AtomicBool,
    exceeded: AtomicU64,
    /// What was asked for when the limit was last exceeded.
    requested_bytes: AtomicUsize,
    /// The next free record, while it is free.
    next: AtomicPtr<Record>,
}

/// Whether a [`GlobalScoped`](crate::GlobalScoped) is the program's allocator.
static IS_ACTIVE: AtomicBool = AtomicBool::new(false);

/// Free records. Anybody pushes, without a lock, since a free may be anywhere; whoever pops holds the lock of [`Pops`], so a
/// record that is popped is not popped and pushed again meanwhile.
static FREE: AtomicPtr<Record> = AtomicPtr::new(null_mut());

struct Pops(ForkLock);

impl HeldAcrossFork for Pops {
    fn for_each_lock(&self, visit: &mut dyn FnMut(&ForkLock)) {
        visit(&self.0);
    }
}

fn pops() -> &'static Pops {
    static POPS: Made<Arc<Pops>> = Made::new();
    POPS.get_or_make(|| {
        let pops = Arc::new(Pops(ForkLock::new()));
        let holder: Arc<dyn HeldAcrossFork> = Arc::clone(&pops) as _;
        hold_across_fork(Arc::downgrade(&holder));
        pops
    })
}

/// In place of an owner, on a thread that has not allocated yet: its first block makes it NULL. So that nothing selected is one
/// look at one word, which also finds out that there is an allocator which counts.
const UNSEEN: *const Record = without_provenance(1);

/// What a thread did for one request since it last added it to the request's record.
///
/// No two that a block changes at one time are neighbours: the compiler would change them as one word of 16 bytes, and wait for the
/// two stores of 8 bytes before.
#[repr(C)]
struct Tally {
    /// The record of the request that is selected; NULL, or [`UNSEEN`].
    owner: Cell<*const Record>,
    /// Made less freed.
    live_bytes: Cell<isize>,
    /// How large `live_bytes` may become before somebody has to look.
    ceiling_bytes: Cell<isize>,
    made_bytes: Cell<u64>,
    /// The largest `live_bytes` since, as far as it was less afterwards.
    high_bytes: Cell<isize>,
    made_blocks: Cell<u64>,
    /// Whether new blocks are nobody's for now.
    is_paused: Cell<bool>,
    freed_blocks: Cell<u64>,
}

thread_local! {
    /// Without a destructor: allocated and freed is until a thread's very end. What selects a request adds it then.
    static TALLY: Tally = const {
        Tally {
            owner: Cell::new(UNSEEN),
            is_paused: Cell::new(false),
            made_blocks: Cell::new(0),
            made_bytes: Cell::new(0),
            freed_blocks: Cell::new(0),
            live_bytes: Cell::new(0),
            high_bytes: Cell::new(0),
            ceiling_bytes: Cell::new(0),
        }
    };
}

/// The request's limit refuses it.
pub(crate) struct Refused;

/// Whether selections are to be told to [`select`].
#[inline]
pub(super) fn is_active() -> bool {
    IS_ACTIVE.load(Ordering::Relaxed)
}

/// Counts for `owner` on this thread from now on.
#[inline]
pub(super) fn select(owner: Option<&'static Record>) {
    TALLY.with(|tally| {
        tally.flush();
        tally.owner.set(owner.map_or(null(), std::ptr::from_ref));
    });
}

/// New blocks of this thread are nobody's until the returned value is dropped.
#[inline]
pub(super) fn unattributed() -> Option<Unattributed> {
    is_active().then(|| Unattributed { was_paused: TALLY.with(|tally| tally.is_paused.replace(true)) })
}

/// See [`unattributed`].
pub(super) struct Unattributed {
    was_paused: bool,
}

impl Drop for Unattributed {
    #[inline]
    fn drop(&mut self) {
        TALLY.with(|tally| tally.is_paused.set(self.was_paused));
    }
}

/// A new block of so many bytes: whose it is.
///
/// # Errors
/// [`Refused`] by that request's limit; nothing is counted then.
#[inline]
pub(crate) fn made(bytes: usize) -> Result<Option<&'static Record>, Refused> {
    TALLY.with(|tally| if tally.owner.get().is_null() { Ok(None) } else { tally.made(bytes) })
}

/// A block of `owner` is freed.
#[inline]
pub(crate) fn freed(owner: &'static Record, bytes: usize) {
    TALLY.with(|tally| {
        if !tally.is_for(owner) {
            return owner.freed_elsewhere(bytes);
        }
        tally.freed_blocks.set(tally.freed_blocks.get() + 1);
        tally.shrink(bytes);
    });
}

/// A block was not made after all, and does not count as made.
#[cold]
#[inline(never)]
pub(crate) fn not_made(owner: Option<&'static Record>, bytes: usize) {
    let Some(owner) = owner else { return };
    TALLY.with(|tally| {
        if !tally.is_for(owner) {
            return owner.freed_elsewhere(bytes); // upstream has selected something else meanwhile
        }
        tally.made_blocks.set(tally.made_blocks.get().wrapping_sub(1));
        tally.take_back(bytes);
    });
}

/// A block of `owner` is to be resized.
///
/// # Errors
/// [`Refused`] by the request's limit; nothing is counted then.
#[inline]
pub(crate) fn resized(owner: &'static Record, old_bytes: usize, new_bytes: usize) -> Result<(), Refused> {
    TALLY.with(|tally| match (tally.is_for(owner), new_bytes.checked_sub(old_bytes)) {
        (true, Some(growth)) => tally.grow(owner, growth),
        (true, None) => {
            tally.shrink(old_bytes - new_bytes);
            Ok(())
        }
        (false, Some(growth)) => owner.grown_elsewhere(growth),
        (false, None) => {
            owner.live_bytes.fetch_sub(old_bytes - new_bytes, Ordering::Relaxed);
            Ok(())
        }
    })
}

/// A block of `owner` was not resized after all.
#[cold]
pub(crate) fn not_resized(owner: &'static Record, old_bytes: usize, new_bytes: usize) {
    TALLY.with(|tally| match (tally.is_for(owner), new_bytes.checked_sub(old_bytes)) {
        (true, Some(growth)) => tally.take_back(growth),
        (true, None) => tally.live_bytes.set(tally.live_bytes.get() + (old_bytes - new_bytes) as isize),
        (false, Some(growth)) => {
            owner.live_bytes.fetch_sub(growth, Ordering::Relaxed);
            owner.total_bytes.fetch_sub(growth as u64, Ordering::Relaxed);
        }
        (false, None) => {
            owner.live_bytes.fetch_add(old_bytes - new_bytes, Ordering::Relaxed);
        }
    })
}

impl Tally {
    #[inline]
    fn is_for(&self, owner: &'static Record) -> bool {
        std::ptr::eq(self.owner.get(), owner)
    }

    #[inline]
    fn owner(&self) -> Option<&'static Record> {
        let owner = self.owner.get();
        // SAFETY: NULL, or from `select`, which is given immortal records.
        if std::ptr::eq(owner, UNSEEN) { None } else { unsafe { owner.as_ref() } }
    }

    #[inline]
    fn made(&self, bytes: usize) -> Result<Option<&'static Record>, Refused> {
        let Some(owner) = self.owner() else {
            self.first_block();
            return Ok(None);
        };
        if self.is_paused.get() {
            return Ok(None);
        }
        self.grow(owner, bytes)?;
        self.made_blocks.set(self.made_blocks.get() + 1);
        Ok(Some(owner))
    }

    /// Notes that there is a global allocator which counts.
    #[cold]
    fn first_block(&self) {
        IS_ACTIVE.store(true, Ordering::Relaxed);
        self.owner.set(null());
    }

    #[inline]
    fn grow(&self, owner: &'static Record, bytes: usize) -> Result<(), Refused> {
        let live = self.live_bytes.get().saturating_add(bytes as isize); // no layout has more than `isize::MAX` bytes
        if live > self.ceiling_bytes.get() {
            return self.grow_slowly(owner, bytes);
        }
        self.add(live, bytes);
        Ok(())
    }

    #[inline]
    fn add(&self, live: isize, bytes: usize) {
        self.live_bytes.set(live);
        self.made_bytes.set(self.made_bytes.get() + bytes as u64);
    }

    /// Only here is `live_bytes` compared with its largest value, and when it is added: what `upstream` refused was never live.
    #[inline]
    fn shrink(&self, bytes: usize) {
        let live = self.live_bytes.get();
        if live > self.high_bytes.get() {
            self.high_bytes.set(live);
        }
        self.live_bytes.set(live - bytes as isize);
    }

    /// Undoes `add`.
    #[cold]
    fn take_back(&self, bytes: usize) {
        self.live_bytes.set(self.live_bytes.get() - bytes as isize);
        self.made_bytes.set(self.made_bytes.get().wrapping_sub(bytes as u64));
    }

    /// Adds what there is to the record, and looks what may come.
    #[cold]
    #[inline(never)]
    fn grow_slowly(&self, owner: &'static Record, bytes: usize) -> Result<(), Refused> {
        self.flush();
        let room = owner.room();
        if bytes > room {
            owner.exceed(bytes)?;
        }
        self.ceiling_bytes.set(room.clamp(bytes, QUANTUM.max(bytes)).cast_signed());
        self.add(bytes as isize, bytes);
        Ok(())
    }

    #[inline]
    fn flush(&self) {
        if self.made_bytes.get() | self.freed_blocks.get() != 0 || self.live_bytes.get() != 0 {
            self.flush_slowly();
        }
        self.ceiling_bytes.set(0);
    }

    #[cold]
    fn flush_slowly(&self) {
        let (made, freed) = (self.made_blocks.replace(0), self.freed_blocks.replace(0));
        let live = self.live_bytes.replace(0);
        let high = self.high_bytes.replace(0).max(live);
        let made_bytes = self.made_bytes.replace(0);
        let Some(owner) = self.owner() else { return };
        // Relaxed: who reads all at one time has ordered that by other means. The request is selected here, hence not gone.
        let before = owner.live_bytes.fetch_add(live.cast_unsigned(), Ordering::Relaxed).cast_signed();
        let peak = before.saturating_add(high).max(0).cast_unsigned();
        if peak > owner.peak_bytes.load(Ordering::Relaxed) {
            owner.peak_bytes.fetch_max(peak, Ordering::Relaxed);
        }
        if made_bytes > 0 {
            owner.total_bytes.fetch_add(made_bytes, Ordering::Relaxed);
        }
        if made > 0 {
            owner.total_blocks.fetch_add(made, Ordering::Relaxed);
        }
        if made != freed {
            owner.live_blocks.fetch_add(made.wrapping_sub(freed), Ordering::Relaxed);
        }
    }
}

impl Record {
    fn fresh() -> Self {
        Self {
            live_bytes: AtomicUsize::new(0),
            live_blocks: AtomicU64::new(0),
            peak_bytes: AtomicUsize::new(0),
            total_bytes: AtomicU64::new(0),
            total_blocks: AtomicU64::new(0),
            limit_bytes: AtomicUsize::new(UNLIMITED),
            refuses: AtomicBool::new(false),
            exceeded: AtomicU64::new(0),
            requested_bytes: AtomicUsize::new(0),
            next: AtomicPtr::new(null_mut()),
        }
    }

    fn live(&self) -> usize {
        self.live_bytes.load(Ordering::Relaxed).cast_signed().max(0).cast_unsigned()
    }

    fn room(&self) -> usize {
        match self.limit_bytes.load(Ordering::Relaxed) {
            UNLIMITED => isize::MAX.cast_unsigned(),
            limit => limit.saturating_sub(self.live()),
        }
    }

    #[cold]
    fn exceed(&self, requested_bytes: usize) -> Result<(), Refused> {
        self.requested_bytes.store(requested_bytes, Ordering::Relaxed);
        self.exceeded.fetch_add(1, Ordering::Relaxed);
        if self.refuses.load(Ordering::Relaxed) { Err(Refused) } else { Ok(()) }
    }

    fn grown_elsewhere(&self, bytes: usize) -> Result<(), Refused> {
        if bytes > self.room() {
            self.exceed(bytes)?;
        }
        let live = self.live_bytes.fetch_add(bytes, Ordering::Relaxed).wrapping_add(bytes).cast_signed().max(0);
        self.peak_bytes.fetch_max(live.cast_unsigned(), Ordering::Relaxed);
        self.total_bytes.fetch_add(bytes as u64, Ordering::Relaxed);
        Ok(())
    }

    #[inline(never)]
    fn freed_elsewhere(&'static self, bytes: usize) {
        self.live_bytes.fetch_sub(bytes, Ordering::Relaxed);
        // AcqRel: whoever recycles it comes after all that was done to it.
        if self.live_blocks.fetch_sub(1, Ordering::AcqRel) == ENDED | 1 {
            self.recycle();
        }
    }

    /// Nothing refers to it any more.
    fn recycle(&'static self) {
        push(self);
    }
}

fn push(record: &'static Record) {
    let own = std::ptr::from_ref(record).cast_mut();
    let mut first = FREE.load(Ordering::Relaxed);
    loop {
        record.next.store(first, Ordering::Relaxed);
        // Release pairs with the Acquire in `pop`.
        match FREE.compare_exchange_weak(first, own, Ordering::Release, Ordering::Relaxed) {
            Ok(_) => return,
            Err(newer) => first = newer,
        }
    }
}

/// For holders of the lock of [`Pops`].
fn pop() -> Option<&'static Record> {
    let mut first = FREE.load(Ordering::Acquire);
    loop {
        // SAFETY: NULL, or from `push`, which is given immortal records.
        let record: &'static Record = unsafe { first.as_ref() }?;
        let next = record.next.load(Ordering::Relaxed);
        // Acquire pairs with the Release in `push`.
        match FREE.compare_exchange_weak(first, next, Ordering::Acquire, Ordering::Acquire) {
            Ok(_) => return Some(record),
            Err(newer) => first = newer,
        }
    }
}

/// A request's record. Dropped when nothing can reach the request any more but its blocks.
pub(super) struct HeapRecord(&'static Record);

impl HeapRecord {
    /// A record with this limit; none if the program's allocator does not count.
    pub(super) fn new(limit_bytes: Option<usize>, refuses: bool) -> Option<Self> {
        if !is_active() {
            return None;
        }
        let record = pops().0.with(pop).unwrap_or_else(grow);
        record.live_bytes.store(0, Ordering::Relaxed);
        record.live_blocks.store(0, Ordering::Relaxed);
        record.peak_bytes.store(0, Ordering::Relaxed);
        record.total_bytes.store(0, Ordering::Relaxed);
        record.total_blocks.store(0, Ordering::Relaxed);
        record.exceeded.store(0, Ordering::Relaxed);
        record.limit_bytes.store(limit_bytes.unwrap_or(UNLIMITED), Ordering::Relaxed);
        record.refuses.store(refuses, Ordering::Relaxed);
        Some(Self(record))
    }

    /// The record itself, for a thread that holds the request.
    pub(super) fn get(&self) -> &'static Record {
        self.0
    }

    /// Its numbers, with those of this thread.
    pub(super) fn stats(&self) -> HeapStats {
        TALLY.with(|tally| {
            if tally.is_for(self.0) {
                tally.flush();
            }
        });
        let live_blocks = self.0.live_blocks.load(Ordering::Relaxed).cast_signed().max(0).cast_unsigned();
        HeapStats {
            live_bytes: self.0.live(),
            live_blocks: live_blocks as usize,
            peak_bytes: self.0.peak_bytes.load(Ordering::Relaxed),
            total_bytes: self.0.total_bytes.load(Ordering::Relaxed),
            total_blocks: self.0.total_blocks.load(Ordering::Relaxed),
            exceeded: self.0.exceeded.load(Ordering::Relaxed),
        }
    }

    /// Its limit, what is live, and what was asked for, if its limit was exceeded.
    pub(super) fn exceeded(&self) -> Option<(usize, usize, usize)> {
        let record = self.0;
        (record.exceeded.load(Ordering::Relaxed) > 0).then(|| {
            (record.limit_bytes.load(Ordering::Relaxed), record.live(), record.requested_bytes.load(Ordering::Relaxed))
        })
    }
}

impl Drop for HeapRecord {
    fn drop(&mut self) {
        // AcqRel: whoever recycles it comes after all that was done to it.
        if self.0.live_blocks.fetch_or(ENDED, Ordering::AcqRel) == 0 {
            self.0.recycle();
        }
    }
}

/// More records, of which one is returned.
#[cold]
fn grow() -> &'static Record {
    const CHUNK: usize = 32;
    let _immortal = unattributed(); // no request's, whatever is selected here
    let chunk = Box::leak((0..CHUNK).map(|_| Record::fresh()).collect::<Box<[_]>>());
    let (first, others) = chunk.split_first().expect("a chunk is not empty");
    others.iter().for_each(push);
    first
}
