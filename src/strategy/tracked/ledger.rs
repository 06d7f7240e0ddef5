//! The lists of live blocks. Each list is a shard with a lock. A thread inserts its blocks into the shard of its lane;
//! whoever releases a block takes it out of the shard that it is in. A lock is held for a few stores, and across
//! `fork`.
//!
//! ```text
//!   shard: oldest ──► record ◄──► record ◄──► record ◄── newest
//!                     block       block       block
//! ```
//! Records are reached only through raw pointers, by the holder of the shard's lock or by the owner of the block.
//!
//! A list can be very long, and a `free` must not wait until a listing has walked all of it. So a listing reads
//! [`AT_ONCE`] records at a time and keeps its position with a bookmark: a record of its own in the list.

use super::blocks::{Attribution, LiveBlock, Thread, Totals};
use super::here::{NameAndLane, here, now_ns};
use super::packed::PackedAttribution;
use crate::sync::{ForkLock, HeldAcrossFork, Locked, held_across_fork};
use std::cell::UnsafeCell;
use std::mem::MaybeUninit;
use std::ptr::{NonNull, null_mut};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

/// The number of lists. Up to this many threads each have a list of their own. (One under loom, whose state space grows
/// with each lock.)
const SHARDS: usize = if cfg!(ctxalloc_loom) { 1 } else { 32 };

#[derive(Debug)]
pub(super) struct Ledger {
    shards: [Shard; SHARDS],
    number: u32,
}

/// On cache lines of its own, so that threads do not disturb each other (no false sharing).
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
    /// The number of blocks ever inserted; wraps around.
    inserted: u32,
}

// SAFETY: the pointers lead to records of live blocks. They are followed only under the shard's lock, by one thread at
// a time.
unsafe impl Send for List {}

/// What stands in front of each block.
#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct Record {
    older: *mut Record,
    newer: *mut Record,
    size_bytes: usize,
    made_ns: u64,
    attribution: PackedAttribution,
    thread: u32,
    /// The shard's count of insertions when this one was inserted.
    number: u32,
    name_and_lane: NameAndLane,
}

const _: () = assert!(align_of::<Record>() == 8, "what `Tracked::new` asks of an upstream");
const _: () = assert!(size_of::<Record>() == 64, "one cache line, and no more than the pool's alignment");

/// Memory for a record without a block: a [`Placeholder`] for a block that is being resized and may move, or the
/// bookmark of a [`Reader`].
///
/// It is an `UnsafeCell` because the list writes to it while its owner holds a reference. It is on the heap because
/// after `fork` the owner may be a thread that the child does not have, whose stack is reused.
struct Place(Box<UnsafeCell<MaybeUninit<Record>>>);

impl Place {
    fn new() -> Self {
        Self(Box::new(UnsafeCell::new(MaybeUninit::uninit())))
    }

    fn record(&self) -> *mut Record {
        self.0.get().cast()
    }
}

/// Set in the lane of a placeholder's record. Cannot be set while BOOKMARK is.
const PLACEHOLDER: u8 = 0x80;
/// Set in the lane of a bookmark's record, which stands for no block. Cannot be set while PLACEHOLDER is.
const BOOKMARK: u8 = 0x40;
const _: () = assert!(SHARDS <= BOOKMARK as usize);

/// How many records a listing reads while it holds a shard's lock: a few microseconds, during which others spin.
pub(super) const AT_ONCE: usize = 64;

/// What a listing copies out of a list under its lock. It does the rest of the work without the lock.
pub(super) struct Seen {
    record: Record,
    address: usize,
    attribution: Attribution,
}

impl Ledger {
    pub(super) fn new() -> Arc<Self> {
        static NUMBERS: AtomicU32 = AtomicU32::new(0);
        let list = || List { oldest: null_mut(), newest: null_mut(), blocks: 0, bytes: 0, inserted: 0 };
        held_across_fork(Self {
            shards: std::array::from_fn(|_| Shard { list: Locked::new(list()) }),
            number: NUMBERS.fetch_add(1, Ordering::Relaxed),
        })
    }

