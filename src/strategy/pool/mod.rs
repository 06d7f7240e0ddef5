//! `Pool`: size classes with caches for each thread, and large blocks that are kept warm.
//!
//! ```text
//!   thread's cache ──► spans of the class ──► pages of 64 KiB ──► regions of 4 MiB ──► Pages (mmap, ...)
//!   (no lock)          (a lock a class)       (one lock)
//!   large blocks (> 256 KiB) ──► the last few that came back ──► extents (one lock) ──► Pages
//! ```
//! Each file has its own invariant: `classes` the sizes, `region` and `span` the record of each block, `heap` the pages,
//! `central` the lists of spans, `cache` the threads, `large` and `extents` the rest; `decay` gives memory back when
//! nobody is there to do it. All locks are held across `fork`.

mod arena;
mod cache;
mod central;
mod classes;
mod clock;
mod decay;
mod extents;
mod heap;
mod large;
mod options;
mod region;
mod span;

pub use arena::Arena;
#[cfg(feature = "python")]
pub(crate) use decay::restart as restart_decay;
pub use options::PoolOptions;

use super::Strategy;
use crate::source::{Pages, PrivatePages, pages};
use crate::sync::{ForkLock, HeldAcrossFork, HeldUntilDropped, Made};
use cache::{Home, NO_BLOCKS, Number};
use central::Central;
use decay::{Keeper, Noted, Registration};
use heap::PageHeap;
use large::Large;
use options::Wishes;
use region::{PAGE, Region};
use std::fmt;
use std::ptr::NonNull;
use std::sync::{Arc, Weak};
use std::time::Duration;

/// A pool over pages: for programs that allocate and free all the time, which is all NumPy programs.
///
/// Blocks are aligned to 64 bytes. Up to 256 KiB they come from size classes (at most 25 % too large) by way of a cache
/// that each thread has; above, they are runs of 64 KiB pages, joined when they come back and cut again for any size,
/// with their memory still there. No more of that is kept than the next busy moment will want, guessed from those
/// before, and nothing that was not used for a while ([`PoolOptions`]); [`trim`](Strategy::trim) gives all of it back.
///
/// Cheap to clone: clones are the same pool.
pub struct Pool<P: Pages = PrivatePages> {
    inner: Arc<Inner<P>>,
}

struct Inner<P: Pages> {
    /// Which of a thread's caches is this pool's.
    number: Number,
    large: Large,
    /// Where the source has pages of another kind for blocks of 2 MiB and more.
    huge: Option<Huge>,
    central: [Central; classes::COUNT],
    heap: PageHeap<P>,
    wishes: Wishes,
    /// Whether there may be something to give back.
    noted: Noted,
    _held: HeldUntilDropped,
    _registration: Registration,
}

struct Huge {
    blocks: Large,
    source: Arc<dyn Pages>,
}

/// Threads empty their caches no more often, however short memory is kept.
const MIN_SWEEP_INTERVAL: Duration = Duration::from_millis(100);

/// Gives back what all pools and arenas keep, and this thread's caches; returns how many bytes that were.
pub(crate) fn trim_pools() -> usize {
    cache::sweep(Duration::MAX, Duration::ZERO);
    decay::trim_pools()
}

/// How many of our pages a huge page has: what blocks on those are multiples of.
const HUGE_PAGES: usize = pages::HUGE_PAGE / PAGE;

impl Pool {
    /// A pool over private pages.
    #[must_use]
    pub fn new() -> Self {
        Self::over(PrivatePages, PoolOptions::default())
    }

    /// The process's own pool, behind the handler `pool`; the arenas of requests take their pages from it.
    pub fn shared() -> &'static Self {
        static SHARED: Made<Pool> = Made::new();
        SHARED.get_or_make(Self::new)
    }
}

impl Default for Pool {
    fn default() -> Self {
        Self::new()
    }
}

impl<P: Pages> Pool<P> {
    /// A pool over pages of the caller's choice.
    #[must_use]
    pub fn over(source: P, options: PoolOptions) -> Self {
        let wishes = Wishes::new(options);
        let inner: Arc<Inner<P>> = Arc::new_cyclic(|inner: &Weak<Inner<P>>| Inner {
            number: Number::new(),
            large: Large::new(1, wishes),
            huge: source.huge().map(|source| Huge { blocks: Large::new(HUGE_PAGES, wishes), source }),
            central: std::array::from_fn(Central::new),
            heap: PageHeap::new(source, wishes),
            wishes,
            noted: Noted::default(),
            // In this order: see `decay`.
            _held: crate::sync::hold_across_fork_until(inner.clone()),
            _registration: decay::register(inner.clone()),
        });
        Self { inner }
    }

