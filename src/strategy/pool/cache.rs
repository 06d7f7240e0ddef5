//! The caches of a thread: for each pool a few blocks of each class. `local` is how a thread reaches its own.
//!
//! A cache does not keep its pool alive: a serial number tells that the pool is gone, and then the next pool in the
//! same place uses the cache. All bins of a thread together have room for [`BUDGET`] bytes.

use super::classes;
use std::ptr::{NonNull, null_mut};
use std::sync::Weak;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// The most blocks that a bin has room for: more of the small classes, of which programs have many alive at a time, so
/// that freeing and making them again stays with the thread.
const fn room(class: usize) -> usize {
    match class {
        0..4 => 512,
        4..8 => 256,
        8..classes::TINY => 64,
        _ => 512, // the tiny ones
    }
}

/// Where the blocks of each bin start among those of a cache; the last one is their number.
const STARTS: [u32; classes::COUNT + 1] = {
    let mut starts = [0; classes::COUNT + 1];
    let mut class = 0;
    while class < classes::COUNT {
        starts[class + 1] = starts[class] + room(class) as u32;
        class += 1;
    }
    starts
};
const PLACES: usize = STARTS[classes::COUNT] as usize;

/// The most blocks that move at a time.
const BATCH: usize = 128;

/// The most bytes that one thread keeps, of all pools together.
const BUDGET: usize = 2 << 20;

/// Blocks on their way to or from a bin.
pub(super) type Batch = [NonNull<u8>; BATCH];
pub(super) const NO_BLOCKS: Batch = [NonNull::dangling(); BATCH];

/// The most blocks of `class` that a thread keeps: 256 KiB of each class, but at least two blocks and at most a full
/// bin.
fn max_cached(class: usize) -> usize {
    ((256 << 10) / classes::bytes(class)).clamp(2, room(class))
}

/// Identifies a pool's cache in every thread: by a place, which pools may have one after the other, and a serial
/// number, which no other pool has.
#[derive(Debug)]
pub(super) struct Number {
    /// [`NONE`] if too many pools are alive: this one has no caches then.
    place: usize,
    serial: u64,
}

const NONE: usize = usize::MAX;

/// A bit for each place. Set while a pool has the place; cleared when that pool is dropped. Atomic instead of locked,
/// so that it works in every child of `fork`.
static TAKEN: [AtomicU64; 64] = [const { AtomicU64::new(0) }; 64];

impl Number {
    /// Takes the lowest free place and a new serial number.
    pub(super) fn new() -> Self {
        static SERIALS: AtomicU64 = AtomicU64::new(1);
        let serial = SERIALS.fetch_add(1, Ordering::Relaxed);
        // Relaxed, here and in `drop`: the bits guard nothing else, since caches compare serial numbers too.
        let taken = TAKEN.iter().enumerate().find_map(|(number, places)| {
            let taken = places.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |bits| {
                (bits != u64::MAX).then(|| bits | (bits + 1))
            });
            taken.ok().map(|bits| number * 64 + bits.trailing_ones() as usize)
        });
        Self { place: taken.unwrap_or(NONE), serial }
    }

    #[inline]
    pub(super) fn serial(&self) -> u64 {
        self.serial
    }

    /// Whether the pool has caches.
    pub(super) fn has_place(&self) -> bool {
        self.place != NONE
    }
}

impl Drop for Number {
    fn drop(&mut self) {
        if let Some(places) = TAKEN.get(self.place / 64) {
            places.fetch_and(!(1 << (self.place % 64)), Ordering::Relaxed);
        }
    }
}

/// One thread's blocks of one pool. In this order: what is at its beginning is reached by shorter instructions.
#[repr(C)]
pub(super) struct Cache {
    bins: [Bin; BINS],
    serial: u64,
    /// Where the blocks go when the thread ends.
    home: Weak<dyn Home>,
    /// Those of each bin are together, the most recently used last: see [`STARTS`].
    blocks: [NonNull<u8>; PLACES],
}

/// Where the blocks of one class are among those of the cache.
#[derive(Clone, Copy)]
#[repr(align(16))] // so that a shift finds it
struct Bin {
    /// The first place, which never changes.
    start: u32,
    /// The place after the last block.
    top: u32,
    /// Where the room ends that it has now. That grows with use, within the thread's budget.
    end: u32,
}

