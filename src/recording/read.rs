//! Reads the files of a recording. What is damaged is passed over and told.
//!
//! Events stay in the files, which stay open (`opened.rs`): a frame at a time is in memory. Whatever is kept of them is
//! taken from one room (`room.rs`), of their length and a constant; so numbers that they give (lengths, names, blocks)
//! allocate nothing that they have no bytes for. What asks for more is no recording.

use super::bodies::{Bodies, Numbers, Stretch};
use super::encoded::{CLOSED, EVENTS, HANDLER, NAME, OTHERS, PROCESS, Process, RATE, USED, Used};
use super::files::files_of;
use super::frames::{Frames, Part, window_bytes};
use super::gaps::{Gap, Gaps};
use super::join::{Joined, join};
use super::opened::Files;
use super::room::{Full, Room};
use super::run::{Run, sound};
use super::stream::{MOST_BYTES, Stream};
use super::texts::Texts;
use super::window::{ReadAt, read_exactly};
use super::wire::{Bytes, MAGIC};
use crate::error::Error;
use std::collections::HashMap;
use std::path::Path;

const HIGHEST_NUMBER_OF_A_NAME: u64 = 1 << 16;
/// Whoever tells a text has it in memory several times. A recorder cuts names after 256 bytes.
const MAX_TEXT_BYTES: usize = 512 << 10;
/// So many processes have room beside those that have enough bytes in the files.
const PROCESSES: usize = 1024;
const BYTES_FOR_EACH_PROCESS: u64 = 2048;
/// What one takes while its files are read and joined: its place in a map, and in lists.
const PROCESS_BYTES: usize = 90 + 2 * (size_of::<Run>() + size_of::<Numbers>() + size_of::<Process>() + 72);

/// What a reading may take beside the files' own length: a window of a file, what overlaps in time, some names.
const ROOM_BYTES: usize = 7 << 19;

/// All that the files say.
#[derive(Debug, Default)]
pub(super) struct Content {
    /// Those of whom it can be read.
    pub(super) processes: Vec<Process>,
    /// How many recorded.
    pub(super) process_count: usize,
    pub(super) has_program: bool,
    /// What of their processor time falls to recorded requests. `None`: one of them does not say.
    pub(super) processor_ns: Option<u64>,
    pub(super) names: Vec<String>,
    pub(super) handlers: Vec<String>,
    pub(super) joined: Joined,
    /// The highest number that was one in so many.
    pub(super) highest_one_in: u64,
    pub(super) is_cut_off: bool,
    pub(super) gaps: Vec<Gap>,
    pub(super) file_bytes: u64,
}

/// What was read so far.
#[derive(Debug, Default)]
struct Reader {
    bodies: Bodies,
    events: usize,
    room: Room,
    runs: Vec<Run>,
    /// By the process's number and its beginning.
    run_of: HashMap<(u64, u64), usize>,
    names: Texts,
    handlers: Texts,
    gaps: Gaps,
    /// What was wrong first: the error, if nothing can be read.
    problem: Option<Error>,
    highest_one_in: u64,
    is_cut_off: bool,
    file_bytes: u64,
}

/// Whose frames are read.
#[derive(Debug, Default)]
struct Place {
    run: Option<usize>,
    /// There is a gap since a process has said who it is: another one may have said so there.
    is_behind_gap: bool,
}

/// What is wrong with a body.
enum Wrong {
    /// It is damaged.
    Body(&'static str),
    /// There is no memory for what it says.
    Full(Full),
}

impl From<&'static str> for Wrong {
    fn from(reason: &'static str) -> Self {
        Self::Body(reason)
    }
}

impl From<Full> for Wrong {
    fn from(full: Full) -> Self {
        Self::Full(full)
    }
}

/// Reads all files of the recording.
///
/// # Errors
/// [`Error::BadRecording`], [`Error::NoRecording`]: of the file that was asked for, or where none is a recording.
pub(super) fn read(path: &Path) -> Result<Content, Error> {
    let mut reader = Reader { room: Room(ROOM_BYTES), ..Reader::default() };
    for file in files_of(path)? {
        let name = file.path.display().to_string();
        let done = match reader.bodies.files.open(&file.path) {
            Ok(length) => reader.file(&name, length),
            Err(error) => Err((0, error)),
        };
        match done {
            Err((_, error)) if file.is_asked_for => return Err(error),
            Err((bytes, error)) => reader.pass_over(&name, bytes, error),
            Ok(()) => {}
        }
    }
    reader.content()
}

