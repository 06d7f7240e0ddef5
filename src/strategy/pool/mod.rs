//! `Pool`: size classes with per-thread caches, and large blocks that are kept warm.
//!
//! ```text
//!   thread's cache ──► spans of the class ──► pages of 64 KiB ──► regions of 4 MiB ──► Pages (mmap, ...)
//!   (no lock)          (a lock per class      (one lock)
//!                       and shard)
//!   large blocks (> 256 KiB) ──► the last few that came back ──► extents (one lock) ──► Pages
//! ```
//! Blocks above 128 KiB are in a thread's cache as small ones, but come from the extents as large ones.
//!
//! `classes` has the sizes, `region` and `span` the record of each block, `heap` the pages, `central` the central free
//! lists of the classes, `cache` the threads' caches (`local`: the running thread's; `idle`: those of others), `large`,
//! `extents` and `growing` the large blocks, `bits` runs of pages as bits, `inner` all of that for one pool. `sized`,
//! `tight` and `resize` are operations on blocks. `decay` returns unused memory to the system when no thread uses the
//! pool. All locks are held across `fork`.

mod arena;
mod bits;
mod cache;
mod central;
mod classes;
pub(super) mod clock;
mod decay;
mod demand;
mod extents;
mod geometry;
mod growing;
mod heap;
mod idle;
mod inner;
mod kept;
mod large;
mod local;
mod moved;
mod options;
mod region;
mod resize;
mod sized;
mod span;
mod tight;
mod turn;

pub use arena::Arena;
#[cfg(feature = "python")]
pub(crate) use decay::restart as restart_decay;
pub(crate) use kept::{Kept, Over, Small};
pub use options::PoolOptions;
pub(super) use options::allow;

use super::Strategy;
use crate::source::{Pages, PrivatePages};
use crate::sync::Made;
use cache::{Home, NO_BLOCKS};
#[cfg(feature = "cuda")]
pub(super) use decay::Noted;
pub use decay::PoolBytes;
pub(super) use decay::{Keeper, Registration, look, register};
pub(crate) use decay::{flush_recordings, pool_bytes, pool_resident_bytes};
use inner::Inner;
use large::Taking;
#[cfg(any(ctxalloc_whole, feature = "cuda"))]
pub(crate) use resize::room_bytes;
#[cfg(feature = "cuda")]
pub(super) use resize::stays;
use resize::{cleared, resize_by, resized_in_place};
use std::fmt;
use std::ptr::NonNull;
use std::sync::{Arc, Weak};
use std::time::Duration;

/// A pool over pages, for programs that allocate and free all the time, as NumPy programs do.
///
/// Blocks are aligned to 64 bytes, but for those of [`allocate_layout`](Self::allocate_layout). Blocks of up to 256 KiB
/// come from size classes (at most 25 % larger than requested; those above 128 KiB take whole pages of 64 KiB) through
/// a cache per thread. Larger ones are runs of 64 KiB pages, which are joined when they come back and cut again for any
/// size, with their memory still behind them. The pool keeps no more of that than it expects to need at the next peak,
/// and nothing that was unused for a while ([`PoolOptions`]); [`trim`](Strategy::trim) returns all of it to the system.
///
/// Clones are the same pool, and cloning is cheap.
pub struct Pool<P: Pages = PrivatePages> {
    inner: Arc<Inner<P>>,
}

/// Returns the unused memory of all pools and arenas and of all threads' caches to the system. Returns how many bytes.
pub(crate) fn trim_pools() -> usize {
    // This thread's first: where no thread can take another one's, that is done at least.
    local::sweep(Duration::MAX, Duration::ZERO);
    idle::take_all();
    decay::trim_pools()
}

impl Pool {
    /// A pool over private pages.
    #[must_use]
    pub fn new() -> Self {
        Self::over(PrivatePages, PoolOptions::default())
    }

    /// The process's pool, behind the handler `pool`. Requests and their arenas take their memory from it.
    #[inline]
    pub fn shared() -> &'static Self {
        match Self::shared_before() {
            Some(shared) => shared,
            None => SHARED.get_or_make(Self::new),
        }
    }

    /// The same, if somebody has used it before.
    #[inline]
    pub(crate) fn shared_before() -> Option<&'static Self> {
        SHARED.get()
    }
}

static SHARED: Made<Pool> = Made::new();

impl Default for Pool {
    fn default() -> Self {
        Self::new()
    }
}

impl<P: Pages> Pool<P> {
    /// A pool over pages from `source`.
    #[must_use]
    pub fn over(source: P, options: PoolOptions) -> Self {
        Self { inner: Inner::new(source, options) }
    }