impl Bin {
    const fn empty(class: usize) -> Self {
        let start = STARTS[class];
        Self { start, top: start, end: start }
    }

    /// How many blocks it has.
    fn length(self) -> usize {
        (self.top - self.start) as usize
    }

    /// How many it may hold now.
    fn max(self) -> usize {
        (self.end - self.start) as usize
    }

    fn set_max(&mut self, max: usize) {
        self.end = self.start + max as u32;
    }
}

/// One for each class, and some that are never used, so that a remainder needs no check.
const BINS: usize = classes::COUNT.next_power_of_two();

const EMPTY: [Bin; BINS] = {
    let mut bins = [Bin::empty(0); BINS];
    let mut class = 0;
    while class < classes::COUNT {
        bins[class] = Bin::empty(class);
        class += 1;
    }
    bins
};

/// What takes blocks back from a thread.
pub(super) trait Home: Send + Sync {
    /// Takes blocks of `class`, which nobody else has.
    fn give(&self, class: usize, blocks: &mut [NonNull<u8>]);
}

impl Cache {
    /// Made where it stays: on the stack it would take most of what a thread with a small one has.
    pub(super) fn new() -> Box<Self> {
        let mut fresh = Box::<Self>::new_uninit();
        let cache = fresh.as_mut_ptr();
        // SAFETY: `cache` has room for a `Cache`, and nobody else has it. Each field, and each place of `blocks`, is
        // written before it counts as one.
        unsafe {
            (&raw mut (*cache).serial).write(0);
            (&raw mut (*cache).bins).write(EMPTY);
            let blocks: *mut NonNull<u8> = (&raw mut (*cache).blocks).cast();
            (0..PLACES).for_each(|place| blocks.add(place).write(NonNull::dangling()));
            (&raw mut (*cache).home).write(Weak::<Nowhere>::new());
            fresh.assume_init()
        }
    }

    /// Takes the most recently used block of `class`.
    #[inline(always)]
    pub(super) fn pop(&mut self, class: usize) -> Option<NonNull<u8>> {
        let bin = &mut self.bins[class % BINS];
        if bin.top == bin.start {
            return None;
        }
        bin.top -= 1;
        // SAFETY: below the bin's `end`, which is at most where the next bin starts.
        Some(unsafe { *self.blocks.get_unchecked(bin.top as usize) })
    }

    /// Keeps a block; false if the bin is full.
    #[inline(always)]
    pub(super) fn push(&mut self, class: usize, block: NonNull<u8>) -> bool {
        let bin = &mut self.bins[class % BINS];
        if bin.top >= bin.end {
            return false;
        }
        // SAFETY: below the bin's `end`, which is at most where the next bin starts.
        unsafe { *self.blocks.get_unchecked_mut(bin.top as usize) = block };
        bin.top += 1;
        true
    }

    /// Keeps as many of these blocks as the bin has room for, from the end; returns how many are left at the front.
    pub(super) fn fill(&mut self, class: usize, blocks: &[NonNull<u8>]) -> usize {
        let bin = &mut self.bins[class];
        let count = blocks.len().min(bin.max().saturating_sub(bin.length()));
        let left = blocks.len() - count;
        let start = bin.top as usize;
        for (place, block) in self.blocks[start..start + count].iter_mut().zip(blocks[left..].iter().rev()) {
            *place = *block;
        }
        bin.top += count as u32;
        left
    }

    /// Takes out the half of a bin that was not used for longest, or a batch if that is less; returns how many blocks.
    pub(super) fn spill(&mut self, class: usize, batch: &mut Batch) -> usize {
        let half = self.bins[class].length().div_ceil(2);
        self.take_out(class, half, batch)
    }

    /// Takes out up to a batch of the blocks of `class`; returns how many, 0 when there are no more. The cache keeps
    /// its room.
    pub(super) fn empty(&mut self, class: usize, batch: &mut Batch) -> usize {
        self.take_out(class, self.bins[class].length(), batch)
    }

    /// How many blocks of `class` to fetch from the central free list at a time.
    pub(super) fn batch(&self, class: usize) -> usize {
        (self.bins[class].max() / 2).clamp(1, BATCH)
    }

