//! What a process reads of a region, its own or another's: without a lock, while its owner may write.

use super::sequence::{RELAXED, read};
use super::{Buckets, CHUNK, CHUNKS, Chunk, Counters, HISTOGRAMS, MAX_NAME, PARTS, Region, SERIES};
use crate::counters::buckets::BUCKETS;
use crate::counters::snapshot::{Histogram, Series};

/// What was read of a region. Fills without allocating if there is room.
pub(in crate::counters) struct Found {
    series: Vec<Read>,
    chunks: Vec<[u64; CHUNK]>,
}

impl Found {
    pub(in crate::counters) fn with_room_for(chunks: usize) -> Self {
        Self { series: Vec::with_capacity(SERIES), chunks: Vec::with_capacity(chunks) }
    }

    pub(in crate::counters) fn has_room_for(&self, chunks: usize) -> bool {
        self.chunks.capacity() >= chunks
    }

    /// The series in which something was counted.
    pub(in crate::counters) fn into_series(self) -> impl Iterator<Item = Series> {
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

impl Region {
    /// All series. `found` must have room for the [`used`](Self::used) chunks where nothing may be allocated.
    pub(in crate::counters) fn read_into(&self, found: &mut Found) {
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

impl Counters {
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

impl Buckets {
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