impl Reader {
    /// Reads the file that was opened last. Where it is no recording at all: how long it is, and why.
    fn file(&mut self, name: &str, length: u64) -> Result<(), (u64, Error)> {
        let begin = self.bodies.files.length() - length;
        self.file_bytes += length;
        // Taken out, so that what is said in it can be noted meanwhile.
        let files = std::mem::take(&mut self.bodies.files);
        let read = files.with_last(|source| Ok(self.file_in(name, source, begin, length, &files)));
        self.bodies.files = files;
        let done = read.unwrap_or_else(|error| Err(self.bodies.files.failed(begin, &error)));
        if done.is_err() {
            self.bodies.forget_from(begin);
        }
        done.map_err(|error| (length, error))
    }

    fn file_in(
        &mut self,
        name: &str,
        source: &dyn ReadAt,
        begin: u64,
        length: u64,
        files: &Files,
    ) -> Result<(), Error> {
        let failed = |error: std::io::Error| files.failed(begin, &error);
        let mut magic = [0; MAGIC.len()];
        let there = length.min(MAGIC.len() as u64) as usize;
        read_exactly(source, &mut magic[..there], 0).map_err(failed)?;
        if there < MAGIC.len() && MAGIC.starts_with(&magic[..there]) {
            self.is_cut_off = true; // its process came no further
            return Ok(());
        }
        if magic != MAGIC {
            const VERSION: usize = MAGIC.len() - 1;
            return Err(match there > VERSION && magic[..VERSION] == MAGIC[..VERSION] {
                true => {
                    files.bad(begin + VERSION as u64, "another version of ctxalloc wrote it; read it with that one")
                }
                false => files.bad(begin, "this is no recording"),
            });
        }
        self.room.give(usize::try_from(length).unwrap_or(usize::MAX));
        let memory = window_bytes(length);
        self.room.take(memory + files.list_bytes()).map_err(|Full(reason)| files.bad(begin, reason))?;
        let done = self.frames(name, Frames::new(source, length, MAGIC.len() as u64), begin, files);
        self.room.give(memory);
        done
    }

    fn frames(&mut self, name: &str, mut frames: Frames<'_>, begin: u64, files: &Files) -> Result<(), Error> {
        let failed = |error: std::io::Error| files.failed(begin, &error);
        let mut place = Place::default();
        while let Some(part) = frames.next().map_err(failed)? {
            let (offset, gap_bytes, reason) = match part {
                Part::CutOff { .. } => {
                    self.is_cut_off = true;
                    continue;
                }
                Part::Gap { offset, bytes, reason } => (offset, bytes, reason),
                Part::Body { offset, bytes } => {
                    let body = frames.body(offset, bytes).map_err(failed)?;
                    match self.body(files, begin + offset, body, &mut place) {
                        Ok(()) => continue,
                        Err(Wrong::Body(reason)) => (offset, bytes as u64, reason),
                        Err(Wrong::Full(Full(reason))) => return Err(files.bad(begin + offset, reason)),
                    }
                }
            };
            self.gap(name, offset, gap_bytes, reason);
            place.is_behind_gap = true;
            if let Some(run) = place.run {
                self.note_gap(run, files, begin + offset)?;
            }
        }
        Ok(())
    }

    /// There is a gap in what a process recorded.
    fn note_gap(&mut self, number: usize, files: &Files, place: u64) -> Result<(), Error> {
        let run = &mut self.runs[number];
        if !run.note_gap() {
            return Ok(());
        }
        for body in self.bodies.of_run(number as u32) {
            let mut events = Stream::open(files, body, MOST_BYTES)?;
            while let Some(told) = events.step(files)? {
                run.note_begun(&told, &mut self.room).map_err(|Full(reason)| files.bad(place, reason))?;
            }
        }
        Ok(())
    }

