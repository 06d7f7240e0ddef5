//! `Region`: the counters of one process, in memory that other processes may map. One process writes, under its lock;
//! any number of processes read, without one.
//!
//! A number only ever grows, and a series keeps its name: what a reader saw is never taken back, whoever dies. Each
//! series has a version, which is odd while it is written: a reader that finds it odd, or changed after reading, reads
//! again (a sequence lock). A writer that died in the middle leaves an odd version behind: readers give up waiting, and
//! the next owner makes it even.
//!
//! The buckets of a histogram are in chunks, which it gets as its values need them. A file has memory for the chunks
//! that are in use, and a hole for the rest.
//!
//! Here are the layout and its one writer; `counters` writes a series, `read` has what readers do, `sequence` the lock.

mod counters;
mod read;
mod sequence;

use super::admitted::Admitted;
use super::buckets::{BUCKETS, bucket_of};
use super::snapshot::Gauges;
pub(super) use read::Found;
use sequence::{RELAXED, add, write};
use std::mem::offset_of;
use std::ops::Range;
use std::sync::atomic::{AtomicU16, AtomicU64};

/// Series in a region, with the two that stand for others. Fewer under Miri, which keeps the history of each atomic; no
/// test that it runs asks for a name's numbers.
pub(super) const SERIES: usize = if cfg!(miri) { 6 } else { 130 };
/// The longest name in bytes; a longer one is cut.
pub(super) const MAX_NAME: usize = 128;

/// `ctxalloc`, and the version of this layout: raise it when a field of [`Region`] or [`Counters`] is added, moved or
/// gets another meaning, so that no process takes over or reads a file of another layout.
const MAGIC: u64 = u64::from_le_bytes(*b"ctxalloc");
const VERSION: u64 = 3;

/// Buckets of a chunk.
const CHUNK: usize = 16;
/// Chunks that one histogram can have. Fewer under Miri, as above: values beyond `2^16` have no bucket there.
const PARTS: usize = if cfg!(miri) { 17 } else { BUCKETS.div_ceil(CHUNK) };
/// Enough for all histograms, whatever they count.
const CHUNKS: usize = SERIES * HISTOGRAMS * PARTS;
/// So many chunks get memory at a time.
const GROWTH: usize = 64;

/// What a request adds at its end.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Sample {
    pub(crate) peak_bytes: u64,
    pub(crate) total_bytes: u64,
    pub(crate) refused: u64,
    pub(crate) escaped_blocks: u64,
    pub(crate) escaped_bytes: u64,
    /// What of its peak was arrays, native memory and objects, if it counted that.
    pub(crate) whole: Option<[u64; 3]>,
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
    gauges: [AtomicU64; 5],
    /// The chunks that histograms have.
    used: AtomicU64,
    /// The chunks that have memory.
    backed: AtomicU64,
    series: [Counters; SERIES],
    chunks: [Chunk; CHUNKS],
}

type Chunk = [AtomicU64; CHUNK];

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
    whole_requests: AtomicU64,
    whole_bytes: [AtomicU64; 3],
    timed_out: AtomicU64,
    turned_away: AtomicU64,
    histograms: [Buckets; HISTOGRAMS],
}

/// The histograms of a series, in this order.
const PEAKS: usize = 0;
const REFUSED_PEAKS: usize = 1;
const TOTALS: usize = 2;
const WAITS: usize = 3;
const HISTOGRAMS: usize = 4;

