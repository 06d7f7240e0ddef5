//! What the counters say: plain values.

/// Buckets of a [`Histogram`].
pub const BUCKETS: usize = 64;

/// The name of the series that the names used least are folded into when there are too many.
pub const OTHER: &str = "other";

/// The name of the series of requests without a name.
pub const UNNAMED: &str = "unnamed";

/// The bucket of a value: 0 for 0 and 1, and `k` for values above 2^(k-1) and up to 2^k.
#[inline]
pub(super) fn bucket_of(value: u64) -> usize {
    let bits = u64::BITS - value.saturating_sub(1).leading_zeros();
    (bits as usize).min(BUCKETS - 1)
}

/// Counts of values by powers of two.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Histogram {
    /// How many values are above 2^(k-1) and at most 2^k, for each `k`. The first has 0 and 1, the last has no upper
    /// end.
    pub counts: [u64; BUCKETS],
    /// The sum of all values; it wraps around after 2^64.
    pub sum: u64,
}

impl Default for Histogram {
    fn default() -> Self {
        Self { counts: [0; BUCKETS], sum: 0 }
    }
}

impl Histogram {
    /// How many values there are.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.counts.iter().sum()
    }

    /// The upper end of the bucket below or in which the part `q` (0 to 1) of all values lies; 0 without values. At
    /// most twice the true quantile.
    #[must_use]
    pub fn quantile(&self, q: f64) -> u64 {
        let wanted = (q.clamp(0.0, 1.0) * self.count() as f64).ceil().max(1.0);
        let mut below = 0;
        for (bucket, count) in self.counts.iter().enumerate() {
            below += count;
            if *count > 0 && below as f64 >= wanted {
                return if bucket == BUCKETS - 1 { u64::MAX } else { 1 << bucket };
            }
        }
        0
    }

    fn add(&mut self, other: &Self) {
        self.counts.iter_mut().zip(&other.counts).for_each(|(count, more)| *count += more);
        self.sum = self.sum.wrapping_add(other.sum);
    }
}

/// The counters of all ended requests with one name. All bytes are requested sizes.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Series {
    /// The name: of the route where a middleware began the request. [`UNNAMED`](UNNAMED) for requests without one, and
    /// [`OTHER`](OTHER) for names that were used least when there were too many.
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
    /// All bytes that each of them allocated.
    pub total_bytes: Histogram,
}

impl Series {
    pub(super) fn add(&mut self, other: &Self) {
        self.requests += other.requests;
        self.refused_requests += other.refused_requests;
        self.refused_allocations += other.refused_allocations;
        self.escaped_requests += other.escaped_requests;
        self.escaped_blocks += other.escaped_blocks;
        self.escaped_bytes = self.escaped_bytes.wrapping_add(other.escaped_bytes);
        self.max_peak_bytes = self.max_peak_bytes.max(other.max_peak_bytes);
        self.peak_bytes.add(&other.peak_bytes);
        self.total_bytes.add(&other.total_bytes);
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
    use super::{BUCKETS, Histogram, bucket_of};

    #[test]
    fn a_bucket_ends_at_its_power_of_two() {
        for (value, bucket) in
            [(0, 0), (1, 0), (2, 1), (3, 2), (4, 2), (5, 3), (1024, 10), (1025, 11), (u64::MAX, BUCKETS - 1)]
        {
            assert_eq!(bucket_of(value), bucket, "{value}");
        }
    }

    #[test]
    fn a_quantile_is_the_end_of_its_bucket() {
        let mut histogram = Histogram::default();
        assert_eq!(histogram.quantile(0.5), 0);
        histogram.counts[10] = 98;
        histogram.counts[20] = 2;
        assert_eq!((histogram.quantile(0.0), histogram.quantile(0.98)), (1024, 1024));
        assert_eq!((histogram.quantile(0.99), histogram.quantile(1.0)), (1 << 20, 1 << 20));
    }
}
