//! Reads the files of a recording, and puts the events of all processes in the order of time.
//!
//! What it keeps is bounded by what the files have: an event has three bytes there at least, and some hundred in
//! memory. Numbers that they give (lengths, names, blocks) allocate nothing.

use super::encoded::{CLOSED, EVENTS, HANDLER, NAME, PROCESS, Process, RATE, read_events};
use super::event::{Event, What};
use super::wire::{Bytes, Found, HEAD_BYTES, MAGIC, next_frame};
use crate::error::Error;
use crate::os;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::fs::{OpenOptions, read_dir};
use std::io::Read as _;
use std::path::{Path, PathBuf};

/// All that the files say.
#[derive(Debug, Default)]
pub(super) struct Content {
    pub(super) processes: Vec<Process>,
    pub(super) names: Vec<String>,
    pub(super) handlers: Vec<String>,
    pub(super) events: Vec<Event>,
    /// The highest number that was one in so many.
    pub(super) highest_one_in: u64,
    pub(super) is_cut_off: bool,
    /// Events whose request or block began in what was dropped.
    pub(super) skipped: usize,
    pub(super) file_bytes: u64,
}

/// What one process recorded, in its own numbers.
struct Run {
    process: Process,
    names: BTreeMap<u64, u32>,
    handlers: BTreeMap<u64, u32>,
    events: Vec<Event>,
    is_closed: bool,
}

#[cold]
fn no_recording(path: &Path, reason: &dyn std::fmt::Display) -> Error {
    Error::NoRecording { file: path.display().to_string(), reason: reason.to_string() }
}

/// The files of the recording of this name, those with older events before those with newer ones of the same process.
fn files_of(path: &Path) -> Result<Vec<PathBuf>, Error> {
    let name = path.file_name().ok_or_else(|| no_recording(path, &"this is no file's name"))?;
    let folder = match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    };
    let name = name.to_string_lossy();
    let mut found = BTreeMap::new();
    for entry in read_dir(folder).map_err(|error| no_recording(path, &error))? {
        let entry = entry.map_err(|error| no_recording(path, &error))?;
        let file_name = entry.file_name();
        let file_name = file_name.to_string_lossy();
        let Some(rest) = file_name.strip_prefix(&*name) else { continue };
        let (rest, is_newer) = rest.strip_suffix(".old").map_or((rest, true), |rest| (rest, false));
        let number = match rest.strip_prefix('.') {
            None if rest.is_empty() => Some(0),
            Some(digits) if digits.bytes().all(|byte| byte.is_ascii_digit()) => digits.parse::<u32>().ok(),
            _ => None,
        };
        if let Some(number) = number {
            found.insert((number, is_newer), entry.path());
        }
    }
    if found.is_empty() {
        return Err(no_recording(path, &"there is no such file"));
    }
    Ok(found.into_values().collect())
}

/// What the file has. One that is no plain file would be waited for.
fn bytes_of(path: &Path) -> Result<Vec<u8>, Error> {
    let mut options = OpenOptions::new();
    let mut file = os::without_waiting(options.read(true)).open(path).map_err(|error| no_recording(path, &error))?;
    if !file.metadata().map_err(|error| no_recording(path, &error))?.is_file() {
        return Err(no_recording(path, &"this is no plain file"));
    }
    let mut bytes = Vec::new();
    file.read_to_end(&mut bytes).map_err(|error| no_recording(path, &error))?;
    Ok(bytes)
}

/// Reads all files of the recording.
///
/// # Errors
/// [`Error::BadRecording`], [`Error::NoRecording`].
pub(super) fn read(path: &Path) -> Result<Content, Error> {
    let (mut read, mut runs) = (Content::default(), Vec::new());
    for file in files_of(path)? {
        let bytes = bytes_of(&file)?;
        read.file_bytes += bytes.len() as u64;
        let bad = |(offset, reason): (usize, &'static str)| Error::BadRecording {
            file: file.display().to_string(),
            offset: offset as u64,
            reason,
        };
        read_file(&bytes, &mut read, &mut runs).map_err(bad)?;
    }
    join(read, runs).map_err(|reason| Error::BadRecording { file: path.display().to_string(), offset: 0, reason })
}

