//! The running thread's number, name and lane. They are asked for once and kept in a thread-local without a destructor,
//! which can be read while the thread ends. Also the clock.

use crate::{os, sync};
use std::cell::Cell;
use std::sync::atomic::{AtomicU32, Ordering};

/// The thread that allocates.
#[derive(Clone, Copy)]
pub(super) struct Here {
    /// The system's number; 0 before the first call of `here`.
    pub(super) id: u32,
    /// The process's count of forks when it was asked: a thread of a child has another number than its parent's.
    forks: u32,
    pub(super) name_and_lane: NameAndLane,
}

/// Sixteen bytes, so that one load and one store copy it.
#[derive(Clone, Copy)]
pub(super) struct NameAndLane {
    /// Padded with zeros.
    pub(super) name: [u8; 15],
    /// Picks the list for this thread's blocks. Few threads have the same one.
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

#[cfg(not(miri))]
fn number() -> u32 {
    os::thread_number()
}

/// Miri has no such number; the process counts its threads.
#[cfg(miri)]
fn number() -> u32 {
    static NUMBERS: AtomicU32 = AtomicU32::new(1);
    NUMBERS.fetch_add(1, Ordering::Relaxed).max(1)
}

fn name() -> [u8; 15] {
    let name = if cfg!(miri) { [0; 16] } else { os::thread_name() };
    std::array::from_fn(|index| name[index])
}

/// Nanoseconds of a monotonic clock: the system's coarse one, which on Linux costs a quarter of the precise one and is
/// good enough for the ages of blocks.
#[inline]
pub(super) fn now_ns() -> u64 {
    let (seconds, nanoseconds) = os::clock();
    seconds * 1_000_000_000 + u64::from(nanoseconds)
}
