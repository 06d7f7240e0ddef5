//! What each thread keeps of each pool: a few blocks of each class, taken and given without a lock.
//!
//! A thread's caches hang on one thread-local pointer, which needs no destructor to be read. They are flushed when
//! the thread ends; what the thread releases after that (in later destructors) goes to the shelves directly.

use super::classes;
use std::cell::Cell;
use std::ptr::{NonNull, null_mut};
use std::sync::Arc;

/// The most blocks of one class that a cache has room for.
pub(super) const ROOM: usize = 64;

/// One thread's blocks of one pool.
pub(super) struct Cache {
    bins: [Bin; classes::COUNT],
    /// Where they go when the thread ends; keeps the pool's memory until then.
    home: Arc<dyn Home>,
}

/// Blocks of one class, the hottest on top.
struct Bin {
    length: u32,
    most: u32,
    blocks: [NonNull<u8>; ROOM],
}

/// What takes blocks back from a thread.
pub(super) trait Home: Send + Sync {
    /// Takes blocks of `class`, which nobody else has.
    fn give(&self, class: usize, blocks: &[NonNull<u8>]);
}

impl Cache {
    pub(super) fn new(home: Arc<dyn Home>) -> Box<Self> {
        Box::new(Self {
            bins: std::array::from_fn(|class| Bin {
                length: 0,
                most: classes::cached_most(class) as u32,
                blocks: [NonNull::dangling(); ROOM],
            }),
            home,
        })
    }

    /// The hottest block of `class`, if there is one.
    #[inline]
    pub(super) fn pop(&mut self, class: usize) -> Option<NonNull<u8>> {
        let bin = &mut self.bins[class];
        bin.length = bin.length.checked_sub(1)?;
        Some(bin.blocks[bin.length as usize % ROOM])
    }

    /// Keeps a block; false where the bin is full.
    #[inline]
    pub(super) fn push(&mut self, class: usize, block: NonNull<u8>) -> bool {
        let bin = &mut self.bins[class];
        if bin.length >= bin.most {
            return false;
        }
        bin.blocks[bin.length as usize % ROOM] = block;
        bin.length += 1;
        true
    }

    /// Fills an empty bin by `take` with half of what it may hold, and pops one.
    pub(super) fn refill(
        &mut self,
        class: usize,
        take: impl FnOnce(&mut [NonNull<u8>]) -> usize,
    ) -> Option<NonNull<u8>> {
        let bin = &mut self.bins[class];
        debug_assert_eq!(bin.length, 0);
        bin.length = take(&mut bin.blocks[..bin.most as usize / 2]) as u32;
        self.pop(class)
    }

    /// Sends the colder half of a full bin home, and keeps `block`.
    pub(super) fn spill(&mut self, class: usize, block: NonNull<u8>) {
        let bin = &mut self.bins[class];
        let half = bin.length as usize / 2;
        self.home.give(class, &bin.blocks[..half]);
        bin.blocks.copy_within(half..bin.length as usize, 0);
        bin.length -= half as u32;
        let kept = self.push(class, block);
        debug_assert!(kept, "half of the bin was emptied");
    }

    /// Sends everything home.
    pub(super) fn flush(&mut self) {
        for (class, bin) in self.bins.iter_mut().enumerate() {
            if bin.length > 0 {
                self.home.give(class, &bin.blocks[..bin.length as usize]);
                bin.length = 0;
            }
        }
    }
}

/// This thread's caches, one for each pool, by the pool's number: the first few at hand, the others a step away.
struct Caches {
    near: [Option<Box<Cache>>; NEAR],
    far: Vec<Option<Box<Cache>>>,
}

const NEAR: usize = 8;

impl Caches {
    #[inline]
    fn get(&mut self, pool: usize) -> Option<&mut Cache> {
        match self.near.get_mut(pool) {
            Some(cache) => cache.as_deref_mut(),
            None => self.far.get_mut(pool - NEAR)?.as_deref_mut(),
        }
    }

    fn place(&mut self, pool: usize) -> &mut Option<Box<Cache>> {
        if pool < NEAR {
            return &mut self.near[pool];
        }
        if self.far.len() <= pool - NEAR {
            self.far.resize_with(pool - NEAR + 1, || None);
        }
        &mut self.far[pool - NEAR]
    }
}

thread_local! {
    /// NULL before the first use and after the thread's destructors ran.
    static CACHES: Cell<*mut Caches> = const { Cell::new(null_mut()) };
    /// Flushes them at the thread's end.
    static OWNER: Owner = const { Owner { closed: Cell::new(false) } };
}

struct Owner {
    closed: Cell<bool>,
}

impl Drop for Owner {
    fn drop(&mut self) {
        self.closed.set(true);
        let caches = CACHES.replace(null_mut());
        if !caches.is_null() {
            // SAFETY: made by `open` with Box::into_raw, known to this thread alone.
            let mut caches = unsafe { Box::from_raw(caches) };
            let Caches { near, far } = &mut *caches;
            near.iter_mut().chain(far).flatten().for_each(|cache| cache.flush());
        }
    }
}

/// This thread's cache of the pool with that number, if it has one yet.
///
/// The reference must not outlive the call of the strategy that asks, nor may two be had at once: no code of others
/// runs in between.
#[inline]
pub(super) fn get<'a>(pool: usize) -> Option<&'a mut Cache> {
    let caches = CACHES.get();
    // SAFETY: NULL, or this thread's own, see `Owner`.
    unsafe { caches.as_mut() }?.get(pool)
}

/// This thread's cache of the pool, made by `make` where there is none; nothing where the thread is ending.
#[cold]
pub(super) fn open<'a>(pool: usize, make: impl FnOnce() -> Box<Cache>) -> Option<&'a mut Cache> {
    let alive = OWNER.try_with(|owner| !owner.closed.get()).unwrap_or(false);
    if !alive {
        return None;
    }
    if CACHES.get().is_null() {
        CACHES.set(Box::into_raw(Box::new(Caches { near: Default::default(), far: Vec::new() })));
    }
    // SAFETY: not NULL, this thread's own.
    let caches = unsafe { &mut *CACHES.get() };
    Some(caches.place(pool).get_or_insert_with(make))
}

/// Flushes this thread's cache of the pool.
pub(super) fn flush(pool: usize) {
    if let Some(cache) = get(pool) {
        cache.flush();
    }
}
