//! Reads the files of a recording. What is damaged is passed over and told.
//!
//! What it keeps is bounded by what the files have: an event has three bytes there at least, and some hundred in
//! memory. Numbers that they give (lengths, names, blocks) allocate nothing.

use super::encoded::{CLOSED, EVENTS, HANDLER, NAME, OTHERS, PROCESS, Process, RATE};
use super::files::{bytes_of, files_of};
use super::frames::{Frames, Part};
use super::gaps::Gaps;
use super::join::{Content, join};
use super::run::Run;
use super::wire::{Bytes, MAGIC};
use crate::error::Error;
use std::collections::HashMap;
use std::path::Path;

/// Texts, each once, in the order in which they came.
#[derive(Debug, Default)]
struct Texts {
    numbers: HashMap<String, u32>,
}

impl Texts {
    fn number_of(&mut self, text: &str) -> Option<u32> {
        if let Some(&number) = self.numbers.get(text) {
            return Some(number);
        }
        let next = u32::try_from(self.numbers.len()).ok()?;
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
        let done = match bytes_of(&file.path) {
            Ok(bytes) => reader.file(&name, &bytes),
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
    /// Reads a file. Where it is no recording at all: how long it is, and why.
    fn file(&mut self, name: &str, bytes: &[u8]) -> Result<(), (u64, Error)> {
        let length = bytes.len() as u64;
        let bad = |offset, reason| Err((length, Error::BadRecording { file: name.to_owned(), offset, reason }));
        self.file_bytes += length;
        match bytes.get(..MAGIC.len()) {
            Some(begin) if begin == MAGIC => {}
            Some(begin) if begin[..MAGIC.len() - 1] == MAGIC[..MAGIC.len() - 1] => {
                return bad(MAGIC.len() as u64 - 1, "another version of ctxalloc wrote it; read it with that one");
            }
            None if MAGIC.starts_with(bytes) => {
                self.is_cut_off = true; // its process came no further
                return Ok(());
            }
            _ => return bad(0, "this is no recording"),
        }
        let mut place = Place::default();
        for part in Frames::new(bytes, MAGIC.len()) {
            let (offset, bytes, reason) = match part {
                Part::CutOff { .. } => {
                    self.is_cut_off = true;
                    continue;
                }
                Part::Gap { offset, bytes, reason } => (offset, bytes, reason),
                Part::Body { offset, body } => match self.body(body, &mut place) {
                    Ok(()) => continue,
                    Err(reason) => (offset, body.len(), reason),
                },
            };
            self.gap(name, offset as u64, bytes as u64, reason);
            place.is_behind_gap = true;
            if let Some(run) = place.run {
                self.runs[run].note_gap();
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

    fn new_run(&mut self, process: Option<Process>) -> usize {
        self.runs.push(Run::new(process));
        self.runs.len() - 1
    }

    fn body(&mut self, body: &[u8], place: &mut Place) -> Result<(), &'static str> {
        let Some((&kind, rest)) = body.split_first() else { return Err("a frame is empty") };
        if kind == PROCESS {
            let process = Process::read(rest).ok_or("what a process says of itself is not complete")?;
            self.highest_one_in = self.highest_one_in.max(process.one_in);
            let key = (process.pid, process.began_unix_ns);
            let known = self.run_of.get(&key).copied();
            let run = known.unwrap_or_else(|| self.new_run(Some(process)));
            self.run_of.insert(key, run);
            *place = Place { run: Some(run), is_behind_gap: false };
            return Ok(());
        }
        if place.is_behind_gap {
            let is_new = |run: usize| {
                let run = &self.runs[run];
                run.is_closed || (kind == EVENTS && run.is_anothers(rest))
            };
            if place.run.is_none_or(is_new) {
                place.run = Some(self.new_run(None));
            }
        }
        let run =
            place.run.and_then(|at| self.runs.get_mut(at)).ok_or("there is something before any process begins")?;
        match kind {
            EVENTS => run.add(rest).then_some(()).ok_or("a frame has something that is no event")?,
            NAME | HANDLER => {
                let mut bytes = Bytes { rest };
                let (Some(number), Some(name)) = (bytes.number(), bytes.text()) else {
                    return Err("a name is not complete");
                };
                let (numbers, texts) = match kind {
                    NAME => (&mut run.names, &mut self.names),
                    _ => (&mut run.handlers, &mut self.handlers),
                };
                numbers.insert(number, texts.number_of(name).ok_or("there are too many names")?);
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
        let content = Content {
            names: self.names.into_vec(),
            handlers: self.handlers.into_vec(),
            highest_one_in: self.highest_one_in,
            is_cut_off: self.is_cut_off,
            gaps: self.gaps.into_vec(),
            file_bytes: self.file_bytes,
            ..Content::default()
        };
        join(content, self.runs).map_err(|reason| Error::BadRecording {
            file: path.display().to_string(),
            offset: 0,
            reason,
        })
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
        Process { pid: 1, version, system, page_bytes, cores, began_unix_ns, one_in, share_ppm }
    }

    fn file(bodies: &[Vec<u8>]) -> Vec<u8> {
        let mut bytes = MAGIC.to_vec();
        bodies.iter().for_each(|body| bytes.extend(frame(body)));
        bytes
    }

    fn read(bytes: &[u8]) -> Result<Content, Error> {
        let mut reader = Reader::default();
        reader.file("file", bytes).map_err(|(_, error)| error)?;
        reader.content(Path::new("file"))
    }

    /// Frames whose checksums are right, with anything inside.
    #[test]
    fn what_a_frame_says_is_not_believed() {
        let mut events = Events::new();
        for number in 1..40_u64 {
            events.push(&Event::new(number * 9, 1, number, What::Begin { name: 0, handler: 0, parent: number - 1 }));
            let block = What::Allocate { block: number, bytes: 1 << number.min(40), align: 16, zeroed: false };
            events.push(&Event::new(number * 9 + 1, 1, number, block));
            events.push(&Event::new(number * 9 + 2, 2, number, What::Free { block: number }));
        }
        let good = [process().body(), named(NAME, 0, "route"), named(HANDLER, 0, "pool"), events.take()];
        assert_eq!(read(&file(&good)).expect("a recording").events.len(), 3 * 39);
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
                    assert!(content.events.len() <= bytes.len() / 3, "an event has three bytes");
                    let is_new = |at: usize, on: u64| content.events[..at].iter().all(|before| before.request != on);
                    for (at, event) in content.events.iter().enumerate().filter(|_| found % 50 == 0) {
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