fn read_file(bytes: &[u8], read: &mut Content, runs: &mut Vec<Run>) -> Result<(), (usize, &'static str)> {
    match bytes.get(..MAGIC.len()) {
        Some(begin) if begin == MAGIC => {}
        Some(begin) if begin[..MAGIC.len() - 1] == MAGIC[..MAGIC.len() - 1] => {
            return Err((MAGIC.len() - 1, "another version of ctxalloc wrote it; read it with that one"));
        }
        None if MAGIC.starts_with(bytes) => {
            read.is_cut_off = true; // its process came no further
            return Ok(());
        }
        _ => return Err((0, "this is no recording")),
    }
    let (mut offset, mut current) = (MAGIC.len(), None);
    loop {
        match next_frame(&bytes[offset..]) {
            Found::End => return Ok(()),
            Found::CutOff => {
                read.is_cut_off = true;
                return Ok(());
            }
            Found::Damaged(reason) => return Err((offset, reason)),
            Found::Body(body) => {
                read_body(body, read, runs, &mut current).map_err(|reason| (offset + HEAD_BYTES, reason))?;
                offset += HEAD_BYTES + body.len();
            }
        }
    }
}

fn read_body(
    body: &[u8],
    read: &mut Content,
    runs: &mut Vec<Run>,
    current: &mut Option<usize>,
) -> Result<(), &'static str> {
    let Some((&kind, rest)) = body.split_first() else { return Err("a frame is empty") };
    if kind == PROCESS {
        let process = Process::read(rest).ok_or("what a process says of itself is not complete")?;
        read.highest_one_in = read.highest_one_in.max(process.one_in);
        let is_it = |run: &Run| (run.process.pid, run.process.began_unix_ns) == (process.pid, process.began_unix_ns);
        *current = runs.iter().position(is_it);
        if current.is_none() {
            *current = Some(runs.len());
            let (names, handlers) = (BTreeMap::new(), BTreeMap::new());
            runs.push(Run { process, names, handlers, events: Vec::new(), is_closed: false });
        }
        return Ok(());
    }
    let run = current.and_then(|at| runs.get_mut(at)).ok_or("there is something before any process begins")?;
    match kind {
        EVENTS => {
            let are_events = read_events(rest, |event| run.events.push(event));
            are_events.then_some(()).ok_or("a frame has something that is no event")?;
        }
        NAME | HANDLER => {
            let mut bytes = Bytes { rest };
            let (Some(number), Some(name)) = (bytes.number(), bytes.text()) else {
                return Err("a name is not complete");
            };
            let (numbers, texts) = match kind {
                NAME => (&mut run.names, &mut read.names),
                _ => (&mut run.handlers, &mut read.handlers),
            };
            let known = texts.iter().position(|text| text == name);
            let at = known.unwrap_or_else(|| {
                texts.push(name.to_owned());
                texts.len() - 1
            });
            numbers.insert(number, u32::try_from(at).map_err(|_| "there are too many names")?);
        }
        RATE => {
            let one_in = Bytes { rest }.number().ok_or("a rate is not complete")?;
            read.highest_one_in = read.highest_one_in.max(one_in);
        }
        CLOSED => run.is_closed = true,
        _ => {} // of a later release
    }
    Ok(())
}