    /// Takes out the `count` blocks that were not used for longest, or a batch if that is less; returns how many.
    fn take_out(&mut self, class: usize, count: usize, batch: &mut Batch) -> usize {
        let bin = &mut self.bins[class];
        let count = count.min(BATCH);
        let kept = &mut self.blocks[bin.start as usize..bin.top as usize];
        batch[..count].copy_from_slice(&kept[..count]);
        kept.copy_within(count.., 0);
        bin.top -= count as u32;
        count
    }

    /// Lowers the room of a bin to `kept`, or as far as a batch of blocks allows; returns the blocks for which there is
    /// no room then.
    fn shrink(&mut self, class: usize, kept: usize) -> Taken {
        let mut taken = Taken { home: self.home.clone(), class, count: 0, blocks: NO_BLOCKS };
        let surplus = self.bins[class].length().saturating_sub(kept);
        taken.count = self.take_out(class, surplus, &mut taken.blocks);
        let bin = &mut self.bins[class];
        bin.set_max(kept.max(bin.length()));
        taken
    }
}

/// The home of a cache before its first pool.
struct Nowhere;

impl Home for Nowhere {
    fn give(&self, _class: usize, _blocks: &mut [NonNull<u8>]) {}
}

/// One thread's caches by the pools' places: the first few in an array, the others in a vector.
pub(super) struct Caches {
    /// From Box::into_raw, or NULL. Pointers instead of boxes, because the thread has a copy of the one that it used
    /// last.
    near: [*mut Cache; NEAR],
    far: Vec<*mut Cache>,
    /// How many bytes all bins together may hold.
    room_bytes: usize,
    /// The bin that last gave up room.
    hand: usize,
    /// When they were last emptied because of their age.
    swept: Duration,
    /// The next ones, while they are in a list (`idle`).
    pub(super) next: *mut Caches,
}

const NEAR: usize = 8;

impl Caches {
    pub(super) fn new() -> Self {
        Self {
            near: [null_mut(); NEAR],
            far: Vec::new(),
            room_bytes: 0,
            hand: 0,
            swept: super::clock::now(),
            next: null_mut(),
        }
    }

    fn get(&mut self, number: &Number) -> Option<&mut Cache> {
        self.at(number.place).filter(|cache| cache.serial == number.serial)
    }

    fn at(&mut self, place: usize) -> Option<&mut Cache> {
        // SAFETY: NULL, or one of our caches, which live as long as we do. There is no other reference to it: whoever
        // has a cache has us borrowed.
        unsafe { self.pointer(place).as_mut() }
    }

    /// The cache of this pool; NULL if there is none.
    pub(super) fn find(&mut self, number: &Number) -> *mut Cache {
        if self.get(number).is_some() { self.pointer(number.place) } else { null_mut() }
    }

    /// NULL if there is none.
    fn pointer(&self, place: usize) -> *mut Cache {
        let found = self.near.get(place).or_else(|| self.far.get(place - NEAR));
        found.copied().unwrap_or(null_mut())
    }

    /// How long the list of far caches has to be for this pool, if it is too short.
    pub(super) fn missing_length(&self, number: &Number) -> Option<usize> {
        let far = number.place.checked_sub(NEAR)?;
        (self.far.len() <= far).then(|| (far + 1).next_power_of_two())
    }

    /// Makes the list of far caches as long as the capacity of `longer`, which has the old list then. Allocates
    /// nothing.
    pub(super) fn lengthen(&mut self, longer: &mut Vec<*mut Cache>) {
        if self.far.len() < longer.capacity() {
            longer.append(&mut self.far);
            longer.resize(longer.capacity(), null_mut());
            std::mem::swap(longer, &mut self.far);
        }
    }

    /// Whether there is a cache in this pool's place, of this pool or of one that is gone.
    pub(super) fn has_place_of(&mut self, number: &Number) -> bool {
        self.at(number.place).is_some()
    }

