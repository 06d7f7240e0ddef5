//! Extents: runs of pages for large blocks, cut from mapped chunks and joined again when they come back.
//!
//! Free runs are found by start and by length. Best fit: the shortest run that is long enough serves, the lowest of those, so
//! that holes fill up and long runs stay long. A page that came back is dirty: it is committed, may have memory behind it,
//! and has what a block left there. Dirty pages are emptied by age, per region of 4 MiB ([`Extents::purge`]). A run never
//! crosses from one chunk into the next, because each chunk is unmapped as a whole.

use super::bits::{mask, runs};
use super::geometry::{PAGE, PAGES, REGION};
use super::region::{self, Region};
use crate::source::Pages;
use std::collections::{BTreeMap, BTreeSet};
use std::ptr::NonNull;
use std::time::Duration;

/// A run of pages. `first` is the number of its first page, counted from address 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Run {
    pub(super) first: usize,
    pub(super) pages: usize,
}

#[derive(Debug, Default)]
pub(super) struct Extents {
    grain_pages: usize,
    /// By the number of their first page.
    chunks: BTreeMap<usize, Chunk>,
    /// The length of each free run, by its first page.
    free: BTreeMap<usize, usize>,
    /// The same, as (length, first page).
    by_length: BTreeSet<(usize, usize)>,
    mapped_pages: usize,
    dirty_pages: usize,
}

/// A mapping.
#[derive(Debug)]
struct Chunk {
    start: NonNull<u8>,
    pages: usize,
    regions: Vec<Part>,
}

// SAFETY: the pool alone owns the mapping and reaches it under its lock.
unsafe impl Send for Chunk {}

/// A region of a chunk: 4 MiB, or less at the chunk's end.
#[derive(Debug)]
struct Part {
    record: &'static Region,
    /// A bit for each free page that may have memory behind it. Set when the page comes back; cleared when it is taken or
    /// emptied. Cannot be set while the page is in use.
    dirty: u64,
    /// The last time that one of its pages came back.
    since: Duration,
}

/// The size of the pieces in which memory is returned to the system.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Grain {
    /// 2 MiB, so that huge pages stay whole. Half of one would come back as 256 small pages, with a fault for each.
    HugePage,
    /// Single pages.
    Page,
}

/// A chunk is at most this much larger than requested: 64 MiB, in pages.
const MAX_GROWTH_PAGES: usize = (64 << 20) / PAGE;

impl Run {
    pub(super) fn bytes(self) -> usize {
        self.pages * PAGE
    }
}

impl Extents {
    /// Extents whose runs are multiples of `grain_pages`: 1, or half a region (2 MiB).
    pub(super) fn new(grain_pages: usize) -> Self {
        debug_assert!(grain_pages == 1 || grain_pages == PAGES / 2);
        Self { grain_pages, ..Self::default() }
    }

    /// Takes `pages` from the shortest free run that has as many. They may be dirty: call [`clean`](Self::clean).
    pub(super) fn take(&mut self, pages: usize) -> Option<Run> {
        let &(length, first) = self.by_length.range((pages, 0)..).next()?;
        self.remove(Run { first, pages: length });
        if length > pages {
            self.insert(Run { first: first + pages, pages: length - pages });
        }
        Some(Run { first, pages })
    }

    /// Maps a chunk of at least `pages`; false if the source refuses.
    pub(super) fn grow<P: Pages + ?Sized>(&mut self, source: &P, pages: usize) -> bool {
        if self.grain_pages > 1 {
            // No more than requested, since such pages may be scarce.
            return self.map(source, pages);
        }
        let whole = PAGES * pages.div_ceil(PAGES);
        // By a quarter of what is mapped, so that chunks stay few. Memory is only used when it is first touched.
        let wanted = whole.max((self.mapped_pages / 4).min(MAX_GROWTH_PAGES) / PAGES * PAGES);
        [wanted, whole].into_iter().any(|pages| self.map(source, pages))
    }

