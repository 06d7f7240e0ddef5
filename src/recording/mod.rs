//! Recordings: what requests asked of memory, and when, to be replayed and to take advice from. A leaf: imports no
//! layer.
//!
//! `event.rs` is the data; a recording is the events of all processes and threads in the order of time. The format of
//! the files is in docs/recording-format.md.

mod bodies;
mod encoded;
mod event;
mod files;
mod frames;
mod gaps;
mod header;
mod join;
mod merge;
mod names;
mod noted;
mod opened;
mod options;
mod output;
mod own_file;
mod pages;
mod read;
mod recorder;
mod room;
mod run;
mod shard;
mod stream;
mod texts;
mod threads;
mod window;
mod wire;

pub use event::{Event, Sums, What};
pub use gaps::Gap;
pub use header::Header;
pub(crate) use noted::{Choice, Noted, begin};
pub use options::Options;
#[cfg(any(test, feature = "python", ctxalloc_fuzz))]
pub(crate) use pages::Pages;
pub(crate) use recorder::flush;
#[cfg(feature = "python")]
pub(crate) use recorder::record_as;
#[cfg(feature = "python")]
pub(crate) use recorder::stop_any;
pub use recorder::{Recorder, record};
#[cfg(any(test, feature = "python", ctxalloc_fuzz))]
pub(crate) use room::{Full, Room};
pub(crate) use threads::MAIN;

use crate::error::Error;
use join::{Joined, Place};
use read::Content;
use std::collections::HashMap;
use std::path::Path;

/// What was recorded. Its events stay in the files, which stay open; what it has of them in memory is a part of what
/// they have, and never more. Requests of whom the end is missing were still open when it ended.
#[derive(Debug, Clone, Default)]
pub struct Recording {
    names: Vec<String>,
    handlers: Vec<String>,
    events: Events,
    header: Header,
    is_cut_off: bool,
    has_program: bool,
    processor_ns: Option<u64>,
    gaps: Vec<Gap>,
}

#[derive(Debug, Clone)]
enum Events {
    Given(Vec<Event>),
    Read(Joined),
}

impl Default for Events {
    fn default() -> Self {
        Self::Given(Vec::new())
    }
}

/// How far somebody has read its events.
#[derive(Debug, Clone, Default)]
pub(crate) struct Reading {
    given: usize,
    place: Place,
}

impl Recording {
    /// Reads the recording of this name: the file itself, and those of other processes and of older times beside it
    /// (`FILE.1`, `FILE.old`). What cannot be read is passed over, and is one of the [`gaps`](Self::gaps).
    ///
    /// # Errors
    /// [`Error::NoRecording`]: there is none, or the system does not let it be read. [`Error::BadRecording`]: the file
    /// is something else, or nothing of it can be read. One that only lacks its end [`is_cut_off`](Self::is_cut_off).
    pub fn open(path: impl AsRef<Path>) -> Result<Self, Error> {
        let found = read::read(path.as_ref())?;
        let mut header = Header {
            highest_one_in: found.highest_one_in,
            other_requests: found.joined.other_requests,
            missing_requests: found.joined.missing_requests,
            processes: found.process_count,
            file_bytes: found.file_bytes,
            ..Header::default()
        };
        if let Some(first) = found.processes.iter().min_by_key(|process| process.began_unix_ns) {
            header.version = first.version.clone();
            header.system = first.system.clone();
            header.page_bytes = first.page_bytes;
            header.cores = first.cores;
            header.began_unix_ns = first.began_unix_ns;
            header.one_in = first.one_in;
            header.share = first.share_ppm as f64 / 1e6;
        }
        let Content { names, handlers, joined, is_cut_off, has_program, processor_ns, gaps, .. } = found;
        let events = Events::Read(joined);
        Ok(Self { names, handlers, events, header, is_cut_off, has_program, processor_ns, gaps })
    }

    /// A recording of these events, which are sorted by time: for tests, and for loads that nobody recorded. Its
    /// requests were made with `default`, the handler of number 0.
    #[must_use]
    pub fn from_events(names: Vec<String>, mut events: Vec<Event>) -> Self {
        events.sort_by_key(|event| event.at_ns);
        Self { names, handlers: vec!["default".to_owned()], events: Events::Given(events), ..Self::default() }
    }

    /// The names of requests, routes for example, that [`What::Begin`] refers to.
    #[must_use]
    pub fn names(&self) -> &[String] {
        &self.names
    }

    /// The names of handlers that [`What::Begin`] refers to.
    #[must_use]
    pub fn handlers(&self) -> &[String] {
        &self.handlers
    }

    /// How and where it was made; one that is made by hand says nothing.
    #[must_use]
    pub fn header(&self) -> &Header {
        &self.header
    }

