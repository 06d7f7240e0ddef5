//! Extents: runs of pages for large blocks, cut from mapped chunks and joined again when they come back.
//!
//! Free runs are found by start and by length. Best fit: the shortest run that is long enough serves, the lowest of
//! those, so that holes fill up and long runs stay long. A page that came back is dirty: it is committed, may have
//! memory behind it, and has what a block left there. Dirty pages are emptied by age, per region of 4 MiB
//! ([`Extents::purge`]). A run never crosses from one chunk into the next, because each chunk is unmapped as a whole.

mod purge;

pub(super) use purge::Grain;

use super::bits::{mask, runs};
use super::geometry::{PAGE, PAGES, REGION};
use super::region::{self, Dirt, Region};
use crate::source::Pages;
use crate::survived::survived;
use std::collections::{BTreeMap, BTreeSet};
use std::ptr::NonNull;
use std::sync::atomic::Ordering;
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
}

// SAFETY: the pool alone owns the mapping and reaches it under its lock.
unsafe impl Send for Chunk {}

impl Chunk {
    /// Its regions: 4 MiB each, or less at the chunk's end.
    fn regions(&self) -> impl Iterator<Item = &'static Region> + use<> {
        let start = self.start.addr().get();
        // SAFETY: `map` inserted the region at each of these addresses, and they are mapped as long as the chunk lives.
        (0..self.pages.div_ceil(PAGES)).map(move |number| unsafe { region::find(start + number * REGION) })
    }

    fn dirty_pages(&self) -> usize {
        self.regions().map(|region| region.dirt.pages()).sum()
    }
}

