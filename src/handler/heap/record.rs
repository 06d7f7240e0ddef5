//! The numbers of one request's blocks on Rust's heap, and the list of those that no request has.

use crate::sync::{ForkLock, HeldAcrossFork, Made, held_across_fork};
use std::ptr::null_mut;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, AtomicUsize, Ordering};
use std::thread::panicking;

/// What Rust's heap holds for a request, by the [global allocator](crate::GlobalScoped).
///
/// It is exact when no thread is at work in the request. What a thread does in it is added when the thread selects
/// something else (at the end of each poll of its future, for example), and whenever what it holds has grown or fallen
/// by 64 KiB; a block of 64 KiB and more is in `live_bytes` at once.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct HeapStats {
    /// The bytes of live blocks, as they were asked for.
    pub live_bytes: usize,
    /// The number of live blocks.
    pub live_blocks: usize,
    /// The largest value of `live_bytes`; exact if one thread at a time works in the request, and no other frees its
    /// blocks meanwhile.
    pub peak_bytes: usize,
    /// The bytes of all blocks ever allocated. A resize adds what it grew by.
    pub total_bytes: u64,
    /// The number of blocks ever allocated.
    pub total_blocks: u64,
    /// How many times more was asked for than its limit allows.
    pub exceeded: u64,
    /// How many of these were refused: none without [`heap_refuses`](crate::request::Builder::heap_refuses).
    pub refused: u64,
}

/// No limit.
const UNLIMITED: usize = usize::MAX;

/// In `live_blocks`: the request is gone.
/// - set: by `Record::end`, once. No thread has the request selected then, so no tally has anything for it.
/// - cannot be set while: a tally counts for the record. So the number beside it is exact from then on, and only falls.
const ENDED: u64 = 1 << 63;

/// The numbers of one request. Lives for ever, and is recycled when its request and all of its blocks are gone.
#[repr(align(128))]
pub(crate) struct Record {
    /// These two may be below zero for a moment, wrapped: a block may be freed elsewhere before its maker's tally is
    /// added.
    live_bytes: AtomicUsize,
    live_blocks: AtomicU64,
    peak_bytes: AtomicUsize,
    total_bytes: AtomicU64,
    total_blocks: AtomicU64,
    limit_bytes: AtomicUsize,
    /// Whether more than the limit is refused.
    refuses: AtomicBool,
    exceeded: AtomicU64,
    refused: AtomicU64,
    /// What was asked for when the limit was last exceeded, and what was live before.
    requested_bytes: AtomicUsize,
    live_before: AtomicUsize,
    /// The next free record, while it is free.
    next: AtomicPtr<Record>,
}

/// The request's limit does not allow a block or a resize.
pub(crate) struct Refused;

/// What one thread did for one request.
pub(super) struct Done {
    pub(super) made_blocks: u64,
    pub(super) freed_blocks: u64,
    pub(super) made_bytes: u64,
    /// Made less freed.
    pub(super) live_bytes: isize,
    /// The largest value that `live_bytes` had.
    pub(super) high_bytes: isize,
}

impl Record {
    pub(super) fn fresh() -> Self {
        Self {
            live_bytes: AtomicUsize::new(0),
            live_blocks: AtomicU64::new(0),
            peak_bytes: AtomicUsize::new(0),
            total_bytes: AtomicU64::new(0),
            total_blocks: AtomicU64::new(0),
            limit_bytes: AtomicUsize::new(UNLIMITED),
            refuses: AtomicBool::new(false),
            exceeded: AtomicU64::new(0),
            refused: AtomicU64::new(0),
            requested_bytes: AtomicUsize::new(0),
            live_before: AtomicUsize::new(0),
            next: AtomicPtr::new(null_mut()),
        }
    }

    /// Makes it a request's, with this limit.
    pub(super) fn begin(&self, limit_bytes: Option<usize>, refuses: bool) {
        self.live_bytes.store(0, Ordering::Relaxed);
        self.live_blocks.store(0, Ordering::Relaxed);
        self.peak_bytes.store(0, Ordering::Relaxed);
        self.total_bytes.store(0, Ordering::Relaxed);
        self.total_blocks.store(0, Ordering::Relaxed);
        self.exceeded.store(0, Ordering::Relaxed);
        self.refused.store(0, Ordering::Relaxed);
        self.limit_bytes.store(limit_bytes.unwrap_or(UNLIMITED), Ordering::Relaxed);
        self.refuses.store(refuses, Ordering::Relaxed);
    }