    #[cold]
    #[inline(never)]
    fn allocate_small_slowly(&self, class: usize) -> Option<NonNull<u8>> {
        // The source may refuse while we sit on memory that nobody uses.
        self.refill(class).or_else(|| if self.inner.give_back() == 0 { None } else { self.refill(class) })
    }

    fn refill(&self, class: usize) -> Option<NonNull<u8>> {
        let inner = &*self.inner;
        inner.look();
        cache::grow(&inner.number, class, || Arc::downgrade(&self.inner) as Weak<dyn Home>);
        let mut batch = NO_BLOCKS;
        let wanted = cache::get(&inner.number).map_or(1, |cache| cache.batch(class));
        let count = inner.central[class].take(&inner.heap, &mut batch[..wanted]);
        let (first, others) = batch[..count].split_first()?;
        let left = cache::get(&inner.number).map_or(others.len(), |cache| cache.fill(class, others));
        if left > 0 {
            inner.give(class, &others[..left]);
        }
        Some(*first)
    }

    #[cold]
    #[inline(never)]
    fn release_small_slowly(&self, class: usize, block: NonNull<u8>) {
        let inner = &*self.inner;
        inner.look();
        cache::grow(&inner.number, class, || Arc::downgrade(&self.inner) as Weak<dyn Home>);
        let mut batch = NO_BLOCKS;
        let mut spilled = 0;
        let kept = cache::get(&inner.number).is_some_and(|cache| {
            cache.push(class, block) || {
                spilled = cache.spill(class, &mut batch);
                cache.push(class, block)
            }
        });
        if spilled > 0 {
            inner.give(class, &batch[..spilled]);
        }
        if !kept {
            inner.give(class, &[block]);
        }
    }

    #[inline]
    fn release_small(&self, class: usize, block: NonNull<u8>) {
        let kept = cache::get(&self.inner.number).is_some_and(|cache| cache.push(class, block));
        if !kept {
            self.release_small_slowly(class, block);
        }
    }

    #[inline]
    fn allocate_small(&self, size_bytes: usize) -> Option<NonNull<u8>> {
        let class = classes::of(size_bytes);
        match cache::get(&self.inner.number).and_then(|cache| cache.pop(class)) {
            Some(block) => Some(block),
            None => self.allocate_small_slowly(class),
        }
    }
}

impl Pool {
    /// How many bytes were asked for.
    ///
    /// # Safety
    /// - `block` came from [`allocate_sized`](Self::allocate_sized) or [`resize_sized`](Self::resize_sized) of a pool over any pages
    ///   and was not released.
    #[inline]
    pub(crate) unsafe fn asked_bytes(block: NonNull<u8>) -> usize {
        // SAFETY: the caller vouches that the block is live.
        let region = unsafe { region::find(block.addr().get()) };
        region.asked_at(block.addr().get())
    }
}

impl Pool {
    /// Notes other bytes than were asked for.
    ///
    /// # Safety
    /// - as for [`asked_bytes`](Self::asked_bytes).
    pub(crate) unsafe fn note_asked(block: NonNull<u8>, size_bytes: usize) {
        // SAFETY: the caller vouches that the block is live.
        let region = unsafe { region::find(block.addr().get()) };
        let noted = region.note_asked(block.addr().get(), size_bytes);
        debug_assert!(noted, "a block that was made with a note has a place for it");
    }
}

/// Blocks that know how many bytes were asked for, to the byte: for whoever counts them.
impl<P: Pages> Pool<P> {
    /// A block as [`allocate`](Strategy::allocate) makes it, or with zeros in it; its size is noted. Release it as any
    /// other block of the pool.
    #[inline]
    pub(crate) fn allocate_sized(&self, size_bytes: usize, zeroed: bool) -> Option<NonNull<u8>> {
        let block = if zeroed { self.allocate_zeroed(size_bytes) } else { self.allocate(size_bytes) }?;
        let address = block.addr().get();
        // SAFETY: just made, and live.
        let region = unsafe { region::find(address) };
        let is_small = size_bytes <= classes::MAX;
        if if is_small { region.note_small(address, size_bytes) } else { region.note_asked(address, size_bytes) } {
            return Some(block);
        }
        // SAFETY: made above, and nobody else has it.
        unsafe { self.release(block) };
        None
    }

