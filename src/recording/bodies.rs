//! `Bodies`: the events of a recording as its files have them, and the order in which they are read. They stay encoded:
//! an event has some seven bytes there, and would have ten times as many as a value.

use super::encoded::{Before, read_event};
use super::event::{Told, What};
use super::wire::{Bytes, HEAD_BYTES};
use std::cmp::{Ordering, Reverse};
use std::collections::BTreeMap;
use std::collections::binary_heap::{BinaryHeap, PeekMut};
use std::fmt;
use std::mem::replace;

/// A body of events.
#[derive(Debug, Clone, Copy)]
pub(super) struct Body {
    /// Its first event's time, by the clock of its process until they are joined.
    pub(super) first_ns: u64,
    /// Where its events begin, behind a head and its first byte.
    pub(super) at: u64,
    pub(super) run: u32,
    /// Behind how many gaps of its process it is.
    pub(super) gaps: u32,
}

/// What makes the numbers of a process those of the recording.
#[derive(Debug, Clone, Default)]
pub(super) struct Numbers {
    pub(super) later_ns: u64,
    pub(super) requests: u64,
    pub(super) blocks: u64,
    pub(super) threads: u32,
    pub(super) highest_request: u64,
    /// Its last event, by the recording's clock, if it says when threads end.
    pub(super) until_ns: Option<u64>,
    pub(super) names: BTreeMap<u64, u32>,
    pub(super) handlers: BTreeMap<u64, u32>,
    pub(super) no_name: u32,
    pub(super) no_handler: u32,
}

/// The files' bytes, and the bodies in them.
#[derive(Clone, Default)]
pub(super) struct Bodies {
    pub(super) bytes: Vec<u8>,
    pub(super) all: Vec<Body>,
    /// By run.
    pub(super) numbers: Vec<Numbers>,
}

impl fmt::Debug for Bodies {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bodies in {} bytes", self.all.len(), self.bytes.len())
    }
}

impl Bodies {
    /// Adds one, without room for many more.
    pub(super) fn push(&mut self, body: Body) {
        if self.all.len() == self.all.capacity() {
            self.all.reserve_exact(self.all.len() / 8 + 64);
        }
        self.all.push(body);
    }

    /// Its events.
    fn of(&self, body: &Body) -> &[u8] {
        events_at(&self.bytes, body)
    }

    /// As the recording has it.
    fn joined(&self, run: u32, mut told: Told) -> Told {
        let numbers = &self.numbers[run as usize];
        let link = |number: u64| match number {
            0 => 0,
            _ if number > numbers.highest_request => 0, // no request of this process
            _ => number + numbers.requests,
        };
        match &mut told {
            Told::ThreadEnd { at_ns, thread } => {
                (*at_ns, *thread) = (*at_ns + numbers.later_ns, *thread + numbers.threads);
            }
            Told::Event(event) => {
                event.at_ns += numbers.later_ns;
                event.thread += numbers.threads;
                event.request += numbers.requests;
                match &mut event.what {
                    What::Begin { name, handler, parent } => {
                        *name = numbers.names.get(&u64::from(*name)).copied().unwrap_or(numbers.no_name);
                        *handler = numbers.handlers.get(&u64::from(*handler)).copied().unwrap_or(numbers.no_handler);
                        *parent = link(*parent);
                    }
                    What::Allocate { block, .. } | What::Resize { block, .. } | What::Free { block } => {
                        *block += numbers.blocks;
                    }
                    What::Refused { by, .. } => *by = link(*by),
                    What::End { .. } => {}
                }
            }
        }
        told
    }
}

/// The events of a body. The head before it, and before its first byte, says how long it is with that.
pub(super) fn events_at<'a>(bytes: &'a [u8], body: &Body) -> &'a [u8] {
    let at = body.at as usize;
    let head = &bytes[at - 1 - HEAD_BYTES..];
    let length = u32::from_le_bytes([head[0], head[1], head[2], head[3]]) as usize - 1;
    &bytes[at..at + length]
}

/// What is left of a body that is being read.
#[derive(Debug, Clone)]
struct Rest {
    run: u32,
    gaps: u32,
    body: u64,
    next: usize,
    end: usize,
    before: Before,
}

impl Rest {
    fn of(body: &Body, bodies: &Bodies) -> Self {
        let next = body.at as usize;
        let end = next + bodies.of(body).len();
        Self { run: body.run, gaps: body.gaps, body: body.at, next, end, before: Before::default() }
    }

    /// The next event; `None` at the body's end.
    fn step(&mut self, bodies: &Bodies) -> Option<Told> {
        let mut bytes = Bytes { rest: &bodies.bytes[self.next..self.end] };
        if bytes.rest.is_empty() {
            return None;
        }
        let told = read_event(&mut bytes, &mut self.before)?;
        self.next = self.end - bytes.rest.len();
        Some(bodies.joined(self.run, told))
    }
}

/// An event that was read, and what is left of its body.
#[derive(Debug, Clone)]
struct Cursor {
    told: Told,
    rest: Rest,
}

impl Cursor {
    /// By time; at one time by request, and then as in the files.
    fn key(&self) -> (u64, u64, u32, u64) {
        let request = match &self.told {
            Told::Event(event) => event.request,
            Told::ThreadEnd { .. } => u64::MAX,
        };
        (self.told.at().0, request, self.rest.run, self.rest.body)
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
const BYTES_FOR_EACH_MORE: usize = 256;

/// Goes through all bodies in the order of time. Few are read at one time: those that overlap.
#[derive(Debug, Clone, Default)]
pub(super) struct Merge {
    next: usize,
    reading: BinaryHeap<Reverse<Cursor>>,
}

/// Something that is told, by which run, and behind how many gaps of it.
pub(super) struct Next {
    pub(super) told: Told,
    pub(super) run: u32,
    pub(super) gaps: u32,
}

impl Merge {
    /// Whether more bodies overlap than it reads at one time: what comes next is not in order.
    pub(super) fn is_too_wide(&self, bodies: &Bodies) -> bool {
        self.reading.len() > WIDTH + bodies.bytes.len() / BYTES_FOR_EACH_MORE
    }

    pub(super) fn next(&mut self, bodies: &Bodies) -> Option<Next> {
        while let Some(body) = bodies.all.get(self.next)
            && !self.is_too_wide(bodies)
            && self.reading.peek().is_none_or(|Reverse(first)| body.first_ns <= first.told.at().0)
        {
            self.next += 1;
            let mut rest = Rest::of(body, bodies);
            if let Some(told) = rest.step(bodies) {
                self.reading.push(Reverse(Cursor { told, rest }));
            }
        }
        let mut first = self.reading.peek_mut()?;
        let Reverse(Cursor { told, rest }) = &mut *first;
        let (run, gaps) = (rest.run, rest.gaps);
        let told = match rest.step(bodies) {
            Some(later) => replace(told, later),
            None => PeekMut::pop(first).0.told,
        };
        Some(Next { told, run, gaps })
    }
}
