//! The lists of live blocks. A list is a shard: threads enter what they make into their own, and whoever releases a block
//! takes it out of the one it is in, under that shard's lock. Locks are held for a few stores, and across `fork`.
//!
//! ```text
//!   shard: oldest ──► record ◄──► record ◄──► record ◄── newest
//!                     block       block       block
//! ```
//! Records are only ever reached through raw pointers: by the shard's lock, or by the one who has the block.
//!
//! A list may be as long as there are blocks, and a free must not wait until all of it was looked at: a listing takes a
//! few hundred records at a time, and keeps its place by a bookmark, a record of its own in the list.

use super::Totals;
use super::blocks::{LiveBlock, Origin, Thread, Told};
use super::here::{NameAndLane, here, now_ns};
use crate::sync::{ForkLock, HeldAcrossFork, Locked};
use std::cell::UnsafeCell;
use std::mem::MaybeUninit;
use std::ptr::{NonNull, null_mut};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

/// How many lists there are. A thread has one of them to itself while no more threads than this were started since.
/// (Loom counts each lock against what it can explore.)
const SHARDS: usize = if cfg!(ctxalloc_loom) { 1 } else { 32 };

#[derive(Debug)]
pub(super) struct Ledger {
    shards: [Shard; SHARDS],
    number: u32,
}

/// On a cache line of its own: two threads at work do not disturb one another.
#[derive(Debug)]
#[repr(align(128))]
struct Shard {
    list: Locked<List>,
}

#[derive(Debug)]
struct List {
    oldest: *mut Record,
    newest: *mut Record,
    blocks: usize,
    bytes: usize,
    /// How many blocks were ever entered.
    entered: u32,
}

// SAFETY: pointers to records of live blocks, followed under the shard's lock alone.
unsafe impl Send for List {}

/// What stands in front of each block.
#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct Record {
    older: *mut Record,
    newer: *mut Record,
    size_bytes: usize,
    made_ns: u64,
    teller: Teller,
    thread: u32,
    /// Which one of its shard it is.
    number: u32,
    name_and_lane: NameAndLane,
}

const _: () = assert!(align_of::<Record>() == 8, "what `Tracked::new` asks of an upstream");
const _: () = assert!(size_of::<Record>() == 64, "one cache line, and no more than the pool's alignment");

/// A place for a record that stands in the list without a block: instead of one that is being resized and may move
/// ([`StoodIn`]), or between two of them, for a listing ([`Reader`]).
///
/// In a cell: the list writes to it while its owner holds a reference. On the heap: in a child of `fork` the owner's stack
/// may be another thread's, and the place has to stay good.
struct Place(Box<UnsafeCell<MaybeUninit<Record>>>);

impl Place {
    fn new() -> Self {
        Self(Box::new(UnsafeCell::new(MaybeUninit::uninit())))
    }

    fn record(&self) -> *mut Record {
        self.0.get().cast()
    }
}

/// Set in the lane of a record that stands in for a block's.
const STANDS_IN: u8 = 0x80;
/// Set in the lane of a bookmark, which is no block's.
const BOOKMARK: u8 = 0x40;
const _: () = assert!(SHARDS <= BOOKMARK as usize);

/// How many records are looked at while a shard is locked: a few microseconds' worth, for which others spin.
pub(super) const AT_ONCE: usize = 64;

/// [`Told`] in one word: nothing, a number with its lowest bit set, or a pointer from [`Arc::into_raw`].
#[derive(Clone, Copy)]
pub(super) struct Teller(*const Origin);

impl Teller {
    pub(super) const NOBODY: Self = Self(std::ptr::null());

    pub(super) fn of(told: Told) -> Self {
        match told {
            Told::Nothing => Self::NOBODY,
            Told::Task(number) => Self(std::ptr::without_provenance((number << 1 | 1) as usize)),
            Told::Origin(origin) => Self(Arc::into_raw(origin)),
        }
    }

    fn number(self) -> Option<u64> {
        (self.0.addr() & 1 == 1).then_some(self.0.addr() as u64 >> 1)
    }

    fn origin(self) -> Option<*const Origin> {
        (!self.0.is_null() && self.0.addr() & 1 == 0).then_some(self.0)
    }

