//! Runs of pages in regions: what spans are cut from. First fit, lowest address first, so that high regions empty
//! and can be given back.
//!
//! Pages that came back are dirty: they have memory behind them. Twice in each `decay` the clock ticks for them: what was
//! dirty at one tick, and at no time taken since, is emptied at the next. The system is asked outside of the lock.

use super::classes;
use super::options::Wishes;
use super::region::{self, PAGE, PAGES, REGION, Region};
use super::span::Span;
use crate::source::Pages;
use crate::sync::Locked;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

#[derive(Debug)]
pub(super) struct PageHeap<P: Pages> {
    pub(super) source: P,
    wishes: Wishes,
    state: Locked<State>,
    /// When the clock ticked last, in nanoseconds.
    ticked: AtomicU64,
}

#[derive(Debug)]
struct State {
    /// Sorted by address.
    open: Vec<Open>,
    /// Before this one no region has a free page.
    first_free: usize,
}

/// A region that is cut into pages, with a bit for each page that is free.
#[derive(Debug, Clone, Copy)]
struct Open {
    region: &'static Region,
    start: NonNull<u8>,
    free: u64,
    /// Free pages that were handed out before, may still have memory behind them, and are committed.
    dirty: u64,
    /// Those that have been dirty since before the last tick.
    old: u64,
    /// Those that the source could not empty (a device's memory): it is not asked again before they were in use.
    stuck: u64,
}

// SAFETY: a mapping that its pool owns alone, reached under the pool's lock.
unsafe impl Send for Open {}

const ALL_FREE: u64 = u64::MAX;
const _: () = assert!(PAGES == 64);

/// A run of pages that was free.
struct Found {
    region: &'static Region,
    /// The region's.
    start: NonNull<u8>,
    first: usize,
    /// Whether all of them are committed.
    is_fit: bool,
}

/// What is taken out to be emptied.
enum Victim {
    /// A region that is free altogether, and how many of its pages are dirty.
    Whole(Open, usize),
    /// Some pages of one, as bits.
    Some(&'static Region, NonNull<u8>, u64),
}

impl<P: Pages> PageHeap<P> {
    pub(super) fn new(source: P, wishes: Wishes) -> Self {
        let ticked = AtomicU64::new(nanoseconds(super::clock::now()));
        let state = State { open: Vec::with_capacity(4), first_free: 0 };
        Self { source, wishes, state: Locked::new(state), ticked }
    }

    /// A span of free blocks of `class`, committed.
    pub(super) fn take(&self, class: usize) -> Option<&'static Span> {
        let pages = classes::span_pages(class);
        let found = self.state.with(|state| state.take(pages));
        let Found { region, start, first, is_fit } = match found {
            Some(found) => found,
            None => self.map_region(pages)?,
        };
        // SAFETY: inside of the region.
        let start = unsafe { start.add(first * PAGE) };
        // Outside of the lock: it may bring the pages into memory.
        // SAFETY: pages of the source's mapping that are ours alone now.
        if is_fit || unsafe { self.source.commit(start, pages * PAGE) } {
            return region.assign(first, class);
        }
        // Those that were dirty are fit, the others are not: none of them from now on.
        // SAFETY: as above.
        let emptied = unsafe { self.source.discard(start, pages * PAGE) };
        self.state.with(|state| state.give(region, run(first, pages), !emptied, false));
        None
    }

    /// Takes a span back, in which no block lies any more.
    pub(super) fn give(&self, span: &Span) {
        debug_assert_eq!(span.live(), 0);
        let (region, first) = span.place();
        self.state.with(|state| state.give(region, run(first, span.pages()), true, false));
    }

    /// The first pages of one more region.
    #[cold]
    fn map_region(&self, pages: usize) -> Option<Found> {
        self.wishes.fix();
        let start = self.source.map(REGION, REGION)?;
        let inserted = region::take_record().filter(|record| {
            record.reset(start);
            let inserted = region::insert(record);
            if !inserted {
                region::give_records(record);
            }
            inserted
        });
        let Some(region) = inserted else {
            // SAFETY: just mapped, and nobody has it.
            unsafe { self.source.unmap(start, REGION) };
            return None;
        };
        let open = Open { region, start, free: ALL_FREE & !run(0, pages), dirty: 0, old: 0, stuck: 0 };
        while !self.state.with(|state| state.insert(open)) {
            self.grow_list();
        }
        // For the next one: the heap that the list grows in may be us, and then takes its pages from this region.
        self.grow_list();
        Some(Found { region, start, first: 0, is_fit: false })
    }

