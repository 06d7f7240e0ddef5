//! `Region`: the counters of one process, in memory that other processes may map. One process writes, under its lock;
//! any number of processes read, without one.
//!
//! Each series has a version, which is odd while it is written: a reader that finds it odd, or changed after reading,
//! reads again (a sequence lock). `layout` does the same for all series together while one of them is folded into
//! another. A writer that died in the middle leaves an odd version behind: readers give up waiting, and the next owner
//! makes it even.

use super::snapshot::{BUCKETS, Gauges, Histogram, Series, bucket_of};
use std::sync::atomic::{AtomicU64, Ordering, fence};

/// Series in a region, with the two that stand for others.
pub(super) const SERIES: usize = 130;
/// The longest name in bytes; a longer one is cut.
pub(super) const MAX_NAME: usize = 128;

/// `ctxalloc`, and the version of this layout: raise it when a field of [`Region`] or [`Counters`] is added, moved or
/// gets another meaning, so that no process takes over or reads a file of another layout.
const MAGIC: u64 = u64::from_le_bytes(*b"ctxalloc");
const VERSION: u64 = 1;

/// What a request adds at its end.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Sample {
    pub(crate) peak_bytes: u64,
    pub(crate) total_bytes: u64,
    pub(crate) refused: u64,
    pub(crate) escaped_blocks: u64,
    pub(crate) escaped_bytes: u64,
}

/// All zeros is a region that nobody has taken yet.
#[repr(C)]
#[derive(Debug)]
pub(super) struct Region {
    magic: AtomicU64,
    version: AtomicU64,
    /// The owner: its number, and when it was started, for numbers are used again.
    pid: AtomicU64,
    started: AtomicU64,
    layout: AtomicU64,
    gauges: [AtomicU64; 4],
    series: [Counters; SERIES],
}

#[repr(C)]
#[derive(Debug)]
pub(super) struct Counters {
    version: AtomicU64,
    name_bytes: AtomicU64,
    name: [AtomicU64; MAX_NAME / 8],
    requests: AtomicU64,
    refused_requests: AtomicU64,
    refused_allocations: AtomicU64,
    escaped_requests: AtomicU64,
    escaped_blocks: AtomicU64,
    escaped_bytes: AtomicU64,
    max_peak_bytes: AtomicU64,
    peak_sum: AtomicU64,
    total_sum: AtomicU64,
    peaks: [AtomicU64; BUCKETS],
    totals: [AtomicU64; BUCKETS],
}

/// The versions order what must be ordered.
const RELAXED: Ordering = Ordering::Relaxed;

/// One writer, so no read-modify-write is needed.
#[inline]
fn add(number: &AtomicU64, change: u64) {
    number.store(number.load(RELAXED).wrapping_add(change), RELAXED);
}

/// Runs `write` while the version is odd.
#[inline]
fn write<R>(version: &AtomicU64, write: impl FnOnce() -> R) -> R {
    let before = version.load(RELAXED);
    version.store(before.wrapping_add(1), RELAXED);
    // Pairs with the fence in `read`: who sees a number of this write sees the odd version too.
    fence(Ordering::Release);
    let result = write();
    // Release pairs with the Acquire in `read`: who sees the even version sees all numbers.
    version.store(before.wrapping_add(2), Ordering::Release);
    result
}

/// What `read` sees while nobody writes. After many tries, what it saw last: the writer may have died.
fn read<R>(version: &AtomicU64, read: impl Fn() -> R) -> R {
    let mut tries = 0;
    loop {
        let before = version.load(Ordering::Acquire);
        let seen = read();
        fence(Ordering::Acquire);
        tries += 1;
        if before.is_multiple_of(2) && version.load(RELAXED) == before || tries == 1000 {
            return seen;
        }
        std::hint::spin_loop();
    }
}

#[allow(clippy::declare_interior_mutable_const, reason = "each use is a new zero")]
const ZERO: AtomicU64 = AtomicU64::new(0);

impl Region {
    /// One that nobody has taken yet.
    pub(super) const fn empty() -> Self {
        Self {
            magic: ZERO,
            version: ZERO,
            pid: ZERO,
            started: ZERO,
            layout: ZERO,
            gauges: [const { ZERO }; 4],
            series: [const { Counters::empty() }; SERIES],
        }
    }