    /// A record for a block of this thread, made now, and the shard to insert it into.
    #[inline]
    pub(super) fn record(&self, size_bytes: usize, attribution: PackedAttribution) -> (Record, usize) {
        let here = here();
        let shard = usize::from(here.name_and_lane.lane) % SHARDS;
        let name_and_lane = NameAndLane { lane: shard as u8, ..here.name_and_lane };
        let record = Record {
            older: null_mut(),
            newer: null_mut(),
            size_bytes,
            made_ns: now_ns(),
            attribution,
            thread: here.id,
            number: 0,
            name_and_lane,
        };
        (record, shard)
    }

    /// Inserts a record as the newest of a shard.
    ///
    /// # Safety
    /// - `record` is in no list and was made for that shard; it stays where it is until it is removed or replaced by a
    ///   placeholder.
    #[inline]
    pub(super) unsafe fn insert(&self, record: NonNull<Record>, shard: usize) {
        let new = record.as_ptr();
        self.shards[shard].list.with(|list| {
            // SAFETY: `new` is in no list (this function's contract), so nobody else reaches it. `list.newest` is NULL
            // or in this list, whose lock is held.
            unsafe {
                (*new).number = list.inserted;
                list.bytes += (*new).size_bytes;
                list.link(list.newest, new);
            }
            list.inserted = list.inserted.wrapping_add(1);
            list.blocks += 1;
            list.newest = new;
        });
    }

    /// Takes a record out of its list; returns its attribution, which the caller must release.
    ///
    /// # Safety
    /// - `record` is in a list of this ledger.
    #[inline]
    pub(super) unsafe fn remove(&self, record: NonNull<Record>) -> PackedAttribution {
        let old = record.as_ptr();
        // SAFETY: the record is alive, and these two fields do not change while it is in a list: only its links do, and
        // those are not read here. So no lock is needed.
        let (lane, attribution) = unsafe { ((*old).name_and_lane.lane, (*old).attribution) };
        self.shards[usize::from(lane) % SHARDS].list.with(|list| {
            list.blocks -= 1;
            // SAFETY: `old` is in this list: its lane names the shard. The lock is held.
            unsafe {
                list.bytes -= (*old).size_bytes;
                list.unlink(old);
            }
        });
        attribution
    }