    /// Makes room in the list for one more region, outside of the lock.
    fn grow_list(&self) {
        let mut longer = Vec::new();
        while let Some(needed) = self.state.with(|state| state.take_longer(&mut longer)) {
            longer = Vec::with_capacity(needed);
        }
    }

    /// Whether it is time for a [`tick`](Self::tick).
    pub(super) fn is_due(&self, now: Duration) -> bool {
        nanoseconds(now).saturating_sub(self.ticked.load(Ordering::Relaxed)) >= nanoseconds(self.wishes.decay() / 2)
    }

    /// Empties what has been dirty for long enough, where it is time to. When to look again; nothing where nothing is
    /// dirty.
    pub(super) fn tick(&self, now: Duration) -> Option<Duration> {
        let ticked = self.ticked.load(Ordering::Relaxed);
        // Of those that come at the same time one does it.
        let claim = || self.ticked.compare_exchange(ticked, nanoseconds(now), Ordering::Relaxed, Ordering::Relaxed);
        if self.is_due(now) && claim().is_ok() {
            super::decay::note_released(self.purge(Purge::Old));
            self.state.with(|state| state.open.iter_mut().for_each(|open| open.old = open.dirty));
        }
        let is_dirty = self.state.with(|state| state.open.iter().any(|open| open.dirty & !open.stuck != 0));
        is_dirty.then(|| Duration::from_nanos(self.ticked.load(Ordering::Relaxed)) + self.wishes.decay() / 2)
    }

    /// Gives the memory of all free pages back; regions that are free altogether go as a whole. Returns how many
    /// bytes of memory went.
    pub(super) fn trim(&self) -> usize {
        self.purge(Purge::All)
    }

    fn purge(&self, what: Purge) -> usize {
        let mut released = 0;
        // From the highest down: whoever takes pages meanwhile takes the lowest.
        let mut below = usize::MAX;
        while let Some(victim) = self.state.with(|state| state.take_victim(&mut below, what)) {
            match victim {
                Victim::Whole(open, dirty_pages) => {
                    // SAFETY: mapped with REGION bytes by `map_region`; no page of it is in use, and no list has it.
                    unsafe { self.source.unmap(open.start, REGION) };
                    open.region.close();
                    region::give_records(open.region);
                    released += dirty_pages * PAGE;
                }
                Victim::Some(region, start, pages) => {
                    let mut left = pages;
                    while left != 0 {
                        let first = left.trailing_zeros() as usize;
                        let count = (left >> first).trailing_ones() as usize;
                        left &= !run(first, count);
                        // SAFETY: inside of the region.
                        let place = unsafe { start.add(first * PAGE) };
                        // SAFETY: the pages were free, and `take_victim` has taken them out.
                        let emptied = unsafe { self.source.discard(place, count * PAGE) };
                        if emptied {
                            region.forget_asked(first, count);
                            released += count * PAGE;
                        }
                        self.state.with(|state| state.give(region, run(first, count), !emptied, !emptied));
                    }
                }
            }
        }
        released
    }

    /// How many regions are mapped for small blocks.
    #[cfg(test)]
    pub(super) fn regions(&self) -> usize {
        self.state.with(|state| state.open.len())
    }