    /// What it says, to be kept beyond the record's life.
    ///
    /// # Safety
    /// - it was not forgotten.
    unsafe fn tell(self) -> Told {
        match (self.number(), self.origin()) {
            (Some(number), _) => Told::Task(number),
            (None, Some(origin)) => {
                // SAFETY: a count is held by the record, says the caller.
                unsafe { Arc::increment_strong_count(origin) };
                // SAFETY: the count just taken.
                Told::Origin(unsafe { Arc::from_raw(origin) })
            }
            (None, None) => Told::Nothing,
        }
    }

    /// Lets go of what was told. Once, and last.
    #[inline]
    pub(super) fn forget(self) {
        if let Some(origin) = self.origin() {
            // SAFETY: `of` took it from an Arc; the record that held it is gone.
            drop(unsafe { Arc::from_raw(origin) });
        }
    }
}

const _: () = assert!(align_of::<Origin>() > 1, "the lowest bit of a pointer to one is free");

/// What is copied out of a list under its lock; the rest of the work is done without.
pub(super) struct Seen {
    record: Record,
    address: usize,
    told: Told,
}

impl Ledger {
    pub(super) fn new() -> Arc<Self> {
        static NUMBERS: AtomicU32 = AtomicU32::new(0);
        let list = || List { oldest: null_mut(), newest: null_mut(), blocks: 0, bytes: 0, entered: 0 };
        let ledger = Arc::new(Self {
            shards: std::array::from_fn(|_| Shard { list: Locked::new(list()) }),
            number: NUMBERS.fetch_add(1, Ordering::Relaxed),
        });
        let holder: Arc<dyn HeldAcrossFork> = Arc::clone(&ledger) as _;
        crate::sync::hold_across_fork(Arc::downgrade(&holder));
        ledger
    }

    /// A record of a block that is made here and now, and the shard it is to enter.
    #[inline]
    pub(super) fn record(&self, size_bytes: usize, teller: Teller) -> (Record, usize) {
        let here = here();
        let shard = usize::from(here.name_and_lane.lane) % SHARDS;
        let name_and_lane = NameAndLane { lane: shard as u8, ..here.name_and_lane };
        let record = Record {
            older: null_mut(),
            newer: null_mut(),
            size_bytes,
            made_ns: now_ns(),
            teller,
            thread: here.id,
            number: 0,
            name_and_lane,
        };
        (record, shard)
    }

    /// Enters a record as the newest of a shard.
    ///
    /// # Safety
    /// - `record` is in no list, was made for that shard, and stays where it is until it leaves or is stood in for.
    #[inline]
    pub(super) unsafe fn enter(&self, record: NonNull<Record>, shard: usize) {
        let new = record.as_ptr();
        self.shards[shard].list.with(|list| {
            // SAFETY: ours alone until the lock is let go.
            unsafe { (*new).older = list.newest };
            // SAFETY: as above.
            unsafe { (*new).number = list.entered };
            // SAFETY: as above.
            list.bytes += unsafe { (*new).size_bytes };
            list.entered = list.entered.wrapping_add(1);
            list.blocks += 1;
            // SAFETY: the newest record of the list, or none; it stays while it is there.
            unsafe { list.link(list.newest, new) };
            list.newest = new;
        });
    }

    /// Takes a record out of its list; returns what was told of it.
    ///
    /// # Safety
    /// - `record` is in a list of this ledger.
    #[inline]
    pub(super) unsafe fn leave(&self, record: NonNull<Record>) -> Teller {
        let old = record.as_ptr();
        // SAFETY: whoever has the block may read what never changes while it is in the list.
        let lane = unsafe { (*old).name_and_lane.lane };
        // SAFETY: as above.
        let teller = unsafe { (*old).teller };
        self.shards[usize::from(lane) % SHARDS].list.with(|list| {
            list.blocks -= 1;
            // SAFETY: in this list, whose lock is held.
            list.bytes -= unsafe { (*old).size_bytes };
            // SAFETY: as above.
            unsafe { list.unlink(old) };
        });
        teller
    }

