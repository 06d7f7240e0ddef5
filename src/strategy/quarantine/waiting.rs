//! The blocks that wait for the devices, all of the process together: one event then stands for blocks of many arenas.
//!
//! The driver is called under no lock but `marking`, whose holder records an event; blocks go back to their pools under
//! none. The decay thread asks too, so that what waits goes back where nobody allocates. In a child of `fork` nothing
//! of this is used: what waited then stays where it is.

use crate::source::{CudaDriver, Marks, pages};
use crate::strategy::Strategy;
use crate::strategy::pool::{Keeper, Noted, Registration, register};
use crate::survived::survived;
use crate::sync::{ForkLock, HeldAcrossFork, Locked, Made, held_across_fork};
use crate::unattributed::unattributed;
use std::collections::VecDeque;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::thread::sleep;
use std::time::{Duration, Instant};

/// An event is recorded when so many blocks have come together, or so many bytes.
const BATCH_BLOCKS: usize = 64;
const BATCH_BYTES: usize = 1 << 20;

/// How long an allocation waits for the devices before it is refused.
const PATIENCE: Duration = Duration::from_secs(1);

/// How often the decay thread asks what is done, while something waits.
const ASKS_EVERY: Duration = Duration::from_secs(1);

/// A small block is allocated without asking for what is done, this many times out of as many plus one.
const UNASKED: usize = 15;

/// Freed blocks, and whose they are.
#[derive(Default)]
struct Batch {
    blocks: Vec<(NonNull<u8>, Arc<dyn Strategy>)>,
    bytes: usize,
}

// SAFETY: the quarantine alone has the blocks, and strategies may be called from any thread.
unsafe impl Send for Batch {}

#[derive(Default)]
struct Store {
    /// No event stands for it yet.
    open: Batch,
    /// No event could be recorded for them: a graph is captured, or the driver refused.
    unmarked: VecDeque<Batch>,
    /// The oldest first.
    marked: VecDeque<(Batch, Marks)>,
}

pub(super) struct Quarantine {
    store: Locked<Store>,
    /// Held while an event is recorded.
    marking: ForkLock,
    /// How many captures the user has announced.
    captures: AtomicUsize,
    blocks: AtomicUsize,
    bytes: AtomicUsize,
    /// Of those, the bytes whose event failed: they wait for ever.
    stuck_bytes: AtomicUsize,
    /// The most bytes that may wait; 0 for the default.
    max_bytes: AtomicUsize,
    /// Small allocations since it was last asked what is done.
    unasked: AtomicUsize,
    /// Whether the decay thread knows that something waits.
    noted: Noted,
    /// When the decay thread asks next, in nanoseconds of its clock; 0 if nothing waits.
    asks_at: AtomicU64,
    registration: Made<Registration>,
}

static QUARANTINE: Made<Arc<Quarantine>> = Made::new();

