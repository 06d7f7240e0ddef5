//! Reads the files of a recording. What is damaged is passed over and told.
//!
//! Files are read into memory once, and events stay there as they are (`bodies.rs`). Whatever else is kept is bounded
//! by the files' bytes: numbers that they give (lengths, names, blocks) allocate nothing, and what would take more than
//! it has in the file is damage (names, processes) or no recording (`pages.rs`).

use super::bodies::{Bodies, Stretch};
use super::encoded::{CLOSED, EVENTS, HANDLER, NAME, OTHERS, PROCESS, Process, RATE};
use super::files::{append_bytes_of, files_of};
use super::frames::{Frames, Part};
use super::gaps::{Gap, Gaps};
use super::join::{Joined, join};
use super::pages::{Room, Scattered};
use super::run::{Run, sound};
use super::wire::{Bytes, MAGIC};
use crate::error::Error;
use std::collections::HashMap;
use std::path::Path;

/// So many names, and processes, have room beside those that have enough bytes in the files. A recorder tells 4096
/// names apart.
const NAMES: usize = 16 << 10;
const BYTES_FOR_EACH_NAME: usize = 128;
const HIGHEST_NUMBER_OF_A_NAME: u64 = 1 << 16;
const PROCESSES: usize = 1024;
const BYTES_FOR_EACH_PROCESS: usize = 1024;
/// What pages of numbers may take beside the files' own length.
const ROOM_BYTES: usize = 1 << 20;

/// All that the files say.
#[derive(Debug, Default)]
pub(super) struct Content {
    /// Those of whom it can be read.
    pub(super) processes: Vec<Process>,
    /// How many recorded.
    pub(super) process_count: usize,
    pub(super) names: Vec<String>,
    pub(super) handlers: Vec<String>,
    pub(super) joined: Joined,
    /// The highest number that was one in so many.
    pub(super) highest_one_in: u64,
    pub(super) is_cut_off: bool,
    pub(super) gaps: Vec<Gap>,
    pub(super) file_bytes: u64,
}

/// Texts, each once, in the order in which they came.
#[derive(Debug, Default)]
struct Texts {
    numbers: HashMap<String, u32>,
}

impl Texts {
    /// `None`: there is no room for one more.
    fn number_of(&mut self, text: &str, bytes: usize) -> Option<u32> {
        if let Some(&number) = self.numbers.get(text) {
            return Some(number);
        }
        let next = u32::try_from(self.numbers.len()).ok()?;
        if self.numbers.len() >= NAMES + bytes / BYTES_FOR_EACH_NAME {
            return None;
        }
        self.numbers.insert(text.to_owned(), next);
        Some(next)
    }

    fn into_vec(self) -> Vec<String> {
        let mut texts: Vec<_> = self.numbers.into_iter().collect();
        texts.sort_unstable_by_key(|&(_, number)| number);
        texts.into_iter().map(|(text, _)| text).collect()
    }
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

/// Reads all files of the recording.
///
/// # Errors
/// [`Error::BadRecording`], [`Error::NoRecording`]: of the file that was asked for, or where none is a recording.
pub(super) fn read(path: &Path) -> Result<Content, Error> {
    let mut reader = Reader::default();
    for file in files_of(path)? {
        let name = file.path.display().to_string();
        let begin = reader.bodies.bytes.len();
        let done = match append_bytes_of(&file.path, &mut reader.bodies.bytes) {
            Ok(()) => reader.file(&name, begin),
            Err(error) => Err((0, error)),
        };
        match done {
            Err((_, error)) if file.is_asked_for => return Err(error),
            Err((bytes, error)) => reader.pass_over(&name, bytes, error),
            Ok(()) => {}
        }
    }
    reader.content(path)
}

impl Reader {
    /// Reads a file, whose bytes are those from `begin` on. Where it is no recording at all: how long it is, and why.
    fn file(&mut self, name: &str, begin: usize) -> Result<(), (u64, Error)> {
        // Taken out, so that what is said in them can be noted meanwhile.
        let all = std::mem::take(&mut self.bodies.bytes);
        let done = self.file_in(name, &all, begin);
        self.bodies.bytes = all;
        if done.is_err() {
            self.bodies.forget_from(begin);
        }
        done
    }

