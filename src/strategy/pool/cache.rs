//! Per-thread caches: for each pool a few blocks of each class, taken and returned without a lock.
//!
//! A thread's caches are reached through one thread-local pointer without a destructor. They are flushed when the thread
//! ends; blocks that it releases after that, in later destructors, go to the central free lists directly. A cache does not
//! keep its pool alive: a serial number tells that the pool is gone, and then the next pool in the same place uses the
//! cache. All bins of a thread together have room for [`BUDGET`] bytes.
//!
//! No reference into the caches is held while other code runs that may allocate: if this pool is the global allocator, that
//! code would enter here again. Blocks move in and out through an array on the stack.

use super::classes;
use std::cell::Cell;
use std::ptr::{NonNull, null_mut};
use std::sync::Weak;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// The most blocks that a bin has room for.
pub(super) const ROOM: usize = 64;

/// The most bytes that one thread keeps, of all pools together.
const BUDGET: usize = 2 << 20;

/// Blocks on their way to or from a bin.
pub(super) type Batch = [NonNull<u8>; ROOM];
pub(super) const NO_BLOCKS: Batch = [NonNull::dangling(); ROOM];

/// The most blocks of `class` that a thread keeps: 256 KiB of each class, but at least two blocks and at most a full bin.
fn max_cached(class: usize) -> usize {
    ((256 << 10) / classes::bytes(class)).clamp(2, ROOM)
}

/// Identifies a pool's cache in every thread: by a place, which pools may have one after the other, and a serial number,
/// which no other pool has.
#[derive(Debug)]
pub(super) struct Number {
    /// [`NONE`] if too many pools are alive: this one has no caches then.
    place: usize,
    serial: u64,
}

const NONE: usize = usize::MAX;

/// A bit for each place. Set while a pool has the place; cleared when that pool is dropped. Atomic instead of locked, so that
/// it works in every child of `fork`.
static PLACES: [AtomicU64; 64] = [const { AtomicU64::new(0) }; 64];

impl Number {
    /// Takes the lowest free place and a new serial number.
    pub(super) fn new() -> Self {
        static SERIALS: AtomicU64 = AtomicU64::new(1);
        let serial = SERIALS.fetch_add(1, Ordering::Relaxed);
        // Relaxed, here and in `drop`: the bits guard nothing else, since caches compare serial numbers too.
        let taken = PLACES.iter().enumerate().find_map(|(number, places)| {
            let taken = places.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |bits| {
                (bits != u64::MAX).then(|| bits | (bits + 1))
            });
            taken.ok().map(|bits| number * 64 + bits.trailing_ones() as usize)
        });
        Self { place: taken.unwrap_or(NONE), serial }
    }
}

impl Drop for Number {
    fn drop(&mut self) {
        if let Some(places) = PLACES.get(self.place / 64) {
            places.fetch_and(!(1 << (self.place % 64)), Ordering::Relaxed);
        }
    }
}

/// One thread's blocks of one pool.
pub(super) struct Cache {
    serial: u64,
    bins: [Bin; classes::COUNT],
    /// Where the blocks go when the thread ends.
    home: Weak<dyn Home>,
}

/// Blocks of one class, the most recently used on top.
struct Bin {
    length: u32,
    /// How many it may hold now. Grows with use, within the thread's budget.
    max: u32,
    blocks: Batch,
}

/// What takes blocks back from a thread.
pub(super) trait Home: Send + Sync {
    /// Takes blocks of `class`, which nobody else has.
    fn give(&self, class: usize, blocks: &[NonNull<u8>]);
}

impl Cache {
    fn new() -> Box<Self> {
        Box::new(Self {
            serial: 0,
            bins: std::array::from_fn(|_| Bin { length: 0, max: 0, blocks: NO_BLOCKS }),
            home: Weak::<Nowhere>::new(),
        })
    }

    /// Takes the most recently used block of `class`.
    #[inline]
    pub(super) fn pop(&mut self, class: usize) -> Option<NonNull<u8>> {
        let bin = &mut self.bins[class];
        bin.length = bin.length.checked_sub(1)?;
        Some(bin.blocks[bin.length as usize % ROOM])
    }

    /// Keeps a block; false if the bin is full.
    #[inline]
    pub(super) fn push(&mut self, class: usize, block: NonNull<u8>) -> bool {
        let bin = &mut self.bins[class];
        if bin.length >= bin.max {
            return false;
        }
        bin.blocks[bin.length as usize % ROOM] = block;
        bin.length += 1;
        true
    }

