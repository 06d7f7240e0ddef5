//! `Region`: the counters of one process, in memory that other processes may map. One process writes, under its lock;
//! any number of processes read, without one.
//!
//! A number only ever grows, and a series keeps its name: what a reader saw is never taken back, whoever dies. Each
//! series has a version, which is odd while it is written: a reader that finds it odd, or changed after reading, reads
//! again (a sequence lock). A writer that died in the middle leaves an odd version behind: readers give up waiting, and
//! the next owner makes it even.
//!
//! The buckets of a histogram are in chunks, which it gets as its values need them. A file has memory for the chunks
//! that are in use, and a hole for the rest. (One file of 500 lines: the layout, its one writer and its readers.)

use super::admitted::Admitted;
use super::buckets::{BUCKETS, bucket_of};
use super::snapshot::{Gauges, Histogram, Series};
use std::mem::offset_of;
use std::ops::Range;
use std::sync::atomic::{AtomicU16, AtomicU64, Ordering, fence};

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
fn read<R>(version: &AtomicU64, mut read: impl FnMut() -> R) -> R {
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

    /// All series. `found` must have room for the [`used`](Self::used) chunks where nothing may be allocated.
    pub(super) fn read_into(&self, found: &mut Found) {
        for series in &self.series {
            let begun = found.chunks.len();
            let one = read(&series.version, || {
                found.chunks.truncate(begun); // of a try that saw half of a write
                series.read(&self.chunks, &mut found.chunks)
            });
            found.series.push(one);
        }
    }
}

/// What was read of a region. Fills without allocating if there is room.
pub(super) struct Found {
    series: Vec<Read>,
    chunks: Vec<[u64; CHUNK]>,
}

impl Found {
    pub(super) fn with_room_for(chunks: usize) -> Self {
        Self { series: Vec::with_capacity(SERIES), chunks: Vec::with_capacity(chunks) }
    }

    pub(super) fn has_room_for(&self, chunks: usize) -> bool {
        self.chunks.capacity() >= chunks
    }

    /// The series in which something was counted.
    pub(super) fn into_series(self) -> impl Iterator<Item = Series> {
        let Self { series, chunks } = self;
        series.into_iter().map(move |one| one.series(&chunks)).filter(Series::has_counted)
    }
}

/// A series as it was read: its name in bytes, and where its chunks are.
struct Read {
    name: [u8; MAX_NAME],
    name_bytes: usize,
    numbers: Series,
    histograms: [ReadBuckets; HISTOGRAMS],
}

struct ReadBuckets {
    sum: u64,
    beyond: u64,
    /// The first of its chunks, which are in one row.
    first: usize,
    /// Bit by bit, which of its parts are there.
    parts: u64,
}

const _: () = assert!(PARTS <= u64::BITS as usize && CHUNKS < u16::MAX as usize);

impl Read {
    fn series(self, chunks: &[[u64; CHUNK]]) -> Series {
        let name = String::from_utf8_lossy(&self.name[..self.name_bytes]).into_owned();
        let [peak_bytes, refused_peak_bytes, total_bytes, waited_micros] =
            self.histograms.map(|one| one.histogram(chunks));
        Series { name, peak_bytes, refused_peak_bytes, total_bytes, waited_micros, ..self.numbers }
    }
}

impl ReadBuckets {
    fn histogram(self, chunks: &[[u64; CHUNK]]) -> Histogram {
        let parts = (0..PARTS).filter(|part| self.parts >> part & 1 == 1);
        let counts = parts
            .zip(&chunks[self.first..])
            .flat_map(|(part, chunk)| chunk.iter().enumerate().map(move |(at, count)| (part * CHUNK + at, *count)));
        Histogram::new(counts.chain([(BUCKETS, self.beyond)]), self.sum)
    }
}

impl Buckets {
    const fn empty() -> Self {
        Self { sum: ZERO, beyond: ZERO, parts: [const { AtomicU16::new(0) }; PARTS] }
    }

