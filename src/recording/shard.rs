//! `Shard`: where recorded requests write their events, under its lock. A request and all that are inside of it use the
//! same one, so that the order of their events is that in which their accounts changed.

use super::encoded::Events;
use super::event::{Event, What};
use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Requests write into so many buffers, so that threads seldom wait for one another.
pub(super) const SHARDS: usize = 8;

/// A body is written when it has so many bytes, or fewer where files are small (`output.rs`),
pub(super) const FULL_BYTES: usize = 16 << 10;
/// or its first event is so old when another one comes,
const OLD_NS: u64 = 200_000_000;
/// or so old when a request ends: what is read after a crash lacks little;
const OLD_AT_END_NS: u64 = 20_000_000;

/// or so old when somebody looks who comes without an event.
const OLD_UNASKED_NS: u64 = 80_000_000;
/// Who comes so often while there is something: what waits is at most that much older then.
pub(super) const LOOKS_EACH: Duration = Duration::from_millis(100);

/// For how many live blocks, and requests, there is room from the beginning on.
const BLOCKS_AT_FIRST: usize = 1024;
const REQUESTS_AT_FIRST: usize = 32;

/// One event in so many is timed, for the share of the time that recording takes.
const TIMED_ONE_IN: u64 = 16;
/// What an event takes beside that: the lock, and the clock itself.
const BESIDE_NS: u64 = 60;

/// The last block's number, which no other block of the process has.
static BLOCKS: AtomicU64 = AtomicU64::new(0);

pub(super) fn next_block() -> u64 {
    BLOCKS.fetch_add(1, Ordering::Relaxed) + 1
}

#[derive(Debug)]
pub(super) struct Shard {
    /// The recording that it is for; 0: for none.
    pub(super) session: u32,
    began: Option<Instant>,
    full_bytes: usize,
    events: Events,
    last_ns: u64,
    first_ns: u64,
    noted: u64,
    /// The time that was spent, until the recorder takes it.
    pub(super) spent_ns: u64,
    /// The numbers of live blocks, by address.
    pub(super) blocks: HashMap<usize, u64>,
    /// Those of what a whole request counts beside arrays, by request and bytes.
    #[cfg(ctxalloc_whole)]
    pub(super) weights: HashMap<(u64, u64), Vec<u64>>,
    /// Requests that have not ended.
    pub(super) open: HashSet<u64>,
}

impl Shard {
    pub(super) fn new() -> Self {
        Self {
            session: 0,
            began: None,
            full_bytes: FULL_BYTES,
            events: Events::new(),
            last_ns: 0,
            first_ns: 0,
            noted: 0,
            spent_ns: 0,
            blocks: HashMap::new(),
            #[cfg(ctxalloc_whole)]
            weights: HashMap::new(),
            open: HashSet::new(),
        }
    }

    /// Begins anew for no recording. What it had is returned, to be dropped without the lock.
    pub(super) fn restart(&mut self) -> Self {
        std::mem::replace(self, Self::new())
    }

    /// As [`restart`](Self::restart), for a recording whose bodies have so many bytes.
    pub(super) fn restart_for(&mut self, session: u32, began: Instant, full_bytes: usize) -> Self {
        let mut next = Self { session, began: Some(began), full_bytes, ..Self::new() };
        // Now, and not when the program's blocks are there: what malloc places behind them keeps it from giving
        // their memory back, and the recording would be of another program than the one that is not recorded.
        next.events = Events::with_room(full_bytes);
        next.blocks.reserve(BLOCKS_AT_FIRST);
        next.open.reserve(REQUESTS_AT_FIRST);
        std::mem::replace(self, next)
    }

    /// Notes what `thread` did ([`threads`](super::threads)).
    pub(super) fn note(&mut self, thread: u32, request: u64, what: What) {
        let now = Instant::now();
        let Some(at_ns) = self.time(now) else { return };
        self.events.push(&Event::new(at_ns, thread, request, what));
        self.noted += 1;
        if self.noted.is_multiple_of(TIMED_ONE_IN) {
            self.spent_ns += (now.elapsed().as_nanos() as u64 + BESIDE_NS) * TIMED_ONE_IN;
        }
    }

    /// A thread that has noted something ends.
    pub(super) fn note_thread_end(&mut self, thread: u32) {
        if let Some(at_ns) = self.time(Instant::now()) {
            self.events.push_thread_end(at_ns, thread);
        }
    }

    /// The time of an event that is noted now.
    fn time(&mut self, now: Instant) -> Option<u64> {
        // Never the same twice: the reader sorts by it.
        let at_ns = (now.duration_since(self.began?).as_nanos() as u64).max(self.last_ns + 1);
        if self.events.len() == 0 {
            self.first_ns = at_ns;
        }
        self.last_ns = at_ns;
        Some(at_ns)
    }

    /// When its last event was.
    pub(super) fn last_ns(&self) -> u64 {
        self.last_ns
    }

    /// The body, if it is time to write it.
    pub(super) fn full(&mut self, is_end: bool) -> Option<Vec<u8>> {
        let age = self.last_ns - self.first_ns;
        let is_due = self.events.len() >= self.full_bytes || age >= if is_end { OLD_AT_END_NS } else { OLD_NS };
        if is_due { self.rest() } else { None }
    }

    /// The body, if it is old, though no event comes.
    pub(super) fn old(&mut self) -> Option<Vec<u8>> {
        let age = (self.began?.elapsed().as_nanos() as u64).saturating_sub(self.first_ns);
        if age >= OLD_UNASKED_NS { self.rest() } else { None }
    }

    /// Whether it has events that are not written.
    pub(super) fn waits(&self) -> bool {
        self.events.len() > 0
    }

    /// The body, if there is one.
    pub(super) fn rest(&mut self) -> Option<Vec<u8>> {
        (self.events.len() > 0).then(|| self.events.take())
    }
}