impl Quarantine {
    pub(super) fn get() -> &'static Self {
        QUARANTINE.get_or_make(|| {
            let made = held_across_fork(Self {
                store: Locked::new(Store::default()),
                marking: ForkLock::new(),
                captures: AtomicUsize::new(0),
                blocks: AtomicUsize::new(0),
                bytes: AtomicUsize::new(0),
                stuck_bytes: AtomicUsize::new(0),
                max_bytes: AtomicUsize::new(0),
                unasked: AtomicUsize::new(0),
                noted: Noted::default(),
                asks_at: AtomicU64::new(0),
                registration: Made::new(),
            });
            let keeper: Weak<dyn Keeper> = Arc::downgrade(&made) as _;
            made.registration.get_or_make(|| register(keeper));
            made
        })
    }

    /// The driver, where it may be called.
    fn driver() -> Option<&'static CudaDriver> {
        CudaDriver::loaded().filter(|driver| driver.is_usable())
    }

    /// Takes a freed block with room for so many bytes, to be released to its strategy later.
    pub(super) fn take(&self, block: NonNull<u8>, room_bytes: usize, home: &Arc<dyn Strategy>) {
        let _unattributed = unattributed();
        self.blocks.fetch_add(1, Ordering::Relaxed);
        self.bytes.fetch_add(room_bytes, Ordering::Relaxed);
        let full = self.store.with(|store| {
            store.open.blocks.push((block, Arc::clone(home)));
            store.open.bytes += room_bytes;
            let is_full = store.open.blocks.len() >= BATCH_BLOCKS || store.open.bytes >= BATCH_BYTES;
            is_full.then(|| std::mem::take(&mut store.open))
        });
        if let Some(batch) = full {
            self.mark(batch);
        }
        self.noted.note();
    }

    /// Gives back what is done, and records an event for what has none yet. Returns how many bytes went back.
    fn settle(&self) -> usize {
        if Self::driver().is_none() {
            return 0;
        }
        let released_bytes = self.release_done();
        self.mark_rest(true);
        released_bytes + self.release_done()
    }

    /// Records an event for a batch, whose blocks were all freed before. If that fails, the batch waits to be tried
    /// again.
    fn mark(&self, batch: Batch) {
        let marks = Self::driver().and_then(|driver| {
            self.marking.with(|| {
                // SeqCst, here and in `cuda_capturing`: who announces a capture sees that nobody records, or is seen.
                (self.captures.load(Ordering::SeqCst) == 0).then(|| driver.mark().ok()).flatten()
            })
        });
        self.store.with(|store| match marks {
            Some(marks) => store.marked.push_back((batch, marks)),
            None => store.unmarked.push_back(batch),
        });
    }

    /// Tries again to record an event for those batches where it failed, and for the open one if it is asked for.
    fn mark_rest(&self, with_open: bool) {
        if self.captures.load(Ordering::SeqCst) > 0 {
            return;
        }
        let _unattributed = unattributed();
        let rest = self.store.with(|store| {
            let mut rest = std::mem::take(&mut store.unmarked);
            if with_open && !store.open.blocks.is_empty() {
                rest.push_back(std::mem::take(&mut store.open));
            }
            rest
        });
        // One event stands for all of them.
        let joined = rest.into_iter().reduce(|mut all, batch| {
            all.blocks.extend(batch.blocks);
            all.bytes += batch.bytes;
            all
        });
        if let Some(batch) = joined {
            self.mark(batch);
        }
    }

    /// Releases each batch whose event is done, the oldest first. Returns how many bytes.
    fn release_done(&self) -> usize {
        let mut released_bytes = 0;
        while let Some((batch, marks)) = self.store.with(|store| store.marked.pop_front()) {
            match marks.are_done() {
                Ok(true) => {
                    drop(marks);
                    released_bytes += batch.bytes;
                    self.release(batch);
                }
                Ok(false) => {
                    self.store.with(|store| store.marked.push_front((batch, marks)));
                    break;
                }
                Err(_) => {
                    // Nobody knows whether a device still reads these blocks: they stay for ever, with their arenas.
                    self.stuck_bytes.fetch_add(batch.bytes, Ordering::Relaxed);
                    std::mem::forget((batch, marks));
                }
            }
        }
        released_bytes
    }

    fn release(&self, batch: Batch) {
        self.blocks.fetch_sub(batch.blocks.len(), Ordering::Relaxed);
        if self.bytes.fetch_sub(batch.bytes, Ordering::Relaxed) == batch.bytes {
            self.asks_at.store(0, Ordering::Relaxed); // what is freed next waits for its own time
        }
        for (block, home) in batch.blocks {
            // SAFETY: a block of that strategy, given up by its user (`take`), and released once: the batch was taken
            // out of the store. A panic of the source must not cost the others.
            survived(|| unsafe { home.release(block) });
        }
    }

    /// What waits and may be given back some day.
    fn waiting_bytes(&self) -> usize {
        self.bytes.load(Ordering::Relaxed).saturating_sub(self.stuck_bytes.load(Ordering::Relaxed))
    }

    fn max_bytes(&self) -> usize {
        match self.max_bytes.load(Ordering::Relaxed) {
            0 => (pages::physical_bytes() / 8).max(256 << 20),
            bytes => bytes,
        }
    }

    /// Before an allocation: releases what is done. False if more waits than may, and the devices do not get done.
    pub(super) fn has_room(&self, size_bytes: usize) -> bool {
        if self.bytes.load(Ordering::Relaxed) == 0 || Self::driver().is_none() {
            return true;
        }
        // Relaxed: a lost count asks a little later.
        if size_bytes >= BATCH_BYTES || self.unasked.fetch_add(1, Ordering::Relaxed) >= UNASKED {
            self.unasked.store(0, Ordering::Relaxed);
            self.release_done();
        }
        let is_within = || self.waiting_bytes() <= self.max_bytes();
        is_within() || self.wait_until(is_within)
    }

    /// Waits until something is given back; false if nothing is.
    pub(super) fn wait_for_some(&self) -> bool {
        let before = self.bytes.load(Ordering::Relaxed);
        before > 0 && self.wait_until(|| self.bytes.load(Ordering::Relaxed) < before)
    }

    /// Waits for the devices until it is enough, at most as long as [`PATIENCE`] says; whether it is.
    fn wait_until(&self, is_enough: impl Fn() -> bool) -> bool {
        let begun = Instant::now();
        let mut pause = Duration::from_micros(20);
        loop {
            self.mark_rest(true);
            self.release_done();
            if is_enough() {
                return true;
            }
            // Without an event nothing will be done. (Another thread may have the only marked batch in hand.)
            let is_in_vain = self.store.with(|store| store.marked.is_empty() && !store.unmarked.is_empty());
            if is_in_vain || self.waiting_bytes() == 0 || begun.elapsed() > PATIENCE {
                return false;
            }
            sleep(pause);
            pause = (pause * 2).min(Duration::from_millis(1));
        }
    }
}