    /// Resizes a block in place; false where it has to move.
    ///
    /// # Safety
    /// - `block` came from this pool and was not released.
    unsafe fn resize_in_place(&self, block: NonNull<u8>, new_size_bytes: usize) -> bool {
        // SAFETY: the block is live and from this pool (this function's contract).
        unsafe { resized_in_place(&*self.inner, block, new_size_bytes) }
    }

    /// A block that lies as the large ones do, whatever its size, by preference in what came back latest: a program
    /// that uses blocks of many sizes in turn has that in its processor's caches. `None` also where another thread is
    /// looking.
    #[cfg(ctxalloc_whole)]
    pub(crate) fn allocate_latest(&self, size_bytes: usize, zeroed: bool) -> Option<NonNull<u8>> {
        self.inner.allocate_latest(size_bytes, zeroed)
    }

    /// A large block in place of one that grows and has to move: it is placed so that it can grow further.
    fn allocate_to_grow(&self, size_bytes: usize) -> Option<NonNull<u8>> {
        self.inner.allocate_large(size_bytes, Taking::ToGrow)
    }

    /// [`resize`](Strategy::resize), after which a block that had to move to grow, to `large_from` bytes or more, lies
    /// as large ones do: where it can grow further.
    ///
    /// # Safety
    /// - as for `resize`.
    pub(crate) unsafe fn resize_to_grow_from(
        &self,
        large_from: usize,
        block: NonNull<u8>,
        new_size_bytes: usize,
    ) -> Option<NonNull<u8>> {
        let allocate = |room_bytes: usize, grows: bool| {
            if grows {
                self.allocate_to_grow(new_size_bytes)
            } else if room_bytes.max(new_size_bytes) <= classes::TINY_MAX {
                self.allocate_tight(new_size_bytes) // who has a tiny block needs no more than its alignment
            } else {
                self.allocate(new_size_bytes)
            }
        };
        // SAFETY: the block is live and from this pool, whose memory is the source's (this function's contract).
        unsafe { resize_by(self, &*self.inner, block, new_size_bytes, large_from, allocate) }
    }

    #[cold]
    #[inline(never)]
    fn allocate_small_slowly(&self, class: usize) -> Option<NonNull<u8>> {
        // Of a pool that this thread used, but not last.
        if let Some(block) = local::with(&self.inner.number, |cache| cache.pop(class)).flatten() {
            return Some(block);
        }
        // If the source refuses, the pool's unused memory can go to make room.
        self.refill(class).or_else(|| if self.inner.give_back() == 0 { None } else { self.refill(class) })
    }

    fn grow_cache(&self, class: usize) {
        if local::grow(&self.inner.number, class, || Arc::downgrade(&self.inner) as Weak<dyn Home>) {
            decay::note_caches();
        }
    }

    fn refill(&self, class: usize) -> Option<NonNull<u8>> {
        let inner = &*self.inner;
        inner.look();
        self.grow_cache(class);
        if classes::is_joined(class) {
            return inner.allocate_joined(class);
        }
        let mut batch = NO_BLOCKS;
        let wanted = local::with(&inner.number, |cache| cache.batch(class)).unwrap_or(1);
        let count = inner.central.take(&inner.heap, local::shard(), class, &mut batch[..wanted]);
        let (first, others) = batch[..count].split_first_mut()?;
        let left = local::with(&inner.number, |cache| cache.fill(class, others)).unwrap_or(others.len());
        if left > 0 {
            inner.give(class, &mut others[..left]);
        }
        Some(*first)
    }

    #[cold]
    #[inline(never)]
    pub(super) fn release_small_slowly(&self, class: usize, block: NonNull<u8>) {
        let inner = &*self.inner;
        if local::with(&inner.number, |cache| cache.push(class, block)) == Some(true) {
            return; // this thread used another pool last
        }
        inner.look();
        self.grow_cache(class);
        let mut batch = NO_BLOCKS;
        let mut spilled = 0;
        let kept = local::with(&inner.number, |cache| {
            cache.push(class, block) || {
                spilled = cache.spill(class, &mut batch);
                cache.push(class, block)
            }
        })
        .unwrap_or(false);
        if spilled > 0 {
            inner.take_back(class, &mut batch[..spilled]);
        }
        if !kept {
            inner.take_back(class, &mut [block]);
        }
    }

    #[inline]
    fn release_small(&self, class: usize, block: NonNull<u8>) {
        if !local::push(self.inner.number.serial(), class, block) {
            self.release_small_slowly(class, block);
        }
    }