    fn file_in(&mut self, name: &str, all: &[u8], begin: usize) -> Result<(), (u64, Error)> {
        let bytes = &all[begin..];
        let length = bytes.len() as u64;
        let error_at = |offset, reason| (length, Error::BadRecording { file: name.to_owned(), offset, reason });
        self.file_bytes += length;
        self.room.0 += bytes.len() + if begin == 0 { ROOM_BYTES } else { 0 };
        match bytes.get(..MAGIC.len()) {
            Some(start) if start == MAGIC => {}
            Some(start) if start[..MAGIC.len() - 1] == MAGIC[..MAGIC.len() - 1] => {
                let reason = "another version of ctxalloc wrote it; read it with that one";
                return Err(error_at(MAGIC.len() as u64 - 1, reason));
            }
            None if MAGIC.starts_with(bytes) => {
                self.is_cut_off = true; // its process came no further
                return Ok(());
            }
            _ => return Err(error_at(0, "this is no recording")),
        }
        let mut place = Place::default();
        for part in Frames::new(bytes, MAGIC.len()) {
            let (offset, gap_bytes, reason) = match part {
                Part::CutOff { .. } => {
                    self.is_cut_off = true;
                    continue;
                }
                Part::Gap { offset, bytes, reason } => (offset, bytes, reason),
                Part::Body { offset, body } => match self.body(all, begin + offset, body, &mut place) {
                    Ok(()) => continue,
                    Err(reason) => (offset, body.len(), reason),
                },
            };
            self.gap(name, offset as u64, gap_bytes as u64, reason);
            place.is_behind_gap = true;
            if let Some(run) = place.run {
                let its = self.bodies.of_run(all, run as u32);
                let noted = self.runs[run].note_gap(its, &mut self.room);
                noted.map_err(|Scattered| error_at(offset as u64, Scattered::REASON))?;
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

    fn new_run(&mut self, process: Option<Process>, bytes: usize) -> Result<usize, &'static str> {
        if self.runs.len() >= PROCESSES + bytes / BYTES_FOR_EACH_PROCESS {
            return Err("there are too many processes for so few bytes");
        }
        self.runs.push(Run::new(process));
        Ok(self.runs.len() - 1)
    }

    /// Reads the body that begins at this place of all bytes.
    fn body(&mut self, all: &[u8], at: usize, body: &[u8], place: &mut Place) -> Result<(), &'static str> {
        let Some((&kind, rest)) = body.split_first() else { return Err("a frame is empty") };
        if kind == PROCESS {
            let process = Process::read(rest).ok_or("what a process says of itself is not complete")?;
            self.highest_one_in = self.highest_one_in.max(process.one_in);
            let key = (process.pid, process.began_unix_ns);
            let known = self.run_of.get(&key).copied();
            let run = known.map_or_else(|| self.new_run(Some(process), all.len()), Ok);
            // Those that follow are not the process's before it.
            *place = Place { run: run.ok(), is_behind_gap: false };
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
                place.run = Some(self.new_run(None, all.len())?);
            }
        }
        let number = place.run.ok_or("there is something before any process begins")?;
        let run = &mut self.runs[number];
        match kind {
            EVENTS => {
                let found = sound(rest).ok_or("a frame has something that is no event")?;
                let Some(first_ns) = found.first_ns else { return Ok(()) };
                run.add(rest, &found, &mut self.room).map_err(|Scattered| Scattered::REASON)?;
                let stretch = Stretch { run: number as u32, gaps: run.gaps };
                if !self.bodies.push(first_ns, at as u64 + 1, stretch, all.len()) {
                    return Err("there are too many gaps between so few events");
                }
                self.events += found.events;
            }
            NAME | HANDLER => {
                let mut bytes = Bytes { rest };
                let (Some(number), Some(name)) = (bytes.number(), bytes.text()) else {
                    return Err("a name is not complete");
                };
                let (numbers, texts) = match kind {
                    NAME => (&mut run.names, &mut self.names),
                    _ => (&mut run.handlers, &mut self.handlers),
                };
                if number > HIGHEST_NUMBER_OF_A_NAME {
                    return Err("a name has a number that no recorder gives");
                }
                let text = texts.number_of(name, all.len());
                numbers.insert(number, text.ok_or("there are too many names for so few bytes")?);
                run.last_name = Some(number);
            }
            RATE => {
                let one_in = Bytes { rest }.number().ok_or("a rate is not complete")?;
                self.highest_one_in = self.highest_one_in.max(one_in);
            }
            CLOSED => run.is_closed = true,
            OTHERS => match (rest.first(), run.last_name) {
                (Some(&NAME), number) => run.other_name = number,
                (Some(&HANDLER), number) => run.other_handler = number,
                _ => return Err("what is not told apart is not complete"),
            },
            _ => {} // of a later release
        }
        Ok(())
    }