    /// Replaces the record in its list by a placeholder. Dropping the placeholder puts the record back.
    ///
    /// # Safety
    /// - `record` is in a list of this ledger;
    /// - until the placeholder is dropped its block is not released; if it is resized, [`Placeholder::resized`] is
    ///   called.
    pub(super) unsafe fn put_placeholder(&self, record: NonNull<Record>) -> Placeholder<'_> {
        let placeholder = Placeholder { ledger: self, place: Place::new(), record, size_bytes: None };
        // SAFETY: `record` is in a list (this function's contract). The place is new, hence in none; it stays where it
        // is (on the heap) until the placeholder's drop takes it out of the list.
        unsafe { self.replace(record.as_ptr(), placeholder.place.record(), None, PLACEHOLDER) };
        placeholder
    }

    /// Puts `new` into the list in place of `old`, with the same contents, perhaps another size, and `mark`.
    ///
    /// # Safety
    /// - `old` is in a list of this ledger; `new` is memory for a record, in no list.
    unsafe fn replace(&self, old: *mut Record, new: *mut Record, size_bytes: Option<usize>, mark: u8) {
        // SAFETY: `old` is alive, and the lane of a record does not change while it is in a list, so no lock is needed.
        let lane = unsafe { (*old).name_and_lane.lane } & !PLACEHOLDER;
        self.shards[usize::from(lane) % SHARDS].list.with(|list| {
            // SAFETY: `old` is in this list, whose lock is held.
            let mut record = unsafe { old.read() };
            if let Some(size_bytes) = size_bytes {
                list.bytes = list.bytes - record.size_bytes + size_bytes;
                record.size_bytes = size_bytes;
            }
            record.name_and_lane.lane = lane | mark;
            // SAFETY: `new` is memory for a record that nobody else reaches. The neighbours of `old` are NULL or in
            // this list, whose lock is held.
            unsafe {
                new.write(record);
                list.link(record.older, new);
                if record.newer.is_null() {
                    list.newest = new;
                } else {
                    (*record.newer).older = new;
                }
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
        // A stable sort keeps the order within a shard, which is exact even if the clock did not tick in between.
        seen.sort_by_key(|seen| seen.record.made_ns);
        let now = now_ns();
        seen.into_iter().map(|seen| seen.block(self.number, now)).collect()
    }

    /// Passes all records to `take`, at most [`AT_ONCE`] at a time, from the oldest to the newest of each shard. No
    /// lock is held while `take` runs.
    pub(super) fn in_turns(&self, mut take: impl FnMut(&mut Vec<Seen>)) {
        // Allocated here, since nothing may be allocated under the lock.
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
    /// Makes `newer` follow `older`. Either may be NULL: then the list ends there.
    ///
    /// # Safety
    /// - each is NULL, in this list, or about to be; the list's lock is held.
    #[inline]
    unsafe fn link(&mut self, older: *mut Record, newer: *mut Record) {
        // SAFETY: what is not NULL is a record that only the holder of the lock reaches (this function's contract).
        unsafe {
            if older.is_null() {
                self.oldest = newer;
            } else {
                (*older).newer = newer;
            }
            if !newer.is_null() {
                (*newer).older = older;
            }
        }
    }

    /// Takes a record out; returns the one that followed it, or NULL.
    ///
    /// # Safety
    /// - it is in this list, and its lock is held.
    #[inline]
    unsafe fn unlink(&mut self, old: *mut Record) -> *mut Record {
        // SAFETY: `old` is in this list, whose lock is held (this function's contract), and so are its neighbours.
        let (older, newer) = unsafe {
            let Record { older, newer, .. } = *old;
            self.link(older, newer);
            (older, newer)
        };
        if newer.is_null() {
            self.newest = older;
        }
        newer
    }

    /// Inserts a bookmark before `next`.
    ///
    /// # Safety
    /// - `place` is memory for a record, in no list, and stays where it is until it is unlinked;
    /// - `next` is in this list, whose lock is held.
    unsafe fn bookmark(&mut self, place: *mut Record, next: *mut Record) {
        let record = Record {
            older: null_mut(),
            newer: next,
            size_bytes: 0,
            made_ns: 0,
            attribution: PackedAttribution::UNKNOWN,
            thread: 0,
            number: 0,
            name_and_lane: NameAndLane { name: [0; 15], lane: BOOKMARK },
        };
        // SAFETY: `place` is memory that nobody else reaches; `next` is in this list, and its older neighbour is NULL
        // or in it too. The lock is held. `link` sets `place`'s older neighbour.
        unsafe {
            place.write(record);
            self.link((*next).older, place);
            (*next).older = place;
        }
    }
}

/// Keeps the place in the list of a record whose block is being resized. Dropping it puts the record back there, also
/// when the upstream panics.
pub(super) struct Placeholder<'a> {
    ledger: &'a Ledger,
    place: Place,
    record: NonNull<Record>,
    size_bytes: Option<usize>,
}

impl Placeholder<'_> {
    /// The block was resized: `record` is its record now, and `size_bytes` its size.
    ///
    /// # Safety
    /// - `record` is that of the resized block, which is live.
    pub(super) unsafe fn resized(mut self, record: NonNull<Record>, size_bytes: usize) {
        self.record = record;
        self.size_bytes = Some(size_bytes);
    }
}

impl Drop for Placeholder<'_> {
    fn drop(&mut self) {
        // SAFETY: `put_placeholder` put the place into a list. The record is that of the live block, and in no list.
        unsafe { self.ledger.replace(self.place.record(), self.record.as_ptr(), self.size_bytes, 0) };
    }
}