    fn clear(&self) {
        self.sum.store(0, RELAXED);
        self.beyond.store(0, RELAXED);
        self.parts.iter().for_each(|part| part.store(0, RELAXED));
    }

    fn read(&self, chunks: &[Chunk], found: &mut Vec<[u64; CHUNK]>) -> ReadBuckets {
        let (first, mut parts) = (found.len(), 0);
        for (at, part) in self.parts.iter().enumerate() {
            let number = usize::from(part.load(RELAXED));
            // One that is out of bounds is in a file that somebody else wrote to.
            if let Some(chunk) = number.checked_sub(1).and_then(|number| chunks.get(number)) {
                parts |= 1 << at;
                found.push(std::array::from_fn(|bucket| chunk[bucket].load(RELAXED)));
            }
        }
        ReadBuckets { sum: self.sum.load(RELAXED), beyond: self.beyond.load(RELAXED), first, parts }
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
            whole_requests: ZERO,
            whole_bytes: [const { ZERO }; 3],
            timed_out: ZERO,
            turned_away: ZERO,
            histograms: [const { Buckets::empty() }; HISTOGRAMS],
        }
    }

    fn clear(&self) {
        let numbers = [
            &self.name_bytes,
            &self.requests,
            &self.refused_requests,
            &self.refused_allocations,
            &self.escaped_requests,
            &self.escaped_blocks,
            &self.escaped_bytes,
            &self.max_peak_bytes,
            &self.whole_requests,
            &self.timed_out,
            &self.turned_away,
        ];
        write(&self.version, || {
            numbers.into_iter().chain(&self.whole_bytes).for_each(|number| number.store(0, RELAXED));
            self.histograms.iter().for_each(Buckets::clear);
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

    /// All but the histograms.
    #[inline]
    fn add(&self, sample: &Sample) {
        add(&self.requests, 1);
        if sample.peak_bytes > self.max_peak_bytes.load(RELAXED) {
            self.max_peak_bytes.store(sample.peak_bytes, RELAXED);
        }
        if sample.refused > 0 {
            add(&self.refused_requests, 1);
            add(&self.refused_allocations, sample.refused);
        }
        if let Some(parts) = sample.whole {
            add(&self.whole_requests, 1);
            self.whole_bytes.iter().zip(parts).for_each(|(sum, part)| add(sum, part));
        }
        if sample.escaped_blocks > 0 {
            self.add_escapes(sample.escaped_blocks, sample.escaped_bytes);
        }
    }

    fn add_escapes(&self, blocks: u64, bytes: u64) {
        add(&self.escaped_requests, 1);
        add(&self.escaped_blocks, blocks);
        add(&self.escaped_bytes, bytes);
    }

    fn read(&self, chunks: &[Chunk], found: &mut Vec<[u64; CHUNK]>) -> Read {
        let (name, name_bytes) = self.name();
        let numbers = Series {
            requests: self.requests.load(RELAXED),
            refused_requests: self.refused_requests.load(RELAXED),
            refused_allocations: self.refused_allocations.load(RELAXED),
            escaped_requests: self.escaped_requests.load(RELAXED),
            escaped_blocks: self.escaped_blocks.load(RELAXED),
            escaped_bytes: self.escaped_bytes.load(RELAXED),
            max_peak_bytes: self.max_peak_bytes.load(RELAXED),
            whole_requests: self.whole_requests.load(RELAXED),
            whole_array_bytes: self.whole_bytes[0].load(RELAXED),
            whole_native_bytes: self.whole_bytes[1].load(RELAXED),
            whole_object_bytes: self.whole_bytes[2].load(RELAXED),
            timed_out: self.timed_out.load(RELAXED),
            turned_away: self.turned_away.load(RELAXED),
            ..Series::default()
        };
        let histograms = std::array::from_fn(|at| self.histograms[at].read(chunks, found));
        Read { name, name_bytes, numbers, histograms }
    }
}

#[cfg(all(test, not(ctxalloc_loom)))]
mod tests {
    use super::*;
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