    /// A block of `class`, or a large one where there is none.
    #[inline]
    fn make(&self, class: Option<usize>, size_bytes: usize, zeroed: bool) -> Option<NonNull<u8>> {
        let Some(class) = class else {
            let taking = if zeroed { Taking::Zeroed } else { Taking::AsItIs };
            return self.inner.allocate_large(size_bytes, taking);
        };
        let block = self.allocate_of(class)?;
        if !zeroed {
            return Some(block);
        }
        // SAFETY: the block was just made with at least `size_bytes` bytes of the heap's source, and nobody else has
        // it.
        unsafe { cleared(self, &self.inner.heap.source, block, size_bytes) }
    }

    #[inline]
    fn allocate_of(&self, class: usize) -> Option<NonNull<u8>> {
        match local::pop(self.inner.number.serial(), class) {
            Some(block) => Some(block),
            None => self.allocate_small_slowly(class),
        }
    }
}

// SAFETY: small blocks are cut from spans that no other class shares, large ones from runs of pages that no other block
// shares; both stay in place until released. They start at multiples of 64 from an aligned start: `allocate` makes no
// tiny ones, and `resize` only of a tiny one.
unsafe impl<P: Pages> Strategy for Pool<P> {
    fn alignment(&self) -> usize {
        classes::ALIGN
    }

    #[inline]
    fn allocate(&self, size_bytes: usize) -> Option<NonNull<u8>> {
        self.make(classes::ALIGNED.find(size_bytes), size_bytes, false)
    }

    fn allocate_zeroed(&self, size_bytes: usize) -> Option<NonNull<u8>> {
        self.make(classes::ALIGNED.find(size_bytes), size_bytes, true)
    }

    unsafe fn resize(&self, block: NonNull<u8>, new_size_bytes: usize) -> Option<NonNull<u8>> {
        // SAFETY: a live block of this pool, as it was if the first of the two has none (this function's contract).
        unsafe {
            self.resize_kept(block, new_size_bytes)
                .or_else(|| self.resize_to_grow_from(classes::MAX + 1, block, new_size_bytes))
        }
    }

    #[inline]
    unsafe fn release(&self, block: NonNull<u8>) {
        let address = block.addr().get();
        // SAFETY: the block is live (this function's contract), so its region is in the map.
        let region = unsafe { region::find(address) };
        let Some(class) = region.class_at(address) else {
            self.inner.release_large(region, block);
            return;
        };
        self.release_small(class, block);
    }