    fn map<P: Pages + ?Sized>(&mut self, source: &P, pages: usize) -> bool {
        let Some(bytes) = pages.checked_mul(PAGE) else { return false };
        let Some(start) = source.map(bytes, REGION) else { return false };
        let first = start.addr().get() / PAGE;
        let mut regions = Vec::with_capacity(pages.div_ceil(PAGES));
        for offset in (0..bytes).step_by(REGION) {
            let record = region::take_record();
            let inserted = record.is_some_and(|record| {
                // SAFETY: `offset` is less than the mapping's length.
                record.reset(unsafe { start.add(offset) });
                region::insert(record)
            });
            regions.extend(record.map(|record| Part { record, dirty: 0, since: Duration::ZERO }));
            if !inserted {
                regions.iter().for_each(|part: &Part| region::give_records(part.record));
                // SAFETY: this mapping was just made, and nobody else has it.
                unsafe { source.unmap(start, bytes) };
                return false;
            }
        }
        self.chunks.insert(first, Chunk { start, pages, regions });
        self.mapped_pages += pages;
        self.insert(Run { first, pages });
        true
    }

    /// Takes a run back as dirty and joins it with its free neighbours.
    pub(super) fn give(&mut self, run: Run, now: Duration) {
        self.each_part(run, |part, bits, dirty_pages| {
            *dirty_pages += (bits & !part.dirty).count_ones() as usize;
            part.dirty |= bits;
            part.since = part.since.max(now);
        });
        self.give_empty(run);
    }

    /// Takes a run back that has no memory behind it, and joins it with its free neighbours.
    pub(super) fn give_empty(&mut self, run: Run) {
        let mut joined = run;
        let behind = run.first + run.pages;
        if let Some(&pages) = self.free.get(&behind).filter(|_| !self.chunks.contains_key(&behind)) {
            self.remove(Run { first: behind, pages });
            joined.pages += pages;
        }
        if !self.chunks.contains_key(&run.first)
            && let Some((&first, &pages)) = self.free.range(..run.first).next_back()
            && first + pages == run.first
        {
            self.remove(Run { first, pages });
            joined = Run { first, pages: pages + joined.pages };
        }
        self.insert(joined);
    }

    /// Clears the dirty marks of a run that was taken; returns the pages that had one, as runs.
    pub(super) fn clean(&mut self, run: Run) -> Vec<Run> {
        let mut dirty: Vec<Run> = Vec::new();
        let mut first = run.first;
        self.each_part(run, |part, bits, dirty_pages| {
            let found = part.dirty & bits;
            *dirty_pages -= found.count_ones() as usize;
            part.dirty &= !bits;
            let region = first / PAGES * PAGES;
            for (skip, pages) in runs(found) {
                match dirty.last_mut().filter(|last| last.first + last.pages == region + skip) {
                    Some(last) => last.pages += pages,
                    None => dirty.push(Run { first: region + skip, pages }),
                }
            }
            first = region + PAGES;
        });
        dirty
    }

    /// The address of a run.
    pub(super) fn place(&self, run: Run) -> NonNull<u8> {
        let (first, chunk) = self.chunk(run);
        // SAFETY: the run lies in this chunk.
        unsafe { chunk.start.add((run.first - first) * PAGE) }
    }