    /// Keeps as many of these blocks as the bin has room for, from the end; returns how many are left at the front.
    pub(super) fn fill(&mut self, class: usize, blocks: &[NonNull<u8>]) -> usize {
        let mut left = blocks.len();
        while left > 0 && self.push(class, blocks[left - 1]) {
            left -= 1;
        }
        left
    }

    /// Takes out the half of a bin that was not used for longest; returns how many blocks.
    pub(super) fn spill(&mut self, class: usize, batch: &mut Batch) -> usize {
        let bin = &mut self.bins[class];
        let half = (bin.length as usize).div_ceil(2);
        bin.take_out(half, batch);
        half
    }

    /// How many blocks of `class` to fetch from the central free list at a time.
    pub(super) fn batch(&self, class: usize) -> usize {
        (self.bins[class].max as usize / 2).max(1)
    }
}

impl Bin {
    /// Takes out the `count` blocks that were not used for longest.
    fn take_out(&mut self, count: usize, batch: &mut Batch) {
        let length = self.length as usize;
        batch[..count].copy_from_slice(&self.blocks[..count]);
        self.blocks.copy_within(count..length, 0);
        self.length -= count as u32;
    }
}

/// The home of a cache before its first pool.
struct Nowhere;

impl Home for Nowhere {
    fn give(&self, _class: usize, _blocks: &[NonNull<u8>]) {}
}

/// This thread's caches by the pools' places: the first few in an array, the others in a vector.
struct Caches {
    /// From Box::into_raw, or NULL. Pointers instead of boxes, because [`LATEST`] has a copy of one.
    near: [*mut Cache; NEAR],
    far: Vec<*mut Cache>,
    /// How many bytes all bins together may hold.
    room_bytes: usize,
    /// The bin that last gave up room.
    hand: usize,
    /// When they were last emptied because of their age.
    swept: Duration,
}

const NEAR: usize = 8;

impl Caches {
    fn get(&mut self, number: &Number) -> Option<&mut Cache> {
        self.at(number.place).filter(|cache| cache.serial == number.serial)
    }

    fn at(&mut self, place: usize) -> Option<&mut Cache> {
        // SAFETY: NULL, or one of this thread's caches, which live until the thread ends. There is no other reference to it:
        // `with` runs one piece of work at a time, and references from `get` do not outlive their call.
        unsafe { self.pointer(place).as_mut() }
    }

    /// NULL if there is none.
    fn pointer(&self, place: usize) -> *mut Cache {
        let found = self.near.get(place).or_else(|| self.far.get(place - NEAR));
        found.copied().unwrap_or(null_mut())
    }

    /// Doubles the room of a bin. If the budget is used up, another bin gives up half of its room, and the blocks in it.
    fn grow(&mut self, number: &Number, class: usize) -> Option<Taken> {
        let bytes = classes::bytes(class);
        let max = self.get(number)?.bins[class].max as usize;
        let wanted = (max * 2).clamp(2, max_cached(class));
        let mut taken = None;
        if self.room_bytes + (wanted - max) * bytes > BUDGET {
            taken = self.shrink_another(number.place, class);
        }
        let wanted = wanted.min(max + BUDGET.saturating_sub(self.room_bytes) / bytes);
        self.room_bytes += (wanted - max) * bytes;
        self.get(number)?.bins[class].max = wanted as u32;
        taken
    }

    /// Halves the room of the next bin that has any; returns the blocks for which there is no room then.
    fn shrink_another(&mut self, place: usize, class: usize) -> Option<Taken> {
        let bins = (NEAR + self.far.len()) * classes::COUNT;
        for _ in 0..bins {
            self.hand = (self.hand + 1) % bins;
            let (at_place, at_class) = (self.hand / classes::COUNT, self.hand % classes::COUNT);
            if (at_place, at_class) == (place, class) {
                continue;
            }
            let Some(cache) = self.at(at_place) else { continue };
            let bin = &mut cache.bins[at_class];
            if bin.max > 0 {
                let kept = bin.max / 2;
                let mut taken = Taken { home: cache.home.clone(), class: at_class, count: 0, blocks: NO_BLOCKS };
                taken.count = bin.length.saturating_sub(kept) as usize;
                bin.take_out(taken.count, &mut taken.blocks);
                let room = (bin.max - kept) as usize * classes::bytes(at_class);
                bin.max = kept;
                self.room_bytes -= room;
                return Some(taken);
            }
        }
        None
    }