    /// Puts a stand-in into the list where the record is, which is in no list until that is dropped.
    ///
    /// # Safety
    /// - `record` is in a list of this ledger; before the answer is dropped its block does not come back, and where it is
    ///   resized [`StoodIn::resized`] is told.
    pub(super) unsafe fn stand_in(&self, record: NonNull<Record>) -> StoodIn<'_> {
        let stand_in = StoodIn { ledger: self, place: Place::new(), record, size_bytes: None };
        // SAFETY: in a list, says the caller; the place is new, and `StoodIn` takes it out again.
        unsafe { self.replace(record.as_ptr(), stand_in.place.record(), None, STANDS_IN) };
        stand_in
    }

    /// # Safety
    /// - `old` is in a list of this ledger, `new` is a place for a record, in none.
    unsafe fn replace(&self, old: *mut Record, new: *mut Record, size_bytes: Option<usize>, mark: u8) {
        // SAFETY: whoever has the block may read what never changes while it is in the list.
        let lane = unsafe { (*old).name_and_lane.lane } & !STANDS_IN;
        self.shards[usize::from(lane) % SHARDS].list.with(|list| {
            // SAFETY: in this list, whose lock is held.
            let mut record = unsafe { old.read() };
            if let Some(size_bytes) = size_bytes {
                list.bytes = list.bytes - record.size_bytes + size_bytes;
                record.size_bytes = size_bytes;
            }
            record.name_and_lane.lane = lane | mark;
            // SAFETY: a place for a record, and nobody else knows it.
            unsafe { new.write(record) };
            // SAFETY: its older neighbour, in the list, or none.
            unsafe { list.link(record.older, new) };
            if record.newer.is_null() {
                list.newest = new;
            } else {
                // SAFETY: its newer neighbour, in the list.
                unsafe { (*record.newer).older = new };
            }
        });
    }

    pub(super) fn totals(&self) -> Totals {
        self.shards.iter().fold(Totals::default(), |sum, shard| {
            let (blocks, bytes) = shard.list.with(|list| (list.blocks, list.bytes));
            Totals { blocks: sum.blocks + blocks, bytes: sum.bytes + bytes }
        })
    }

    /// Every live block, the oldest first.
    pub(super) fn live_blocks(&self) -> Vec<LiveBlock> {
        let mut seen = Vec::new();
        self.in_turns(|some| seen.append(some));
        // Stable: within a shard the order is exact, whatever the clock's grain.
        seen.sort_by_key(|seen| seen.record.made_ns);
        let now = now_ns();
        seen.into_iter().map(|seen| seen.block(self.number, now)).collect()
    }

    /// Shows `take` all records, a few at a time, from the oldest to the newest of each shard. No lock is held meanwhile.
    pub(super) fn in_turns(&self, mut take: impl FnMut(&mut Vec<Seen>)) {
        // Room for a turn: nothing is allocated under the lock.
        let mut some = Vec::with_capacity(AT_ONCE);
        for shard in &self.shards {
            let mut reader = Reader { shard, bookmark: Place::new(), placed: false, end: None };
            let mut more = true;
            while more {
                more = reader.read(&mut some);
                take(&mut some);
                some.clear();
            }
        }
    }
}

impl List {
    /// Makes `newer` follow `older`; either may be none, and then the list ends there.
    ///
    /// # Safety
    /// - both are in this list, or about to be, and its lock is held.
    #[inline]
    unsafe fn link(&mut self, older: *mut Record, newer: *mut Record) {
        if older.is_null() {
            self.oldest = newer;
        } else {
            // SAFETY: in this list, says the caller.
            unsafe { (*older).newer = newer };
        }
        if !newer.is_null() {
            // SAFETY: as above.
            unsafe { (*newer).older = older };
        }
    }

    /// Takes a record out; answers the one that followed it, or none.
    ///
    /// # Safety
    /// - it is in this list, and its lock is held.
    #[inline]
    unsafe fn unlink(&mut self, old: *mut Record) -> *mut Record {
        // SAFETY: in this list, says the caller.
        let Record { older, newer, .. } = unsafe { old.read() };
        // SAFETY: its neighbours, in the list too.
        unsafe { self.link(older, newer) };
        if newer.is_null() {
            self.newest = older;
        }
        newer
    }

    /// Puts a bookmark before `next`.
    ///
    /// # Safety
    /// - `place` is one for a record, in no list, and stays where it is until it is unlinked; `next` is in this list, whose
    ///   lock is held.
    unsafe fn bookmark(&mut self, place: *mut Record, next: *mut Record) {
        // SAFETY: in this list, says the caller.
        let older = unsafe { (*next).older };
        let record = Record {
            older,
            newer: next,
            size_bytes: 0,
            made_ns: 0,
            teller: Teller::NOBODY,
            thread: 0,
            number: 0,
            name_and_lane: NameAndLane { name: [0; 15], lane: BOOKMARK },
        };
        // SAFETY: a place for a record, and nobody else knows it.
        unsafe { place.write(record) };
        // SAFETY: its older neighbour, in the list, or none.
        unsafe { self.link(older, place) };
        // SAFETY: in this list, says the caller.
        unsafe { (*next).older = place };
    }
}

