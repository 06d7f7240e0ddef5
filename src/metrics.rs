//! How much, where, how often: counters of all ended requests by name, and what is in use now. Layer 6, beside
//! `request`.
//!
//! A request adds to its name's counters at its end: one lock, no allocation. [`snapshot`] reads them, for exporters.
//! A process has room for 128 names; whatever comes under another one counts as [`OTHER`].
//!
//! ```
//! use ctxalloc::{Buffer, metrics, request};
//!
//! let thumbnail = request().name("thumbnail").begin()?;
//! thumbnail.run(|| Buffer::zeroed(1000))?;
//! drop(thumbnail);
//! let snapshot = metrics::snapshot()?;
//! let series = snapshot.series.iter().find(|series| series.name == "thumbnail").expect("it has ended");
//! assert_eq!((series.requests, series.refused_requests, series.max_peak_bytes), (1, 0, 1000));
//! assert_eq!(series.peak_bytes.quantile(0.95), 1024); // to 4.5 %
//! # Ok::<(), ctxalloc::Error>(())
//! ```
//!
//! With the feature `metrics`, `publish` hands them to the recorder of the `metrics` crate.
//!
//! With `CTXALLOC_METRICS_DIR` in the environment, the processes of a server that forks share their counters by files
//! in that directory, and each of them reads all. A child of `fork` counts from zero otherwise.

#[cfg(feature = "metrics")]
mod ends;
#[cfg(feature = "metrics")]
mod publish;

use crate::counters;
use crate::error::Error;
use crate::handler::requests;
use crate::strategy::{PoolBytes, pool_bytes, pool_resident_bytes};

#[cfg(feature = "metrics")]
pub use publish::publish;

pub use crate::counters::{Gauges, Histogram, OTHER, Process, Series, Snapshot, UNNAMED};
pub use crate::handler::requests::{Present, RequestCounts, present, request_counts};
pub use crate::room::{Waits, waits};
pub use crate::strategy::account::{BudgetNumbers, MadeRoom, budgets, made_room, ready};

/// What all pools together have of the system: in use, and kept for later.
#[must_use]
pub fn pools() -> PoolBytes {
    pool_bytes()
}

/// How many bytes of what all pools have mapped are in memory: pages that nobody touched are not. Asks the system for
/// each page, which takes a millisecond for some gigabytes. `None`: the system does not say.
#[must_use]
pub fn pools_resident_bytes() -> Option<usize> {
    pool_resident_bytes()
}

/// All counters now, and what requests have in use: of this process, or with `CTXALLOC_METRICS_DIR` of all processes
/// that count there.
///
/// # Errors
/// [`Error::Metrics`] if that directory cannot be used.
pub fn snapshot() -> Result<Snapshot, Error> {
    counters::set_gauges(requests::gauges());
    counters::snapshot()
}