    /// Takes everything out of the next bin from `hand` on that has room.
    fn empty_next(&mut self, hand: &mut usize) -> Option<Taken> {
        let bins = (NEAR + self.far.len()) * classes::COUNT;
        while *hand < bins {
            let (place, class) = (*hand / classes::COUNT, *hand % classes::COUNT);
            *hand += 1;
            let Some(cache) = self.at(place) else {
                *hand = (place + 1) * classes::COUNT;
                continue;
            };
            let bin = &mut cache.bins[class];
            if bin.max > 0 {
                let count = bin.length as usize;
                let mut taken = Taken { home: cache.home.clone(), class, count, blocks: NO_BLOCKS };
                bin.take_out(count, &mut taken.blocks);
                let room = bin.max as usize * classes::bytes(class);
                bin.max = 0;
                self.room_bytes -= room;
                return Some(taken);
            }
        }
        None
    }
}

/// Blocks to be returned to their pool.
struct Taken {
    home: Weak<dyn Home>,
    class: usize,
    count: usize,
    blocks: Batch,
}

impl Taken {
    /// Returns them. If the pool is gone, the memory went with it.
    fn send(self) {
        if self.count > 0
            && let Some(home) = self.home.upgrade()
        {
            home.give(self.class, &self.blocks[..self.count]);
        }
    }
}

thread_local! {
    /// The serial number and the address of the cache that was used last. The number is 0, which no pool has, if there is
    /// none. A cache stays where it is until the thread ends.
    static LATEST: (Cell<u64>, Cell<*mut Cache>) = const { (Cell::new(0), Cell::new(null_mut())) };
    /// NULL before the first use and after `OWNER` was dropped.
    static CACHES: Cell<*mut Caches> = const { Cell::new(null_mut()) };
    /// Its destructor flushes the caches when the thread ends.
    static OWNER: Owner = const { Owner { closed: Cell::new(false) } };
    /// Set while a cache is being made. What that allocates may come from a pool, which then does without a cache.
    static OPENING: Cell<bool> = const { Cell::new(false) };
}

struct Owner {
    closed: Cell<bool>,
}

impl Drop for Owner {
    fn drop(&mut self) {
        self.closed.set(true);
        LATEST.with(|(serial, _)| serial.set(0));
        let caches = CACHES.replace(null_mut());
        if !caches.is_null() {
            // SAFETY: `make` got it from Box::into_raw; it is this thread's alone, and `CACHES` no longer has it.
            let mut caches = unsafe { Box::from_raw(caches) };
            let mut hand = 0;
            while let Some(taken) = caches.empty_next(&mut hand) {
                taken.send();
            }
            for cache in caches.near.iter().chain(&caches.far).filter(|cache| !cache.is_null()) {
                // SAFETY: `make` got it from Box::into_raw; it is this thread's alone, and neither `CACHES` nor `LATEST`
                // leads to it.
                drop(unsafe { Box::from_raw(*cache) });
            }
        }
    }
}

/// Runs `work` on this thread's caches. `work` must not allocate, free or call into this file.
#[inline]
fn with<R>(work: impl FnOnce(&mut Caches) -> R) -> Option<R> {
    // SAFETY: NULL, or this thread's caches, which live until `Owner` is dropped. There is no other reference, since `work`
    // does not call into this file.
    unsafe { CACHES.get().as_mut() }.map(work)
}

/// This thread's cache of the pool, if it has one yet.
///
/// The reference must not outlive the strategy's call that uses it, and there must not be two at once: nothing that may
/// allocate or free runs while there is one.
#[inline]
pub(super) fn get<'a>(number: &Number) -> Option<&'a mut Cache> {
    LATEST.with(|(serial, cache)| {
        if serial.get() == number.serial {
            // SAFETY: this thread's own cache; it is alive as long as its serial number is in `LATEST`. There is no other
            // reference, by the rule above.
            return unsafe { cache.get().as_mut() };
        }
        find(number)
    })
}

/// [`get`] for another pool than the last time.
#[inline(never)]
fn find<'a>(number: &Number) -> Option<&'a mut Cache> {
    let found = with(|caches| {
        caches.get(number)?;
        Some(caches.pointer(number.place))
    });
    let found = found.flatten()?;
    LATEST.with(|(serial, latest)| {
        latest.set(found);
        serial.set(number.serial);
    });
    // SAFETY: one of this thread's caches; there is no other reference, by the rule of `get`.
    unsafe { found.as_mut() }
}

