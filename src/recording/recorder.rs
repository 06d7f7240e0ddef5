//! `Recorder`: whether this process records, into what, and which requests.
//!
//! While nothing is recorded a request's beginning costs one load more, and its blocks cost nothing: only a recorded
//! request's state has a [`Noted`](super::Noted). A recording never breaks the program: where a file cannot be written,
//! it says so once on standard error and stops.

mod share;

use super::encoded::{Process, Used};
use super::names::{Name, Names};
use super::options::Options;
use super::output::{Output, full_bytes, max_file_bytes};
use super::shard::{self, SHARDS, Shard};
use crate::error::Error;
use crate::os;
use crate::settings;
use crate::sync::{ForkLock, HeldAcrossFork, Locked, Made, forks, held_across_fork};
use crate::unattributed::unattributed;
use std::collections::VecDeque;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant, SystemTime};

/// Whether this process records.
static STATE: AtomicU8 = AtomicU8::new(UNKNOWN);
/// The environment was not looked at.
const UNKNOWN: u8 = 0;
const OFF: u8 = 1;
const ON: u8 = 2;

/// Makes ready who calls [`flush`] in time, and answers what tells them that there is something to write.
pub(super) type Flusher = fn() -> fn();

/// What there is one of in a process.
#[derive(Debug)]
pub(super) struct Core {
    pub(super) shards: [Locked<Shard>; SHARDS],
    output: Locked<Option<Output>>,
    names: Locked<Names>,
    /// What is to be written next. It is put there under the lock of the shard or of the names that it comes from: so
    /// whoever comes after them, as [`stop`](Self::stop) does, finds it here or in the file.
    ready: Locked<VecDeque<Ready>>,
    session: Locked<Option<Session>>,
    /// The number of the recording that runs; 0: none does. Numbers are never used twice.
    current: AtomicU32,
    /// That of the [`Recorder`] which ends it: a child of `fork` goes on under the one of its parent.
    recorder: AtomicU32,
    sessions: AtomicU32,
    /// As `forks()` was: another number means that this may be a child.
    forks: AtomicU32,
    one_in: AtomicU64,
    /// Requests that could have been recorded, and those that were; at last those with all inside of them.
    seen: AtomicU64,
    chosen: AtomicU64,
    requests: AtomicU64,
    /// The highest number of those whose beginning was noted.
    pub(super) begun: AtomicU64,
    spent_ns: AtomicU64,
    /// When it last looked, and what had been spent then.
    looked: Locked<(u64, u64)>,
    /// Tells whoever calls [`flush`] that something waits.
    flusher: Made<fn()>,
}

/// What waits for the file.
#[derive(Debug)]
enum Ready {
    Body(Vec<u8>),
    Name(Name),
}

/// A recording of this process.
#[derive(Debug, Clone)]
struct Session {
    path: PathBuf,
    options: Options,
    pid: u32,
    began: Instant,
    problem: Option<String>,
}

impl HeldAcrossFork for Core {
    fn for_each_lock(&self, visit: &mut dyn FnMut(&ForkLock)) {
        self.shards.iter().for_each(|shard| visit(shard.lock()));
        visit(self.output.lock());
        visit(self.names.lock());
        visit(self.ready.lock());
        visit(self.session.lock());
        visit(self.looked.lock());
    }
}

pub(super) fn core() -> &'static Core {
    static CORE: Made<Arc<Core>> = Made::new();
    CORE.get_or_make(|| {
        held_across_fork(Core {
            shards: std::array::from_fn(|_| Locked::new(Shard::new())),
            output: Locked::new(None),
            names: Locked::new(Names::default()),
            ready: Locked::new(VecDeque::new()),
            session: Locked::new(None),
            current: AtomicU32::new(0),
            recorder: AtomicU32::new(0),
            sessions: AtomicU32::new(0),
            forks: AtomicU32::new(forks()),
            one_in: AtomicU64::new(1),
            seen: AtomicU64::new(0),
            chosen: AtomicU64::new(0),
            requests: AtomicU64::new(0),
            begun: AtomicU64::new(0),
            spent_ns: AtomicU64::new(0),
            looked: Locked::new((0, 0)),
            flusher: Made::new(),
        })
    })
}

/// A recording of this process, which ends when this is dropped. In a child of `fork` that ends the child's, and not
/// that of its parent.
#[derive(Debug)]
#[must_use = "dropping it ends the recording"]
pub struct Recorder {
    number: u32,
}