    /// [`release`](Strategy::release) that says how many bytes were noted.
    ///
    /// # Safety
    /// - as for `release`; `block` came from [`allocate_sized`](Self::allocate_sized) or
    ///   [`resize_sized`](Self::resize_sized).
    #[inline]
    pub(crate) unsafe fn release_sized(&self, block: NonNull<u8>) -> usize {
        let address = block.addr().get();
        // SAFETY: a live block, says the caller.
        let region = unsafe { region::find(address) };
        let Some(class) = region.class_at(address) else {
            let asked_bytes = region.asked_at(address);
            self.inner.release_large(region, block);
            return asked_bytes;
        };
        let asked_bytes = region.asked_small(address);
        self.release_small(class, block);
        asked_bytes
    }

    /// [`resize`](Strategy::resize) that notes the new size. A failure leaves the block and its size as they were.
    ///
    /// # Safety
    /// - `block` came from [`allocate_sized`](Self::allocate_sized) or [`resize_sized`](Self::resize_sized) of this pool
    ///   and was not released; after `Some` the old pointer is not used again.
    pub(crate) unsafe fn resize_sized(&self, block: NonNull<u8>, new_size_bytes: usize) -> Option<NonNull<u8>> {
        // SAFETY: the caller vouches that the block is live.
        if unsafe { stays(block, new_size_bytes) } {
            // SAFETY: live, as above.
            let region = unsafe { region::find(block.addr().get()) };
            // The note's place is there: the block has one.
            return region.note_asked(block.addr().get(), new_size_bytes).then_some(block);
        }
        // SAFETY: live, and made with a note.
        let old_size_bytes = unsafe { Pool::asked_bytes(block) };
        let moved = self.allocate_sized(new_size_bytes, false)?;
        // SAFETY: both are live and disjoint; each has the lesser of the two sizes.
        let copied = unsafe { self.inner.heap.source.copy(moved, block, old_size_bytes.min(new_size_bytes)) };
        let (gone, answer) = if copied { (block, Some(moved)) } else { (moved, None) };
        // SAFETY: a live block; the caller uses the other one from now on.
        unsafe { self.release(gone) };
        answer
    }
}

/// Whether a block may stay where it is when it is to hold `new_size_bytes`.
///
/// # Safety
/// - `block` came from a pool and was not released.
unsafe fn stays(block: NonNull<u8>, new_size_bytes: usize) -> bool {
    // SAFETY: the caller vouches that the block is live.
    let room = unsafe { room(block) };
    if room <= classes::MAX {
        new_size_bytes <= room && classes::bytes(classes::of(new_size_bytes)) == room
    } else {
        Large::fits(room, new_size_bytes)
    }
}

/// How many bytes a live block has room for.
///
/// # Safety
/// - `block` came from a pool and was not released.
unsafe fn room(block: NonNull<u8>) -> usize {
    // SAFETY: a live block, says the caller.
    let region = unsafe { region::find(block.addr().get()) };
    match region.class_at(block.addr().get()) {
        Some(class) => classes::bytes(class),
        None => region.large_pages_at(block.addr().get()) * PAGE,
    }
}

/// A new block with zeros in it; nothing, and the block back, where the source cannot write them.
///
/// # Safety
/// - `block` is a live block of `strategy`, which has its memory from `source`, with that many bytes; nobody else has it.
#[inline]
unsafe fn cleared(
    strategy: &impl Strategy,
    source: &impl Pages,
    block: NonNull<u8>,
    size_bytes: usize,
) -> Option<NonNull<u8>> {
    // SAFETY: says the caller.
    if unsafe { source.clear(block, size_bytes) } {
        return Some(block);
    }
    // SAFETY: a live block that nobody has.
    unsafe { strategy.release(block) };
    None
}

/// Resizes a block of `strategy`, which has the pool's classes, in memory of `source`: in place where its class stays, else
/// by moving it.
///
/// # Safety
/// - `block` came from `strategy`, which cuts its blocks from regions as pools do, and was not released; after `Some`
///   the old pointer is not used again.
unsafe fn resize_by(
    strategy: &impl Strategy,
    source: &impl Pages,
    block: NonNull<u8>,
    new_size_bytes: usize,
) -> Option<NonNull<u8>> {
    // SAFETY: a live block, says the caller.
    if unsafe { stays(block, new_size_bytes) } {
        return Some(block);
    }
    // SAFETY: as above.
    let room = unsafe { room(block) };
    let moved = strategy.allocate(new_size_bytes)?;
    // SAFETY: both are live and disjoint; each has the lesser of the two sizes.
    let copied = unsafe { source.copy(moved, block, room.min(new_size_bytes)) };
    let (gone, answer) = if copied { (block, Some(moved)) } else { (moved, None) };
    // SAFETY: a live block; the caller uses the other one from now on.
    unsafe { strategy.release(gone) };
    answer
}