/// Makes room for more blocks of `class` in this thread's cache of the pool, which is made if there is none. Does nothing
/// while the thread is ending.
#[cold]
pub(super) fn grow(number: &Number, class: usize, home: impl FnOnce() -> Weak<dyn Home>) {
    if (get(number).is_some() || open(number, home))
        && let Some(taken) = with(|caches| caches.grow(number, class)).flatten()
    {
        taken.send();
    }
}

/// Makes this thread's cache of the pool; false if there can be none now.
fn open(number: &Number, home: impl FnOnce() -> Weak<dyn Home>) -> bool {
    let alive = OWNER.try_with(|owner| !owner.closed.get()).unwrap_or(false);
    if !alive || number.place == NONE || OPENING.replace(true) {
        return false;
    }
    make(number, home);
    OPENING.set(false);
    true
}

fn make(number: &Number, home: impl FnOnce() -> Weak<dyn Home>) {
    // Everything is allocated before a reference is taken, and put in place only if it is still needed then: allocating may
    // have called into this file.
    if CACHES.get().is_null() {
        let caches =
            Caches { near: [null_mut(); NEAR], far: Vec::new(), room_bytes: 0, hand: 0, swept: super::clock::now() };
        let fresh = Box::into_raw(Box::new(caches));
        if CACHES.get().is_null() {
            CACHES.set(fresh);
        } else {
            // SAFETY: from Box::into_raw above, and nobody else has it.
            drop(unsafe { Box::from_raw(fresh) });
        }
    }
    if let Some(far) = number.place.checked_sub(NEAR)
        && with(|caches| caches.far.len() <= far).unwrap_or(false)
    {
        let mut longer = Vec::with_capacity((far + 1).next_power_of_two());
        with(|caches| {
            if caches.far.len() < longer.capacity() {
                longer.append(&mut caches.far);
                longer.resize(longer.capacity(), null_mut());
                std::mem::swap(&mut longer, &mut caches.far);
            }
        });
    }
    let mut fresh = None;
    if with(|caches| caches.at(number.place).is_none()).unwrap_or(false) {
        fresh = Some(Cache::new());
    }
    let mut home = home();
    with(|caches| {
        if caches.at(number.place).is_none() {
            let cache = fresh.take().map_or(null_mut(), Box::into_raw);
            match caches.near.get_mut(number.place) {
                Some(place) => *place = cache,
                None => caches.far[number.place - NEAR] = cache,
            }
        }
        let Some(cache) = caches.at(number.place).filter(|cache| cache.serial != number.serial) else { return };
        // The blocks of the previous pool are gone with that pool.
        let mut room_bytes = 0;
        for (class, bin) in cache.bins.iter_mut().enumerate() {
            room_bytes += bin.max as usize * classes::bytes(class);
            (bin.length, bin.max) = (0, 0);
        }
        cache.serial = number.serial;
        std::mem::swap(&mut cache.home, &mut home);
        caches.room_bytes -= room_bytes;
    });
    // What was not needed, and the previous pool's home, are dropped here, where no reference is held.
}

/// Returns all blocks of this thread's caches to their pools, if the last time was `age` ago. Blocks in use are cached again
/// soon.
pub(super) fn sweep(now: Duration, age: Duration) {
    let is_due = |caches: &mut Caches| {
        let is_due = now.saturating_sub(caches.swept) >= age;
        if is_due {
            caches.swept = now.min(super::clock::now());
        }
        is_due
    };
    if with(is_due).unwrap_or(false) {
        let mut hand = 0;
        while let Some(taken) = with(|caches| caches.empty_next(&mut hand)).flatten() {
            taken.send();
        }
    }
}

/// Returns the blocks of this thread's cache of the pool through `give`. The cache keeps its room.
pub(super) fn flush(number: &Number, give: impl Fn(usize, &[NonNull<u8>])) {
    for class in 0..classes::COUNT {
        let mut batch = NO_BLOCKS;
        let take_out = |cache: &mut Cache| {
            let bin = &mut cache.bins[class];
            let count = bin.length as usize;
            bin.take_out(count, &mut batch);
            count
        };
        let Some(count) = get(number).map(take_out) else { return };
        if count > 0 {
            give(class, &batch[..count]);
        }
    }
}