    /// The record of the region in which a run starts.
    pub(super) fn record(&self, run: Run) -> &'static Region {
        let (first, chunk) = self.chunk(run);
        chunk.regions[(run.first - first) / PAGES].record
    }

    /// How many bytes are free and may have memory behind them.
    pub(super) fn dirty_bytes(&self) -> usize {
        self.dirty_pages * PAGE
    }

    /// Empties pages that have been dirty since before `moment`, in whole grains, and unmaps chunks that are free altogether.
    /// Returns how many bytes.
    pub(super) fn purge<P: Pages + ?Sized>(&mut self, source: &P, moment: Duration, grain: Grain) -> usize {
        self.purge_some(source, moment, grain, usize::MAX).0
    }

    /// [`purge`](Self::purge) that stops soon after `max_pages`; also returns whether it is done.
    pub(super) fn purge_some<P: Pages + ?Sized>(
        &mut self,
        source: &P,
        moment: Duration,
        grain: Grain,
        max_pages: usize,
    ) -> (usize, bool) {
        let before = self.dirty_pages;
        let mut gone = Vec::new();
        let mut gone_pages = 0;
        let mut is_done = true;
        for (&first, chunk) in &mut self.chunks {
            if before - self.dirty_pages + gone_pages >= max_pages {
                is_done = false;
                break;
            }
            let is_old = chunk.regions.iter().all(|part| part.since < moment);
            if is_old && self.free.get(&first) == Some(&chunk.pages) {
                gone.push(first);
                gone_pages += chunk.regions.iter().map(|part| part.dirty.count_ones() as usize).sum::<usize>();
                continue;
            }
            for (number, part) in chunk.regions.iter_mut().enumerate() {
                let old = if part.since < moment { granules(part.dirty, grain) } else { 0 };
                for (skip, pages) in runs(old) {
                    // SAFETY: these pages lie in the chunk. Dirty pages are free, so nobody needs their contents.
                    let emptied =
                        unsafe { source.discard(chunk.start.add((number * PAGES + skip) * PAGE), pages * PAGE) };
                    if emptied {
                        part.dirty &= !mask(skip, pages);
                        self.dirty_pages -= pages;
                    }
                }
            }
        }
        for first in gone {
            self.unmap(source, first);
        }
        ((before - self.dirty_pages) * PAGE, is_done)
    }

    /// Whether a page became dirty at `moment` or later.
    pub(super) fn has_dirty_since(&self, moment: Duration) -> bool {
        self.chunks.values().flat_map(|chunk| &chunk.regions).any(|part| part.dirty != 0 && part.since >= moment)
    }

    /// Empties the oldest dirty pages until at most `max_bytes` are dirty.
    pub(super) fn purge_down_to<P: Pages + ?Sized>(&mut self, source: &P, max_bytes: usize) {
        let parts = self.chunks.values().flat_map(|chunk| &chunk.regions).filter(|part| part.dirty != 0);
        let mut ages: Vec<_> = parts.map(|part| (part.since, part.dirty.count_ones() as usize * PAGE)).collect();
        ages.sort_unstable();
        let mut left = self.dirty_bytes();
        let mut moment = None;
        for (since, bytes) in ages {
            if left <= max_bytes {
                break;
            }
            left -= bytes;
            moment = Some(since + Duration::from_nanos(1));
        }
        if let Some(moment) = moment {
            self.purge(source, moment, Grain::HugePage);
        }
    }

    /// Unmaps every chunk. The pool is dropped, so its large blocks are all gone.
    pub(super) fn close<P: Pages + ?Sized>(&mut self, source: &P) {
        while let Some((&first, _)) = self.chunks.first_key_value() {
            self.unmap(source, first);
        }
    }

    fn unmap<P: Pages + ?Sized>(&mut self, source: &P, first: usize) {
        let Some(chunk) = self.chunks.remove(&first) else { return };
        if let Some(&pages) = self.free.get(&first) {
            self.remove(Run { first, pages });
        }
        self.mapped_pages -= chunk.pages;
        self.dirty_pages -= chunk.regions.iter().map(|part| part.dirty.count_ones() as usize).sum::<usize>();
        chunk.regions.iter().for_each(|part| region::give_records(part.record));
        // SAFETY: `map` mapped it with this size, and nobody has a block in it.
        unsafe { source.unmap(chunk.start, chunk.pages * PAGE) };
    }

    fn insert(&mut self, run: Run) {
        self.free.insert(run.first, run.pages);
        self.by_length.insert((run.pages, run.first));
    }

    fn remove(&mut self, run: Run) {
        self.free.remove(&run.first);
        self.by_length.remove(&(run.pages, run.first));
    }

    fn chunk(&self, run: Run) -> (usize, &Chunk) {
        let found = self.chunks.range(..=run.first).next_back();
        let (&first, chunk) = found.expect("a run lies in a chunk");
        (first, chunk)
    }

    /// Calls `visit` with each part that the run touches, the bits of its pages there, and the count of dirty pages.
    fn each_part(&mut self, run: Run, mut visit: impl FnMut(&mut Part, u64, &mut usize)) {
        let (&first, chunk) = self.chunks.range_mut(..=run.first).next_back().expect("a run lies in a chunk");
        let (mut at, end) = (run.first - first, run.first - first + run.pages);
        while at < end {
            let pages = (end - at).min(PAGES - at % PAGES);
            visit(&mut chunk.regions[at / PAGES], mask(at % PAGES, pages), &mut self.dirty_pages);
            at += pages;
        }
    }
}

