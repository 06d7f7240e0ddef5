//! `Bodies`: where in a recording's files events are, and the order in which they are read. They stay there: an event
//! has some seven bytes in a file, and would have ten times as many as a value.

use super::event::{Event, Told, What};
use super::opened::{CHANGED, Files, MAX_BYTES};
use super::room::{Full, Room};
use super::run::Highest;
use super::texts::NumberedNames;
use crate::error::Error;
use std::fmt;

/// A body of events. A file may be made of the smallest ones, so it is little.
#[derive(Debug, Clone, Copy)]
pub(super) struct Body {
    /// Its first event's time, by the clock of its process until they are joined.
    pub(super) first_ns: u64,
    /// Where its events begin, behind a head and its first byte, and above that which stretch it is in.
    place: u64,
}

impl Body {
    /// The place of its first event.
    pub(super) fn at(self) -> u64 {
        self.place & HIGHEST_PLACE
    }

    fn stretch(self) -> usize {
        (self.place >> PLACE_BITS) as usize
    }
}

const PLACE_BITS: u32 = MAX_BYTES.ilog2();
const HIGHEST_PLACE: u64 = MAX_BYTES - 1;

/// Bodies of one process one after the other, without a gap.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Stretch {
    pub(super) run: u32,
    /// Behind how many gaps of its process they are.
    pub(super) gaps: u32,
}

/// So many stretches have room beside those that have enough bytes in the files.
const STRETCHES: usize = 1024;
const BYTES_FOR_EACH_STRETCH: usize = 64;

/// What makes the numbers of a process those of the recording.
#[derive(Debug, Clone, Default)]
pub(super) struct Numbers {
    pub(super) later_ns: u64,
    pub(super) requests: u64,
    pub(super) blocks: u64,
    pub(super) threads: u32,
    pub(super) highest: Highest,
    /// Its last event, by the recording's clock, if it says when threads end.
    pub(super) until_ns: Option<u64>,
    pub(super) names: NumberedNames,
    pub(super) handlers: NumberedNames,
    pub(super) no_name: u32,
    pub(super) no_handler: u32,
}

/// The bodies of the files.
#[derive(Default)]
pub(super) struct Bodies {
    pub(super) files: Files,
    all: Vec<Body>,
    stretches: Vec<Stretch>,
    /// By run.
    pub(super) numbers: Vec<Numbers>,
}

impl fmt::Debug for Bodies {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bodies in {:?}", self.all.len(), self.files)
    }
}

impl Bodies {
    /// Adds one of files of so many bytes, whose first event is at this place. False: there are too many stretches.
    pub(super) fn push(
        &mut self,
        first_ns: u64,
        at: u64,
        stretch: Stretch,
        bytes: u64,
        room: &mut Room,
    ) -> Result<bool, Full> {
        if self.stretches.last() != Some(&stretch) {
            let more = usize::try_from(bytes).unwrap_or(usize::MAX) / BYTES_FOR_EACH_STRETCH;
            if self.stretches.len() >= more.saturating_add(STRETCHES).min(1 << (u64::BITS - PLACE_BITS)) {
                return Ok(false);
            }
            room.push(&mut self.stretches, stretch)?;
        }
        let place = (self.stretches.len() as u64 - 1) << PLACE_BITS | at & HIGHEST_PLACE;
        room.push(&mut self.all, Body { first_ns, place })?;
        Ok(true)
    }

    /// Forgets those from this place on.
    pub(super) fn forget_from(&mut self, place: u64) {
        while self.all.pop_if(|body| body.at() >= place).is_some() {}
    }

    /// Gives all the recording's clock, and puts them in the order of their times.
    pub(super) fn sort(&mut self) {
        let Self { all, stretches, numbers, .. } = self;
        for body in &mut *all {
            body.first_ns += numbers[stretches[body.stretch()].run as usize].later_ns;
        }
        all.sort_unstable_by_key(|body| (body.first_ns, stretches[body.stretch()].run, body.at()));
        all.shrink_to_fit();
    }

    /// What they take of memory, without the files' list.
    pub(super) fn memory_bytes(&self) -> usize {
        let names = |numbers: &Numbers| numbers.names.memory_bytes() + numbers.handlers.memory_bytes();
        self.all.capacity() * size_of::<Body>()
            + self.stretches.capacity() * size_of::<Stretch>()
            + self.numbers.iter().map(|numbers| size_of::<Numbers>() + names(numbers)).sum::<usize>()
            + self.files.memory_bytes()
    }

    /// The one that comes after so many.
    pub(super) fn get(&self, at: usize) -> Option<Body> {
        self.all.get(at).copied()
    }

    pub(super) fn stretch_of(&self, body: Body) -> Stretch {
        self.stretches[body.stretch()]
    }

    /// The places of the events of a run so far, body by body.
    pub(super) fn of_run(&self, run: u32) -> impl Iterator<Item = u64> {
        self.all.iter().filter(move |&&body| self.stretch_of(body).run == run).map(|body| body.at())
    }

    /// What a body at this place tells, as the recording has it.
    ///
    /// # Errors
    /// Its numbers are not those that were there when it was read first.
    pub(super) fn joined(&self, run: u32, place: u64, mut told: Told) -> Result<Told, Error> {
        let numbers = &self.numbers[run as usize];
        if !is_within(&told, &numbers.highest) {
            return Err(self.files.bad(place - 1, CHANGED));
        }
        let link = |number: u64| match number {
            0 => 0,
            _ if number > numbers.highest.request => 0, // no request of this process
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
                        *name = numbers.names.get(u64::from(*name)).unwrap_or(numbers.no_name);
                        *handler = numbers.handlers.get(u64::from(*handler)).unwrap_or(numbers.no_handler);
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
        Ok(told)
    }
}

fn is_within(told: &Told, highest: &Highest) -> bool {
    let (at_ns, thread) = told.at();
    let (request, block) = match *told {
        Told::ThreadEnd { .. } => (0, 0),
        Told::Event(Event { request, what, .. }) => match what {
            What::Allocate { block, .. } | What::Resize { block, .. } | What::Free { block } => (request, block),
            _ => (request, 0),
        },
    };
    at_ns <= highest.at_ns && thread <= highest.thread && request <= highest.request && block <= highest.block
}
