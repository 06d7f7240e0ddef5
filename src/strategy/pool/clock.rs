//! The clock for the age of unused memory.

use std::time::Duration;

/// The time since an arbitrary moment, accurate to a few milliseconds. Cheap.
pub(in crate::strategy) fn now() -> Duration {
    // Miri knows the precise clock only.
    let clock = if cfg!(miri) { libc::CLOCK_MONOTONIC } else { libc::CLOCK_MONOTONIC_COARSE };
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is a timespec of ours, and every Linux has these clocks.
    let failed = unsafe { libc::clock_gettime(clock, &raw mut time) };
    debug_assert_eq!(failed, 0);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}