/// A listing's position in one shard.
struct Reader<'a> {
    shard: &'a Shard,
    bookmark: Place,
    /// Whether the bookmark is in the list, before the record to read next. Set by `read` if there are more records;
    /// cleared at its next call. Cannot be set once the end was reached.
    placed: bool,
    /// The number of the shard's next block when the listing began: it does not wait for blocks that come later.
    end: Option<u32>,
}

impl Reader<'_> {
    /// Copies the next records to `some`, which has room for [`AT_ONCE`]; returns whether there are more.
    fn read(&mut self, some: &mut Vec<Seen>) -> bool {
        let Self { shard, bookmark, placed, end } = self;
        let bookmark = bookmark.record();
        shard.list.with(|list| {
            let end = *end.get_or_insert(list.inserted);
            let mut next = list.oldest;
            if std::mem::take(placed) {
                // SAFETY: `placed` was set, so the bookmark is in this list, whose lock is held.
                next = unsafe { list.unlink(bookmark) };
            }
            for _ in 0..AT_ONCE {
                let Some(place) = NonNull::new(next) else { return false };
                // SAFETY: `next` is in this list, whose lock is held: the first one, or one that another record links
                // to.
                let record = unsafe { place.read() };
                next = record.newer;
                let marks = record.name_and_lane.lane & (PLACEHOLDER | BOOKMARK);
                if marks == BOOKMARK {
                    continue;
                }
                // Numbers increase along the list and wrap around.
                if end.wrapping_sub(record.number).wrapping_sub(1) > u32::MAX / 2 {
                    return false;
                }
                // The block starts where its record ends.
                let address = if marks == PLACEHOLDER { 0 } else { place.addr().get() + size_of::<Record>() };
                // SAFETY: an attribution is released only after its record has left the list, and the lock is held.
                let attribution = unsafe { record.attribution.unpack() };
                some.push(Seen { record, address, attribution });
            }
            if next.is_null() {
                return false;
            }
            // SAFETY: the bookmark's place is this reader's own and in no list; `next` is in this list, whose lock is
            // held.
            unsafe { list.bookmark(bookmark, next) };
            *placed = true;
            true
        })
    }
}

impl Drop for Reader<'_> {
    fn drop(&mut self) {
        if self.placed {
            // SAFETY: `placed` is set, so the bookmark is in this list, whose lock is held.
            self.shard.list.with(|list| unsafe { list.unlink(self.bookmark.record()) });
        }
    }
}

impl Seen {
    fn block(self, ledger: u32, now_ns: u64) -> LiveBlock {
        let Record { size_bytes, made_ns, thread, number, name_and_lane: NameAndLane { name, lane }, .. } = self.record;
        let (task, place) = match self.attribution {
            Attribution::Unknown => (None, None),
            Attribution::Task(number) => (Some(number.to_string().into()), None),
            Attribution::Origin(origin) => (origin.task.clone(), origin.place.clone()),
        };
        let length = name.iter().position(|&byte| byte == 0).unwrap_or(name.len());
        LiveBlock {
            address: self.address,
            size_bytes,
            age: Duration::from_nanos(now_ns.saturating_sub(made_ns)),
            thread: Thread { id: thread, name: String::from_utf8_lossy(&name[..length]).into_owned() },
            task,
            place,
            number: u64::from(ledger) << 40 | u64::from(lane & !PLACEHOLDER) << 32 | u64::from(number),
        }
    }
}

impl HeldAcrossFork for Ledger {
    fn for_each_lock(&self, visit: &mut dyn FnMut(&ForkLock)) {
        self.shards.iter().for_each(|shard| visit(shard.list.lock()));
    }
}