/// Records requests of this process from now on. Those that have begun already are not recorded.
///
/// The file is appended to if it is a recording already. Other processes may record below the same name: each has a
/// file of its own (`FILE.1`, `FILE.2`), and [`Recording::open`](super::Recording::open) reads all of them. A child of
/// `fork` goes on in a file of its own.
///
/// # Errors
/// [`Error::NoRecording`]: this process records already, the file cannot be written, or is something else.
/// [`Error::BadOption`].
pub fn record(path: impl AsRef<Path>, options: Options) -> Result<Recorder, Error> {
    record_as(path.as_ref(), options, false)
}

/// As [`record`]. `is_program`: whether the next request is a whole program.
///
/// # Errors
/// As [`record`].
pub(crate) fn record_as(path: &Path, options: Options, is_program: bool) -> Result<Recorder, Error> {
    options.check()?;
    let _unattributed = unattributed();
    let fail = |reason: &dyn std::fmt::Display| Error::NoRecording {
        file: path.display().to_string(),
        reason: reason.to_string(),
    };
    let absolute = std::path::absolute(path).map_err(|error| fail(&error))?;
    core().settle();
    let number = core().start(&absolute, options, is_program, None).map_err(|error| fail(&error))?;
    Ok(Recorder { number })
}

/// Begins the recording that the environment asks for, if it does.
#[cold]
pub(crate) fn start_by_environment() {
    if STATE.compare_exchange(UNKNOWN, OFF, Relaxed, Relaxed).is_err() {
        return;
    }
    let Some((path, one_in)) = settings::recording() else { return };
    let options = Options { one_in: one_in.unwrap_or(Options::default().one_in), ..Options::default() };
    match record(&path, options) {
        Ok(recorder) => std::mem::forget(recorder), // until the process ends
        Err(error) => say(&error),
    }
}

fn say(error: &dyn std::fmt::Display) {
    os::print_error(format!("ctxalloc: {error}; nothing is recorded\n").as_bytes());
}

/// Writes what waits long enough. Returns after how much time there is more to write; `None`: nothing waits.
pub(crate) fn flush() -> Option<Duration> {
    if STATE.load(Relaxed) != ON {
        return None;
    }
    let _unattributed = unattributed();
    core().flush()
}

/// What records, if it does. Not in a child of `fork`, whose buffers are the parent's until its first request.
pub(super) fn at_work() -> Option<&'static Core> {
    (STATE.load(Relaxed) == ON).then(core).filter(|core| core.forks.load(Relaxed) == forks())
}

/// The recording that runs, if a request may be recorded.
#[inline]
pub(super) fn running() -> Option<(&'static Core, u32)> {
    match STATE.load(Relaxed) {
        OFF => None,
        _ => running_if_asked(),
    }
}

#[cold]
fn running_if_asked() -> Option<(&'static Core, u32)> {
    let _unattributed = unattributed();
    if STATE.load(Relaxed) == UNKNOWN {
        start_by_environment();
    }
    if STATE.load(Relaxed) != ON {
        return None;
    }
    let core = core();
    core.settle();
    let session = core.current.load(Relaxed);
    (session != 0).then_some((core, session))
}

impl Core {
    /// A child of `fork` begins a recording of its own.
    pub(super) fn settle(&'static self) {
        if self.forks.load(Relaxed) != forks() {
            self.settle_after_fork();
        }
    }

    #[cold]
    fn settle_after_fork(&'static self) {
        let now = forks();
        if let Some(session) = self.leave_to_parent()
            && let Err(error) = self.start(&session.path, session.options, false, Some(self.recorder.load(Relaxed)))
        {
            say(&error);
        }
        self.forks.store(now, Relaxed);
    }

    /// In a child of `fork`, the first time: what its parent recorded when it began. The child has none then.
    fn leave_to_parent(&'static self) -> Option<Session> {
        let session = self.session.with(|session| session.clone())?;
        if session.pid == std::process::id() || self.current.swap(0, Relaxed) == 0 {
            return None;
        }
        // What the buffers have is the parent's, and so is the file: it is closed here only.
        self.shards.iter().for_each(|shard| drop(shard.with(Shard::restart)));
        drop(self.output.with(Option::take));
        drop(self.ready.with(std::mem::take));
        drop(self.session.with(Option::take));
        Some(session)
    }

