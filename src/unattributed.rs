//! Which new blocks of Rust's heap belong to no request: those that ctxalloc makes for itself. A leaf: imports no
//! layer.
//!
//! [`GlobalScoped`](crate::GlobalScoped) attributes each block to the request that is selected. What a process keeps
//! once, or for all of its requests together (a list, a thread's cache, a strategy's books), is made by whichever
//! thread needs it first. The request on that thread would be charged for it for ever.

use std::cell::Cell;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

/// Whether a [`GlobalScoped`](crate::GlobalScoped) is the program's allocator.
static IS_ACTIVE: AtomicBool = AtomicBool::new(false);

/// Whether anybody attributes blocks: that, or the whole request (`src/whole`).
static IS_WATCHED: AtomicBool = AtomicBool::new(false);

/// Groups of threads whose memory is counted while no request is selected.
pub(crate) const GROUPS: usize = 64;

/// The threads of a group count in so many places, each in a cache line of its own: in one they waited for each other.
const PLACES: usize = 16;

#[repr(align(64))]
struct Line(AtomicU64);

/// What a group of threads asked for while no request was selected, since the whole request is counted (`src/whole`).
struct Nobodys {
    /// How many threads have joined.
    threads: AtomicU32,
    bytes: [Line; PLACES],
}

static NOBODYS: [Nobodys; GROUPS] =
    [const { Nobodys { threads: AtomicU32::new(0), bytes: [const { Line(AtomicU64::new(0)) }; PLACES] } }; GROUPS];

/// A bit for each group that has had threads.
static HAVE_THREADS: AtomicU64 = AtomicU64::new(0);
const _: () = assert!(GROUPS <= u64::BITS as usize);

/// Where this thread counts, which joins a group.
#[cfg(ctxalloc_whole)]
pub(crate) fn join_nobodys(group: usize) -> &'static AtomicU64 {
    let Nobodys { threads, bytes } = &NOBODYS[group];
    // Release pairs with the Acquire in `nobodys_of`: whoever sees what is added there sees this thread too.
    let place = &bytes[threads.fetch_add(1, Ordering::Release) as usize % PLACES].0;
    // Release pairs with the Acquire in `nobodys_bytes`, in the same way.
    HAVE_THREADS.fetch_or(1 << group, Ordering::Release);
    place
}

/// How many bytes a group asked for.
pub(crate) fn nobodys_of(group: usize) -> u64 {
    let Nobodys { threads, bytes } = &NOBODYS[group];
    let used = (threads.load(Ordering::Acquire) as usize).min(PLACES);
    bytes[..used].iter().map(|line| line.0.load(Ordering::Relaxed)).sum()
}

/// How many bytes of native memory and Python objects no request was charged, since these are counted.
pub(crate) fn nobodys_bytes() -> u64 {
    // Each request asks four times, and most groups have no threads.
    let mut groups = HAVE_THREADS.load(Ordering::Acquire);
    let mut sum = 0;
    while groups != 0 {
        sum += nobodys_of(groups.trailing_zeros() as usize);
        groups &= groups - 1;
    }
    sum
}

thread_local! {
    /// Without a destructor: a thread allocates until its very end.
    static IS_PAUSED: Cell<bool> = const { Cell::new(false) };
}

/// Whether blocks are attributed at all.
#[inline]
pub(crate) fn is_active() -> bool {
    IS_ACTIVE.load(Ordering::Relaxed)
}

/// Called when a [`GlobalScoped`](crate::GlobalScoped) makes a block on a thread that it has not seen before.
pub(crate) fn activate() {
    IS_ACTIVE.store(true, Ordering::Relaxed);
    watch();
}

/// Whether anybody attributes blocks of the process's heaps.
#[inline]
pub(crate) fn is_watched() -> bool {
    IS_WATCHED.load(Ordering::Relaxed)
}

/// Makes [`is_paused`] tell what [`unattributed`] says from now on.
pub(crate) fn watch() {
    IS_WATCHED.store(true, Ordering::Relaxed);
}

/// Whether a new block of this thread is nobody's.
#[inline]
pub(crate) fn is_paused() -> bool {
    IS_PAUSED.get()
}

/// Where [`is_paused`] finds its answer on this thread, as long as that lives.
#[cfg(ctxalloc_whole)]
pub(crate) fn pause_of_this_thread() -> *const bool {
    IS_PAUSED.with(Cell::as_ptr)
}

/// New blocks of this thread are attributed to no request until the returned value is dropped. Around no code of the
/// user's but strategies, what those call, and panic hooks: what else it makes is its request's.
#[inline]
#[must_use = "it ends with the returned value"]
pub(crate) fn unattributed() -> Option<Unattributed> {
    is_watched().then(|| Unattributed { was_paused: IS_PAUSED.replace(true) })
}

/// See [`unattributed`].
pub(crate) struct Unattributed {
    was_paused: bool,
}

impl Drop for Unattributed {
    #[inline]
    fn drop(&mut self) {
        IS_PAUSED.set(self.was_paused);
    }
}