    /// Makes it the calling process's. False: it is of another version, or no region at all.
    pub(super) fn take(&self, pid: u32, started: u64) -> bool {
        match (self.magic.load(RELAXED), self.version.load(RELAXED)) {
            (0, 0) => {
                self.magic.store(MAGIC, RELAXED);
                self.version.store(VERSION, RELAXED);
            }
            (MAGIC, VERSION) => {}
            _ => return false,
        }
        self.set_gauges(Gauges::default());
        self.pid.store(u64::from(pid), RELAXED);
        self.started.store(started, RELAXED);
        let versions = self.series.iter().map(|series| &series.version).chain([&self.layout]);
        versions.filter(|version| version.load(RELAXED) % 2 == 1).for_each(|version| add(version, 1));
        true
    }

    pub(super) fn is_one(&self) -> bool {
        (self.magic.load(RELAXED), self.version.load(RELAXED)) == (MAGIC, VERSION)
    }

    /// The owner: its number, and when it was started.
    pub(super) fn owner(&self) -> (u32, u64) {
        (self.pid.load(RELAXED) as u32, self.started.load(RELAXED))
    }

    pub(super) fn series(&self, number: usize) -> &Counters {
        &self.series[number]
    }

    pub(super) fn set_gauges(&self, gauges: Gauges) {
        let Gauges { live_requests, live_bytes, escaping_requests, escaped_bytes } = gauges;
        let all = [live_requests, live_bytes, escaping_requests, escaped_bytes];
        self.gauges.iter().zip(all).for_each(|(gauge, value)| gauge.store(value, RELAXED));
    }

    pub(super) fn gauges(&self) -> Gauges {
        let [live_requests, live_bytes, escaping_requests, escaped_bytes] =
            std::array::from_fn(|number| self.gauges[number].load(RELAXED));
        Gauges { live_requests, live_bytes, escaping_requests, escaped_bytes }
    }

    /// Adds all of one series to another, and empties it.
    pub(super) fn fold(&self, from: usize, into: usize) {
        write(&self.layout, || {
            let (from, into) = (&self.series[from], &self.series[into]);
            write(&into.version, || {
                into.numbers().zip(from.numbers()).for_each(|(to, more)| add(to, more.load(RELAXED)))
            });
            let max = into.max_peak_bytes.load(RELAXED).max(from.max_peak_bytes.load(RELAXED));
            into.max_peak_bytes.store(max, RELAXED);
            from.clear();
        });
    }

    /// Forgets everything.
    pub(super) fn clear(&self) {
        self.series.iter().for_each(Counters::clear);
        self.set_gauges(Gauges::default());
    }

    /// All series, for whoever holds the writer's lock. Allocates nothing if there is room for [`SERIES`].
    pub(super) fn read_into(&self, found: &mut Vec<Read>) {
        found.extend(self.series.iter().map(Counters::read));
    }

    /// All series, of a process that may be writing.
    pub(super) fn read(&self) -> Vec<Read> {
        read(&self.layout, || self.series.iter().map(|series| read(&series.version, || series.read())).collect())
    }
}

/// A series as it was read: with its name as bytes.
pub(super) struct Read {
    name: [u8; MAX_NAME],
    name_bytes: usize,
    numbers: Series,
}

impl Read {
    /// The series, if it has requests.
    pub(super) fn series(self) -> Option<Series> {
        let name = String::from_utf8_lossy(&self.name[..self.name_bytes]).into_owned();
        (self.numbers.requests > 0).then_some(Series { name, ..self.numbers })
    }
}

impl Counters {
    const fn empty() -> Self {
        Self {
            version: ZERO,
            name_bytes: ZERO,
            name: [const { ZERO }; MAX_NAME / 8],
            requests: ZERO,
            refused_requests: ZERO,
            refused_allocations: ZERO,
            escaped_requests: ZERO,
            escaped_blocks: ZERO,
            escaped_bytes: ZERO,
            max_peak_bytes: ZERO,
            peak_sum: ZERO,
            total_sum: ZERO,
            peaks: [const { ZERO }; BUCKETS],
            totals: [const { ZERO }; BUCKETS],
        }
    }

    /// All that are sums.
    fn numbers(&self) -> impl Iterator<Item = &AtomicU64> {
        let single = [
            &self.requests,
            &self.refused_requests,
            &self.refused_allocations,
            &self.escaped_requests,
            &self.escaped_blocks,
            &self.escaped_bytes,
            &self.peak_sum,
            &self.total_sum,
        ];
        single.into_iter().chain(&self.peaks).chain(&self.totals)
    }

    fn clear(&self) {
        write(&self.version, || {
            self.numbers().chain([&self.max_peak_bytes, &self.name_bytes]).for_each(|number| number.store(0, RELAXED));
        });
    }

