//! Large blocks, and the memory of those that came back.
//!
//! New memory costs a page fault for every page, and returning it costs again. So the last few blocks that came back
//! are kept as they are for the next ones of their size. All others are joined (`extents`) and cut again for any size,
//! with their memory. No more is kept than the next peak is expected to need ([`Demand`]), and nothing that was unused
//! for `decay`.
//!
//! Under the lock a source maps, unmaps and discards; its panic leaves the lists whole. It commits, empties and clears
//! outside: the block is nobody's yet, and lost if it panics.

mod given;
mod joined;
#[cfg(ctxalloc_whole)]
mod latest;
mod parked;
mod refused;
mod resize;
mod store;
#[cfg(test)]
mod told;

use given::Given;
use parked::Parked;
pub(super) use resize::LEFT_FROM;
use store::{RECENT, Recent, Store};

use super::classes;
use super::clock::now;
use super::decay::{PoolBytes, has_thread, note_released};
use super::demand::Demand;
use super::extents::{Extents, Grain, Run};
use super::geometry::PAGE;
use super::growing::Growing;
use super::options::Retention;
use super::region;
use crate::source::Pages;
use crate::sync::{ForkLock, Locked};
use crate::unattributed::unattributed;
use std::ptr::NonNull;
use std::time::Duration;

/// The most pages that the decay thread returns to the system before it lets go of the lock for a moment.
const AT_A_TIME: usize = (8 << 20) / PAGE;

/// Dirty runs above this size are emptied instead of cleared: the system then clears pages when they are touched, and
/// many never are. In bytes.
const CLEAR_BY_HAND: usize = 32 << 20;

/// The largest block: half of the user address space.
const MAX_PAGES: usize = (1 << 46) / PAGE;

#[derive(Debug)]
pub(super) struct Large {
    store: Locked<Store>,
    /// What came back and is not in the store yet.
    given: Given,
    parked: Parked,
    grain_pages: usize,
    retention: Retention,
}

/// How a block is taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Taking {
    AsItIs,
    Zeroed,
    /// It grew, and is to grow further where it will lie.
    ToGrow,
}

impl Large {
    /// Large blocks that are multiples of `grain_pages`.
    pub(super) fn new(grain_pages: usize, retention: Retention) -> Self {
        let recent = Vec::with_capacity(RECENT + 1);
        let demand = Demand::default();
        let store = Store {
            recent,
            recent_bytes: 0,
            extents: Extents::new(grain_pages),
            growing: Growing::default(),
            live_bytes: 0,
            demand,
            holes_bytes: 0,
            look_again: now(),
            warm_bytes: None,
        };
        let (given, parked) = (Given::default(), Parked::default());
        Self { store: Locked::new(store), given, parked, grain_pages, retention }
    }

    pub(super) fn allocate<P: Pages + ?Sized>(
        &self,
        source: &P,
        size_bytes: usize,
        taking: Taking,
    ) -> Option<NonNull<u8>> {
        debug_assert!(size_bytes > classes::SPANNED || (size_bytes > 0 && taking == Taking::ToGrow));
        self.allocate_any(source, size_bytes, taking)
    }

    /// The same for a size that has a class of its own, too.
    fn allocate_any<P: Pages + ?Sized>(&self, source: &P, size_bytes: usize, taking: Taking) -> Option<NonNull<u8>> {
        if taking == Taking::AsItIs
            && let Some(block) = self.take_recent(size_bytes)
        {
            return Some(block);
        }
        let _unattributed = unattributed();
        if size_bytes.div_ceil(PAGE) > MAX_PAGES {
            return None;
        }
        self.retention.fix();
        let pages = self.pages_of(size_bytes);
        // If the source refuses, unused memory can go to make room.
        self.try_allocate(source, pages, taking)
            .or_else(|| if self.trim(source) == 0 { None } else { self.try_allocate(source, pages, taking) })
    }

    /// How many pages a block of so many bytes takes.
    #[inline]
    fn pages_of(&self, size_bytes: usize) -> usize {
        size_bytes.div_ceil(PAGE).next_multiple_of(self.grain_pages)
    }

    /// One of the blocks that came back lately, as it is, if one fits. The source is not called.
    #[inline]
    pub(super) fn take_recent(&self, size_bytes: usize) -> Option<NonNull<u8>> {
        self.take_parked(size_bytes).or_else(|| self.take_recent_of_store(size_bytes))
    }