/// How many runs of dirty pages of one block are told apart: beyond these, the last one goes on to the last dirty page.
/// A list without a limit could be too long for a small block, and a large one cannot be had under the lock.
pub(super) const MAX_RUNS: usize = 1024;

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
        Some(self.take_at(Run { first, pages: length }, first, pages))
    }

    pub(super) fn longest(&self) -> Option<Run> {
        self.by_length.last().map(|&(pages, first)| Run { first, pages })
    }

    /// Takes the `pages` of a free run that begin at `first`.
    pub(super) fn take_at(&mut self, free: Run, first: usize, pages: usize) -> Run {
        self.remove(free);
        let (end, free_end) = (first + pages, free.first + free.pages);
        if first > free.first {
            self.insert(Run { first: free.first, pages: first - free.first });
        }
        if free_end > end {
            self.insert(Run { first: end, pages: free_end - end });
        }
        Run { first, pages }
    }

    pub(super) fn grain_pages(&self) -> usize {
        self.grain_pages
    }

    /// Takes the `pages` that lie right behind a run in use, if they are free.
    pub(super) fn take_behind(&mut self, run: Run, pages: usize) -> Option<Run> {
        let first = run.first + run.pages;
        let &length = self.free.get(&first).filter(|length| **length >= pages && !self.chunks.contains_key(&first))?;
        Some(self.take_at(Run { first, pages: length }, first, pages))
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
        for offset in (0..bytes).step_by(REGION) {
            let record = region::take_record();
            let inserted = record.is_some_and(|record| {
                // SAFETY: `offset` is less than the mapping's length.
                record.reset(unsafe { start.add(offset) });
                region::insert(record)
            });
            if !inserted {
                let made = Chunk { start, pages: offset / PAGE };
                made.regions().chain(record).for_each(region::give_records);
                // SAFETY: this mapping was just made, and nobody else has it.
                unsafe { source.unmap(start, bytes) };
                return false;
            }
        }
        self.chunks.insert(first, Chunk { start, pages });
        self.mapped_pages += pages;
        self.insert(Run { first, pages });
        true
    }

    /// Takes a run back as dirty and joins it with its free neighbours.
    pub(super) fn give(&mut self, run: Run, now: Duration) {
        self.dirty_pages += self
            .parts(run)
            .map(|(Region { dirt, .. }, bits)| {
                let fresh = bits & !dirt.bits();
                dirt.set_bits(dirt.bits() | bits);
                dirt.set_since(dirt.since().max(now));
                fresh.count_ones() as usize
            })
            .sum::<usize>();
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

    /// Clears the dirty marks of a run that was taken; returns how many pages had one, and runs that they lie in.
    pub(super) fn clean(&mut self, run: Run) -> (usize, Vec<Run>) {
        let (mut dirty_pages, mut dirty): (_, Vec<Run>) = (0, Vec::new());
        for (region, bits) in self.parts(run) {
            let found = region.dirt.bits() & bits;
            region.dirt.set_bits(region.dirt.bits() & !bits);
            dirty_pages += found.count_ones() as usize;
            let start = region.start.load(Ordering::Relaxed).addr() / PAGE;
            for (skip, pages) in runs(found) {
                let first = start + skip;
                let is_full = dirty.len() == MAX_RUNS;
                match dirty.last_mut().filter(|last| is_full || last.first + last.pages == first) {
                    Some(last) => last.pages = first + pages - last.first,
                    None => dirty.push(Run { first, pages }),
                }
            }
        }
        self.dirty_pages -= dirty_pages;
        (dirty_pages, dirty)
    }

    /// The address of a run.
    pub(super) fn place(&self, run: Run) -> NonNull<u8> {
        let (first, chunk) = self.chunks.range(..=run.first).next_back().expect("a run lies in a chunk");
        // SAFETY: the run lies in this chunk.
        unsafe { chunk.start.add((run.first - first) * PAGE) }
    }

    /// The record of the region in which a run starts.
    pub(super) fn record(&self, run: Run) -> &'static Region {
        self.parts(run).next().expect("a run has pages").0
    }

    /// How many bytes are free and may have memory behind them.
    pub(super) fn for_each_mapping(&self, visit: &mut dyn FnMut(usize, usize)) {
        self.chunks.values().for_each(|chunk| visit(chunk.start.addr().get(), chunk.pages * PAGE));
    }

    pub(super) fn dirty_bytes(&self) -> usize {
        self.dirty_pages * PAGE
    }

    /// Unmaps every chunk. The pool is dropped, so its large blocks are all gone. What its source panics at stays
    /// mapped: a pool may end while a panic unwinds, where a second one would end the process.
    pub(super) fn close<P: Pages + ?Sized>(&mut self, source: &P) {
        while let Some((&first, _)) = self.chunks.first_key_value() {
            survived(|| self.unmap(source, first)); // which takes it out of the list first
        }
    }

    fn unmap<P: Pages + ?Sized>(&mut self, source: &P, first: usize) {
        let Some(chunk) = self.chunks.remove(&first) else { return };
        if let Some(&pages) = self.free.get(&first) {
            self.remove(Run { first, pages });
        }
        self.mapped_pages -= chunk.pages;
        self.dirty_pages -= chunk.dirty_pages();
        for region in chunk.regions() {
            region.close();
            region::give_records(region);
        }
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

    /// The dirt of each region that has some.
    fn dirt(&self) -> impl Iterator<Item = &'static Dirt> {
        let all = self.chunks.values().flat_map(Chunk::regions).map(|region| &region.dirt);
        all.filter(|dirt| dirt.bits() != 0)
    }

    /// The regions that a run of a chunk here lies in, each with the bits of the run's pages there.
    fn parts(&self, run: Run) -> impl Iterator<Item = (&'static Region, u64)> + use<> {
        let (mut at, end) = (run.first, run.first + run.pages);
        std::iter::from_fn(move || {
            let pages = (end - at).min(PAGES - at % PAGES);
            // SAFETY: the run lies in a chunk, whose regions `map` inserted.
            let part = (pages > 0).then(|| (unsafe { region::find(at * PAGE) }, mask(at % PAGES, pages)));
            at += pages;
            part
        })
    }
}