    fn gap(&mut self, file: &str, offset: u64, bytes: u64, reason: &'static str) {
        self.problem.get_or_insert_with(|| Error::BadRecording { file: file.to_owned(), offset, reason });
        self.gaps.add(file, offset, bytes, reason);
    }

    /// A file beside the one that was asked for is none of the recording's.
    #[cold]
    fn pass_over(&mut self, file: &str, bytes: u64, error: Error) {
        let told;
        let reason = match &error {
            Error::BadRecording { reason, .. } => reason,
            Error::NoRecording { reason, .. } => reason.as_str(),
            other => {
                told = other.to_string();
                &told
            }
        };
        self.gaps.add(file, 0, bytes, reason);
        self.file_bytes -= bytes;
        self.problem.get_or_insert(error);
    }

    fn new_run(&mut self, at: u64, process: Option<Process>, bytes: u64) -> Result<usize, Wrong> {
        if self.runs.len() as u64 >= PROCESSES as u64 + bytes / BYTES_FOR_EACH_PROCESS {
            return Err("there are too many processes for so few bytes".into());
        }
        self.room.take(PROCESS_BYTES)?;
        self.runs.push(Run::new(at, process));
        Ok(self.runs.len() - 1)
    }

    /// Reads the body at this place.
    fn body(&mut self, files: &Files, at: u64, body: &[u8], place: &mut Place) -> Result<(), Wrong> {
        let Some((&kind, rest)) = body.split_first() else { return Err("a frame is empty".into()) };
        let bytes = files.length();
        if kind == PROCESS {
            self.room.take(rest.len())?; // for its texts
            let process = Process::read(rest).ok_or("what a process says of itself is not complete")?;
            if process.version.len().max(process.system.len()) > MAX_TEXT_BYTES {
                return Err("what a process says of itself is longer than what any recorder writes".into());
            }
            self.highest_one_in = self.highest_one_in.max(process.one_in);
            let key = (process.pid, process.began_unix_ns);
            let known = self.run_of.get(&key).copied();
            let run = known.map_or_else(|| self.new_run(at, Some(process), bytes), Ok);
            self.room.give(if known.is_some() || run.is_err() { rest.len() } else { 0 });
            // Those that follow are not the process's before it.
            *place = Place { run: run.as_ref().ok().copied(), is_behind_gap: false };
            let run = run?;
            self.run_of.insert(key, run);
            return Ok(());
        }
        if place.is_behind_gap {
            let is_new = |run: usize| {
                let run = &self.runs[run];
                run.is_closed || (kind == EVENTS && run.is_anothers(rest))
            };
            if place.run.is_none_or(is_new) {
                place.run = Some(self.new_run(at, None, bytes)?);
            }
        }
        let number = place.run.ok_or("there is something before any process begins")?;
        let run = &mut self.runs[number];
        match kind {
            EVENTS => {
                let found = sound(rest).ok_or("a frame has something that is no event")?;
                let Some(first_ns) = found.first_ns else { return Ok(()) };
                self.room.take(found.events.div_ceil(4))?; // what `join` notes of each
                run.add(rest, &found, &mut self.room)?;
                let stretch = Stretch { run: number as u32, gaps: run.gaps };
                if !self.bodies.push(first_ns, at + 1, stretch, bytes, &mut self.room)? {
                    return Err("there are too many gaps between so few events".into());
                }
                self.events += found.events;
            }
            NAME | HANDLER => {
                let mut told = Bytes { rest };
                let (Some(number), Some(name)) = (told.number(), told.text()) else {
                    return Err("a name is not complete".into());
                };
                let (numbers, texts) = match kind {
                    NAME => (&mut run.names, &mut self.names),
                    _ => (&mut run.handlers, &mut self.handlers),
                };
                if name.len() > MAX_TEXT_BYTES {
                    return Err("a name is longer than those that any recorder writes".into());
                }
                if number > HIGHEST_NUMBER_OF_A_NAME {
                    return Err("a name has a number that no recorder gives".into());
                }
                let text = texts.number_of(name, bytes, &mut self.room)?;
                numbers.set(number, text.ok_or("there are too many names for so few bytes")?, &mut self.room)?;
                run.last_name = Some(number);
            }
            RATE => {
                let one_in = Bytes { rest }.number().ok_or("a rate is not complete")?;
                self.highest_one_in = self.highest_one_in.max(one_in);
            }
            CLOSED => run.is_closed = true,
            USED => {
                let now = Used::read(rest).ok_or("what a process has used is not complete")?;
                run.note_used(now, &mut self.room)?;
            }
            OTHERS => match (rest.first(), run.last_name) {
                (Some(&NAME), number) => run.other_name = number,
                (Some(&HANDLER), number) => run.other_handler = number,
                _ => return Err("what is not told apart is not complete".into()),
            },
            _ => {} // of a later release
        }
        Ok(())
    }