    /// Its number. `recorder`: whose end ends it, if that is another one.
    fn start(&'static self, path: &Path, options: Options, is_program: bool, recorder: Option<u32>) -> io::Result<u32> {
        let (began, unix) = (Instant::now(), SystemTime::now().duration_since(SystemTime::UNIX_EPOCH));
        let pid = std::process::id();
        let process = Process {
            pid: u64::from(pid),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            system: format!("{} {}", std::env::consts::OS, std::env::consts::ARCH),
            page_bytes: os::page_bytes() as u64,
            cores: std::thread::available_parallelism().map_or(1, usize::from) as u64,
            began_unix_ns: unix.map_or(0, |since| since.as_nanos() as u64),
            one_in: u64::from(options.one_in),
            share_ppm: (options.share * 1e6) as u64,
            tells_ends: true,
            is_program,
            requests_before: Some(self.requests.load(Relaxed)),
        };
        let session = Session { path: path.to_owned(), options, pid, began, problem: None };
        let taken = self.session.with(|there| match there {
            Some(there) => {
                Err(io::Error::other(format!("this process records already, into {}", there.path.display())))
            }
            None => {
                *there = Some(session);
                Ok(())
            }
        });
        taken?;
        let opened = Output::take(path, options.max_bytes, process);
        let output = match opened.and_then(|mut output| self.append_used(&mut output).map(|()| output)) {
            Ok(output) => output,
            Err(error) => {
                drop(self.session.with(Option::take));
                return Err(error);
            }
        };
        let number = self.sessions.fetch_add(1, Relaxed) + 1;
        // At once: a name that is known from now on is in this file.
        drop(self.output.with(|there| {
            let names = Names::new(max_file_bytes(options.max_bytes));
            let named = self.names.with(|there| std::mem::replace(there, names));
            (there.replace(output), named, self.ready.with(std::mem::take))
        }));
        self.one_in.store(u64::from(options.one_in), Relaxed);
        self.spent_ns.store(0, Relaxed);
        self.looked.with(|looked| *looked = (0, 0));
        for shard in &self.shards {
            drop(shard.with(|shard| shard.restart_for(number, began, full_bytes(options.max_bytes))));
        }
        self.recorder.store(recorder.unwrap_or(number), Relaxed);
        self.current.store(number, Relaxed);
        STATE.store(ON, Relaxed);
        Ok(number)
    }

    /// Ends the recording of this recorder, if it is the one that runs; what went wrong while it ran.
    fn stop(&'static self, recorder: u32) -> Option<String> {
        let current = self.current.load(Relaxed);
        if self.recorder.load(Relaxed) != recorder || current == 0 {
            return None;
        }
        let now = forks();
        if self.forks.load(Relaxed) != now && self.leave_to_parent().is_some() {
            // A child that has recorded nothing needs no file.
            STATE.store(OFF, Relaxed);
            self.forks.store(now, Relaxed);
            return None;
        }
        if self.current.compare_exchange(current, 0, Relaxed, Relaxed).is_err() {
            return None; // somebody else has just ended it
        }
        STATE.store(OFF, Relaxed);
        let mut shards: Vec<Shard> = self.shards.iter().map(|it| it.with(Shard::restart)).collect();
        // Where the file is full, what comes last stays.
        shards.sort_by_key(Shard::last_ns);
        for shard in &mut shards {
            self.make_ready(shard.rest().map(Ready::Body));
        }
        self.write();
        self.output(Output::close);
        drop(self.output.with(Option::take));
        self.session.with(Option::take).and_then(|session| session.problem)
    }

    /// Runs `change` and, if a shard is this recording's, notes it there, with nothing in between for the requests of
    /// the shard; then what is full is written. `is_end`: of a request.
    pub(super) fn noting<R>(
        &self,
        shard: usize,
        session: u32,
        is_end: bool,
        change: impl FnOnce() -> R,
        note: impl FnOnce(&mut Shard, &R),
    ) -> R {
        let (done, is_ready, waits) = self.shards[shard].with(|shard| {
            let done = change();
            if shard.session != session {
                return (done, false, false);
            }
            note(shard, &done);
            let is_ready = self.make_ready(shard.full(is_end).map(Ready::Body));
            (done, is_ready, shard.waits())
        });
        if is_ready {
            self.write();
        }
        if waits {
            self.call_flusher();
        }
        done
    }

