//! Counters of ended requests by name: written once at a request's end, read by exporters. A leaf: imports no layer.
//!
//! `snapshot` has the values that are read, `admitted` what became of reservations, `history` what requests needed
//! lately, `buckets` says which value is in which, `region` has the counters in memory, `place` where they are (this
//! process's own memory, or a file that other processes read too), `writer` finds a name's series. [`crate::metrics`]
//! is what users call. ARCHITECTURE.md says what else a new counter touches.

mod admitted;
mod buckets;
mod history;
mod place;
mod region;
mod snapshot;
mod writer;

pub(crate) use admitted::Admitted;
#[cfg(feature = "metrics")]
pub(crate) use buckets::{STEPS, end_of};
pub(crate) use history::{History, history_of};
pub(crate) use region::Sample;
pub use snapshot::{Gauges, Histogram, OTHER, Process, Series, Snapshot, UNNAMED};

use crate::error::Error;
use crate::os;
use crate::settings;
use crate::sync::{ForkLock, HeldAcrossFork, Locked, Made, forks, held_across_fork};
use crate::trace;
use place::{Mapping, Place};
use region::Found;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use writer::Writer;

/// How old the gauges of a process may be at its last request's end.
const GAUGES_AGE: Duration = Duration::from_millis(100);

struct Counting {
    home: Locked<Option<Home>>,
}

/// The counters of this process.
struct Home {
    writer: Writer,
    /// As `forks()` was: another number means that this may be a child, whose counters are its own.
    forks: u32,
    pid: u32,
    /// When the gauges were written last, if they are shared.
    gauged: Option<Instant>,
    /// Why the counters are not where the environment wants them.
    problem: Option<Arc<Error>>,
}

impl HeldAcrossFork for Counting {
    fn for_each_lock(&self, visit: &mut dyn FnMut(&ForkLock)) {
        visit(self.home.lock());
    }
}

fn counting() -> &'static Counting {
    static COUNTING: Made<Arc<Counting>> = Made::new();
    COUNTING.get_or_make(|| held_across_fork(Counting { home: Locked::new(None) }))
}

impl Counting {
    /// Runs `work` with this process's counters.
    fn with<R>(&self, mut work: impl FnMut(&mut Home) -> R) -> R {
        loop {
            let is_ours = |home: &&mut Home| home.forks == forks();
            if let Some(result) = self.home.with(|home| home.as_mut().filter(is_ours).map(&mut work)) {
                return result;
            }
            self.settle();
        }
    }

    /// Finds a place for this process's counters. What it makes is made and dropped outside of the lock: the allocator
    /// may be one of ours.
    #[cold]
    fn settle(&self) {
        let (forks, pid) = (forks(), std::process::id());
        let is_known = self.home.with(|home| match home {
            Some(home) if home.pid == pid => {
                home.forks = forks; // the parent's side
                true
            }
            _ => false,
        });
        if is_known {
            return;
        }
        let folder = settings::metrics_dir();
        let start = os::process_started(pid).unwrap_or_default();
        let (place, problem) = match folder.as_deref().map(|folder| Mapping::take(folder, pid, start)) {
            Some(Ok(mapping)) => (Place::Mapped(mapping), None),
            Some(Err(error)) => {
                trace::bad_setting(&error);
                (Place::here(), Some(error))
            }
            None => (Place::here(), None),
        };
        let is_shared = matches!(place, Place::Mapped(_));
        let mut fresh = Home {
            writer: Writer::new(place),
            forks,
            pid,
            gauged: is_shared.then(|| Instant::now() - GAUGES_AGE),
            problem: problem.map(Arc::new),
        };
        let unused = self.home.with(|home| match home {
            Some(home) if home.pid == pid => Some(fresh), // another thread was faster
            _ => {
                if !is_shared {
                    // A child of fork has a copy of what its parent counted.
                    fresh.writer.region().clear();
                    fresh.writer.region().take(pid, start);
                }
                fresh.writer.open();
                home.replace(fresh)
            }
        });
        drop(unused);
    }
}

/// Counts a request that has ended. Returns whether the [gauges](set_gauges) are due.
#[inline]
pub(crate) fn record(name: Option<&str>, sample: &Sample) -> bool {
    counting().with(|home| {
        home.writer.record(name, sample);
        home.gauged.is_some_and(|last| last.elapsed() >= GAUGES_AGE)
    })
}

/// Counts what has escaped of a request that was counted without.
#[cfg(feature = "python")]
pub(crate) fn record_escapes(name: Option<&str>, blocks: u64, bytes: u64) {
    counting().with(|home| home.writer.record_escapes(name, blocks, bytes));
}

/// Counts one that did not get its reservation at once.
pub(crate) fn record_admission(name: Option<&str>, admitted: Admitted) {
    counting().with(|home| home.writer.record_admission(name, admitted));
}

/// How many wait for room: kept by the queue.
static WAITING: AtomicU64 = AtomicU64::new(0);

/// Says how many wait for room now.
pub(crate) fn set_waiting(waiting: usize) {
    WAITING.store(waiting as u64, Ordering::Relaxed);
}

/// How many wait for room.
pub(crate) fn waiting() -> u64 {
    WAITING.load(Ordering::Relaxed)
}

/// Tells other processes what this one has in use.
pub(crate) fn set_gauges(gauges: Gauges) {
    counting().with(|home| {
        home.writer.set_gauges(gauges);
        home.gauged = home.gauged.map(|_| Instant::now());
    });
}

/// All counters now: of this process, or with `CTXALLOC_METRICS_DIR` of all that count there.
///
/// # Errors
/// [`Error::Metrics`].
pub(crate) fn snapshot() -> Result<Snapshot, Error> {
    let counting = counting();
    // A reader must not take a part for the whole.
    if let Some(problem) = counting.with(|home| home.problem.clone()) {
        return Err(Error::clone(&problem));
    }
    let mut all = BTreeMap::<String, Series>::new();
    let mut add = |series: Series| match all.get_mut(&series.name) {
        Some(sum) => sum.add(&series),
        None => drop(all.insert(series.name.clone(), series)),
    };
    let mut processes = Vec::new();
    match settings::metrics_dir() {
        Some(folder) => {
            for mapping in Mapping::all(&folder)? {
                let region = mapping.region();
                let mut found = Found::with_room_for(region.used());
                region.read_into(&mut found);
                found.into_series().for_each(&mut add);
                let (pid, start) = region.owner();
                if os::process_started(pid) == Some(start) {
                    processes.push(Process { pid, gauges: region.gauges() });
                }
            }
        }
        None => {
            let (found, gauges) = read_here(counting);
            found.into_series().for_each(&mut add);
            processes.push(Process { pid: std::process::id(), gauges });
        }
    }
    Ok(Snapshot { series: all.into_values().collect(), processes })
}

/// This process's own. What it needs is allocated outside of the lock.
fn read_here(counting: &Counting) -> (Found, Gauges) {
    loop {
        let mut found = Found::with_room_for(counting.with(|home| home.writer.region().used()));
        let gauges = counting.with(|home| {
            let region = home.writer.region();
            found.has_room_for(region.used()).then(|| {
                region.read_into(&mut found);
                region.gauges()
            })
        });
        if let Some(gauges) = gauges {
            return (found, gauges);
        }
    }
}