    /// Returns this thread's cache and all unused memory of the pool to the system. Other threads keep their caches.
    fn trim(&self) -> usize {
        let inner = &*self.inner;
        local::flush(&inner.number, |class, blocks| inner.give(class, blocks));
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
impl<P: Pages> Pool<P> {
    /// How many regions for small blocks are mapped after everything was trimmed. Where there are some it trims anew
    /// for a while: another thread, the decay thread or a test that trims, may hold pages of them at the moment.
    fn regions_after_trim(&self) -> usize {
        for _ in 0..500 {
            self.trim();
            if self.inner.heap.regions() == 0 {
                return 0;
            }
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
        self.inner.heap.regions()
    }
}

#[cfg(test)]
mod tests {
    use super::{Keeper, Pool, Strategy, classes};
    use crate::strategy::conformance;
    use crate::strategy::live::Live;

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
            // SAFETY: `allocate_sized` made it, which notes the size; it is freed below only.
            assert_eq!(unsafe { Pool::requested_bytes(block) }, size);
        }
        for (mut block, size) in blocks {
            // SAFETY: this pool made the block, of one byte at least.
            unsafe { block.write(77) };
            for new_size in [size + 1, size * 3, 1, 300_000, 200_000, 5] {
                // SAFETY: live, with a noted size; the old pointer is not used again.
                block = unsafe { pool.resize_sized(block, new_size) }.expect("memory");
                // SAFETY: live, with a noted size and its first byte written.
                assert_eq!(unsafe { (Pool::requested_bytes(block), block.read()) }, (new_size, 77));
            }
            // SAFETY: this pool made the block, and it is released here only.
            unsafe { pool.release(block) };
        }
        assert_eq!(pool.regions_after_trim(), 0, "nothing is left, and the notes went with it");
    }

    /// Both ways to resize: what was a large block, and what was a larger one.
    #[test]
    #[cfg_attr(miri, ignore = "blocks of many pages take minutes under Miri")]
    fn a_block_that_moves_to_grow_leaves_little_memory_behind() {
        const MIB: usize = 1 << 20;
        for (size, warm) in [(15 * MIB, 15 * MIB), (16 * MIB, super::geometry::PAGE)] {
            for is_sized in [false, true] {
                let pool = Pool::new();
                let make = || pool.allocate_sized(size, false).expect("memory");
                let (block, behind) = (make(), make());
                // SAFETY: a live block of so many bytes; this pool made it, and the old pointer is not used again.
                let grown = unsafe {
                    block.write_bytes(7, size);
                    if is_sized { pool.resize_sized(block, 2 * size) } else { pool.resize(block, 2 * size) }
                };
                let grown = grown.expect("memory");
                assert_eq!(pool.inner.kept().warm, warm, "{size}");
                // SAFETY: it has what the first had, and nobody else has it.
                assert!((0..size).all(|at| unsafe { grown.add(at).read() } == 7));
                let zeroed = pool.allocate_zeroed(size - MIB).expect("memory");
                // SAFETY: a new block of so many bytes.
                assert!((0..size - MIB).all(|at| unsafe { zeroed.add(at).read() } == 0));
                // SAFETY: this pool made them, and they are released here only.
                [grown, behind, zeroed].into_iter().for_each(|block| unsafe { pool.release(block) });
            }
        }
    }

    #[test]
    fn a_block_that_grows_may_lie_as_large_ones_do_before_it_is_as_large() {
        const KIB: usize = 1 << 10;
        const FROM: usize = 32 * KIB;
        let pool = Pool::new();
        let mut block = pool.allocate(20 * KIB).expect("memory");
        // SAFETY: a live block of so many bytes.
        unsafe { block.write_bytes(7, 20 * KIB) };
        let mut moves = 0;
        for kib in [33, 60, 64, 65, 200, 256, 257, 600, 300, 256, 250, 100, 100, 33, 20] {
            // SAFETY: a live block of this pool, and the old pointer is not used again.
            let resized = unsafe { pool.resize_to_grow_from(FROM, block, kib * KIB) }.expect("memory");
            moves += usize::from(resized != block);
            block = resized;
            // SAFETY: at least so many bytes of it were written first.
            assert!((0..20 * KIB).all(|at| unsafe { block.add(at).read() } == 7), "{kib} KiB");
        }
        // Once to grow, and to each smaller class: 256, 112, 40 and 20 KiB.
        assert_eq!(moves, 5);
        // SAFETY: this pool made the block, and it is released here only.
        unsafe { pool.release(block) };
        assert_eq!(pool.regions_after_trim(), 0, "nothing is left");
    }

    #[test]
    fn a_block_that_is_resized_in_vain_keeps_its_size() {
        let pool = Pool::new();
        let block = pool.allocate_sized(1000, false).expect("memory");
        // SAFETY: live, with a noted size; a failure leaves it.
        assert_eq!(unsafe { pool.resize_sized(block, isize::MAX as usize) }, None);
        // SAFETY: the resize failed, so the block is as `allocate_sized` made it.
        assert_eq!(unsafe { Pool::requested_bytes(block) }, 1000);
        // SAFETY: this pool made the block, and it is released here only.
        unsafe { pool.release(block) };
    }

    #[test]
    fn a_block_that_comes_back_is_the_next_one_given() {
        let pool = Pool::new();
        for size in [8, 1000, 100_000, 1 << 20, if cfg!(miri) { 2 << 20 } else { 64 << 20 }] {
            let first = Live::of(&pool, size);
            let start = first.start();
            first.release();
            assert_eq!(Live::of(&pool, size).start(), start, "{size} bytes");
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "asks the system for more than it has")]
    fn a_block_larger_than_the_machine_is_refused_at_once() {
        // By Linux' default; where it is told to overcommit always, it gives what it is asked for.
        let overcommits =
            std::fs::read_to_string("/proc/sys/vm/overcommit_memory").is_ok_and(|mode| mode.trim() == "1");
        let pool = Pool::new();
        for shift in if overcommits { 60..63 } else { 42..63 } {
            assert_eq!(pool.allocate(1 << shift), None, "1 << {shift}");
        }
        assert_eq!(pool.inner.heap.regions(), 0);
    }

    #[test]
    fn trim_gives_everything_back_when_nothing_is_alive() {
        let pool = Pool::new();
        let sizes = [64, 500, 4000, 70_000, 300_000, 10 << 20];
        let rounds = if cfg!(miri) { 3 } else { 100 };
        // Not touched: together they are a gigabyte.
        let blocks: Vec<_> =
            sizes.iter().cycle().take(rounds * sizes.len()).map(|&size| pool.allocate(size).expect("memory")).collect();
        for block in blocks {
            // SAFETY: this pool has just made it, and it is released once.
            unsafe { pool.release(block) };
        }
        assert!(pool.trim() > rounds * (10 << 20), "the blocks of 10 MiB alone are that much");
        assert_eq!(pool.trim(), 0, "nothing is left for a second time");
        assert_eq!(pool.regions_after_trim(), 0, "no region is left mapped");
    }
}