#[cfg(test)]
mod tests {
    use super::{Extents, Grain, MAX_RUNS, PAGE, PAGES, REGION, Run};
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
        assert_eq!(extents.clean(run), (0, vec![]), "fresh memory is zero");
        extents.give(run, SECOND);
        assert_eq!(extents.dirty_bytes(), 2 * PAGES * PAGE);
        let part = extents.take(PAGES + 1).expect("free");
        assert_eq!(extents.clean(part), (part.pages, vec![part]), "one run, across two regions");
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
        assert_eq!(extents.clean(run), (PAGES, vec![kept]), "only the younger one still has its memory");
        extents.close(&PrivatePages);
    }

    #[test]
    fn no_more_goes_than_is_too_much() {
        let mut extents = grown(4 * PAGES);
        let whole = extents.take(4 * PAGES).expect("mapped");
        extents.give(whole, SECOND); // all of one age, in one chunk that is free
        extents.purge_down_to(&PrivatePages, 3 * REGION + REGION / 2 + PAGE);
        assert_eq!(extents.dirty_bytes(), 3 * REGION, "a region's run at a time");
        let mut given_back_bytes = 0;
        let mut is_done = false;
        while !is_done {
            let (bytes, done) = extents.purge_some(&PrivatePages, 2 * SECOND, Grain::Page, PAGES);
            assert!(bytes <= REGION);
            (given_back_bytes, is_done) = (given_back_bytes + bytes, done);
        }
        assert_eq!((given_back_bytes, extents.mapped_pages), (3 * REGION, 0));
    }

    #[test]
    #[cfg_attr(miri, ignore = "its addresses would all be memory under Miri")]
    fn beyond_so_many_dirty_runs_the_last_one_goes_on_to_the_end() {
        let pages = 2 * (MAX_RUNS + 10);
        let mut extents = grown(pages);
        let single: Vec<_> = (0..pages).map(|_| extents.take(1).expect("mapped")).collect();
        for (number, page) in single.iter().enumerate() {
            if number % 2 == 0 { extents.give(*page, SECOND) } else { extents.give_empty(*page) }
        }
        let whole = extents.take(pages).expect("all of it is free");
        let (dirty_pages, dirty) = extents.clean(whole);
        assert_eq!((dirty_pages, dirty.len()), (pages / 2, MAX_RUNS));
        let ends = dirty.iter().map(|run| run.first + run.pages);
        assert_eq!(ends.max(), Some(whole.first + pages - 1), "to the last dirty page");
        assert_eq!(extents.dirty_bytes(), 0);
        extents.close(&PrivatePages);
    }

    #[test]
    #[cfg_attr(miri, ignore = "its addresses would all be memory under Miri")]
    fn of_more_ages_than_are_told_apart_the_oldest_go_too() {
        let mut extents = grown(300 * PAGES);
        let regions: Vec<_> = (0..300).map(|_| extents.take(PAGES).expect("mapped")).collect();
        for (number, region) in regions.iter().enumerate() {
            extents.give(*region, SECOND * number as u32);
        }
        for left in [299, 150, 149, 2] {
            extents.purge_down_to(&PrivatePages, left * REGION);
            let is_left = extents.dirty_bytes() / REGION;
            assert!((left.saturating_sub(2)..=left).contains(&is_left), "{is_left} for {left}");
        }
        extents.close(&PrivatePages);
    }

    proptest! {
        #![proptest_config(ProptestConfig {
            cases: if cfg!(miri) { 4 } else { 200 }, failure_persistence: None, ..ProptestConfig::default()
        })]

        /// Runs never overlap, nothing is lost, and what is free is joined as far as it goes.
        #[test]
        fn extents_are_a_set_of_pages(steps in prop::collection::vec((1_usize..200, any::<usize>(), 0..7_u8), 1..60)) {
            let mut extents = Extents::new(1);
            let mut taken: Vec<Run> = Vec::new();
            for (time, (pages, which, what)) in steps.into_iter().enumerate() {
                let now = Duration::from_secs(time as u64);
                match what {
                    0 if !taken.is_empty() => extents.give(taken.swap_remove(which % taken.len()), now),
                    1 => drop(extents.purge(&PrivatePages, Duration::from_secs(which as u64 % 60), Grain::HugePage)),
                    2 if !taken.is_empty() => {
                        let at = which % taken.len();
                        let mut run = taken[at];
                        if let Some(more) = extents.take_behind(run, pages) {
                            prop_assert_eq!(more, Run { first: run.first + run.pages, pages });
                            prop_assert!(!extents.chunks.contains_key(&more.first), "into another chunk");
                            extents.clean(more);
                            run.pages += pages;
                        }
                        taken[at] = run;
                    }
                    3 if !taken.is_empty() => {
                        let at = which % taken.len();
                        let Run { first, pages: had } = taken[at];
                        let left = (pages % had).max(1);
                        if left < had {
                            extents.give(Run { first: first + left, pages: had - left }, now);
                            taken[at].pages = left;
                        }
                    }
                    4 => {
                        let longest = extents.free.iter().map(|(_, &pages)| pages).max();
                        prop_assert_eq!(extents.longest().map(|run| run.pages), longest);
                        if let Some(free) = extents.longest().filter(|run| run.pages >= pages) {
                            let run = extents.take_at(free, free.first + which % (free.pages - pages + 1), pages);
                            extents.clean(run);
                            taken.push(run);
                        }
                    }
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
                let dirty: usize = extents.chunks.values().map(super::Chunk::dirty_pages).sum();
                prop_assert_eq!(dirty, extents.dirty_pages);
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