    /// Gives the pool the cache in its place, or `fresh` if there is none there. What is not needed any more is left in
    /// `fresh` and `home`.
    pub(super) fn assign(&mut self, number: &Number, fresh: &mut Option<Box<Cache>>, home: &mut Weak<dyn Home>) {
        if self.at(number.place).is_none()
            && let Some(place) = self.near.get_mut(number.place).or_else(|| self.far.get_mut(number.place - NEAR))
        {
            *place = fresh.take().map_or(null_mut(), Box::into_raw);
        }
        let Some(cache) = self.at(number.place).filter(|cache| cache.serial != number.serial) else { return };
        // The blocks of the previous pool are gone with that pool.
        let mut room_bytes = 0;
        for (class, bin) in cache.bins.iter_mut().enumerate().take(classes::COUNT) {
            room_bytes += bin.max() * classes::bytes(class);
            *bin = Bin::empty(class);
        }
        cache.serial = number.serial;
        std::mem::swap(&mut cache.home, home);
        self.room_bytes -= room_bytes;
    }

    /// Whether they were last emptied at least `age` ago; if so, that they are now.
    pub(super) fn is_due(&mut self, now: Duration, age: Duration) -> bool {
        let is_due = now.saturating_sub(self.swept) >= age;
        if is_due {
            self.swept = now.min(super::clock::now());
        }
        is_due
    }

    /// Doubles the room of a bin. If the budget is used up, another bin gives up half of its room, and the blocks in
    /// it.
    pub(super) fn grow(&mut self, number: &Number, class: usize) -> Option<Taken> {
        let bytes = classes::bytes(class);
        let max = self.get(number)?.bins[class].max();
        let wanted = (max * 2).clamp(2, max_cached(class));
        let mut taken = None;
        if self.room_bytes + (wanted - max) * bytes > BUDGET {
            taken = self.shrink_another(number.place, class);
        }
        let wanted = wanted.min(max + BUDGET.saturating_sub(self.room_bytes) / bytes);
        self.room_bytes += (wanted - max) * bytes;
        self.get(number)?.bins[class].set_max(wanted);
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
            let max = cache.bins[at_class].max();
            if max > 0 {
                let taken = cache.shrink(at_class, max / 2);
                let room = (max - cache.bins[at_class].max()) * classes::bytes(at_class);
                self.room_bytes -= room;
                return Some(taken);
            }
        }
        None
    }

    /// Takes up to a batch out of the next bin from `hand` on that has room.
    pub(super) fn empty_next(&mut self, hand: &mut usize) -> Option<Taken> {
        let bins = (NEAR + self.far.len()) * classes::COUNT;
        while *hand < bins {
            let (place, class) = (*hand / classes::COUNT, *hand % classes::COUNT);
            let Some(cache) = self.at(place) else {
                *hand = (place + 1) * classes::COUNT;
                continue;
            };
            let max = cache.bins[class].max();
            if max > 0 {
                let taken = cache.shrink(class, 0);
                let room = (max - cache.bins[class].max()) * classes::bytes(class);
                self.room_bytes -= room;
                return Some(taken);
            }
            *hand += 1;
        }
        None
    }
}

impl Caches {
    /// Returns all blocks to their pools.
    pub(super) fn send(mut self) {
        let mut hand = 0;
        while let Some(taken) = self.empty_next(&mut hand) {
            taken.send();
        }
    }
}

impl Drop for Caches {
    fn drop(&mut self) {
        for cache in self.near.iter().chain(&self.far).filter(|cache| !cache.is_null()) {
            // SAFETY: `assign` got it from Box::into_raw. Whoever drops us has no copy of the pointer.
            drop(unsafe { Box::from_raw(*cache) });
        }
    }
}

/// Blocks to be returned to their pool.
pub(super) struct Taken {
    home: Weak<dyn Home>,
    class: usize,
    count: usize,
    blocks: Batch,
}

impl Taken {
    /// Returns them. If the pool is gone, the memory went with it.
    pub(super) fn send(mut self) {
        if self.count > 0
            && let Some(home) = self.home.upgrade()
        {
            home.give(self.class, &mut self.blocks[..self.count]);
        }
    }
}

#[cfg(all(test, not(miri)))]
mod tests {
    use crate::strategy::{Pool, Strategy as _};
    use std::thread;

    #[test]
    fn a_thread_with_a_small_stack_has_caches_too() {
        let makes_one = || {
            let block = Pool::shared().allocate(100).expect("memory");
            // SAFETY: made above, and given up.
            unsafe { Pool::shared().release(block) };
        };
        let thread = thread::Builder::new().stack_size(48 << 10).spawn(makes_one).expect("a thread");
        thread.join().expect("no panic");
    }
}
