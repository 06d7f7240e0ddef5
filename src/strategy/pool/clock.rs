//! The clock for the age of unused memory.

use crate::os;
use std::time::Duration;

/// The time since an arbitrary moment, accurate to a few milliseconds. Cheap.
pub(in crate::strategy) fn now() -> Duration {
    let (seconds, nanoseconds) = os::clock();
    Duration::new(seconds, nanoseconds)
}
