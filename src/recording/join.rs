//! Puts the events of all processes in the order of time, each request, block and thread with a number of its own.

use super::bodies::{Bodies, Numbers};
use super::encoded::Process;
use super::event::{Event, Told, What};
use super::merge::{Merge, Next};
use super::opened::CHANGED;
use super::pages::Pages;
use super::room::{Full, Room};
use super::run::Run;
use super::texts::NumberedNames;
use crate::error::Error;
use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;

/// The events of a recording: those of the files that make sense.
#[derive(Debug, Clone, Default)]
pub(super) struct Joined {
    bodies: Arc<Bodies>,
    /// Two bits for each event of the files: [`DROPPED`], [`KEPT`], [`UNLINKED`].
    verdicts: Vec<u8>,
    pub(super) skipped: usize,
    /// Requests whose events may not all be there, though their end is, in their order.
    torn: Vec<u32>,
    /// Requests that are programs and have others inside of them, in their order.
    programs: Vec<u64>,
    /// How many names there are of requests, and of handlers.
    names: (usize, usize),
    /// Requests whose name, or whose handler's, stands for several.
    pub(super) other_requests: u64,
    /// Requests that have a number, and no beginning.
    pub(super) missing_requests: u64,
    /// The most blocks alive at one time.
    pub(super) max_live_blocks: u64,
    /// What going through the events takes.
    merge_bytes: usize,
}

const DROPPED: u8 = 0;
const KEPT: u8 = 1;
/// Kept, but the request that it names did not begin.
const UNLINKED: u8 = 2;

/// How far somebody has read.
#[derive(Debug, Clone, Default)]
pub(super) struct Place {
    merge: Merge,
    seen: usize,
    /// The body that the last event is in.
    at: u64,
}

