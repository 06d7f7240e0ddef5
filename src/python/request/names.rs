//! Names that CPython keeps of requests that have ended.
//!
//! Its cache of attributes keeps the name of each look-up, up to 4096 of them. One that a program made for it
//! (`getattr(visitor, "visit_" + kind)`) is kept until another one takes its place, and for one that is a sample of a
//! whole request that may be never: samples lie where no other names do, so theirs are places of their own. Each stands
//! for 16 KiB, so ended requests filled their budgets with MiB that nobody has. So the cache is emptied now and then,
//! where a whole request left something alive: CPython fills it again as it looks up.
#![allow(unsafe_code, reason = "a C function")]

use pyo3::prelude::*;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

/// How long it is kept at least, in milliseconds: it takes some ten microseconds to empty, and more to fill.
const PAUSE_MS: u64 = 50;

/// Whether a whole request has left something alive since it was emptied.
static IS_LEFT: AtomicBool = AtomicBool::new(false);
/// When it was emptied, in milliseconds.
static EMPTIED_MS: AtomicU64 = AtomicU64::new(0);

/// A whole request ends. `leaves`: something of it is alive.
pub(super) fn forget_now_and_then(_py: Python<'_>, leaves: bool) {
    if leaves {
        IS_LEFT.store(true, Ordering::Relaxed);
    } else if !IS_LEFT.load(Ordering::Relaxed) {
        return;
    }
    let now_ms = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis() as u64);
    // Where the clock was set back, it is due too.
    if now_ms.abs_diff(EMPTIED_MS.load(Ordering::Relaxed)) < PAUSE_MS {
        return;
    }
    EMPTIED_MS.store(now_ms, Ordering::Relaxed);
    IS_LEFT.store(false, Ordering::Relaxed);
    // SAFETY: this thread has the GIL, as the argument shows. Names are plain strings, so no code runs as they go.
    unsafe { pyo3::ffi::PyType_ClearCache() };
}