#[repr(C)]
#[derive(Debug)]
struct Buckets {
    sum: AtomicU64,
    /// Values that are too large for a bucket, or for whose bucket the file system had no room.
    beyond: AtomicU64,
    /// Where its chunks are: one more than the number; 0 where it has none yet.
    parts: [AtomicU16; PARTS],
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
            gauges: [const { ZERO }; 5],
            used: ZERO,
            backed: ZERO,
            series: [const { Counters::empty() }; SERIES],
            chunks: [const { [const { ZERO }; CHUNK] }; CHUNKS],
        }
    }

    /// The part of it that has memory from the beginning.
    pub(super) const BASE_BYTES: usize = offset_of!(Self, chunks);

    /// Whether no process has taken it yet.
    pub(super) fn is_blank(&self) -> bool {
        self.magic.load(RELAXED) == 0
    }

    /// Makes it the calling process's. False: it is of another version, or no region at all.
    pub(super) fn take(&self, pid: u32, started: u64) -> bool {
        match (self.magic.load(RELAXED), self.version.load(RELAXED)) {
            (0, 0) => {
                self.version.store(VERSION, RELAXED);
                self.magic.store(MAGIC, RELAXED);
            }
            (MAGIC, VERSION) => {}
            _ => return false,
        }
        self.set_gauges(Gauges::default());
        self.pid.store(u64::from(pid), RELAXED);
        self.started.store(started, RELAXED);
        let versions = self.series.iter().map(|series| &series.version);
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
        let Gauges { live_requests, live_bytes, escaping_requests, escaped_bytes, waiting_requests } = gauges;
        let all = [live_requests, live_bytes, escaping_requests, escaped_bytes, waiting_requests];
        self.gauges.iter().zip(all).for_each(|(gauge, value)| gauge.store(value, RELAXED));
    }

    pub(super) fn gauges(&self) -> Gauges {
        let [live_requests, live_bytes, escaping_requests, escaped_bytes, waiting_requests] =
            std::array::from_fn(|number| self.gauges[number].load(RELAXED));
        Gauges { live_requests, live_bytes, escaping_requests, escaped_bytes, waiting_requests }
    }

    /// Forgets everything.
    pub(super) fn clear(&self) {
        self.series.iter().for_each(Counters::clear);
        self.chunks[..self.used()].iter().flatten().for_each(|count| count.store(0, RELAXED));
        self.used.store(0, RELAXED);
        self.set_gauges(Gauges::default());
    }

    /// The chunks that histograms have.
    pub(super) fn used(&self) -> usize {
        (self.used.load(RELAXED) as usize).min(CHUNKS)
    }

    /// Counts one request. `grow` gives memory to these bytes of the region, unless there is none.
    #[inline]
    pub(super) fn add(&self, number: usize, sample: &Sample, grow: impl Fn(Range<usize>) -> bool) {
        let series = &self.series[number];
        write(&series.version, || {
            series.add(sample);
            self.count(&series.histograms[PEAKS], sample.peak_bytes, &grow);
            self.count(&series.histograms[TOTALS], sample.total_bytes, &grow);
            if sample.refused > 0 {
                self.count(&series.histograms[REFUSED_PEAKS], sample.peak_bytes, &grow);
            }
        });
    }

    /// Counts what has escaped of a request that was counted without.
    #[cfg(feature = "python")]
    pub(super) fn add_escapes(&self, number: usize, blocks: u64, bytes: u64) {
        let series = &self.series[number];
        write(&series.version, || series.add_escapes(blocks, bytes));
    }

    /// Counts one that did not get its reservation at once.
    pub(super) fn add_admission(&self, number: usize, admitted: Admitted, grow: impl Fn(Range<usize>) -> bool) {
        let series = &self.series[number];
        write(&series.version, || match admitted {
            Admitted::Waited(time) => {
                let micros = u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
                self.count(&series.histograms[WAITS], micros, &grow);
            }
            Admitted::TimedOut => add(&series.timed_out, 1),
            Admitted::TurnedAway => add(&series.turned_away, 1),
        });
    }

    #[inline]
    fn count(&self, buckets: &Buckets, value: u64, grow: &impl Fn(Range<usize>) -> bool) {
        add(&buckets.sum, value);
        let count = bucket_of(value).and_then(|bucket| {
            let part = buckets.parts.get(bucket / CHUNK)?;
            let chunk = match part.load(RELAXED) {
                0 => self.new_chunk(part, grow),
                number => self.chunks.get(usize::from(number) - 1),
            };
            Some(&chunk?[bucket % CHUNK])
        });
        add(count.unwrap_or(&buckets.beyond), 1);
    }

    /// Gives a chunk to a histogram.
    #[cold]
    fn new_chunk(&self, part: &AtomicU16, grow: &impl Fn(Range<usize>) -> bool) -> Option<&Chunk> {
        let (number, backed) = (self.used(), self.backed.load(RELAXED) as usize);
        let chunk = self.chunks.get(number)?;
        if number >= backed {
            let end = (number + GROWTH).min(CHUNKS);
            if !grow(Self::BASE_BYTES + number * size_of::<Chunk>()..Self::BASE_BYTES + end * size_of::<Chunk>()) {
                return None;
            }
            self.backed.store(end as u64, RELAXED);
        }
        // In this order: whoever dies between the two has lost a chunk, and no two histograms have the same one.
        self.used.store(number as u64 + 1, RELAXED);
        part.store(number as u16 + 1, RELAXED);
        Some(chunk)
    }
}