/// Joins what the processes recorded, and looks what of it makes sense.
///
/// # Errors
/// [`Error::BadRecording`]: its numbers are too high, or would take more memory than there is room for. Or a file was
/// changed, or cannot be read.
pub(super) fn join(
    mut bodies: Bodies,
    mut runs: Vec<Run>,
    events: usize,
    (names, handlers): (&mut Vec<String>, &mut Vec<String>),
    mut room: Room,
) -> Result<(Joined, Vec<Process>), Error> {
    const TOO_HIGH: &str = "the numbers of its requests, blocks or times are too high";
    let began_of = |run: &Run| run.process.as_ref().map(|process| process.began_unix_ns);
    let began = runs.iter().filter_map(began_of).min().unwrap_or_default();
    let (no_name, no_handler) = (names.len() as u32, handlers.len() as u32);
    let mut next = Numbers::default();
    let (mut processes, mut others) = (Vec::with_capacity(runs.len()), Vec::with_capacity(runs.len()));
    let mut programs: Vec<Option<(u64, bool)>> = Vec::with_capacity(runs.len());
    // Of each run: how many requests it numbered, and how many of them begin here.
    let mut requests: Vec<(Option<u64>, u64)> = Vec::with_capacity(runs.len());
    bodies.numbers.reserve_exact(runs.len());
    // By then all are read, and what that needed is not needed any more.
    runs.iter_mut().filter_map(|run| run.begun.take()).for_each(|begun| begun.give_back(&mut room));
    for run in runs {
        let (highest, later_ns) = (run.highest, began_of(&run).unwrap_or(began) - began);
        let too_high = || bodies.files.bad(run.at, TOO_HIGH);
        let until_ns = highest.at_ns.checked_add(later_ns).ok_or_else(too_high)?;
        let after = Numbers {
            requests: next.requests.checked_add(highest.request).ok_or_else(too_high)?,
            blocks: next.blocks.checked_add(highest.block).ok_or_else(too_high)?,
            threads: next.threads.checked_add(highest.thread).ok_or_else(too_high)?,
            ..Numbers::default()
        };
        if after.requests > HIGHEST_REQUEST {
            return Err(too_high());
        }
        let tells_ends = run.process.as_ref().is_some_and(|process| process.tells_ends);
        let before = run.process.as_ref().and_then(|process| process.requests_before);
        let numbered = highest.request.max(run.highest_told);
        requests.push((before.map(|before| numbered.saturating_sub(before)), 0));
        let is_program = run.process.as_ref().is_some_and(|process| process.is_program);
        programs.push(
            before.filter(|_| is_program).map(|before| (next.requests.saturating_add(before).saturating_add(1), false)),
        );
        let other = |numbers: &NumberedNames, other: Option<u64>| other.and_then(|number| numbers.get(number));
        others.push((other(&run.names, run.other_name), other(&run.handlers, run.other_handler)));
        bodies.numbers.push(Numbers {
            later_ns,
            highest,
            until_ns: tells_ends.then_some(until_ns),
            names: run.names,
            handlers: run.handlers,
            no_name,
            no_handler,
            ..next
        });
        processes.extend(run.process);
        next = after;
    }
    bodies.sort();
    let mut joined = Joined { bodies: Arc::new(bodies), verdicts: vec![0; events.div_ceil(4)], ..Joined::default() };
    let (mut lacks_name, mut lacks_handler) = (false, false);
    let mut sense = Sense::default();
    let (mut merge, mut seen) = (Merge::new(room), 0_usize);
    while let Some(Next { told, run, gaps, place }) = merge.next(&joined.bodies)? {
        let Told::Event(event) = told else { continue };
        let verdict = sense.of(&event, gaps, &mut merge.room);
        let verdict = verdict.map_err(|Full(reason)| joined.bodies.files.bad(place - 1, reason))?;
        let Some(verdicts) = joined.verdicts.get_mut(seen / 4) else {
            return Err(joined.bodies.files.bad(place - 1, CHANGED));
        };
        *verdicts |= verdict << (seen % 4 * 2);
        seen += 1;
        if verdict == DROPPED {
            joined.skipped += 1;
        } else if let What::Begin { name, handler, parent } = event.what {
            if let Some((_, has_inner)) = programs[run as usize].as_mut().filter(|(program, _)| *program == parent) {
                *has_inner |= verdict == KEPT;
            }
            requests[run as usize].1 += 1;
            let (other_name, other_handler) = others[run as usize];
            joined.other_requests += u64::from(other_name == Some(name) || other_handler == Some(handler));
            lacks_name |= name == no_name;
            lacks_handler |= handler == no_handler;
        }
    }
    if lacks_name {
        names.push("?".to_owned());
    }
    if lacks_handler {
        handlers.push("?".to_owned());
    }
    joined.names = (names.len(), handlers.len());
    let missing =
        |&(numbered, begun): &(Option<u64>, u64)| numbered.map_or(0, |numbered| numbered.saturating_sub(begun));
    joined.missing_requests = requests.iter().map(missing).fold(0, u64::saturating_add);
    (joined.max_live_blocks, joined.merge_bytes) = (sense.max_live, merge.max_bytes());
    joined.programs = programs.into_iter().flatten().filter(|(_, has_inner)| *has_inner).map(|(it, _)| it).collect();
    joined.torn = sense.torn;
    joined.torn.sort_unstable();
    Ok((joined, processes))
}

impl Joined {
    /// The next event that makes sense.
    ///
    /// # Errors
    /// A file was changed, or cannot be read.
    pub(super) fn next(&self, place: &mut Place) -> Result<Option<Event>, Error> {
        while let Some(Next { told, place: at, .. }) = place.merge.next(&self.bodies)? {
            let Told::Event(mut event) = told else { continue };
            place.at = at;
            let changed = || self.bodies.files.bad(at - 1, CHANGED);
            let verdict = self.verdicts.get(place.seen / 4).ok_or_else(changed)? >> (place.seen % 4 * 2) & 3;
            place.seen += 1;
            if verdict == DROPPED {
                continue;
            }
            if let (UNLINKED, What::Begin { parent: link, .. } | What::Refused { by: link, .. }) =
                (verdict, &mut event.what)
            {
                *link = 0;
            }
            if let What::Begin { name, handler, .. } = event.what
                && (name as usize >= self.names.0 || handler as usize >= self.names.1)
            {
                return Err(changed());
            }
            return Ok(Some(event));
        }
        Ok(None)
    }

    /// The file and the offset in it of the body that the last event is in.
    pub(super) fn place_of(&self, place: &Place) -> (&Path, u64) {
        self.bodies.files.place_of(place.at.saturating_sub(1))
    }

    /// What it takes of memory, and who goes through its events.
    pub(super) fn memory_bytes(&self) -> usize {
        let lists = self.verdicts.capacity() + self.torn.capacity() * 4 + self.programs.capacity() * 8;
        lists + self.merge_bytes + self.bodies.memory_bytes()
    }