    /// All that was read, of all processes. An error where nothing was.
    fn content(self) -> Result<Content, Error> {
        if let (true, Some(problem)) = (self.runs.is_empty(), self.problem) {
            return Err(problem);
        }
        let mut content = Content {
            names: self.names.into_vec(),
            handlers: self.handlers.into_vec(),
            highest_one_in: self.highest_one_in,
            is_cut_off: self.is_cut_off || self.runs.iter().any(|run| !run.is_closed),
            gaps: self.gaps.into_vec(),
            file_bytes: self.file_bytes,
            process_count: self.runs.len(),
            processor_ns: self.runs.iter().try_fold(0_u64, |sum, run| Some(sum.saturating_add(run.processor_ns()?))),
            has_program: self.runs.iter().any(|run| run.process.as_ref().is_some_and(|process| process.is_program)),
            ..Content::default()
        };
        let texts = (&mut content.names, &mut content.handlers);
        (content.joined, content.processes) = join(self.bodies, self.runs, self.events, texts, self.room)?;
        Ok(content)
    }
}

#[cfg(test)]
mod tests {
    use super::super::encoded::{EVENTS, Events, HANDLER, NAME, Process, USED, Used, named};
    use super::super::event::{Event, What};
    use super::super::wire::frame;
    use super::{Content, Error, Files, MAGIC, Reader};
    use crate::random::Random;

    fn process() -> Process {
        let (version, system) = ("1".to_owned(), "any".to_owned());
        let (page_bytes, cores, began_unix_ns, one_in, share_ppm) = (4096, 1, 5, 1, 10_000);
        let (tells_ends, is_program, requests_before) = (true, false, Some(0));
        Process {
            pid: 1,
            version,
            system,
            page_bytes,
            cores,
            began_unix_ns,
            one_in,
            share_ppm,
            tells_ends,
            is_program,
            requests_before,
        }
    }

    fn file(bodies: &[Vec<u8>]) -> Vec<u8> {
        let mut bytes = MAGIC.to_vec();
        bodies.iter().for_each(|body| bytes.extend(frame(body)));
        bytes
    }

    fn read(bytes: &[u8]) -> Result<Content, Error> {
        let mut reader = Reader { room: super::Room(super::ROOM_BYTES), ..Reader::default() };
        reader.bodies.files = Files::of_bytes(bytes.to_vec());
        reader.file("file", bytes.len() as u64).map_err(|(_, error)| error)?;
        reader.content()
    }