    /// The request is gone: the record is free when its last block is.
    pub(super) fn end(&'static self) {
        // AcqRel: whoever recycles it comes after all that was done to it.
        if self.live_blocks.fetch_or(ENDED, Ordering::AcqRel) == 0 {
            push(self);
        }
    }

    pub(super) fn stats(&self) -> HeapStats {
        let live_blocks = self.live_blocks.load(Ordering::Relaxed).cast_signed().max(0).cast_unsigned();
        HeapStats {
            live_bytes: self.live(),
            live_blocks: live_blocks as usize,
            peak_bytes: self.peak_bytes.load(Ordering::Relaxed).max(self.live()),
            total_bytes: self.total_bytes.load(Ordering::Relaxed),
            total_blocks: self.total_blocks.load(Ordering::Relaxed),
            exceeded: self.exceeded.load(Ordering::Relaxed),
            refused: self.refused.load(Ordering::Relaxed),
        }
    }

    /// Its limit, what was live then, and what was asked for, when its limit was last exceeded.
    pub(super) fn exceeded(&self) -> Option<(usize, usize, usize)> {
        (self.exceeded.load(Ordering::Relaxed) > 0).then(|| {
            let [limit, live, requested] = [&self.limit_bytes, &self.live_before, &self.requested_bytes];
            (limit.load(Ordering::Relaxed), live.load(Ordering::Relaxed), requested.load(Ordering::Relaxed))
        })
    }

    /// How many refusals its limit is among those of the request: each block that it refused. One that refuses nothing
    /// marks the request, which is one.
    pub(super) fn refusals(&self) -> u64 {
        let is_marked = self.exceeded.load(Ordering::Relaxed) > 0 && !self.refuses.load(Ordering::Relaxed);
        self.refused.load(Ordering::Relaxed) + u64::from(is_marked)
    }

    /// Adds what a thread did that has the request selected: so the request is not gone.
    pub(super) fn add(&self, done: &Done) {
        // Relaxed: whoever reads all numbers together orders that by other means.
        let before = self.live_bytes.fetch_add(done.live_bytes.cast_unsigned(), Ordering::Relaxed).cast_signed();
        let peak = before.saturating_add(done.high_bytes).max(0).cast_unsigned();
        if peak > self.peak_bytes.load(Ordering::Relaxed) {
            self.peak_bytes.fetch_max(peak, Ordering::Relaxed);
        }
        if done.made_bytes > 0 {
            self.total_bytes.fetch_add(done.made_bytes, Ordering::Relaxed);
        }
        if done.made_blocks > 0 {
            self.total_blocks.fetch_add(done.made_blocks, Ordering::Relaxed);
        }
        if done.made_blocks != done.freed_blocks {
            self.live_blocks.fetch_add(done.made_blocks.wrapping_sub(done.freed_blocks), Ordering::Relaxed);
        }
    }