    /// Whether this request is a program that has others inside of it.
    pub(super) fn is_program(&self, request: u64) -> bool {
        self.programs.binary_search(&request).is_ok()
    }

    /// Which of the processes a request is of, from 0 on.
    pub(super) fn process_of(&self, request: u64) -> u32 {
        let before = self.bodies.numbers.partition_point(|numbers| numbers.requests < request);
        before.saturating_sub(1) as u32
    }

    /// Whether this request was open where a gap is.
    pub(super) fn is_torn(&self, request: u64) -> bool {
        u32::try_from(request).is_ok_and(|request| self.torn.binary_search(&request).is_ok())
    }

    /// When each thread ended: as the recording says; where that does not tell ends, after its last event; and where
    /// it tells them, but not this one, with the last event of its process.
    ///
    /// # Errors
    /// A file was changed, or cannot be read.
    pub(super) fn thread_ends(&self) -> Result<HashMap<u32, u64>, Error> {
        let mut ends: HashMap<u32, (u64, bool)> = HashMap::new();
        let mut merge = Merge::default();
        while let Some(found) = merge.next(&self.bodies)? {
            let (at_ns, thread) = found.told.at();
            let is_told = matches!(found.told, Told::ThreadEnd { .. });
            let until_ns = self.bodies.numbers[found.run as usize].until_ns;
            let (end, was_told) = ends.entry(thread).or_insert((until_ns.unwrap_or(at_ns), false));
            // What it does after its end, while its last variables go, is still its own.
            *end = if is_told && !*was_told { at_ns } else { at_ns.max(*end) };
            *was_told |= is_told;
        }
        Ok(ends.into_iter().map(|(thread, (end, _))| (thread, end)).collect())
    }
}

/// What makes sense: events of requests and blocks whose beginning is there (it may be in a file that rotation removed,
/// or in a gap), and each once.
#[derive(Default)]
struct Sense {
    /// Of each request: [`BEGUN`], [`ENDED`], and above these behind how many gaps it began.
    requests: Pages<u32>,
    /// Of each live block: whose it is; [`FREED`].
    blocks: Pages<u32>,
    torn: Vec<u32>,
    last: Option<Event>,
    live: u64,
    max_live: u64,
}

const BEGUN: u32 = 1;
const ENDED: u32 = 2;
const FREED: u32 = u32::MAX;

/// Requests of all processes have numbers up to this: each is a mark, neither 0 nor [`FREED`].
const HIGHEST_REQUEST: u64 = FREED as u64 - 1;

fn mark(request: u64) -> u32 {
    request as u32
}

impl Sense {
    fn of(&mut self, event: &Event, gaps: u32, room: &mut Room) -> Result<u8, Full> {
        // The same resize twice: its file is there twice.
        if self.last.as_ref() == Some(event) {
            return Ok(DROPPED);
        }
        self.last = Some(*event);
        let state = self.requests.get(event.request);
        let has_begun = |request| self.requests.get(request) & BEGUN != 0;
        let is_kept = match event.what {
            What::Begin { parent, .. } => {
                if state & BEGUN != 0 || event.request == 0 {
                    return Ok(DROPPED);
                }
                let is_linked = parent == 0 || has_begun(parent); // so nothing is inside of itself
                self.requests.set(event.request, gaps << 2 | BEGUN, room)?;
                return Ok(if is_linked { KEPT } else { UNLINKED });
            }
            _ if state & BEGUN == 0 => false,
            What::Refused { by, .. } => return Ok(if by == 0 || has_begun(by) { KEPT } else { UNLINKED }),
            What::Allocate { block, .. } => {
                let is_new = self.blocks.get(block) == 0;
                if is_new {
                    self.blocks.set(block, mark(event.request), room)?;
                    self.live += 1;
                    self.max_live = self.max_live.max(self.live);
                }
                is_new
            }
            What::Resize { block, .. } => self.blocks.get(block) == mark(event.request),
            What::Free { block } => {
                let is_its = self.blocks.get(block) == mark(event.request);
                if is_its {
                    self.blocks.set(block, FREED, room)?;
                    self.live -= 1;
                }
                is_its
            }
            What::End { .. } => {
                let is_first = state & ENDED == 0;
                if is_first {
                    self.requests.set(event.request, state | ENDED, room)?;
                    if state >> 2 != gaps {
                        room.push(&mut self.torn, mark(event.request))?;
                    }
                }
                is_first
            }
        };
        Ok(if is_kept { KEPT } else { DROPPED })
    }
}