impl<P: Pages> Home for Inner<P> {
    fn give(&self, class: usize, blocks: &[NonNull<u8>]) {
        if self.central[class].give(&self.heap, blocks) {
            self.noted.note();
        }
    }
}

impl<P: Pages> Inner<P> {
    fn allocate_large(&self, size_bytes: usize, zeroed: bool) -> Option<NonNull<u8>> {
        match &self.huge {
            Some(huge) if size_bytes.div_ceil(PAGE) >= HUGE_PAGES => {
                huge.blocks.allocate(&*huge.source, size_bytes, zeroed)
            }
            _ => self.large.allocate(&self.heap.source, size_bytes, zeroed),
        }
    }

    /// A span for an arena.
    fn take_span(&self, class: usize) -> Option<&'static span::Span> {
        self.look();
        // The source may refuse while we sit on memory that nobody uses.
        self.heap.take(class).or_else(|| if self.give_back() == 0 { None } else { self.heap.take(class) })
    }

    /// Takes a span back that an arena had.
    fn give_span(&self, span: &span::Span) {
        self.heap.give(span);
        self.noted.note();
    }

    /// Gives back what is old enough, where it is time to look: whoever uses the pool needs no thread for that.
    fn look(&self) {
        let now = clock::now();
        if self.heap.is_due(now) {
            self.heap.tick(now);
        }
        cache::sweep(now, (self.wishes.decay() / 2).max(MIN_SWEEP_INTERVAL));
    }

    /// Takes a live large block back.
    fn release_large(&self, region: &Region, block: NonNull<u8>) {
        match &self.huge {
            // Sizes were told apart in the same way, and no block is given more than its grain.
            Some(huge) if region.large_pages_at(block.addr().get()) >= HUGE_PAGES => {
                huge.blocks.release(&*huge.source, block);
            }
            _ => self.large.release(&self.heap.source, block),
        }
        self.noted.note();
    }

    /// Gives back what no thread has; returns how many bytes that were.
    fn give_back(&self) -> usize {
        let huge = self.huge.as_ref().map_or(0, |huge| huge.blocks.trim(&*huge.source));
        huge + self.large.trim(&self.heap.source) + self.heap.trim()
    }
}

impl<P: Pages> Drop for Inner<P> {
    fn drop(&mut self) {
        self.large.close(&self.heap.source);
        if let Some(huge) = &self.huge {
            huge.blocks.close(&*huge.source);
        }
    }
}

impl<P: Pages> HeldAcrossFork for Inner<P> {
    fn for_each_lock(&self, visit: &mut dyn FnMut(&ForkLock)) {
        self.central.iter().for_each(|central| visit(central.lock()));
        visit(self.large.lock());
        if let Some(huge) = &self.huge {
            visit(huge.blocks.lock());
        }
        visit(self.heap.lock());
    }
}

impl<P: Pages> Keeper for Inner<P> {
    fn decay(&self, now: Duration) -> Option<Duration> {
        if !self.heap.source.decays_by_itself() {
            return None;
        }
        self.noted.clear();
        let huge = self.huge.as_ref().and_then(|huge| huge.blocks.decay(&*huge.source, now));
        let next = [huge, self.large.decay(&self.heap.source, now), self.heap.tick(now)].into_iter().flatten().min();
        if next.is_some() {
            self.noted.keep();
        }
        next
    }

    fn give_back(&self) -> usize {
        Self::give_back(self)
    }
}

// SAFETY: small blocks are cut from spans that no other class or block shares, large ones have mappings of their own;
// both stay where they are until released (`region`, `heap`). Multiples of 64 from an aligned start are aligned.
unsafe impl<P: Pages> Strategy for Pool<P> {
    fn alignment(&self) -> usize {
        classes::ALIGN
    }

    #[inline]
    fn allocate(&self, size_bytes: usize) -> Option<NonNull<u8>> {
        if size_bytes <= classes::MAX {
            return self.allocate_small(size_bytes);
        }
        self.inner.allocate_large(size_bytes, false)
    }

    fn allocate_zeroed(&self, size_bytes: usize) -> Option<NonNull<u8>> {
        if size_bytes > classes::MAX {
            return self.inner.allocate_large(size_bytes, true);
        }
        let block = self.allocate_small(size_bytes)?;
        // SAFETY: the block has that many bytes, and nobody else has it yet.
        unsafe { cleared(self, &self.inner.heap.source, block, size_bytes) }
    }

