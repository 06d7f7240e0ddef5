//! Names that CPython keeps of requests that have ended.
//!
//! Its cache of attributes keeps the name of each look-up, up to 4096 of them. One that a program made for it
//! (`getattr(visitor, "visit_" + kind)`) is kept until another one takes its place, and for one that is a sample of a
//! whole request that may be never: samples lie where no other names do, so theirs are places of their own. Each stands
//! for 32 KiB, so ended requests filled their budgets with MiB that nobody has. So the cache is emptied now and then,
//! where a whole request left something alive: CPython fills it again as it looks up.
#![allow(unsafe_code, reason = "a C function")]

use pyo3::prelude::*;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

/// How long it is kept at least, in milliseconds: it takes some ten microseconds to empty, and more to fill.
const PAUSE_MS: u64 = 200;
/// How long where ended requests have left much: a fast program fills a budget of 4 MiB within [`PAUSE_MS`].
const SHORT_PAUSE_MS: u64 = 2;
/// How much is much: one part in so many of what a budget holds. Without a budget nothing is.
const MUCH_OF_LIMIT: usize = 16;

/// How many bytes of objects whole requests have left alive since it was emptied.
static LEFT_BYTES: AtomicUsize = AtomicUsize::new(0);
/// When it was emptied, in milliseconds.
static EMPTIED_MS: AtomicU64 = AtomicU64::new(0);

/// A whole request ends, and so many bytes of its objects are alive. `limit_bytes`: the lowest of those above it.
pub(super) fn forget_now_and_then(_py: Python<'_>, object_bytes: usize, limit_bytes: usize) {
    // Under the GIL: no other thread comes between.
    let left_bytes = LEFT_BYTES.load(Ordering::Relaxed).saturating_add(object_bytes);
    LEFT_BYTES.store(left_bytes, Ordering::Relaxed);
    if left_bytes == 0 {
        return;
    }
    let now_ms = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis() as u64);
    let pause_ms = if left_bytes < limit_bytes / MUCH_OF_LIMIT { PAUSE_MS } else { SHORT_PAUSE_MS };
    // Where the clock was set back, it is due too.
    if now_ms.abs_diff(EMPTIED_MS.load(Ordering::Relaxed)) < pause_ms {
        return;
    }
    EMPTIED_MS.store(now_ms, Ordering::Relaxed);
    LEFT_BYTES.store(0, Ordering::Relaxed);
    // SAFETY: this thread has the GIL, as the argument shows. Names are plain strings, so no code runs as they go.
    unsafe { pyo3::ffi::PyType_ClearCache() };
}