    /// How many events were left out, since their request or their block began in a file that is there no more, or in a
    /// gap, or since they are there twice.
    #[must_use]
    pub fn skipped(&self) -> usize {
        match &self.events {
            Events::Given(_) => 0,
            Events::Read(joined) => joined.skipped,
        }
    }

    /// All events, the oldest first; those of one request are in the order in which they happened.
    ///
    /// They are read from the files as they are asked for. An error is the last one that comes:
    /// [`Error::NoRecording`], a file cannot be read any more, or [`Error::BadRecording`], somebody has changed it.
    pub fn events(&self) -> impl Iterator<Item = Result<Event, Error>> + '_ {
        let mut reading = Some(Reading::default());
        std::iter::from_fn(move || {
            let next = self.next_event(reading.as_mut()?).transpose();
            reading.take_if(|_| !matches!(next, Some(Ok(_))));
            next
        })
    }

    /// The event behind those that were read.
    ///
    /// # Errors
    /// As [`events`](Self::events).
    pub(crate) fn next_event(&self, reading: &mut Reading) -> Result<Option<Event>, Error> {
        match &self.events {
            Events::Given(events) => {
                reading.given += 1;
                Ok(events.get(reading.given - 1).copied())
            }
            Events::Read(joined) => joined.next(&mut reading.place),
        }
    }

    /// The file and the offset of what was read last; `None`: it is in no file.
    pub(crate) fn place_of(&self, reading: &Reading) -> Option<(&Path, u64)> {
        match &self.events {
            Events::Given(_) => None,
            Events::Read(joined) => Some(joined.place_of(&reading.place)),
        }
    }

    /// Whether one of its processes is a program that was recorded (`ctxalloc run --record`).
    #[cfg_attr(not(feature = "python"), allow(dead_code, reason = "is for `recommend`"))]
    pub(crate) fn has_program(&self) -> bool {
        self.has_program
    }

    /// What of its processes' time on processors, in the program and in the kernel, falls to the recorded requests, if
    /// those that were left out took as much. With it goes what was done beside all requests. `None`: not known.
    #[cfg_attr(not(feature = "python"), allow(dead_code, reason = "is for `recommend`"))]
    pub(crate) fn processor_ns(&self) -> Option<u64> {
        self.processor_ns
    }

    /// Whether this request is a program that was recorded (`ctxalloc run --record`), and has others inside of it: to
    /// these it is what a process is to the requests of a service.
    pub(crate) fn is_program(&self, request: u64) -> bool {
        match &self.events {
            Events::Given(_) => false,
            Events::Read(joined) => joined.is_program(request),
        }
    }

    /// Which of its processes a request is of, from 0 on: each has pools and settings of its own.
    pub(crate) fn process_of(&self, request: u64) -> u32 {
        match &self.events {
            Events::Given(_) => 0,
            Events::Read(joined) => joined.process_of(request),
        }
    }

    /// When each thread of its events had ended: where that is not told, after the last of its events.
    ///
    /// # Errors
    /// As [`events`](Self::events).
    pub(crate) fn thread_ends(&self) -> Result<HashMap<u32, u64>, Error> {
        match &self.events {
            Events::Given(events) => Ok(events.iter().map(|event| (event.thread, event.at_ns)).collect()),
            Events::Read(joined) => joined.thread_ends(),
        }
    }

    /// What it takes of memory, and with it one who reads its events.
    #[cfg_attr(not(any(test, feature = "python")), allow(dead_code, reason = "is for `trace`"))]
    pub(crate) fn memory_bytes(&self) -> usize {
        let names = self.names.iter().chain(&self.handlers);
        let texts = names.map(|name| name.capacity() + size_of::<String>()).sum::<usize>();
        texts
            + match &self.events {
                Events::Given(events) => events.capacity() * size_of::<Event>(),
                Events::Read(joined) => joined.memory_bytes(),
            }
    }

    /// The most blocks that are alive at one time.
    #[cfg_attr(not(any(test, feature = "python")), allow(dead_code, reason = "is for `trace`"))]
    pub(crate) fn max_live_blocks(&self) -> u64 {
        match &self.events {
            Events::Given(events) => events.len() as u64,
            Events::Read(joined) => joined.max_live_blocks,
        }
    }

    /// Whether something may be missing at its end: a process was killed, still records, or had no room on its disk.
    #[must_use]
    pub fn is_cut_off(&self) -> bool {
        self.is_cut_off
    }

    /// What of its files cannot be read: damage, and files beside it that are none of its own. What follows each was
    /// read.
    #[must_use]
    pub fn gaps(&self) -> &[Gap] {
        &self.gaps
    }

    /// Whether events of a request that has an end may be missing, since it was open where a gap is. What its end says
    /// is true all the same.
    #[must_use]
    pub fn is_torn(&self, request: u64) -> bool {
        match &self.events {
            Events::Given(_) => false,
            Events::Read(joined) => joined.is_torn(request),
        }
    }
}
