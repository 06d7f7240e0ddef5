//! Which buckets of a histogram `publish` exports: some bounds from the first value on, and finer ones where there are
//! values. `python/ctxalloc/_buckets.py` is the same for Python, and says why the next doubling has its end too.

use super::Histogram;
use crate::counters::{STEPS, end_of};
use std::collections::BTreeSet;

/// The exponents of the ends that each histogram has: 4 KiB, 64 KiB, ... 64 GiB.
const POWERS: [u32; 7] = [12, 16, 20, 24, 28, 32, 36];
const MIN_POWER: u32 = POWERS[0];
const MAX_POWER: u32 = POWERS[POWERS.len() - 1];

/// Buckets for each doubling that has values.
const PER_DOUBLING: usize = 4;

/// The ends of buckets, in order, each with how many values are at most as large. Of those below the smallest value
/// only the last is there.
pub(super) fn buckets(histogram: &Histogram) -> Vec<(u64, u64)> {
    let mut found = Vec::new();
    let mut below = 0;
    let mut rest = histogram.buckets().peekable();
    for end in ends(histogram) {
        while let Some((_, count)) = rest.next_if(|(largest, _)| *largest <= end) {
            below += count;
        }
        if below == 0 {
            found.clear();
        }
        found.push((end, below));
    }
    found
}

fn ends(histogram: &Histogram) -> BTreeSet<u64> {
    let mut ends: BTreeSet<u64> = POWERS.into_iter().map(|power| 1 << power).collect();
    let used = histogram.buckets().filter(|(end, _)| (1 << MIN_POWER) < *end && *end <= 1 << MAX_POWER);
    let doublings: BTreeSet<u32> = used.map(|(end, _)| (end - 1).ilog2()).collect();
    for power in doublings {
        let steps = (0..=STEPS).step_by(STEPS / PER_DOUBLING);
        ends.extend(steps.map(|step| end_of(1 + STEPS * power as usize + step)));
        ends.insert(1 << (power + 2).min(MAX_POWER));
    }
    ends
}
