//! The page heap: runs of pages in regions, for spans. First fit at the lowest address, so that high regions become
//! empty and can be unmapped.
//!
//! Pages that came back are dirty: they may have memory behind them. A tick happens twice per `decay`; pages that were
//! dirty at one tick and were not taken since are emptied at the next. System calls are made outside the lock.

use super::bits::{first_run, mask, runs};
use super::classes;
use super::clock::{self, nanoseconds};
use super::decay::PoolBytes;
use super::geometry::{PAGE, REGION};
use super::options::Retention;
use super::region::{self, Region};
use super::span::Span;
use super::turn::in_turn;
use crate::source::Pages;
use crate::survived::survived;
use crate::sync::{ForkLock, Locked};
use crate::unattributed::unattributed;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

#[derive(Debug)]
pub(super) struct PageHeap<P: Pages> {
    pub(super) source: P,
    retention: Retention,
    state: Locked<State>,
    /// The turn of the thread that takes pages out to empty them, which are missing in the state meanwhile. Taken
    /// before the state's lock.
    purging: ForkLock,
    /// The time of the last tick, in nanoseconds.
    ticked: AtomicU64,
}

/// Dirty pages that were taken out of the heap and not emptied yet. They go back if the source panics.
struct Waiting<'a, P: Pages> {
    heap: &'a PageHeap<P>,
    region: &'static Region,
    pages: u64,
}

impl<P: Pages> Drop for Waiting<'_, P> {
    fn drop(&mut self) {
        if self.pages != 0 {
            self.heap.state.with(|state| state.give(self.region, self.pages, true, false));
        }
    }
}

#[derive(Debug)]
struct State {
    /// Sorted by address.
    open: Vec<Open>,
    /// The index of the first region that may have a free page.
    first_free: usize,
}

/// A region for spans. The words have a bit for each page.
#[derive(Debug, Clone, Copy)]
struct Open {
    region: &'static Region,
    start: NonNull<u8>,
    /// Set when a page comes back; cleared when it is taken, or is about to be emptied.
    free: u64,
    /// The page was handed out before, may still have memory behind it, and is committed. Set when it comes back;
    /// cannot be set while the page is not free.
    dirty: u64,
    /// It was dirty at the last tick. Set at a tick; cannot be set while the page is not dirty.
    old: u64,
    /// The source could not empty it (a device's memory) and is not asked again until it was in use. Set after a failed
    /// discard; cannot be set while the page is not dirty.
    stuck: u64,
}

// SAFETY: the pool alone owns the mapping and reaches it under its lock.
unsafe impl Send for Open {}

const ALL_FREE: u64 = u64::MAX;

/// A run of pages that was free.
struct Found {
    region: &'static Region,
    /// The start of the region.
    start: NonNull<u8>,
    first: usize,
    /// Those of its pages that are committed, as bits.
    committed: u64,
}

/// Pages that were taken out of the heap to be emptied.
enum Victim {
    /// A region without a page in use, and how many of its pages are dirty.
    Whole(Open, usize),
    /// Some pages of a region, as bits.
    Some(&'static Region, NonNull<u8>, u64),
}

impl<P: Pages> PageHeap<P> {
    pub(super) fn new(source: P, retention: Retention) -> Self {
        let ticked = AtomicU64::new(nanoseconds(clock::now()));
        let state = State { open: Vec::with_capacity(4), first_free: 0 };
        Self { source, retention, state: Locked::new(state), purging: ForkLock::new(), ticked }
    }