    unsafe fn resize(&self, block: NonNull<u8>, new_size_bytes: usize) -> Option<NonNull<u8>> {
        // SAFETY: a live block of this pool, says the caller.
        unsafe { resize_by(self, &self.inner.heap.source, block, new_size_bytes) }
    }

    #[inline]
    unsafe fn release(&self, block: NonNull<u8>) {
        let address = block.addr().get();
        // SAFETY: a live block, says the caller.
        let region = unsafe { region::find(address) };
        let Some(class) = region.class_at(address) else {
            self.inner.release_large(region, block);
            return;
        };
        self.release_small(class, block);
    }

    /// What this thread keeps, and all that lies ready for others. Other threads keep their caches.
    fn trim(&self) -> usize {
        let inner = &*self.inner;
        cache::flush(&inner.number, |class, blocks| inner.give(class, blocks));
        inner.give_back()
    }
}

impl<P: Pages> Clone for Pool<P> {
    fn clone(&self) -> Self {
        Self { inner: Arc::clone(&self.inner) }
    }
}

impl<P: Pages> fmt::Debug for Pool<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pool").field("source", &self.inner.heap.source).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::{Pool, Strategy, classes};
    use crate::strategy::conformance;

    #[test]
    fn pool_keeps_the_strategy_contract() {
        conformance::check(Pool::new());
    }

    #[test]
    fn a_block_knows_how_many_bytes_were_asked_for() {
        let pool = Pool::new();
        let sizes = [1, 63, 64, 65, 100, 700, 4097, 65_537, classes::MAX, classes::MAX + 1, 3_000_001];
        let blocks: Vec<_> =
            sizes.iter().map(|&size| (pool.allocate_sized(size, size % 2 == 0).expect("memory"), size)).collect();
        for &(block, size) in &blocks {
            // SAFETY: live, with a noted size.
            assert_eq!(unsafe { Pool::asked_bytes(block) }, size);
        }
        for (mut block, size) in blocks {
            // SAFETY: live, from this pool; it has a byte.
            unsafe { block.write(77) };
            for new_size in [size + 1, size * 3, 1, 300_000, 200_000, 5] {
                // SAFETY: live, with a noted size; the old pointer is not used again.
                block = unsafe { pool.resize_sized(block, new_size) }.expect("memory");
                // SAFETY: as above.
                assert_eq!(unsafe { Pool::asked_bytes(block) }, new_size);
                // SAFETY: as above.
                assert_eq!(unsafe { block.read() }, 77);
            }
            // SAFETY: live, from this pool, once.
            unsafe { pool.release(block) };
        }
        pool.trim();
        assert_eq!(pool.inner.heap.regions(), 0, "nothing is left, and the notes went with it");
    }

    #[test]
    fn a_block_that_is_resized_in_vain_keeps_its_size() {
        let pool = Pool::new();
        let block = pool.allocate_sized(1000, false).expect("memory");
        // SAFETY: live, with a noted size; a failure leaves it.
        assert_eq!(unsafe { pool.resize_sized(block, isize::MAX as usize) }, None);
        // SAFETY: live, as above.
        assert_eq!(unsafe { Pool::asked_bytes(block) }, 1000);
        // SAFETY: live, from this pool, once.
        unsafe { pool.release(block) };
    }

    #[test]
    fn a_block_that_comes_back_is_the_next_one_given() {
        let pool = Pool::new();
        for size in [8, 1000, 100_000, 1 << 20, if cfg!(miri) { 2 << 20 } else { 64 << 20 }] {
            let first = pool.allocate(size).expect("memory");
            // SAFETY: live, from this pool.
            unsafe { pool.release(first) };
            let second = pool.allocate(size).expect("memory");
            assert_eq!(first, second, "{size} bytes");
            // SAFETY: live, from this pool.
            unsafe { pool.release(second) };
        }
    }

    #[test]
    fn trim_gives_everything_back_when_nothing_is_alive() {
        let pool = Pool::new();
        let sizes = [64, 500, 4000, 70_000, 300_000, 10 << 20];
        let rounds = if cfg!(miri) { 3 } else { 100 };
        let blocks: Vec<_> =
            sizes.iter().cycle().take(rounds * sizes.len()).map(|&size| pool.allocate(size).expect("memory")).collect();
        for block in blocks {
            // SAFETY: live, from this pool, once.
            unsafe { pool.release(block) };
        }
        assert!(pool.trim() > rounds * (10 << 20), "the blocks of 10 MiB alone are that much");
        assert_eq!(pool.trim(), 0, "nothing is left for a second time");
        assert_eq!(pool.inner.heap.regions(), 0, "no region is left mapped");
    }
}