    /// That which came back last, if it is there without the lock and fits.
    #[inline]
    pub(super) fn take_parked(&self, size_bytes: usize) -> Option<NonNull<u8>> {
        self.parked.take(self.pages_of(size_bytes))
    }

    #[inline(never)]
    fn take_recent_of_store(&self, size_bytes: usize) -> Option<NonNull<u8>> {
        let pages = self.pages_of(size_bytes);
        self.with(|store| {
            let Recent { block, run, .. } = store.take_recent(pages)?;
            store.lend(run);
            Some(block)
        })
    }

    fn try_allocate<P: Pages + ?Sized>(&self, source: &P, pages: usize, taking: Taking) -> Option<NonNull<u8>> {
        let zeroed = taking == Taking::Zeroed;
        let (block, run, dirty, is_fit) = self.with(|store| {
            // Where it may be as it is, `allocate` has looked.
            if zeroed && let Some(Recent { block, run, .. }) = store.take_recent(pages) {
                store.lend(run);
                return Some((block, run, vec![run], true));
            }
            let roomy = if taking == Taking::ToGrow { store.take_with_room(source, pages) } else { None };
            let run = roomy.or_else(|| store.take(source, pages))?;
            let block = store.extents.place(run);
            store.extents.record(run).assign_large(block.addr().get(), pages);
            let (dirty_pages, dirty) = store.extents.clean(run);
            store.lend(run);
            Some((block, run, dirty, dirty_pages == pages))
        })?;
        // Outside the lock, because a commit may bring the pages into memory.
        // SAFETY: these pages lie in the source's mapping, and they were taken out of the free ones.
        if !is_fit && !unsafe { source.commit(block, run.bytes()) } {
            // The dirty pages were committed, the others are not. After the discard none is.
            // SAFETY: the same pages; nobody needs their contents.
            let emptied = unsafe { source.discard(block, run.bytes()) };
            self.with(|store| store.take_back_uncommitted(run, emptied, &dirty));
            return None;
        }
        for dirty in dirty.into_iter().filter(|_| zeroed) {
            // SAFETY: a part of the new block in committed pages of the source; nobody else has it or needs its
            // contents.
            let is_zero = unsafe {
                let place = block.add((dirty.first - run.first) * PAGE);
                (dirty.bytes() > CLEAR_BY_HAND && source.empty(place, dirty.bytes()))
                    || source.clear(place, dirty.bytes())
            };
            if !is_zero {
                self.with(|store| store.take_back(run));
                return None;
            }
        }
        Some(block)
    }

    /// Whether a block with room for `room_bytes` serves `size_bytes` as well.
    #[cfg(feature = "cuda")]
    pub(super) fn fits(room_bytes: usize, size_bytes: usize) -> bool {
        size_bytes <= room_bytes && size_bytes > classes::MAX && size_bytes >= room_bytes / 2
    }

    /// Takes a live large block back.
    pub(super) fn release<P: Pages + ?Sized>(&self, source: &P, block: NonNull<u8>) {
        let run = run_of(block);
        // That thread begins another moment in time.
        let may_park = has_thread() || !self.parked.is_due(now());
        if !(may_park && self.parked.put(block, run.pages)) {
            self.release_to_store(source, block, run);
        }
    }

    #[inline(never)]
    fn release_to_store<P: Pages + ?Sized>(&self, source: &P, block: NonNull<u8>, run: Run) {
        let _unattributed = unattributed();
        self.release_at(source, block, run, now());
    }

    fn release_at<P: Pages + ?Sized>(&self, source: &P, block: NonNull<u8>, run: Run, now: Duration) {
        self.release_with(source, now, |store| store.put(block, run, now));
    }

    /// What `put` takes back is there for the next one, and what is old or too much goes to the system.
    fn release_with<P: Pages + ?Sized>(&self, source: &P, now: Duration, put: impl FnOnce(&mut Store)) {
        self.with(|store| {
            let (is_due, decay) = (now >= store.look_again, self.retention.decay());
            if is_due {
                store.turn(now, decay);
                store.join_recent();
            }
            put(store);
            // The source is called once the block is back: where it panics, nothing is lost.
            if is_due {
                note_released(store.extents.purge(source, now.saturating_sub(decay), Grain::Page));
            }
            // Known for good once memory is handed out.
            let warm_bytes = *store.warm_bytes.get_or_insert_with(|| self.retention.warm_bytes());
            store.keep_within(source, warm_bytes);
        });
    }