    /// A new span of `class`, committed.
    pub(super) fn take(&self, class: usize) -> Option<&'static Span> {
        let pages = classes::span_pages(class);
        let found = self.state.with(|state| state.take(pages));
        let Found { region, start, first, committed } = match found {
            Some(found) => found,
            None => self.map_region(pages)?,
        };
        // SAFETY: `first` is a page of the region.
        let start = unsafe { start.add(first * PAGE) };
        // Outside the lock, because a commit may bring the pages into memory.
        // SAFETY: these pages lie in the source's mapping, and they were taken out of the free ones.
        if committed == mask(first, pages) || unsafe { self.source.commit(start, pages * PAGE) } {
            return region.assign(first, class);
        }
        // After the discard none is committed; if that is refused too, those that were are.
        // SAFETY: the same pages; nobody needs their contents.
        let emptied = unsafe { self.source.discard(start, pages * PAGE) };
        let dirty = if emptied { 0 } else { committed };
        self.state.with(|state| {
            state.give(region, mask(first, pages) & !dirty, false, false);
            state.give(region, dirty, true, false);
        });
        None
    }

    /// Takes back a span without a live block.
    pub(super) fn give(&self, span: &Span) {
        debug_assert_eq!(span.live(), 0);
        let (region, first) = region::place_of(span);
        self.state.with(|state| state.give(region, mask(first, span.pages()), true, false));
    }

