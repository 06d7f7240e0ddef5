//! `Merge`: goes through the events of all bodies in the order of time.

use super::bodies::{Bodies, Body, Stretch};
use super::event::Told;
use super::room::{Full, Room};
use super::stream::{LEAST_BYTES, MOST_BYTES, Stream};
use crate::error::Error;
use std::cmp::{Ordering, Reverse};
use std::collections::binary_heap::{BinaryHeap, PeekMut};
use std::mem::replace;

/// An event that was read, and what is left of its body.
#[derive(Debug, Clone)]
struct Cursor {
    told: Told,
    stretch: Stretch,
    /// Where its body's first event is.
    place: u64,
    rest: Stream,
}

impl Cursor {
    /// By time; at one time by request, and then as in the files.
    fn key(&self) -> (u64, u64, u32, u64) {
        let request = match &self.told {
            Told::Event(event) => event.request,
            Told::ThreadEnd { .. } => u64::MAX,
        };
        (self.told.at().0, request, self.stretch.run, self.place)
    }
}

impl PartialEq for Cursor {
    fn eq(&self, other: &Self) -> bool {
        self.key() == other.key()
    }
}

impl Eq for Cursor {}

impl PartialOrd for Cursor {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Cursor {
    fn cmp(&self, other: &Self) -> Ordering {
        self.key().cmp(&other.key())
    }
}

/// So many bodies may overlap: eight of each process that was there at one time. And more in larger files.
const WIDTH: usize = 1024;
const BYTES_FOR_EACH_MORE: u64 = 512;

/// So many are read at once only because they begin at the same time; others wait, and come in the order of the files.
const MAX_TIES: usize = 64;

/// What the bodies that are being read have in memory, as long as few are. Each has at most what is left, divided by
/// this, and at least what an event needs.
const MEMORY_BYTES: usize = 512 << 10;
const PART: usize = 16;

const TOO_WIDE: &str = "more of its frames overlap in time than those of any recording";

/// Goes through all bodies in the order of time. Few are read at one time: those that overlap.
#[derive(Debug, Clone)]
pub(super) struct Merge {
    next: usize,
    reading: BinaryHeap<Reverse<Cursor>>,
    /// What these have in memory.
    memory_bytes: usize,
    /// The most that they had.
    max_bytes: usize,
    pub(super) room: Room,
}

impl Default for Merge {
    fn default() -> Self {
        Self::new(Room::unlimited())
    }
}

/// Something that is told, by which run, behind how many gaps of it, and where its body's first event is.
pub(super) struct Next {
    pub(super) told: Told,
    pub(super) run: u32,
    pub(super) gaps: u32,
    pub(super) place: u64,
}

impl Merge {
    pub(super) fn new(room: Room) -> Self {
        Self { next: 0, reading: BinaryHeap::new(), memory_bytes: 0, max_bytes: 0, room }
    }

    /// The most memory that it had: who goes through the same bodies again needs as much.
    pub(super) fn max_bytes(&self) -> usize {
        self.max_bytes + self.reading.capacity() * size_of::<Cursor>()
    }

    /// The event behind those that were read.
    ///
    /// # Errors
    /// A file was changed, or cannot be read. Once only: more bodies overlap than there is room for.
    pub(super) fn next(&mut self, bodies: &Bodies) -> Result<Option<Next>, Error> {
        while let Some(body) = bodies.get(self.next)
            && self.reading.peek().is_none_or(|Reverse(first)| self.is_due(body, first))
        {
            self.begin(body, bodies)?;
            self.next += 1;
        }
        let Some(mut first) = self.reading.peek_mut() else { return Ok(None) };
        let Reverse(Cursor { told, stretch, place, rest }) = &mut *first;
        let (Stretch { run, gaps }, place) = (*stretch, *place);
        let told = match rest.step(&bodies.files)? {
            Some(later) => replace(told, bodies.joined(run, place, later)?),
            None => {
                let bytes = rest.memory_bytes();
                self.room.give(bytes);
                self.memory_bytes -= bytes;
                PeekMut::pop(first).0.told
            }
        };
        Ok(Some(Next { told, run, gaps, place }))
    }

    /// Whether a body has to be read by now. Where many begin at the same time as what is next they may wait: all that
    /// goes by memory must not, since what is read again has to come in the same order.
    fn is_due(&self, body: Body, first: &Cursor) -> bool {
        let at_ns = first.told.at().0;
        body.first_ns < at_ns || body.first_ns == at_ns && self.reading.len() < MAX_TIES
    }

    fn begin(&mut self, body: Body, bodies: &Bodies) -> Result<(), Error> {
        let (stretch, place) = (bodies.stretch_of(body), body.at());
        let full = |Full(reason)| bodies.files.bad(place - 1, reason);
        if self.reading.len() == self.reading.capacity() {
            let (width, more) = (self.reading.len(), self.reading.len() / 8 + 16);
            let most = WIDTH as u64 + bodies.files.length() / BYTES_FOR_EACH_MORE;
            if width as u64 > most {
                return Err(full(Full(TOO_WIDE)));
            }
            self.room.take_for(more * size_of::<Cursor>(), TOO_WIDE).map_err(full)?;
            self.reading.reserve_exact(more);
        }
        let most = (MEMORY_BYTES.saturating_sub(self.memory_bytes) / PART).clamp(LEAST_BYTES, MOST_BYTES);
        let mut rest = Stream::open(&bodies.files, place, most)?;
        let Some(told) = rest.step(&bodies.files)? else { return Ok(()) };
        let told = bodies.joined(stretch.run, place, told)?;
        self.room.take_for(rest.memory_bytes(), TOO_WIDE).map_err(full)?;
        self.memory_bytes += rest.memory_bytes();
        self.max_bytes = self.max_bytes.max(self.memory_bytes);
        self.reading.push(Reverse(Cursor { told, stretch, place, rest }));
        Ok(())
    }
}
