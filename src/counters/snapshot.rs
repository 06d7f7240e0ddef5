//! What the counters say: plain values.

use super::buckets::end_of;

/// The name of the series of what a process has no room for under its own name.
pub const OTHER: &str = "other";

/// The name of the series of requests without a name.
pub const UNNAMED: &str = "unnamed";

/// Counts of values, in sixteen buckets for each doubling: a bucket's end is at most 4.5 % above any value in it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Histogram {
    /// The numbers of the buckets that have values, in order, and how many.
    counts: Vec<(u16, u64)>,
    /// The sum of all values; it wraps around after 2^64.
    pub sum: u64,
}

impl Histogram {
    /// From the numbers of all buckets in order, and how many values each has.
    pub(super) fn new(counts: impl Iterator<Item = (usize, u64)>, sum: u64) -> Self {
        let used = counts.filter(|(_, count)| *count > 0);
        Self { counts: used.map(|(bucket, count)| (bucket as u16, count)).collect(), sum }
    }

    /// The buckets that have values, in order: the largest value that belongs into it, and how many it has. `u64::MAX`
    /// ends the bucket of all that is above 2^48.
    pub fn buckets(&self) -> impl Iterator<Item = (u64, u64)> {
        self.counts.iter().map(|(bucket, count)| (end_of(usize::from(*bucket)), *count))
    }

    /// How many values there are.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.counts.iter().map(|(_, count)| count).sum()
    }

    /// How many values are in buckets that end at `bytes` or below. Exact for powers of two.
    #[must_use]
    pub fn at_most(&self, bytes: u64) -> u64 {
        self.buckets().take_while(|(end, _)| *end <= bytes).map(|(_, count)| count).sum()
    }

    /// The end of the bucket in which the part `q` (0 to 1) of all values is reached; 0 without values. At most 4.5 %
    /// above the true quantile, and never below.
    #[must_use]
    pub fn quantile(&self, q: f64) -> u64 {
        let wanted = (q.clamp(0.0, 1.0) * self.count() as f64).ceil().max(1.0);
        let mut below = 0;
        let reached = self.buckets().find(|(_, count)| {
            below += count;
            below as f64 >= wanted
        });
        reached.map_or(0, |(end, _)| end)
    }

    fn add(&mut self, other: &Self) {
        for (bucket, more) in &other.counts {
            match self.counts.binary_search_by_key(bucket, |(bucket, _)| *bucket) {
                Ok(at) => self.counts[at].1 += more,
                Err(at) => self.counts.insert(at, (*bucket, *more)),
            }
        }
        self.sum = self.sum.wrapping_add(other.sum);
    }
}

/// The counters of all requests with one name that have ended, or were not admitted. All bytes are requested sizes.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Series {
    /// The name: of the route where a middleware began the request. [`UNNAMED`](UNNAMED) for requests without one, and
    /// [`OTHER`](OTHER) for those whose name came when its process had no room for another one.
    pub name: String,
    /// How many have ended.
    pub requests: u64,
    /// How many of them were refused memory at least once, by their own limit or a budget above.
    pub refused_requests: u64,
    /// How many allocations they were refused.
    pub refused_allocations: u64,
    /// How many left blocks behind.
    pub escaped_requests: u64,
    /// How many blocks were alive at their ends.
    pub escaped_blocks: u64,
    /// The bytes of these blocks.
    pub escaped_bytes: u64,
    /// The largest peak of one request, in bytes.
    pub max_peak_bytes: u64,
    /// Their peaks, in bytes.
    pub peak_bytes: Histogram,
    /// The peaks, in bytes, of those that were refused memory.
    pub refused_peak_bytes: Histogram,
    /// All bytes that each of them allocated.
    pub total_bytes: Histogram,
    /// How many of them counted native memory and Python objects too. Their peaks are of all that; of the others, of
    /// arrays.
    pub whole_requests: u64,
    /// What of the peaks of these was arrays: a sum over them, in bytes.
    pub whole_array_bytes: u64,
    /// The same of native memory.
    pub whole_native_bytes: u64,
    /// The same of Python objects.
    pub whole_object_bytes: u64,
    /// How long those waited for their reservation that got it, and not at once: in microseconds.
    pub waited_micros: Histogram,
    /// How many waited for their reservation until their time was over. They did not begin.
    pub timed_out: u64,
    /// How many did not begin because they could not wait for their reservation: as many waited as may, it could never
    /// fit, or they were not to wait.
    pub turned_away: u64,
}