/// The events of all processes, each request, block and thread with a number that no other one has.
fn join(mut read: Content, mut runs: Vec<Run>) -> Result<Content, &'static str> {
    const TOO_HIGH: &str = "the numbers of its requests, blocks or times are too high";
    let began = runs.iter().map(|run| run.process.began_unix_ns).min().unwrap_or_default();
    let unknown = |texts: &mut Vec<String>| {
        texts.push("?".to_owned());
        texts.len() as u32 - 1
    };
    let (mut no_name, mut no_handler) = (None, None);
    let (mut requests, mut blocks, mut threads) = (0_u64, 0_u64, 0_u32);
    for run in &mut runs {
        read.is_cut_off |= !run.is_closed;
        let later = run.process.began_unix_ns - began;
        let (mut highest_request, mut highest_block, mut highest_thread) = (requests, blocks, threads);
        for mut event in std::mem::take(&mut run.events) {
            event.at_ns = event.at_ns.checked_add(later).ok_or(TOO_HIGH)?;
            event.request = event.request.checked_add(requests).ok_or(TOO_HIGH)?;
            event.thread = event.thread.checked_add(threads).ok_or(TOO_HIGH)?;
            highest_request = highest_request.max(event.request);
            highest_thread = highest_thread.max(event.thread);
            match &mut event.what {
                What::Begin { name, handler, parent } => {
                    *name = match run.names.get(&u64::from(*name)) {
                        Some(&known) => known,
                        None => *no_name.get_or_insert_with(|| unknown(&mut read.names)),
                    };
                    *handler = match run.handlers.get(&u64::from(*handler)) {
                        Some(&known) => known,
                        None => *no_handler.get_or_insert_with(|| unknown(&mut read.handlers)),
                    };
                    if *parent > 0 {
                        *parent = parent.checked_add(requests).ok_or(TOO_HIGH)?;
                    }
                }
                What::Allocate { block, .. } | What::Resize { block, .. } | What::Free { block } => {
                    *block = block.checked_add(blocks).ok_or(TOO_HIGH)?;
                    highest_block = highest_block.max(*block);
                }
                What::Refused { .. } | What::End { .. } => {}
            }
            read.events.push(event);
        }
        (requests, blocks, threads) = (highest_request, highest_block, highest_thread);
    }
    read.processes = runs.into_iter().map(|run| run.process).collect();
    read.events.sort_by_key(|event| event.at_ns);
    let before = read.events.len();
    keep_whole(&mut read.events);
    read.skipped = before - read.events.len();
    Ok(read)
}

/// Drops events of requests and blocks whose beginning is not there: it was in a file that rotation removed.
fn keep_whole(events: &mut Vec<Event>) {
    let (mut begun, mut ended, mut live, mut made) = (HashSet::new(), HashSet::new(), HashMap::new(), HashSet::new());
    events.retain_mut(|event| {
        let is_known = begun.contains(&event.request);
        match &mut event.what {
            What::Begin { parent, .. } => {
                if !begun.contains(parent) {
                    *parent = 0; // so nothing is inside of itself
                }
                begun.insert(event.request)
            }
            What::Allocate { block, .. } => {
                let is_new = is_known && made.insert(*block);
                if is_new {
                    live.insert(*block, event.request);
                }
                is_new
            }
            What::Resize { block, .. } => is_known && live.get(block) == Some(&event.request),
            What::Free { block } => {
                let is_its = is_known && live.get(block) == Some(&event.request);
                if is_its {
                    live.remove(block);
                }
                is_its
            }
            What::Refused { .. } => is_known,
            What::End { .. } => is_known && ended.insert(event.request),
        }
    });
}

#[cfg(test)]
mod tests {
    use super::super::encoded::{EVENTS, Events, HANDLER, NAME, Process, named};
    use super::super::wire::frame;
    use super::{Content, Event, MAGIC, What, join, read_file};

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

    fn read(bytes: &[u8]) -> Result<Content, (usize, &'static str)> {
        let (mut content, mut runs) = (Content::default(), Vec::new());
        read_file(bytes, &mut content, &mut runs)?;
        join(content, runs).map_err(|reason| (0, reason))
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
        let (mut errors, mut found) = (0, 0);
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
                Err((offset, _)) => {
                    errors += 1;
                    assert!(offset <= bytes.len());
                }
            }
        }
        assert!(cfg!(miri) || errors > 100 && found > 100, "{errors} errors, {found} read");
        assert!(read(&file(&[vec![EVENTS]])).is_err(), "events of no process");
    }
}