    pub(super) fn flushed_by(&self, flusher: Flusher) {
        self.flusher.get_or_make(flusher);
    }

    /// Something waits to be written.
    fn call_flusher(&self) {
        if STATE.load(Relaxed) == ON
            && let Some(call) = self.flusher.get()
        {
            call();
        }
    }

    fn flush(&self) -> Option<Duration> {
        // In a child of `fork` the buffers are the parent's, until the child's first request.
        let own = Some(std::process::id());
        if self.session.with(|session| session.as_ref().map(|session| session.pid)) != own {
            return None;
        }
        let waits = self.shards.iter().fold(false, |waits, shard| {
            let is_left = shard.with(|shard| {
                self.make_ready(shard.old().map(Ready::Body));
                shard.waits()
            });
            waits || is_left
        });
        self.write();
        waits.then_some(shard::LOOKS_EACH)
    }

    /// Whether there was something. For whoever holds the lock of what it comes from; [`write`](Self::write) writes it.
    fn make_ready(&self, next: Option<Ready>) -> bool {
        next.map(|next| self.ready.with(|ready| ready.push_back(next))).is_some()
    }

    /// Writes what is ready; where that is not possible, says so and records no more.
    fn write(&self) {
        let before = Instant::now();
        self.output(|output| {
            let mut has_events = false;
            while let Some(next) = self.ready.with(VecDeque::pop_front) {
                match next {
                    Ready::Body(body) => {
                        output.append(&body)?;
                        has_events = true;
                    }
                    Ready::Name(name) => output.name(name)?,
                }
            }
            if has_events { self.append_used(output) } else { Ok(()) }
        });
        self.spent_ns.fetch_add(before.elapsed().as_nanos() as u64, Relaxed);
    }

    /// Says what the process has used until now.
    fn append_used(&self, output: &mut Output) -> io::Result<()> {
        let Some((time, _)) = os::used() else { return Ok(()) };
        let [seen, chosen, highest] = [&self.seen, &self.chosen, &self.begun].map(|it| it.load(Relaxed));
        output.append(&Used { processor_ns: time.as_nanos() as u64, seen, chosen, highest }.body())
    }

    fn output(&self, work: impl FnOnce(&mut Output) -> io::Result<()>) {
        let failed = self.output.with(|there| {
            let failed = match there {
                Some(output) => work(output).err(),
                None => None,
            };
            let failed = failed.and_then(|error| there.take().map(|output| (error, output)));
            let lost = if there.is_none() { self.ready.with(std::mem::take) } else { VecDeque::new() };
            (failed, lost)
        });
        let (Some((error, output)), _lost) = failed else { return };
        STATE.store(OFF, Relaxed);
        let said = format!("the recording in {} cannot be written: {error}", output.base().display());
        os::print_error(format!("ctxalloc: {said}; it has what was written before\n").as_bytes());
        self.session.with(|session| {
            if let Some(session) = session {
                session.problem = Some(said);
            }
        });
    }

    /// The number of a name, or of a handler's.
    pub(super) fn number_of(&self, is_handler: bool, name: &str) -> u32 {
        let (number, is_new) = self.names.with(|names| {
            let (number, name) = names.number_of(is_handler, name);
            (number, self.make_ready(name.map(Ready::Name)))
        });
        if is_new {
            self.write();
        }
        number
    }

    /// A number for a request that is recorded.
    pub(super) fn next_request(&self) -> u64 {
        self.requests.fetch_add(1, Relaxed) + 1
    }
}

impl Recorder {
    /// Ends the recording. Requests that are open have no end in it.
    ///
    /// # Errors
    /// [`Error::NoRecording`]: it ended before, since its file could not be written.
    pub fn stop(self) -> Result<(), Error> {
        let path = core().session.with(|session| session.as_ref().map(|session| session.path.clone()));
        let problem = core().stop(self.number);
        std::mem::forget(self);
        let file = path.map_or_else(String::new, |path| path.display().to_string());
        problem.map_or(Ok(()), |reason| Err(Error::NoRecording { file, reason }))
    }
}

impl Drop for Recorder {
    fn drop(&mut self) {
        core().stop(self.number);
    }
}

/// Ends the recording that the environment asked for, if it runs.
#[cfg(feature = "python")]
pub(crate) fn stop_any() {
    if STATE.load(Relaxed) != UNKNOWN {
        core().stop(core().recorder.load(Relaxed));
    }
}
