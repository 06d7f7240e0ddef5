//! Returns memory of free pages to the system, by age, per region of 4 MiB.

use super::Extents;
use crate::source::Pages;
use crate::strategy::pool::bits::{mask, runs};
use crate::strategy::pool::geometry::{PAGE, PAGES};
use crate::strategy::pool::region::{Dirt, Region};
use std::time::Duration;

/// The size of the pieces in which memory is returned to the system.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in super::super) enum Grain {
    /// 2 MiB, so that huge pages stay whole. Half of one would come back as 256 small pages, with a fault for each.
    HugePage,
    /// Single pages.
    Page,
}

/// How many ages of dirty pages are told apart.
const AGES: usize = 256;

impl Extents {
    /// Empties pages that have been dirty since before `moment`, in whole grains, and unmaps chunks that are free
    /// altogether. Returns how many bytes.
    pub(in super::super) fn purge<P: Pages + ?Sized>(&mut self, source: &P, moment: Duration, grain: Grain) -> usize {
        self.purge_some(source, moment, grain, usize::MAX).0
    }

    /// [`purge`](Self::purge) that stops soon after `max_pages`; also returns whether it is done. A chunk whose single
    /// pages cannot be emptied is unmapped whole, however many it has.
    pub(in super::super) fn purge_some<P: Pages + ?Sized>(
        &mut self,
        source: &P,
        moment: Duration,
        grain: Grain,
        max_pages: usize,
    ) -> (usize, bool) {
        let before = self.dirty_pages;
        let mut gone = Vec::new();
        let mut left_pages = max_pages;
        let mut is_done = true;
        'chunks: for (&first, chunk) in &self.chunks {
            let is_old = chunk.regions().all(|region| region.dirt.since() < moment);
            let is_unused = is_old && self.free.get(&first) == Some(&chunk.pages);
            if is_unused && chunk.dirty_pages() <= left_pages {
                gone.push(first);
                left_pages -= chunk.dirty_pages();
                continue;
            }
            for (number, region) in chunk.regions().enumerate() {
                let Region { dirt, .. } = region;
                let old = if dirt.since() < moment { granules(dirt.bits(), grain) } else { 0 };
                for (skip, pages) in runs(old) {
                    if left_pages == 0 {
                        is_done = false;
                        break 'chunks;
                    }
                    // SAFETY: these pages lie in the chunk. Dirty pages are free, so nobody needs their contents.
                    let emptied =
                        unsafe { source.discard(chunk.start.add((number * PAGES + skip) * PAGE), pages * PAGE) };
                    if emptied {
                        region.forget_requested(skip, pages);
                        dirt.set_bits(dirt.bits() & !mask(skip, pages));
                        self.dirty_pages -= pages;
                        left_pages = left_pages.saturating_sub(pages);
                    } else if is_unused && grain == Grain::Page {
                        // A source that empties no page of it, as SYCL's or CUDA's: it goes whole, or would stay.
                        gone.push(first);
                        left_pages = left_pages.saturating_sub(chunk.dirty_pages());
                        continue 'chunks;
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
    pub(in super::super) fn has_dirty_since(&self, moment: Duration) -> bool {
        self.dirt().any(|dirt| dirt.since() >= moment)
    }

    /// Empties the oldest dirty pages until at most `max_bytes` are dirty, and soon stops then.
    pub(in super::super) fn purge_down_to<P: Pages + ?Sized>(&mut self, source: &P, max_bytes: usize) {
        let Some(excess) = self.dirty_bytes().checked_sub(max_bytes).filter(|excess| *excess > 0) else { return };
        // How much there is of each age, in so many steps from the oldest to the youngest.
        let (oldest, youngest) =
            self.dirt().map(Dirt::since).fold((Duration::MAX, Duration::ZERO), |(oldest, youngest), since| {
                (oldest.min(since), youngest.max(since))
            });
        let step = (youngest.saturating_sub(oldest) / AGES as u32).max(Duration::from_nanos(1));
        let step_of = |since: Duration| ((since - oldest).as_nanos() / step.as_nanos()).min(AGES as u128 - 1) as usize;
        let mut bytes = [0; AGES];
        self.dirt().for_each(|dirt| bytes[step_of(dirt.since())] += dirt.pages() * PAGE);
        let mut more = excess;
        let enough = bytes.iter().position(|bytes| {
            more = more.saturating_sub(*bytes);
            more == 0
        });
        let moment = enough.filter(|enough| enough + 1 < AGES).map(|enough| oldest + step * (enough as u32 + 1));
        self.purge_some(source, moment.unwrap_or(Duration::MAX), Grain::HugePage, excess.div_ceil(PAGE));
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
    use super::{Grain, granules};

    #[test]
    fn grains_are_halves_of_a_region() {
        let half = (1 << 32) - 1;
        assert_eq!(granules(u64::MAX, Grain::HugePage), u64::MAX);
        assert_eq!(granules(half | 1 << 40, Grain::HugePage), half);
        assert_eq!(granules(half << 32 | 7, Grain::HugePage), half << 32);
        assert_eq!(granules(7, Grain::Page), 7);
    }
}