    pub(super) fn set_name(&self, name: &[u8]) {
        debug_assert!(name.len() <= MAX_NAME);
        write(&self.version, || {
            for (word, bytes) in self.name.iter().zip(name.chunks(8)) {
                let mut padded = [0; 8];
                padded[..bytes.len()].copy_from_slice(bytes);
                word.store(u64::from_le_bytes(padded), RELAXED);
            }
            self.name_bytes.store(name.len() as u64, RELAXED);
        });
    }

    pub(super) fn is_named(&self, name: &[u8]) -> bool {
        self.name_bytes.load(RELAXED) == name.len() as u64
            && self
                .name
                .iter()
                .zip(name.chunks(8))
                .all(|(word, bytes)| word.load(RELAXED).to_le_bytes().starts_with(bytes))
    }

    /// The name and its length, which is 0 where there is none.
    fn name(&self) -> ([u8; MAX_NAME], usize) {
        let mut name = [0; MAX_NAME];
        name.chunks_mut(8).zip(&self.name).for_each(|(to, word)| to.copy_from_slice(&word.load(RELAXED).to_le_bytes()));
        (name, (self.name_bytes.load(RELAXED) as usize).min(MAX_NAME))
    }

    /// Calls `work` with the name, if there is one.
    pub(super) fn with_name<R>(&self, work: impl FnOnce(&[u8]) -> R) -> Option<R> {
        let (name, length) = self.name();
        (length > 0).then(|| work(&name[..length]))
    }

    pub(super) fn requests(&self) -> u64 {
        self.requests.load(RELAXED)
    }

    /// Counts one request.
    #[inline]
    pub(super) fn add(&self, sample: &Sample) {
        write(&self.version, || {
            add(&self.requests, 1);
            add(&self.peak_sum, sample.peak_bytes);
            add(&self.total_sum, sample.total_bytes);
            add(&self.peaks[bucket_of(sample.peak_bytes)], 1);
            add(&self.totals[bucket_of(sample.total_bytes)], 1);
            if sample.peak_bytes > self.max_peak_bytes.load(RELAXED) {
                self.max_peak_bytes.store(sample.peak_bytes, RELAXED);
            }
            if sample.refused > 0 {
                add(&self.refused_requests, 1);
                add(&self.refused_allocations, sample.refused);
            }
            if sample.escaped_blocks > 0 {
                add(&self.escaped_requests, 1);
                add(&self.escaped_blocks, sample.escaped_blocks);
                add(&self.escaped_bytes, sample.escaped_bytes);
            }
        });
    }

    /// Allocates nothing.
    fn read(&self) -> Read {
        let histogram = |counts: &[AtomicU64; BUCKETS], sum: &AtomicU64| Histogram {
            counts: std::array::from_fn(|bucket| counts[bucket].load(RELAXED)),
            sum: sum.load(RELAXED),
        };
        let (name, name_bytes) = self.name();
        let numbers = Series {
            name: String::new(),
            requests: self.requests.load(RELAXED),
            refused_requests: self.refused_requests.load(RELAXED),
            refused_allocations: self.refused_allocations.load(RELAXED),
            escaped_requests: self.escaped_requests.load(RELAXED),
            escaped_blocks: self.escaped_blocks.load(RELAXED),
            escaped_bytes: self.escaped_bytes.load(RELAXED),
            max_peak_bytes: self.max_peak_bytes.load(RELAXED),
            peak_bytes: histogram(&self.peaks, &self.peak_sum),
            total_bytes: histogram(&self.totals, &self.total_sum),
        };
        Read { name, name_bytes, numbers }
    }
}

#[cfg(all(test, not(ctxalloc_loom)))]
mod tests {
    use super::*;
    use std::thread;

    /// Under Miri with the stale values that a weakly ordered machine shows: `make miri-seeds`.
    #[test]
    fn a_reader_never_sees_half_of_a_write() {
        const WRITES: u64 = 8;
        let (region, done) = (Region::empty(), AtomicU64::new(0));
        let series = region.series(3);
        let look = || {
            read(&series.version, || (series.requests(), series.peak_sum.load(RELAXED), series.total_sum.load(RELAXED)))
        };
        thread::scope(|scope| {
            scope.spawn(|| {
                for _ in 0..WRITES {
                    series.add(&Sample { peak_bytes: 3, total_bytes: 5, ..Sample::default() });
                }
                done.store(1, Ordering::Relaxed);
            });
            while done.load(Ordering::Relaxed) == 0 {
                let (requests, peaks, totals) = look();
                assert_eq!((peaks, totals), (3 * requests, 5 * requests));
            }
        });
        assert_eq!(look(), (WRITES, 3 * WRITES, 5 * WRITES));
    }
}
