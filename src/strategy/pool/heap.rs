//! Runs of pages in regions: what spans are cut from. First fit, lowest address first, so that high regions empty
//! and can be given back.

use super::region::{self, PAGE, PAGES, REGION, Region};
use crate::source::Pages;
use crate::sync::Locked;
use std::ptr::NonNull;
use std::sync::atomic::Ordering;

#[derive(Debug)]
pub(super) struct PageHeap<P: Pages> {
    pub(super) source: P,
    state: Locked<State>,
}

#[derive(Debug, Default)]
struct State {
    /// Sorted by address.
    open: Vec<Open>,
    /// Records whose memory was given back.
    spare: Vec<&'static Region>,
}

/// A region that is cut into pages, with a bit for each page that is free.
#[derive(Debug)]
struct Open {
    region: &'static Region,
    free: u64,
    /// Free pages that were handed out before, may still have memory behind them, and are committed.
    dirty: u64,
}

const ALL_FREE: u64 = u64::MAX;
const _: () = assert!(PAGES == 64);

impl<P: Pages> PageHeap<P> {
    pub(super) fn new(source: P) -> Self {
        Self { source, state: Locked::new(State { spare: region::take_spare(), ..State::default() }) }
    }

    /// A run of `pages` free pages, committed and declared a span of `class`; its start.
    pub(super) fn take(&self, pages: usize, class: usize) -> Option<NonNull<u8>> {
        let (region, first, is_fit) = self.state.with(|state| {
            let found = state.open.iter_mut().find_map(|open| first_run(open.free, pages).map(|first| (first, open)));
            let (first, open) = match found {
                Some(found) => found,
                None => {
                    let region = self.map_region(state)?;
                    let at = state.open.partition_point(|open| open.start() < region.start.load(Ordering::Relaxed));
                    state.open.insert(at, Open { region, free: ALL_FREE, dirty: 0 });
                    (0, &mut state.open[at])
                }
            };
            let is_fit = open.dirty & run(first, pages) == run(first, pages);
            open.free &= !run(first, pages);
            open.dirty &= !run(first, pages);
            open.region.assign(first, pages, class);
            Some((open.region, first, is_fit))
        })?;
        let start = NonNull::new(region.start.load(Ordering::Relaxed).wrapping_add(first * PAGE))?;
        // Outside of the lock: it may bring the pages into memory.
        // SAFETY: pages of the source's mapping that are ours alone now.
        if is_fit || unsafe { self.source.commit(start, pages * PAGE) } {
            return Some(start);
        }
        // Those that were dirty are fit, the others are not: none of them from now on.
        // SAFETY: as above.
        let emptied = unsafe { self.source.discard(start, pages * PAGE) };
        self.put_back(region, first, pages, !emptied);
        None
    }

    /// Takes a span back, in which no block lies any more.
    pub(super) fn give(&self, region: &'static Region, first: usize, pages: usize) {
        self.put_back(region, first, pages, true);
    }

    fn put_back(&self, region: &'static Region, first: usize, pages: usize, is_dirty: bool) {
        self.state.with(|state| {
            if let Some(open) = state.open.iter_mut().find(|open| std::ptr::eq(open.region, region)) {
                open.free |= run(first, pages);
                if is_dirty {
                    open.dirty |= run(first, pages);
                }
            }
        });
    }

    fn map_region(&self, state: &mut State) -> Option<&'static Region> {
        let start = self.source.map(REGION, REGION)?;
        let record = state.spare.pop().unwrap_or_else(|| Box::leak(Box::new(Region::new())));
        record.reset(start);
        if region::enter(record) {
            return Some(record);
        }
        state.spare.push(record);
        // SAFETY: just mapped, and nobody has it.
        unsafe { self.source.unmap(start, REGION) };
        None
    }

    /// Gives the memory of all free pages back; regions that are free altogether go as a whole. Returns how many
    /// bytes of address space or memory went.
    pub(super) fn trim(&self) -> usize {
        self.state.with(|state| {
            let mut released = 0;
            let State { open, spare } = state;
            open.retain_mut(|open| {
                let Some(start) = NonNull::new(open.start()) else { return false };
                if open.free == ALL_FREE {
                    // SAFETY: mapped with REGION bytes by `take`; no page of it is in use.
                    unsafe { self.source.unmap(start, REGION) };
                    open.region.close();
                    spare.push(open.region);
                    released += open.dirty.count_ones() as usize * PAGE;
                    return false;
                }
                for page in 0..PAGES {
                    if open.dirty & (1 << page) != 0 {
                        // SAFETY: inside of the region.
                        let place = unsafe { start.add(page * PAGE) };
                        // SAFETY: the page is free.
                        if unsafe { self.source.discard(place, PAGE) } {
                            open.region.forget_asked(page, 1);
                            open.dirty &= !(1 << page);
                            released += PAGE;
                        }
                    }
                }
                true
            });
            released
        })
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

impl Open {
    fn start(&self) -> *mut u8 {
        self.region.start.load(Ordering::Relaxed)
    }
}

impl<P: Pages> Drop for PageHeap<P> {
    /// The pool is gone, and with it every block of its small regions (the contract of a strategy's users).
    fn drop(&mut self) {
        let source = &self.source;
        self.state.with(|state| {
            for open in state.open.drain(..) {
                if let Some(start) = NonNull::new(open.start()) {
                    // SAFETY: mapped with REGION bytes by `take`; nobody has a block of it any more.
                    unsafe { source.unmap(start, REGION) };
                }
                open.region.close();
                state.spare.push(open.region);
            }
            region::give_spare(&mut state.spare);
        });
    }
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