    /// Returns memory that was unused for a while to the system. Returns when to look again; `None` if nothing is left.
    pub(super) fn decay<P: Pages + ?Sized>(&self, source: &P, now: Duration) -> Option<Duration> {
        let decay = self.retention.decay();
        let moment = now.saturating_sub(decay);
        let mut is_done = false;
        // A few pages at a time, so that other threads get the lock.
        while !is_done {
            is_done = self.with(|store| {
                store.turn(now, decay);
                store.join_recent();
                let (released, is_done) = store.extents.purge_some(source, moment, Grain::Page, AT_A_TIME);
                note_released(released);
                is_done
            });
        }
        self.with(|store| store.extents.has_dirty_since(moment)).then(|| now + decay / 8)
    }

    pub(super) fn kept(&self) -> PoolBytes {
        self.with(|store| PoolBytes { in_use: store.live_bytes, warm: store.kept_bytes() })
    }

    pub(super) fn for_each_mapping(&self, visit: &mut dyn FnMut(usize, usize)) {
        self.with(|store| store.extents.for_each_mapping(visit));
    }

    /// Returns all unused memory to the system. Returns how many bytes.
    pub(super) fn trim<P: Pages + ?Sized>(&self, source: &P) -> usize {
        let _unattributed = unattributed();
        self.with(|store| store.trim(source))
    }

    /// Unmaps everything. The pool is dropped, so its blocks are all gone.
    pub(super) fn close<P: Pages + ?Sized>(&self, source: &P) {
        self.with(|store| store.extents.close(source));
    }

    pub(super) fn lock(&self) -> &ForkLock {
        self.store.lock()
    }
}

/// The run of a live large block.
fn run_of(block: NonNull<u8>) -> Run {
    let address = block.addr().get();
    // SAFETY: the callers pass a live block of a pool, so its region is in the map.
    let record = unsafe { region::find(address) };
    Run { first: address / PAGE, pages: record.large_pages_at(address) }
}

#[cfg(test)]
mod tests {
    use super::told::{Discards, Told};
    use super::{Large, PAGE, Run, Taking};
    use crate::source::PrivatePages;
    use crate::strategy::PoolOptions;
    use crate::strategy::pool::options::Retention;
    use std::collections::VecDeque;
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use std::ptr::NonNull;
    use std::sync::atomic::Ordering;
    use std::time::Duration;

    const MOMENT: Duration = Duration::from_millis(1250);

    /// Takes so many blocks of 1 MiB and lets them go at this time.
    fn burst(large: &Large, count: usize, now: Duration) {
        let blocks: Vec<_> =
            (0..count).map(|_| large.allocate(&PrivatePages, 1 << 20, Taking::AsItIs).expect("memory")).collect();
        for block in blocks {
            let run = Run { first: block.addr().get() / PAGE, pages: (1 << 20) / PAGE };
            large.release_at(&PrivatePages, block, run, now);
        }
    }

    fn large() -> (Large, Duration) {
        large_that_keeps(1 << 30)
    }

    fn large_that_keeps(warm_bytes: usize) -> (Large, Duration) {
        let mut options = PoolOptions::default();
        (options.warm_bytes, options.decay) = (warm_bytes, MOMENT * 8);
        (Large::new(1, Retention::new(options)), super::now())
    }

    #[test]
    #[cfg_attr(miri, ignore = "many large blocks take minutes under Miri")]
    fn no_more_is_kept_warm_than_was_said() {
        for warm_bytes in [0, 1 << 20, 9 << 20, 30 << 20] {
            let (large, _) = large_that_keeps(warm_bytes);
            // Whole huge pages, so that all of them can go back.
            let blocks: Vec<_> =
                (0..20).map(|_| large.allocate(&PrivatePages, 4 << 20, Taking::AsItIs).expect("memory")).collect();
            for block in blocks {
                large.release(&PrivatePages, block);
                assert!(large.kept().warm <= warm_bytes, "{:?} of {warm_bytes}", large.kept());
            }
            let pieces_bytes = warm_bytes / (4 << 20) * (4 << 20);
            assert!(large.kept().warm >= pieces_bytes / 2, "{:?} of {warm_bytes}", large.kept());
            large.close(&PrivatePages);
        }
    }