    #[test]
    fn what_a_process_used_lies_between_its_files_first_and_last_word() {
        let used = |processor_ns, seen, chosen| Used { processor_ns, seen, chosen, highest: 1 }.body();
        let begun = || {
            let mut body = Events::new();
            body.push(&Event::new(1, 1, 1, What::Begin { name: 0, handler: 0, parent: 0 }));
            body.take()
        };
        let read_all = |of: &[&[Vec<u8>]]| {
            let bodies = of.iter().enumerate().flat_map(|(pid, bodies)| {
                let process = Process { pid: pid as u64, ..process() }.body();
                [process, begun()].into_iter().chain(bodies.iter().cloned())
            });
            read(&file(&bodies.collect::<Vec<_>>()))
        };
        let processor = |of: &[&[Vec<u8>]]| read_all(of).expect("a recording").processor_ns;
        let in_another_order = [used(700, 20, 2), used(1_100, 40, 4), used(100, 0, 0)];
        assert_eq!(processor(&[&in_another_order]), Some(100), "a tenth of 1,000");
        assert_eq!(processor(&[&in_another_order, &[used(0, 0, 0), used(50, 1, 1)]]), Some(150));
        assert_eq!(processor(&[&in_another_order, &[]]), None, "the other one does not say");
        assert_eq!(processor(&[&in_another_order[..1]]), None, "said once");
        assert_eq!(read_all(&[&[vec![USED, 1]]]).expect("the rest").gaps.len(), 1);
        let idle = |said: Vec<u8>| {
            let busy = [process().body(), begun(), used(0, 0, 0), used(50, 1, 1)];
            let bodies = [&busy[..], &[Process { pid: 2, ..process() }.body(), said]].concat();
            read(&file(&bodies)).expect("a recording").processor_ns
        };
        assert_eq!(idle(used(900, 0, 0)), Some(50), "who recorded no request has no part");
        assert_eq!(idle(named(NAME, 0, "route")), None, "but has to say so");
    }

    fn events(content: &Content) -> Vec<Event> {
        let mut place = super::super::join::Place::default();
        std::iter::from_fn(|| content.joined.next(&mut place).expect("an event")).collect()
    }

    /// Frames whose checksums are right, with anything inside.
    #[test]
    fn what_a_frame_says_is_not_believed() {
        let mut body = Events::new();
        for number in 1..40_u64 {
            body.push(&Event::new(number * 9, 1, number, What::Begin { name: 0, handler: 0, parent: number - 1 }));
            let block = What::Allocate { block: number, bytes: 1 << number.min(40), align: 16, zeroed: false };
            body.push(&Event::new(number * 9 + 1, 1, number, block));
            body.push(&Event::new(number * 9 + 2, 2, number, What::Free { block: number }));
        }
        let used = Used { processor_ns: 1, seen: 1, chosen: 1, highest: 39 }.body();
        let good = [process().body(), named(NAME, 0, "route"), named(HANDLER, 0, "pool"), body.take(), used];
        assert_eq!(events(&read(&file(&good)).expect("a recording")).len(), 3 * 39);
        let mut random = Random::new(1);
        let (mut errors, mut found, mut with_gaps) = (0, 0, 0);
        for _ in 0..if cfg!(miri) { 20 } else { 20_000 } {
            let mut bodies = good.to_vec();
            for _ in 0..=random.below(3) {
                let body = random.below(bodies.len());
                let at = random.below(bodies[body].len().max(1));
                match random.below(4) {
                    0 if at < bodies[body].len() => bodies[body][at] = random.below(256) as u8,
                    1 => bodies[body].truncate(at),
                    2 => bodies[body].splice(at..at, (0..random.below(12)).map(|_| 0xff)).for_each(drop),
                    _ => {
                        let other = random.below(bodies.len());
                        bodies.swap(body, other);
                    }
                }
            }
            let bytes = file(&bodies);
            match read(&bytes) {
                Ok(content) => {
                    found += 1;
                    with_gaps += usize::from(!content.gaps.is_empty());
                    let events = events(&content);
                    assert!(events.len() <= bytes.len() / 3, "an event has three bytes");
                    assert!(events.is_sorted_by_key(|event| event.at_ns));
                    let is_new = |at: usize, on: u64| events[..at].iter().all(|before| before.request != on);
                    for (at, event) in events.iter().enumerate().filter(|_| found % 50 == 0) {
                        if let What::Begin { parent, name, handler } = event.what {
                            assert!(is_new(at, event.request) && (parent == 0 || !is_new(at, parent)));
                            assert!((name as usize) < content.names.len());
                            assert!((handler as usize) < content.handlers.len());
                        }
                    }
                }
                Err(Error::BadRecording { offset, .. }) => {
                    errors += 1;
                    assert!(offset <= bytes.len() as u64);
                }
                Err(error) => panic!("{error}"),
            }
        }
        assert!(cfg!(miri) || with_gaps > 100 && found > with_gaps + 100, "{errors} errors, {found}, {with_gaps}");
        assert!(read(&file(&[vec![EVENTS]])).is_err(), "events of no process");
    }
}