    pub(super) fn lock(&self) -> &crate::sync::ForkLock {
        self.state.lock()
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Purge {
    Old,
    All,
}

impl State {
    /// Enters a region; false where the list has no room for it.
    fn insert(&mut self, open: Open) -> bool {
        if self.open.len() == self.open.capacity() {
            return false;
        }
        let at = self.open.partition_point(|other| other.start < open.start);
        self.open.insert(at, open);
        self.first_free = self.first_free.min(at);
        true
    }

    /// Goes on in a longer list, if that is one; how long the next one has to be, where there is no room still.
    fn take_longer(&mut self, longer: &mut Vec<Open>) -> Option<usize> {
        if longer.capacity() > self.open.capacity() {
            longer.append(&mut self.open);
            std::mem::swap(longer, &mut self.open);
        }
        (self.open.len() == self.open.capacity()).then_some(self.open.len() * 2)
    }

    /// A run of free pages.
    fn take(&mut self, pages: usize) -> Option<Found> {
        while self.open.get(self.first_free).is_some_and(|open| open.free == 0) {
            self.first_free += 1;
        }
        self.open[self.first_free..].iter_mut().find_map(|open| {
            let first = first_run(open.free, pages)?;
            let taken = run(first, pages);
            let is_fit = open.dirty & taken == taken;
            open.free &= !taken;
            open.dirty &= !taken;
            open.old &= !taken;
            open.stuck &= !taken;
            Some(Found { region: open.region, start: open.start, first, is_fit })
        })
    }

    fn give(&mut self, region: &'static Region, pages: u64, is_dirty: bool, is_stuck: bool) {
        let start = region.start.load(Ordering::Relaxed).addr();
        let at = self.open.partition_point(|open| open.start.addr().get() < start);
        debug_assert!(self.open.get(at).is_some_and(|open| std::ptr::eq(open.region, region)));
        if let Some(open) = self.open.get_mut(at) {
            open.free |= pages;
            if is_dirty {
                open.dirty |= pages;
            }
            if is_stuck {
                open.stuck |= pages;
            }
            self.first_free = self.first_free.min(at);
        }
    }

    /// Takes out what is to be emptied in the highest region that starts below an address, which it lowers.
    fn take_victim(&mut self, below: &mut usize, what: Purge) -> Option<Victim> {
        let end = self.open.partition_point(|open| open.start.addr().get() < *below);
        for at in (0..end).rev() {
            let open = &mut self.open[at];
            *below = open.start.addr().get();
            let victims = if what == Purge::All { open.dirty } else { open.old & !open.stuck };
            if open.free == ALL_FREE && victims | open.stuck == open.dirty {
                let open = self.open.remove(at);
                self.first_free = self.first_free.min(at);
                let dirty_pages = open.dirty.count_ones() as usize;
                return Some(Victim::Whole(open, dirty_pages));
            }
            if victims != 0 {
                open.free &= !victims;
                open.dirty &= !victims;
                open.old &= !victims;
                open.stuck &= !victims;
                return Some(Victim::Some(open.region, open.start, victims));
            }
        }
        None
    }
}

impl<P: Pages> Drop for PageHeap<P> {
    /// The pool is gone, and with it every block of its small regions (the contract of a strategy's users).
    fn drop(&mut self) {
        let source = &self.source;
        let open = self.state.with(|state| std::mem::take(&mut state.open));
        for open in open {
            // SAFETY: mapped with REGION bytes by `map_region`; nobody has a block of it any more.
            unsafe { source.unmap(open.start, REGION) };
            open.region.close();
            region::give_records(open.region);
        }
    }
}

fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// The bits of `pages` pages from `first` on.
const fn run(first: usize, pages: usize) -> u64 {
    (u64::MAX >> (64 - pages)) << first
}

/// The first of `pages` set bits in a row.
fn first_run(free: u64, pages: usize) -> Option<usize> {
    debug_assert!((1..=64).contains(&pages));
    // After k steps bit i says that bits i to i+k are set; steps double as far as they can.
    let (mut runs, mut length) = (free, 1);
    while length < pages {
        let step = length.min(pages - length);
        runs &= runs >> step;
        length += step;
    }
    (runs != 0).then(|| runs.trailing_zeros() as usize)
}

#[cfg(test)]
mod tests {
    use super::{first_run, run};

    #[test]
    fn the_first_run_is_found_or_there_is_none() {
        for pages in 1..=64 {
            assert_eq!(first_run(u64::MAX, pages), Some(0));
            for first in 0..=64 - pages {
                assert_eq!(first_run(run(first, pages), pages), Some(first), "{pages} pages from {first}");
                if pages < 64 {
                    assert_eq!(first_run(run(first, pages), pages + 1), None);
                }
            }
        }
        assert_eq!(first_run(0b0110_1110, 3), Some(1));
        assert_eq!(first_run(0b0110_0110, 3), None);
    }
}