    /// Counts a growth that other threads must see at once. It becomes part of the peak later: upstream may refuse it.
    ///
    /// # Errors
    /// [`Refused`] by the limit; nothing is counted then.
    pub(super) fn grow(&self, bytes: usize) -> Result<(), Refused> {
        // In one step: two threads at once must not pass the limit together.
        let grown = self.live_bytes.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |live| {
            (bytes.cast_signed() <= self.room_beside(live)).then(|| live.wrapping_add(bytes))
        });
        if grown.is_err() {
            self.exceed(bytes)?;
            self.live_bytes.fetch_add(bytes, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Undoes [`grow`](Self::grow).
    pub(super) fn not_grown(&self, bytes: usize) {
        self.live_bytes.fetch_sub(bytes, Ordering::Relaxed);
    }

    fn live(&self) -> usize {
        self.live_bytes.load(Ordering::Relaxed).cast_signed().max(0).cast_unsigned()
    }

    /// What its limit leaves; below zero if it is exceeded.
    pub(super) fn room(&self) -> isize {
        self.room_beside(self.live_bytes.load(Ordering::Relaxed))
    }

    fn room_beside(&self, live_bytes: usize) -> isize {
        match self.limit_bytes.load(Ordering::Relaxed) {
            UNLIMITED => isize::MAX,
            limit => isize::try_from(limit).unwrap_or(isize::MAX).saturating_sub(live_bytes.cast_signed().max(0)),
        }
    }

    #[cold]
    pub(super) fn exceed(&self, requested_bytes: usize) -> Result<(), Refused> {
        self.requested_bytes.store(requested_bytes, Ordering::Relaxed);
        self.live_before.store(self.live(), Ordering::Relaxed);
        self.exceeded.fetch_add(1, Ordering::Relaxed);
        // A panic that got no memory would abort the process.
        if !self.refuses.load(Ordering::Relaxed) || panicking() {
            return Ok(());
        }
        self.refused.fetch_add(1, Ordering::Relaxed);
        Err(Refused)
    }

    /// A block grows on a thread that has not selected the request. It becomes part of the peak when
    /// [`has_resized_elsewhere`](Self::has_resized_elsewhere) says so: upstream may refuse it.
    ///
    /// # Errors
    /// [`Refused`] by the limit; nothing is counted then.
    pub(super) fn grown_elsewhere(&self, bytes: usize) -> Result<(), Refused> {
        self.grow(bytes)?;
        self.total_bytes.fetch_add(bytes as u64, Ordering::Relaxed);
        Ok(())
    }

    /// A thread that has not selected the request has freed a block of it.
    #[inline(never)]
    pub(super) fn freed_elsewhere(&'static self, bytes: usize) {
        let before = self.live_bytes.fetch_sub(bytes, Ordering::Relaxed).cast_signed();
        if before > self.peak_bytes.load(Ordering::Relaxed).cast_signed() {
            self.peak_bytes.fetch_max(before.cast_unsigned(), Ordering::Relaxed);
        }
        // AcqRel: whoever recycles it comes after all that was done to it.
        if self.live_blocks.fetch_sub(1, Ordering::AcqRel) == ENDED | 1 {
            push(self);
        }
    }

    /// A block shrinks on a thread that has not selected the request.
    pub(super) fn shrunk_elsewhere(&self, bytes: usize) {
        self.live_bytes.fetch_sub(bytes, Ordering::Relaxed);
    }

    /// The resize on a thread that has not selected the request is done.
    pub(super) fn has_resized_elsewhere(&self) {
        self.peak_bytes.fetch_max(self.live(), Ordering::Relaxed);
    }

    /// Undoes [`grown_elsewhere`](Self::grown_elsewhere).
    pub(super) fn not_grown_elsewhere(&self, bytes: usize) {
        self.not_grown(bytes);
        self.total_bytes.fetch_sub(bytes as u64, Ordering::Relaxed);
    }

    /// Undoes [`shrunk_elsewhere`](Self::shrunk_elsewhere).
    pub(super) fn not_shrunk_elsewhere(&self, bytes: usize) {
        self.live_bytes.fetch_add(bytes, Ordering::Relaxed);
    }
}

/// Free records. Any thread pushes, without a lock, since a block may be freed anywhere. Only the holder of the lock of
/// [`Pops`] pops: so while a thread pops a record, no other can pop it and push it again (the ABA problem).
static FREE: AtomicPtr<Record> = AtomicPtr::new(null_mut());

struct Pops(ForkLock);

impl HeldAcrossFork for Pops {
    fn for_each_lock(&self, visit: &mut dyn FnMut(&ForkLock)) {
        visit(&self.0);
    }
}

fn pops() -> &'static Pops {
    static POPS: Made<Arc<Pops>> = Made::new();
    POPS.get_or_make(|| held_across_fork(Pops(ForkLock::new())))
}

/// A free record, if there is one.
pub(super) fn take() -> Option<&'static Record> {
    pops().0.with(pop)
}

/// Makes a record free, which nothing refers to any more.
pub(super) fn push(record: &'static Record) {
    let own = std::ptr::from_ref(record).cast_mut();
    let mut first = FREE.load(Ordering::Relaxed);
    loop {
        record.next.store(first, Ordering::Relaxed);
        // Release pairs with the Acquire in `pop`.
        match FREE.compare_exchange_weak(first, own, Ordering::Release, Ordering::Relaxed) {
            Ok(_) => return,
            Err(newer) => first = newer,
        }
    }
}

/// For holders of the lock of [`Pops`].
fn pop() -> Option<&'static Record> {
    let mut first = FREE.load(Ordering::Acquire);
    loop {
        // SAFETY: NULL, or from `push`, which is given immortal records.
        let record: &'static Record = unsafe { first.as_ref() }?;
        let next = record.next.load(Ordering::Relaxed);
        // Acquire pairs with the Release in `push`.
        match FREE.compare_exchange_weak(first, next, Ordering::Acquire, Ordering::Acquire) {
            Ok(_) => return Some(record),
            Err(newer) => first = newer,
        }
    }
}