/// A record that is in no list while its block is resized: it is put back where its [stand-in](Ledger::stand_in) is when
/// this is dropped, be it by a panic of the upstream.
pub(super) struct StoodIn<'a> {
    ledger: &'a Ledger,
    place: Place,
    record: NonNull<Record>,
    size_bytes: Option<usize>,
}

impl StoodIn<'_> {
    /// The block was resized: this is its record now, and this its size.
    ///
    /// # Safety
    /// - `record` came along with the block, which is alive.
    pub(super) unsafe fn resized(mut self, record: NonNull<Record>, size_bytes: usize) {
        self.record = record;
        self.size_bytes = Some(size_bytes);
    }
}

impl Drop for StoodIn<'_> {
    fn drop(&mut self) {
        // SAFETY: `stand_in` put the place into a list; the record is the live block's, and in no list.
        unsafe { self.ledger.replace(self.place.record(), self.record.as_ptr(), self.size_bytes, 0) };
    }
}

/// One listing's way through one shard.
struct Reader<'a> {
    shard: &'a Shard,
    bookmark: Place,
    /// Whether the bookmark is in the list, before the record that is read next.
    placed: bool,
    /// The number that the shard's next block had at the start: what is entered later is not waited for.
    end: Option<u32>,
}

impl Reader<'_> {
    /// Copies the next few records to `some`, which has room for [`AT_ONCE`]; whether there are more.
    fn read(&mut self, some: &mut Vec<Seen>) -> bool {
        let Self { shard, bookmark, placed, end } = self;
        let bookmark = bookmark.record();
        shard.list.with(|list| {
            let end = *end.get_or_insert(list.entered);
            let mut next = list.oldest;
            if std::mem::take(placed) {
                // SAFETY: in this list, whose lock is held.
                next = unsafe { list.unlink(bookmark) };
            }
            for _ in 0..AT_ONCE {
                let Some(place) = NonNull::new(next) else { return false };
                // SAFETY: in this list, whose lock is held.
                let record = unsafe { place.read() };
                next = record.newer;
                let marks = record.name_and_lane.lane & (STANDS_IN | BOOKMARK);
                if marks == BOOKMARK {
                    continue;
                }
                // Numbers go up along the list, and round past their end.
                if end.wrapping_sub(record.number).wrapping_sub(1) > u32::MAX / 2 {
                    return false;
                }
                // The block starts where its record ends.
                let address = if marks == STANDS_IN { 0 } else { place.addr().get() + size_of::<Record>() };
                // SAFETY: what was told is forgotten only after the record left the list.
                let told = unsafe { record.teller.tell() };
                some.push(Seen { record, address, told });
            }
            if next.is_null() {
                return false;
            }
            // SAFETY: our own place, in no list, before a record of this list.
            unsafe { list.bookmark(bookmark, next) };
            *placed = true;
            true
        })
    }
}

impl Drop for Reader<'_> {
    fn drop(&mut self) {
        if self.placed {
            // SAFETY: in this list, whose lock is held.
            self.shard.list.with(|list| unsafe { list.unlink(self.bookmark.record()) });
        }
    }
}

impl Seen {
    fn block(self, ledger: u32, now_ns: u64) -> LiveBlock {
        let Record { size_bytes, made_ns, thread, number, name_and_lane: NameAndLane { name, lane }, .. } = self.record;
        let (task, place) = match self.told {
            Told::Nothing => (None, None),
            Told::Task(number) => (Some(number.to_string().into()), None),
            Told::Origin(origin) => (origin.task.clone(), origin.place.clone()),
        };
        let length = name.iter().position(|&byte| byte == 0).unwrap_or(name.len());
        LiveBlock {
            address: self.address,
            size_bytes,
            age: Duration::from_nanos(now_ns.saturating_sub(made_ns)),
            thread: Thread { id: thread, name: String::from_utf8_lossy(&name[..length]).into_owned() },
            task,
            place,
            number: u64::from(ledger) << 40 | u64::from(lane & !STANDS_IN) << 32 | u64::from(number),
        }
    }
}

impl HeldAcrossFork for Ledger {
    fn for_each_lock(&self, visit: &mut dyn FnMut(&ForkLock)) {
        self.shards.iter().for_each(|shard| visit(shard.list.lock()));
    }
}