    /// All that was read, of all processes. An error where nothing was.
    fn content(self, path: &Path) -> Result<Content, Error> {
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
            ..Content::default()
        };
        let (mut room, texts) = (self.room, (&mut content.names, &mut content.handlers));
        match join(self.bodies, self.runs, self.events, texts, &mut room) {
            Ok((joined, processes)) => (content.joined, content.processes) = (joined, processes),
            Err(reason) => {
                let file = path.display().to_string();
                return Err(Error::BadRecording { file, offset: 0, reason });
            }
        }
        Ok(content)
    }
}

#[cfg(test)]
mod tests {
    use super::super::encoded::{EVENTS, Events, HANDLER, NAME, Process, named};
    use super::super::event::{Event, What};
    use super::super::wire::frame;
    use super::{Content, Error, MAGIC, Reader};
    use std::path::Path;

    fn process() -> Process {
        let (version, system) = ("1".to_owned(), "any".to_owned());
        let (page_bytes, cores, began_unix_ns, one_in, share_ppm) = (4096, 1, 5, 1, 10_000);
        let (tells_ends, requests_before) = (true, Some(0));
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
            requests_before,
        }
    }

    fn file(bodies: &[Vec<u8>]) -> Vec<u8> {
        let mut bytes = MAGIC.to_vec();
        bodies.iter().for_each(|body| bytes.extend(frame(body)));
        bytes
    }

    fn read(bytes: &[u8]) -> Result<Content, Error> {
        let mut reader = Reader::default();
        reader.bodies.bytes = bytes.to_vec();
        reader.file("file", 0).map_err(|(_, error)| error)?;
        reader.content(Path::new("file"))
    }

    fn events(content: &Content) -> Vec<Event> {
        let mut place = super::super::join::Place::default();
        std::iter::from_fn(|| content.joined.next(&mut place)).collect()
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
        let good = [process().body(), named(NAME, 0, "route"), named(HANDLER, 0, "pool"), body.take()];
        assert_eq!(events(&read(&file(&good)).expect("a recording")).len(), 3 * 39);
        let mut state = 0x9e37_79b9_7f4a_7c15_u64;
        let mut below = |end: usize| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 11) as usize % end
        };
        let (mut errors, mut found, mut with_gaps) = (0, 0, 0);
        for _ in 0..if cfg!(miri) { 20 } else { 20_000 } {
            let mut bodies = good.to_vec();
            for _ in 0..=below(3) {
                let body = below(bodies.len());
                let at = below(bodies[body].len().max(1));
                match below(4) {
                    0 if at < bodies[body].len() => bodies[body][at] = below(256) as u8,
                    1 => bodies[body].truncate(at),
                    2 => bodies[body].splice(at..at, (0..below(12)).map(|_| 0xff)).for_each(drop),
                    _ => {
                        let other = below(bodies.len());
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
