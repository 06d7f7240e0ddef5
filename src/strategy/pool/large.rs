//! Large blocks, and the cache of those that came back: where the seconds are.
//!
//! A fresh mapping costs a page fault for every page, and giving it back costs again. So a block that comes back is
//! kept with its memory for a while (`decay`), up to a limit, and the next one of its size gets it warm. Sizes are
//! rounded up in eight steps to a doubling; what nobody touches of that costs no memory.

use super::classes;
use super::heap::PageHeap;
use super::region::Region;
use crate::source::Pages;
use crate::sync::{ForkLock, Locked};
use std::ptr::NonNull;
use std::sync::atomic::Ordering;
use std::time::Duration;

const STEPS: usize = 8;
const LEAST_LOG: usize = classes::MOST.ilog2() as usize;
/// The largest class: 2^46 bytes, half of what user space can address.
const MOST_LOG: usize = 46;
const COUNT: usize = (MOST_LOG - LEAST_LOG) * STEPS;

/// Above this size zeros come from the system rather than from our own hands: it clears pages when they are
/// touched, which many never are.
const CLEAR_BY_HAND: usize = 32 << 20;

#[derive(Debug)]
pub(super) struct Large {
    store: Locked<Store>,
    most_bytes: usize,
    decay: Duration,
}

#[derive(Debug)]
struct Store {
    /// By class; in each the warmest is last.
    bins: Vec<Vec<Kept>>,
    bytes: usize,
    /// When the bins were last looked through for what is too old.
    looked: Duration,
}

#[derive(Debug)]
struct Kept {
    region: &'static Region,
    since: Duration,
}

/// The class whose blocks hold `size_bytes` (more than [`classes::MOST`]), and how many bytes those have.
fn class_of(size_bytes: usize) -> Option<(usize, usize)> {
    debug_assert!(size_bytes > classes::MOST);
    let doubling = (size_bytes - 1).ilog2() as usize;
    let step = 1_usize << (doubling - STEPS.ilog2() as usize);
    let bytes = size_bytes.checked_next_multiple_of(step)?;
    let class = (doubling - LEAST_LOG) * STEPS + (bytes - (1 << doubling)) / step - 1;
    (class < COUNT).then_some((class, bytes))
}

/// Time since some moment, to a few milliseconds, cheaply.
fn now() -> Duration {
    // Miri knows the precise clock only.
    let clock = if cfg!(miri) { libc::CLOCK_MONOTONIC } else { libc::CLOCK_MONOTONIC_COARSE };
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: a clock that every Linux has, and a place for its answer.
    let failed = unsafe { libc::clock_gettime(clock, &raw mut time) };
    debug_assert_eq!(failed, 0);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

impl Large {
    pub(super) fn new(most_bytes: usize, decay: Duration) -> Self {
        let bins = std::iter::repeat_with(Vec::new).take(COUNT).collect();
        Self { store: Locked::new(Store { bins, bytes: 0, looked: now() }), most_bytes, decay }
    }

    pub(super) fn allocate<P: Pages>(
        &self,
        heap: &PageHeap<P>,
        size_bytes: usize,
        zeroed: bool,
    ) -> Option<NonNull<u8>> {
        let (class, bytes) = class_of(size_bytes)?;
        let kept = self.store.with(|store| {
            let kept = store.bins[class].pop();
            if kept.is_some() {
                store.bytes -= bytes;
            }
            kept
        });
        let Some(kept) = kept else {
            // The system may refuse while we sit on memory that nobody uses.
            let region = heap
                .map_large(bytes)
                .or_else(|| if self.release_all(heap) == 0 { None } else { heap.map_large(bytes) })?;
            return NonNull::new(region.start.load(Ordering::Relaxed));
        };
        let block = NonNull::new(kept.region.start.load(Ordering::Relaxed))?;
        if zeroed {
            // SAFETY: the whole mapping is ours, and nobody needs its contents.
            let emptied = bytes > CLEAR_BY_HAND && unsafe { heap.source.discard(block, bytes) };
            if !emptied {
                // SAFETY: `size_bytes <= bytes` are ours to write.
                unsafe { block.write_bytes(0, size_bytes) };
            }
        }
        Some(block)
    }

    /// Whether a block with room for `room_bytes` may stay where it is when it is to hold `size_bytes`.
    pub(super) fn fits(room_bytes: usize, size_bytes: usize) -> bool {
        size_bytes <= room_bytes && size_bytes > classes::MOST && size_bytes >= room_bytes / 2
    }

    pub(super) fn release<P: Pages>(&self, heap: &PageHeap<P>, region: &'static Region) {
        let bytes = region.large_bytes.load(Ordering::Relaxed);
        let now = now();
        let given_back: Vec<&'static Region> = match class_of(bytes) {
            Some((class, _)) if bytes <= self.most_bytes => self.store.with(|store| {
                store.bins[class].push(Kept { region, since: now });
                store.bytes += bytes;
                let mut out = Vec::new();
                if now.saturating_sub(store.looked) >= self.decay / 8 {
                    store.looked = now;
                    store.drain_older_than(now.saturating_sub(self.decay), &mut out);
                }
                while store.bytes > self.most_bytes && store.drain_oldest(&mut out) {}
                out
            }),
            _ => vec![region],
        };
        for region in given_back {
            heap.unmap_large(region);
        }
    }

    /// Gives back every block that nobody uses; returns their bytes.
    pub(super) fn release_all<P: Pages>(&self, heap: &PageHeap<P>) -> usize {
        let (regions, bytes) = self.store.with(|store| {
            let regions: Vec<_> = store.bins.iter_mut().flat_map(|bin| bin.drain(..)).map(|kept| kept.region).collect();
            (regions, std::mem::take(&mut store.bytes))
        });
        for region in regions {
            heap.unmap_large(region);
        }
        bytes
    }

    pub(super) fn lock(&self) -> &ForkLock {
        self.store.lock()
    }
}

impl Store {
    fn drain_older_than(&mut self, moment: Duration, out: &mut Vec<&'static Region>) {
        for bin in &mut self.bins {
            let old = bin.partition_point(|kept| kept.since < moment);
            for kept in bin.drain(..old) {
                self.bytes -= kept.region.large_bytes.load(Ordering::Relaxed);
                out.push(kept.region);
            }
        }
    }

    fn drain_oldest(&mut self, out: &mut Vec<&'static Region>) -> bool {
        let oldest = self.bins.iter_mut().filter(|bin| !bin.is_empty()).min_by_key(|bin| bin[0].since);
        let Some(bin) = oldest else { return false };
        let kept = bin.remove(0);
        self.bytes -= kept.region.large_bytes.load(Ordering::Relaxed);
        out.push(kept.region);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::{COUNT, class_of};
    use crate::strategy::pool::classes::MOST;

    #[test]
    fn large_classes_grow_by_an_eighth_and_never_overlap() {
        let mut last = None;
        let mut size = MOST + 1;
        while let Some((class, bytes)) = class_of(size) {
            assert!(bytes >= size && class < COUNT);
            assert!((bytes - size) * 8 <= size, "{size} rounded up to {bytes}");
            assert_eq!(bytes % 4096, 0);
            assert_eq!(class_of(bytes), Some((class, bytes)), "a class holds what it has room for");
            assert_eq!(last.map_or(0, |last| last + 1), class, "classes follow one another");
            last = Some(class);
            size = bytes + 1;
        }
        assert_eq!(last, Some(COUNT - 1));
        assert_eq!(class_of(usize::MAX - 1), None);
    }
}