    #[test]
    fn light_load_after_a_burst_keeps_what_the_last_moments_used() {
        let (large, start) = large();
        (0..20).for_each(|_| burst(&large, 64, start));
        burst(&large, 1, start + MOMENT / 2);
        assert!(large.kept().warm >= 64 << 20, "of this moment: {:?}", large.kept());
        burst(&large, 1, start + MOMENT);
        assert!(large.kept().warm >= 64 << 20, "of the one before: {:?}", large.kept());
        burst(&large, 1, start + MOMENT * 2);
        assert!(large.kept().warm <= 4 << 20, "long before the decay {:?}", large.kept());
        burst(&large, 1, start + MOMENT * 2);
        assert!((1 << 20..=4 << 20).contains(&large.kept().warm), "its own stays: {:?}", large.kept());
        large.close(&PrivatePages);
    }

    /// As a description of a column takes and lets go of its temporary arrays.
    #[test]
    #[cfg_attr(miri, ignore = "many large blocks take minutes under Miri")]
    fn a_request_that_comes_again_gives_nothing_back_meanwhile() {
        let (large, start) = large();
        let source = Told::default();
        let mut given_back_before = 0;
        for request in 0..40 {
            let now = start + Duration::from_millis(4 * request);
            let mut alive = VecDeque::new();
            let let_go = |(block, bytes): (NonNull<u8>, usize)| {
                let run = Run { first: block.addr().get() / PAGE, pages: bytes.div_ceil(PAGE) };
                large.release_at(&source, block, run, now);
            };
            for number in 0..60_usize {
                let bytes = (300 << 10) + (number * number * 7919) % (3 << 20);
                alive.push_back((large.allocate(&source, bytes, Taking::AsItIs).expect("memory"), bytes));
                let keeps = if number == 20 { 12 } else { 2 };
                let surplus = alive.len().saturating_sub(keeps);
                alive.drain(..surplus).for_each(let_go);
            }
            alive.into_iter().for_each(let_go);
            if request == 10 {
                given_back_before = source.given_back_bytes.load(Ordering::Relaxed);
            }
        }
        assert_eq!(source.given_back_bytes.load(Ordering::Relaxed), given_back_before);
        large.close(&source);
    }

    #[test]
    fn a_block_is_back_although_the_source_panicked_at_what_was_old() {
        let (large, start) = large();
        let bad = Told { discards: Discards::Panics, ..Told::default() };
        let [first, second] = [(); 2].map(|()| large.allocate(&bad, 1 << 20, Taking::AsItIs).expect("memory"));
        let run = |block: NonNull<u8>| Run { first: block.addr().get() / PAGE, pages: (1 << 20) / PAGE };
        large.release_at(&bad, first, run(first), start);
        let late = start + MOMENT * 20;
        let release = || large.release_at(&bad, second, run(second), late);
        assert!(catch_unwind(AssertUnwindSafe(release)).is_err());
        assert_eq!(large.kept().in_use, 0);
        large.close(&bad);
    }

    /// As SYCL's and CUDA's memory: more than the decay thread returns at a time, and less.
    #[test]
    fn mappings_of_a_source_that_empties_no_page_go_back_whole() {
        let (large, start) = large();
        let whole = Told { discards: Discards::None, ..Told::default() };
        let sizes_bytes = [11 << 20, 1 << 20, 70 << 20];
        let blocks = sizes_bytes.map(|bytes| large.allocate(&whole, bytes, Taking::AsItIs).expect("memory"));
        for (block, bytes) in blocks.into_iter().zip(sizes_bytes) {
            let run = Run { first: block.addr().get() / PAGE, pages: bytes / PAGE };
            large.release_at(&whole, block, run, start);
        }
        assert!(large.decay(&whole, start + MOMENT * 20).is_none());
        assert_eq!(large.kept().warm, 0);
        assert_eq!(whole.given_back_bytes.load(Ordering::Relaxed), whole.mapped_bytes.load(Ordering::Relaxed));
        large.close(&whole);
    }

    #[test]
    fn a_loop_keeps_its_blocks_warm_however_long_its_turns_are() {
        let (large, start) = large();
        for (turn, count) in [1, 1, 1, 8, 8, 8].into_iter().enumerate() {
            burst(&large, count, start + MOMENT * (3 * turn as u32));
            assert_eq!(large.kept().warm, count << 20, "turn {turn}");
        }
        large.close(&PrivatePages);
    }
}
