//! Who runs here: the thread's number, name and shard, asked once and kept in a thread-local without a destructor, so
//! that it can be read while threads end. And the clock.

use crate::sync;
use std::cell::Cell;
use std::sync::atomic::{AtomicU32, Ordering};

/// The thread that allocates.
#[derive(Clone, Copy)]
pub(super) struct Here {
    /// The system's number; 0 where it was not asked yet.
    pub(super) id: u32,
    /// After how many forks it was asked: a child's thread has another number than its parent's.
    forks: u32,
    pub(super) name_and_lane: NameAndLane,
}

/// Sixteen bytes, copied at once.
#[derive(Clone, Copy)]
pub(super) struct NameAndLane {
    /// Padded with zeros.
    pub(super) name: [u8; 15],
    /// A number that few threads have, for lists that threads do not share.
    pub(super) lane: u8,
}

thread_local! {
    static HERE: Cell<Here> =
        const { Cell::new(Here { id: 0, forks: 0, name_and_lane: NameAndLane { name: [0; 15], lane: 0 } }) };
}

/// The running thread.
#[inline]
pub(super) fn here() -> Here {
    let here = HERE.get();
    if here.id != 0 && here.forks == sync::forks() { here } else { ask(here) }
}

#[cold]
#[inline(never)]
fn ask(before: Here) -> Here {
    static LANES: AtomicU32 = AtomicU32::new(0);
    let lane = match before.id {
        0 => LANES.fetch_add(1, Ordering::Relaxed) as u8,
        _ => before.name_and_lane.lane,
    };
    let here = Here { id: number(), forks: sync::forks(), name_and_lane: NameAndLane { name: name(), lane } };
    HERE.set(here);
    here
}

#[cfg(all(target_os = "linux", not(miri)))]
fn number() -> u32 {
    // SAFETY: it may always be asked.
    unsafe { libc::gettid() as u32 }
}

/// Elsewhere a number of our own.
#[cfg(not(all(target_os = "linux", not(miri))))]
fn number() -> u32 {
    static NUMBERS: AtomicU32 = AtomicU32::new(1);
    NUMBERS.fetch_add(1, Ordering::Relaxed).max(1)
}

#[cfg(not(miri))]
fn name() -> [u8; 15] {
    let mut name = [0_u8; 64];
    // SAFETY: it may always be asked.
    let this_thread = unsafe { libc::pthread_self() };
    // SAFETY: a live thread, and a buffer of that length, which gets a NUL at its end. An error leaves it empty.
    let _ = unsafe { libc::pthread_getname_np(this_thread, name.as_mut_ptr().cast(), name.len()) };
    let length = name.iter().position(|&byte| byte == 0).unwrap_or(0);
    std::array::from_fn(|index| if index < length { name[index] } else { 0 })
}

#[cfg(miri)]
fn name() -> [u8; 15] {
    [0; 15]
}

/// Nanoseconds of a clock that only goes forward. The coarse one where there is one: it costs a quarter of the fine
/// one, and ages of blocks need no nanoseconds.
#[inline]
pub(super) fn now_ns() -> u64 {
    #[cfg(target_os = "linux")]
    const CLOCK: libc::clockid_t = libc::CLOCK_MONOTONIC_COARSE;
    #[cfg(not(target_os = "linux"))]
    const CLOCK: libc::clockid_t = libc::CLOCK_MONOTONIC;
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: a clock that every system here has, and a place for the answer.
    let _ = unsafe { libc::clock_gettime(CLOCK, &raw mut time) };
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}