impl Keeper for Quarantine {
    /// Asks for what is done. While a graph is captured nothing is recorded; who ends the capture notes it again.
    fn decay(&self, now: Duration) -> Option<Duration> {
        self.noted.clear();
        // Not at once: blocks come together meanwhile, and share an event.
        let mut next = match self.asks_at.load(Ordering::Relaxed) {
            0 => now + ASKS_EVERY,
            nanos => Duration::from_nanos(nanos),
        };
        if now >= next {
            self.settle();
            next = now + ASKS_EVERY;
        }
        let is_idle = self.waiting_bytes() == 0 || self.captures.load(Ordering::SeqCst) > 0 || Self::driver().is_none();
        let nanos = if is_idle { 0 } else { u64::try_from(next.as_nanos()).unwrap_or(u64::MAX) };
        self.asks_at.store(nanos, Ordering::Relaxed);
        (!is_idle).then(|| {
            self.noted.keep();
            next
        })
    }
}

impl HeldAcrossFork for Quarantine {
    fn for_each_lock(&self, visit: &mut dyn FnMut(&ForkLock)) {
        visit(&self.marking);
        visit(self.store.lock());
    }
}

/// Gives back each freed block that the devices are done with, and records an event for those that have none yet.
/// Returns how many bytes went back. Does not wait.
pub fn cuda_settle() -> usize {
    QUARANTINE.get().map_or(0, |quarantine| quarantine.settle())
}

/// How many bytes of freed blocks may wait at most; by default an eighth of the machine's memory, and at least 256 MiB.
/// An allocation beyond that waits for the devices, at most a second, and is then refused.
pub fn set_cuda_quarantine_bytes(bytes: usize) {
    Quarantine::get().max_bytes.store(bytes.max(1), Ordering::Relaxed);
}

/// What waits for the devices, in all strategies of the process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct CudaWaiting {
    /// Freed blocks that are not handed out yet.
    pub blocks: usize,
    /// Their bytes, rounded up as the pool does.
    pub bytes: usize,
    /// Those of them that will never be handed out again, because their event failed.
    pub stuck_bytes: usize,
    /// The most bytes that may wait.
    pub max_bytes: usize,
    /// How many captures are announced ([`cuda_capturing`]).
    pub captures: usize,
}

/// What waits for the devices now.
#[must_use]
pub fn cuda_waiting() -> CudaWaiting {
    let quarantine = Quarantine::get();
    CudaWaiting {
        blocks: quarantine.blocks.load(Ordering::Relaxed),
        bytes: quarantine.bytes.load(Ordering::Relaxed),
        stuck_bytes: quarantine.stuck_bytes.load(Ordering::Relaxed),
        max_bytes: quarantine.max_bytes(),
        captures: quarantine.captures.load(Ordering::SeqCst),
    }
}

/// While it lives no event is recorded on any device, which would invalidate a graph that a stream captures. What is
/// freed meanwhile waits.
#[derive(Debug)]
pub struct CudaCapturing(());

/// Announces that a graph is captured, until the value is dropped.
///
/// The graph's copies read their memory each time that it is launched: keep that memory as long as the graph.
#[must_use = "events are recorded again when it is dropped"]
pub fn cuda_capturing() -> CudaCapturing {
    let quarantine = Quarantine::get();
    quarantine.captures.fetch_add(1, Ordering::SeqCst);
    quarantine.marking.with(|| ()); // whoever records an event now has ended then
    CudaCapturing(())
}

impl Drop for CudaCapturing {
    fn drop(&mut self) {
        let quarantine = Quarantine::get();
        if quarantine.captures.fetch_sub(1, Ordering::SeqCst) == 1 && Quarantine::driver().is_some() {
            quarantine.mark_rest(false);
            quarantine.noted.note();
        }
    }
}
