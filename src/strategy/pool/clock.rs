//! The clock for the age of unused memory.

use crate::os;
use std::time::Duration;

/// The time since an arbitrary moment, accurate to a few milliseconds. Cheap.
pub(in crate::strategy) fn now() -> Duration {
    let (seconds, nanoseconds) = os::clock();
    Duration::new(seconds, nanoseconds)
}

/// A time as one number, for an atomic.
pub(super) fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}