    /// Maps one more region; its first pages.
    #[cold]
    fn map_region(&self, pages: usize) -> Option<Found> {
        self.retention.fix();
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
            // SAFETY: this mapping was just made, and nobody else has it.
            unsafe { self.source.unmap(start, REGION) };
            return None;
        };
        let open = Open { region, start, free: ALL_FREE & !mask(0, pages), dirty: 0, old: 0, stuck: 0 };
        while !self.state.with(|state| state.insert(open)) {
            self.grow_list();
        }
        // The list grows now for the next region: if the global allocator is this pool, the longer list is allocated
        // from the region that was just mapped.
        self.grow_list();
        Some(Found { region, start, first: 0, committed: 0 })
    }

    /// Makes room in the list for one more region. Allocates outside the lock.
    fn grow_list(&self) {
        let _unattributed = unattributed();
        let mut longer = Vec::new();
        while let Some(needed) = self.state.with(|state| state.take_longer(&mut longer)) {
            longer = Vec::with_capacity(needed);
        }
    }

    /// Whether the next [`tick`](Self::tick) is due.
    pub(super) fn is_due(&self, now: Duration) -> bool {
        nanoseconds(now).saturating_sub(self.ticked.load(Ordering::Relaxed)) >= nanoseconds(self.retention.decay() / 2)
    }

    /// Empties old pages, if a tick is due. Returns when the next one is; `None` if nothing is dirty.
    pub(super) fn tick(&self, now: Duration) -> Option<Duration> {
        let ticked = self.ticked.load(Ordering::Relaxed);
        // If several threads come at the same time, one does the work.
        let claim = || self.ticked.compare_exchange(ticked, nanoseconds(now), Ordering::Relaxed, Ordering::Relaxed);
        if self.is_due(now) && claim().is_ok() {
            super::decay::note_released(self.purge(Purge::Old));
            self.state.with(|state| state.open.iter_mut().for_each(|open| open.old = open.dirty));
        }
        let is_dirty = self.state.with(|state| state.open.iter().any(|open| open.dirty & !open.stuck != 0));
        is_dirty.then(|| Duration::from_nanos(self.ticked.load(Ordering::Relaxed)) + self.retention.decay() / 2)
    }

    /// Returns the memory of all free pages to the system, and unmaps empty regions. Returns how many bytes.
    pub(super) fn trim(&self) -> usize {
        self.purge(Purge::All)
    }

    fn purge(&self, what: Purge) -> usize {
        in_turn(&self.purging, || self.purge_alone(what))
    }

    fn purge_alone(&self, what: Purge) -> usize {
        let mut released = 0;
        // From the highest region down, since other threads meanwhile take pages from the lowest.
        let mut below = usize::MAX;
        while let Some(victim) = self.state.with(|state| state.take_victim(&mut below, what)) {
            match victim {
                Victim::Whole(open, dirty_pages) => {
                    // SAFETY: `map_region` mapped it with REGION bytes. No page is in use, and it is out of the list.
                    unsafe { self.source.unmap(open.start, REGION) };
                    open.region.close();
                    region::give_records(open.region);
                    released += dirty_pages * PAGE;
                }
                Victim::Some(region, start, pages) => {
                    let mut waiting = Waiting { heap: self, region, pages };
                    for (first, count) in runs(pages) {
                        waiting.pages &= !mask(first, count);
                        // SAFETY: pages of the region that were free, so nobody needs their contents, and that
                        // `take_victim` took out, so nobody takes them.
                        let emptied = unsafe { self.source.discard(start.add(first * PAGE), count * PAGE) };
                        if emptied {
                            region.forget_requested(first, count);
                            released += count * PAGE;
                        }
                        self.state.with(|state| state.give(region, mask(first, count), !emptied, !emptied));
                    }
                }
            }
        }
        released
    }

    pub(super) fn kept(&self) -> PoolBytes {
        let pages = |bits: u64| bits.count_ones() as usize * PAGE;
        self.state.with(|state| {
            let of = |open: &Open| PoolBytes { in_use: pages(!open.free), warm: pages(open.dirty) };
            state.open.iter().map(of).fold(PoolBytes::default(), PoolBytes::plus)
        })
    }

    pub(super) fn for_each_mapping(&self, visit: &mut dyn FnMut(usize, usize)) {
        self.state.with(|state| state.open.iter().for_each(|open| visit(open.start.addr().get(), REGION)));
    }

    /// The number of regions mapped for small blocks.
    #[cfg(test)]
    pub(super) fn regions(&self) -> usize {
        self.state.with(|state| state.open.len())
    }

    pub(super) fn for_each_lock(&self, visit: &mut dyn FnMut(&ForkLock)) {
        visit(&self.purging);
        visit(self.state.lock());
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Purge {
    Old,
    All,
}

impl State {
    /// Inserts a region; false if the list has no room for it.
    fn insert(&mut self, open: Open) -> bool {
        if self.open.len() == self.open.capacity() {
            return false;
        }
        let at = self.open.partition_point(|other| other.start < open.start);
        self.open.insert(at, open);
        self.first_free = self.first_free.min(at);
        true
    }

    /// Replaces the list by `longer` if that is longer. Returns the length that is needed if there is still no room.
    fn take_longer(&mut self, longer: &mut Vec<Open>) -> Option<usize> {
        if longer.capacity() > self.open.capacity() {
            longer.append(&mut self.open);
            std::mem::swap(longer, &mut self.open);
        }
        (self.open.len() == self.open.capacity()).then_some(self.open.len() * 2)
    }

    /// Takes the lowest run of free pages that is long enough.
    fn take(&mut self, pages: usize) -> Option<Found> {
        while self.open.get(self.first_free).is_some_and(|open| open.free == 0) {
            self.first_free += 1;
        }
        self.open[self.first_free..].iter_mut().find_map(|open| {
            let first = first_run(open.free, pages)?;
            let taken = mask(first, pages);
            let committed = open.dirty & taken;
            open.free &= !taken;
            open.dirty &= !taken;
            open.old &= !taken;
            open.stuck &= !taken;
            Some(Found { region: open.region, start: open.start, first, committed })
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

    /// Takes pages to be emptied out of the highest region below the address `below`, and lowers that to the region's
    /// start.
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
    /// Unmaps all regions. The pool is dropped, so its small blocks are all gone (the contract of a strategy's users).
    /// What its source panics at stays mapped.
    fn drop(&mut self) {
        let source = &self.source;
        let open = self.state.with(|state| std::mem::take(&mut state.open));
        for open in open {
            // A pool may end while a panic unwinds, where a second one would end the process.
            // SAFETY: `map_region` mapped it with REGION bytes, and nobody has a block in it.
            survived(|| unsafe { source.unmap(open.start, REGION) });
            open.region.close();
            region::give_records(open.region);
        }
    }
}