impl Series {
    pub(crate) fn add(&mut self, other: &Self) {
        self.requests += other.requests;
        self.refused_requests += other.refused_requests;
        self.refused_allocations += other.refused_allocations;
        self.escaped_requests += other.escaped_requests;
        self.escaped_blocks += other.escaped_blocks;
        self.escaped_bytes = self.escaped_bytes.wrapping_add(other.escaped_bytes);
        self.max_peak_bytes = self.max_peak_bytes.max(other.max_peak_bytes);
        self.peak_bytes.add(&other.peak_bytes);
        self.refused_peak_bytes.add(&other.refused_peak_bytes);
        self.total_bytes.add(&other.total_bytes);
        self.whole_requests += other.whole_requests;
        self.whole_array_bytes = self.whole_array_bytes.wrapping_add(other.whole_array_bytes);
        self.whole_native_bytes = self.whole_native_bytes.wrapping_add(other.whole_native_bytes);
        self.whole_object_bytes = self.whole_object_bytes.wrapping_add(other.whole_object_bytes);
        self.waited_micros.add(&other.waited_micros);
        self.timed_out += other.timed_out;
        self.turned_away += other.turned_away;
    }

    /// Whether there is anything to tell.
    pub(super) fn has_counted(&self) -> bool {
        self.requests > 0 || self.timed_out > 0 || self.turned_away > 0 || self.waited_micros.count() > 0
    }
}

/// What a process had in use when its last request ended, at most a tenth of a second before that.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Gauges {
    /// Requests that had not ended.
    pub live_requests: u64,
    /// Bytes in live blocks of these requests.
    pub live_bytes: u64,
    /// Requests that had ended while blocks of theirs were alive.
    pub escaping_requests: u64,
    /// The bytes of these blocks.
    pub escaped_bytes: u64,
    /// Requests that waited for their reservation.
    pub waiting_requests: u64,
}

/// A process that counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Process {
    /// Its number in the system.
    pub pid: u32,
    /// What it had in use.
    pub gauges: Gauges,
}

/// All counters at one moment.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Snapshot {
    /// By name; those without requests are left out.
    pub series: Vec<Series>,
    /// The processes that live: this one, and with `CTXALLOC_METRICS_DIR` all that count there.
    pub processes: Vec<Process>,
}

#[cfg(test)]
mod tests {
    use super::Histogram;
    use crate::counters::buckets::{BUCKETS, bucket_of};
    use std::collections::BTreeMap;

    /// Against the values themselves, sorted.
    #[test]
    fn a_quantile_is_at_most_a_twentieth_too_large_and_never_too_small() {
        let mut state = 1_u64;
        let mut random = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            state >> 16
        };
        for round in 0..if cfg!(miri) { 3 } else { 300 } {
            let (mut all, mut merged) = (Vec::new(), Histogram::default());
            for _ in 0..1 + random() % 3 {
                let mut counts = BTreeMap::new();
                for _ in 0..random() % 200 {
                    let value = (random() >> (random() % 48)) % (1 << 48);
                    all.push(value);
                    *counts.entry(bucket_of(value).unwrap_or(BUCKETS)).or_default() += 1;
                }
                merged.add(&Histogram::new(counts.into_iter(), 0));
            }
            all.sort_unstable();
            assert_eq!(merged.count(), all.len() as u64);
            for q in [0.0, 0.01, 0.5, 0.9, 0.99, 1.0].into_iter().filter(|_| !all.is_empty()) {
                let rank = (q * all.len() as f64).ceil().max(1.0) as usize;
                let (exact, said) = (all[rank - 1], merged.quantile(q));
                assert!(exact <= said && said as f64 <= 1.05 * exact as f64, "round {round}, {q}: {said}, not {exact}");
            }
            for bytes in [0, 1, 2, 1024, 1 << 20, u64::MAX] {
                let exact = all.iter().filter(|value| **value <= bytes).count();
                assert_eq!(merged.at_most(bytes), exact as u64, "round {round}, {bytes}");
            }
        }
        assert_eq!((Histogram::default().quantile(0.5), Histogram::default().count()), (0, 0));
    }
}