#[cfg(all(test, not(ctxalloc_loom)))]
mod tests {
    use super::*;
    use crate::counters::snapshot::Series;
    use std::sync::atomic::Ordering;
    use std::thread;

    fn one(region: &Region) -> Series {
        let mut found = Found::with_room_for(region.used());
        region.read_into(&mut found);
        found.into_series().next().unwrap_or_default()
    }

    /// Under Miri with the stale values that a weakly ordered machine shows: `make miri-seeds`.
    #[test]
    fn a_reader_never_sees_half_of_a_write() {
        const WRITES: u64 = 8;
        static REGION: Region = Region::empty(); // too large for a thread's stack
        let done = AtomicU64::new(0);
        let sums = |series: &Series| (series.requests, series.peak_bytes.sum, series.total_bytes.sum);
        thread::scope(|scope| {
            scope.spawn(|| {
                for number in 0..WRITES {
                    // Each in a chunk of its own.
                    let sample = Sample { peak_bytes: 4 << (2 * number), total_bytes: 5, ..Sample::default() };
                    REGION.add(3, &sample, |_| true);
                }
                done.store(1, Ordering::Relaxed);
            });
            while done.load(Ordering::Relaxed) == 0 {
                let seen = one(&REGION);
                assert_eq!(seen.peak_bytes.count(), seen.requests);
                assert_eq!((seen.total_bytes.count(), seen.total_bytes.sum), (seen.requests, 5 * seen.requests));
            }
        });
        assert_eq!(sums(&one(&REGION)), (WRITES, (4 << (2 * WRITES)) / 3 - 1, 5 * WRITES));
    }

    #[test]
    fn a_value_without_a_bucket_is_counted_all_the_same() {
        static REGION: Region = Region::empty();
        let too_large = Sample { peak_bytes: u64::MAX, ..Sample::default() };
        REGION.add(5, &too_large, |_| true);
        REGION.add(5, &Sample { peak_bytes: 1000, ..too_large }, |_| true);
        let seen = one(&REGION);
        assert_eq!(seen.peak_bytes.buckets().collect::<Vec<_>>(), [(1024, 1), (u64::MAX, 1)]);

        static FULL: Region = Region::empty();
        FULL.add(5, &Sample { peak_bytes: 1000, refused: 1, ..Sample::default() }, |_| false);
        let seen = one(&FULL);
        for histogram in [&seen.peak_bytes, &seen.refused_peak_bytes, &seen.total_bytes] {
            assert_eq!(histogram.buckets().collect::<Vec<_>>(), [(u64::MAX, 1)]);
        }
        assert_eq!((seen.requests, seen.peak_bytes.sum), (1, 1000));
    }
}