/// The bits of `bits` that are in whole grains of set bits.
const fn granules(bits: u64, grain: Grain) -> u64 {
    const HALF: u64 = u64::MAX >> 32;
    match grain {
        Grain::Page => bits,
        Grain::HugePage => {
            let low = if bits & HALF == HALF { HALF } else { 0 };
            low | if bits >> 32 == HALF { HALF << 32 } else { 0 }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Extents, Grain, PAGE, PAGES, Run, granules};
    use crate::source::PrivatePages;
    use proptest::prelude::*;
    use std::time::Duration;

    const SECOND: Duration = Duration::from_secs(1);

    fn grown(pages: usize) -> Extents {
        let mut extents = Extents::new(1);
        assert!(extents.grow(&PrivatePages, pages));
        extents
    }

    #[test]
    fn what_comes_back_is_joined_and_serves_any_size() {
        let mut extents = grown(60);
        let runs: Vec<_> = [10, 20, 30].map(|pages| extents.take(pages).expect("60 pages")).into();
        for at in [1, 0, 2] {
            assert!(extents.take(PAGES).is_none(), "a part is in use");
            extents.give(runs[at], SECOND);
        }
        let whole = extents.take(PAGES).expect("all of it, in one run");
        assert_eq!(whole.first, runs[0].first);
        extents.close(&PrivatePages);
    }

    #[test]
    fn the_shortest_run_that_is_long_enough_serves() {
        let mut extents = grown(64);
        let runs = [4, 1, 2, 1, 3, 1].map(|pages| extents.take(pages).expect("12 pages"));
        for at in [0, 2, 4] {
            extents.give(runs[at], SECOND); // holes of 4, 2 and 3 pages
        }
        assert_eq!(extents.take(2), Some(runs[2]));
        assert_eq!(extents.take(3), Some(runs[4]));
        assert_eq!(extents.take(4), Some(runs[0]));
        extents.close(&PrivatePages);
    }

    #[test]
    fn what_came_back_is_dirty_until_it_is_taken_or_given_back() {
        let mut extents = grown(3 * PAGES);
        let run = extents.take(2 * PAGES).expect("mapped");
        assert_eq!(extents.clean(run), [], "fresh memory is zero");
        extents.give(run, SECOND);
        assert_eq!(extents.dirty_bytes(), 2 * PAGES * PAGE);
        let part = extents.take(PAGES + 1).expect("free");
        assert_eq!(extents.clean(part), [part], "one run, across two regions");
        assert_eq!(extents.dirty_bytes(), (PAGES - 1) * PAGE);
        assert_eq!(extents.purge(&PrivatePages, SECOND, Grain::Page), 0, "it is not that old");
        assert_eq!(extents.purge(&PrivatePages, 2 * SECOND, Grain::HugePage), 32 * PAGE);
        assert_eq!(extents.purge(&PrivatePages, 2 * SECOND, Grain::Page), 31 * PAGE, "what is less than a huge page");
        extents.close(&PrivatePages);
    }

    #[test]
    fn the_oldest_goes_first() {
        let mut extents = grown(2 * PAGES);
        let [old, young] = [PAGES, PAGES].map(|pages| extents.take(pages).expect("mapped"));
        let kept = if old.first < young.first { young } else { old };
        extents.give(old, SECOND);
        extents.give(young, 2 * SECOND);
        extents.purge_down_to(&PrivatePages, PAGES * PAGE);
        let run = extents.take(2 * PAGES).expect("joined");
        assert_eq!(extents.clean(run), [kept], "only the younger one still has its memory");
        extents.close(&PrivatePages);
    }

    #[test]
    fn grains_are_halves_of_a_region() {
        let half = (1 << 32) - 1;
        assert_eq!(granules(u64::MAX, Grain::HugePage), u64::MAX);
        assert_eq!(granules(half | 1 << 40, Grain::HugePage), half);
        assert_eq!(granules(half << 32 | 7, Grain::HugePage), half << 32);
        assert_eq!(granules(7, Grain::Page), 7);
    }

    proptest! {
        #![proptest_config(ProptestConfig {
            cases: if cfg!(miri) { 4 } else { 200 }, failure_persistence: None, ..ProptestConfig::default()
        })]

        /// Runs never overlap, nothing is lost, and what is free is joined as far as it goes.
        #[test]
        fn extents_are_a_set_of_pages(steps in prop::collection::vec((1_usize..200, any::<usize>(), 0..4_u8), 1..60)) {
            let mut extents = Extents::new(1);
            let mut taken: Vec<Run> = Vec::new();
            for (time, (pages, which, what)) in steps.into_iter().enumerate() {
                let now = Duration::from_secs(time as u64);
                match what {
                    0 if !taken.is_empty() => extents.give(taken.swap_remove(which % taken.len()), now),
                    1 => drop(extents.purge(&PrivatePages, Duration::from_secs(which as u64 % 60), Grain::HugePage)),
                    _ => {
                        let run = extents.take(pages).or_else(|| {
                            extents.grow(&PrivatePages, pages).then(|| extents.take(pages)).flatten()
                        }).expect("memory");
                        prop_assert_eq!(run.pages, pages);
                        extents.clean(run);
                        taken.push(run);
                    }
                }
                let mut all: Vec<_> = extents.free.iter().map(|(&first, &pages)| (first, pages, true)).collect();
                all.extend(taken.iter().map(|run| (run.first, run.pages, false)));
                all.sort_unstable();
                for pair in all.windows(2) {
                    let ((first, pages, one_free), (next, _, next_free)) = (pair[0], pair[1]);
                    prop_assert!(first + pages <= next, "runs overlap");
                    let joins = first + pages == next && !extents.chunks.contains_key(&next);
                    prop_assert!(!(joins && one_free && next_free), "two free neighbours are not joined");
                }
                let known: usize = all.iter().map(|&(_, pages, _)| pages).sum();
                prop_assert_eq!(known, extents.mapped_pages, "pages were lost");
                let dirty = extents.chunks.values().flat_map(|chunk| &chunk.regions);
                prop_assert_eq!(dirty.map(|part| part.dirty.count_ones() as usize).sum::<usize>(), extents.dirty_pages);
                prop_assert_eq!(extents.by_length.len(), extents.free.len());
            }
            for run in taken.drain(..) {
                extents.give(run, Duration::from_secs(99));
            }
            extents.purge(&PrivatePages, Duration::MAX, Grain::Page);
            prop_assert_eq!((extents.mapped_pages, extents.dirty_pages, extents.free.len()), (0, 0, 0));
            extents.close(&PrivatePages);
        }
    }
}
