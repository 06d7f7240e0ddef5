//! `Stream`: the events of one body, of which some bytes at a time are in memory.

use super::encoded::{Before, read_event};
use super::event::Told;
use super::opened::{CHANGED, Files};
use super::wire::{Bytes, HEAD_BYTES, MAX_BODY_BYTES, MAX_EVENT_BYTES};
use crate::error::Error;

/// Behind the head and the body's first byte events begin.
pub(super) const BEFORE_EVENTS: u64 = HEAD_BYTES as u64 + 1;

/// What a body that a recorder writes fits into: it begins another one after 16 KiB.
pub(super) const MOST_BYTES: usize = 17 << 10;
/// The least that works: a head, or an event.
pub(super) const LEAST_BYTES: usize = 256;

const _: () = assert!(LEAST_BYTES > MAX_EVENT_BYTES && LEAST_BYTES > HEAD_BYTES);

/// What is left of a body that is being read.
#[derive(Debug, Clone)]
pub(super) struct Stream {
    /// What was read of it.
    bytes: Box<[u8]>,
    /// How many of them are behind us, and how many are known.
    at: usize,
    known: usize,
    /// The place behind those that are known, and that of the body's end.
    next: u64,
    end: u64,
    before: Before,
}

impl Stream {
    /// Begins with the events at this place, in so many bytes of memory or fewer. The body's checksum is looked at.
    ///
    /// # Errors
    /// The file was changed, or cannot be read.
    pub(super) fn open(files: &Files, place: u64, memory_bytes: usize) -> Result<Self, Error> {
        let changed = || files.bad(place.saturating_sub(1), CHANGED);
        let begin = place.checked_sub(BEFORE_EVENTS).ok_or_else(changed)?;
        // Most bodies of a server that has little to do are complete with this.
        let mut start = [0; LEAST_BYTES];
        let there = files.rest(begin).min(LEAST_BYTES as u64) as usize;
        files.read(begin, &mut start[..there])?;
        let [a, b, c, d, .., e, f, g, h] = *start.first_chunk::<HEAD_BYTES>().ok_or_else(changed)?;
        let body_bytes = u32::from_le_bytes([a, b, c, d]) as usize;
        if there <= HEAD_BYTES || body_bytes == 0 || body_bytes > MAX_BODY_BYTES {
            return Err(changed());
        }
        let size = (HEAD_BYTES + body_bytes).min(memory_bytes.max(LEAST_BYTES));
        let mut bytes = vec![0; size].into_boxed_slice();
        let there = there.min(size);
        bytes[..there].copy_from_slice(&start[..there]);
        files.read(begin + there as u64, &mut bytes[there..])?;
        let mut hasher = crc32fast::Hasher::new();
        hasher.update(&bytes[HEAD_BYTES..]);
        let (next, end) = (begin + size as u64, begin + (HEAD_BYTES + body_bytes) as u64);
        let mut at = next;
        while at < end {
            // The rest of a long body, which is read a second time.
            let count = usize::try_from(end - at).map_or(size, |rest| rest.min(size));
            files.read(at, &mut bytes[..count])?;
            hasher.update(&bytes[..count]);
            at += count as u64;
        }
        if hasher.finalize() != u32::from_le_bytes([e, f, g, h]) {
            return Err(changed());
        }
        if next < end {
            files.read(begin, &mut bytes)?;
        }
        Ok(Self { bytes, at: HEAD_BYTES + 1, known: size, next, end, before: Before::default() })
    }

    pub(super) fn memory_bytes(&self) -> usize {
        self.bytes.len()
    }

    /// The next event; `None` at the body's end.
    ///
    /// # Errors
    /// The file was changed, or cannot be read.
    #[inline]
    pub(super) fn step(&mut self, files: &Files) -> Result<Option<Told>, Error> {
        if self.known - self.at < MAX_EVENT_BYTES && self.next < self.end {
            self.load(files)?;
        }
        let mut bytes = Bytes { rest: &self.bytes[self.at..self.known] };
        if bytes.rest.is_empty() {
            return Ok(None);
        }
        let told = read_event(&mut bytes, &mut self.before).ok_or_else(|| files.bad(self.next, CHANGED))?;
        self.at = self.known - bytes.rest.len();
        Ok(Some(told))
    }

    #[cold]
    fn load(&mut self, files: &Files) -> Result<(), Error> {
        self.bytes.copy_within(self.at..self.known, 0);
        (self.at, self.known) = (0, self.known - self.at);
        let room = self.bytes.len() - self.known;
        let count = usize::try_from(self.end - self.next).map_or(room, |rest| rest.min(room));
        files.read(self.next, &mut self.bytes[self.known..self.known + count])?;
        self.known += count;
        self.next += count as u64;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::encoded::Events;
    use super::super::event::{Event, Told, What};
    use super::super::opened::Files;
    use super::super::wire::frame;
    use super::{BEFORE_EVENTS, LEAST_BYTES, MOST_BYTES, Stream};

    fn body(count: u64) -> (Vec<Told>, Vec<u8>) {
        let mut body = Events::new();
        let events = (0..count).map(|at| Event::new(at << at.min(40), at as u32, at, What::Free { block: at * at }));
        let told = events.inspect(|event| body.push(event)).map(Told::Event).collect();
        (told, frame(&body.take()))
    }

    #[test]
    fn a_body_is_the_same_in_little_memory() {
        let (told, bytes) = body(30_000);
        assert!(bytes.len() > 4 * MOST_BYTES);
        let files = Files::of_bytes([bytes.as_slice(), &[9; 1000]].concat());
        for memory in [LEAST_BYTES, 1000, MOST_BYTES, 1 << 20] {
            let mut stream = Stream::open(&files, BEFORE_EVENTS, memory).expect("a body");
            assert!(stream.memory_bytes() <= memory);
            let found = std::iter::from_fn(|| stream.step(&files).expect("an event"));
            assert!(found.eq(told.iter().cloned()), "{memory}");
        }
    }

    #[test]
    fn a_body_that_was_changed_is_an_error() {
        let (_, good) = body(200);
        for at in 8..good.len() {
            let mut bytes = good.clone();
            bytes[at] ^= 1;
            assert!(Stream::open(&Files::of_bytes(bytes), BEFORE_EVENTS, LEAST_BYTES).is_err(), "byte {at}");
        }
        let short = Files::of_bytes(good[..good.len() - 1].to_vec());
        assert!(Stream::open(&short, BEFORE_EVENTS, MOST_BYTES).is_err());
    }
}
