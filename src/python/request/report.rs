//! What a request says of itself: its numbers, and what outlived it. Plain values.

use crate::handler::requests;
use crate::python::tracked::{self, PyBlock};
use crate::strategy::LiveBlock;
use crate::strategy::account::Stats;
use pyo3::prelude::*;

/// A request's numbers at one moment. Bytes are those that were asked for; the numbers of requests inside of it are part
/// of them.
#[pyclass(frozen, eq, hash, get_all, name = "Stats", module = "ctxalloc")]
#[derive(PartialEq, Eq, Hash)]
pub(in crate::python) struct PyStats {
    /// Bytes in blocks that are alive.
    live_bytes: usize,
    /// Blocks that are alive.
    live_blocks: usize,
    /// The most bytes that were alive at one time.
    peak_bytes: usize,
    /// All bytes that were ever allocated; a resize counts what it grew by.
    total_bytes: u64,
    /// How many blocks were ever made.
    count: u64,
    /// How many of them its own limit refused.
    refused: u64,
    /// How far it is beyond its limit: arrays of up to 1 KiB may be, see ``request()``.
    overdraft_bytes: usize,
}

impl From<Stats> for PyStats {
    fn from(stats: Stats) -> Self {
        Self {
            live_bytes: stats.live_bytes,
            live_blocks: stats.live_blocks,
            peak_bytes: stats.peak_bytes,
            total_bytes: stats.total_bytes,
            count: stats.total_blocks,
            refused: stats.refused,
            overdraft_bytes: stats.overdraft_bytes,
        }
    }
}

#[pymethods]
impl PyStats {
    fn __repr__(&self) -> String {
        let Self { live_bytes, live_blocks, peak_bytes, total_bytes, count, refused, overdraft_bytes } = self;
        format!(
            "Stats(live_bytes={live_bytes}, live_blocks={live_blocks}, peak_bytes={peak_bytes}, \
             total_bytes={total_bytes}, count={count}, refused={refused}, overdraft_bytes={overdraft_bytes})"
        )
    }

    /// Numbers: pickles and copies, so that a worker may send them home.
    fn __reduce__<'py>(&self, py: Python<'py>) -> PyResult<(Bound<'py, PyAny>, (StatsNumbers,))> {
        let Self { live_bytes, live_blocks, peak_bytes, total_bytes, count, refused, overdraft_bytes } = *self;
        let numbers = (live_bytes, live_blocks, peak_bytes, total_bytes, count, refused, overdraft_bytes);
        Ok((py.import("ctxalloc._native")?.getattr("_stats")?, (numbers,)))
    }
}

type StatsNumbers = (usize, usize, usize, u64, u64, u64, usize);
type EscapedNumbers = (usize, usize);

/// What a pickled Stats is made from again.
#[pyfunction]
#[pyo3(name = "_stats", signature = (numbers, /))]
pub(in crate::python) fn stats_of(numbers: StatsNumbers) -> PyStats {
    let (live_bytes, live_blocks, peak_bytes, total_bytes, count, refused, overdraft_bytes) = numbers;
    PyStats { live_bytes, live_blocks, peak_bytes, total_bytes, count, refused, overdraft_bytes }
}

/// What a pickled Escaped is made from again.
#[pyfunction]
#[pyo3(name = "_escaped", signature = (numbers, /))]
pub(in crate::python) fn escaped_of(numbers: EscapedNumbers) -> PyEscaped {
    PyEscaped::new(numbers.0, numbers.1, None)
}

/// How many requests there are, and were.
#[pyclass(frozen, eq, hash, get_all, name = "RequestMetrics", module = "ctxalloc")]
#[derive(PartialEq, Eq, Hash)]
pub(in crate::python) struct PyRequestMetrics {
    /// How many were begun.
    begun: u64,
    /// How many are there: not ended, or still reached by arrays, tasks, capsules.
    present: usize,
    /// Slots that were made, some 512 bytes each: as many as were ever present at one time.
    slots: usize,
}

#[pymethods]
impl PyRequestMetrics {
    fn __repr__(&self) -> String {
        let Self { begun, present, slots } = self;
        format!("RequestMetrics(begun={begun}, present={present}, slots={slots})")
    }
}

/// How many requests there are, and were.
#[pyfunction]
pub(in crate::python) fn request_metrics() -> PyRequestMetrics {
    let now = requests::metrics();
    PyRequestMetrics { begun: now.begun, present: now.present, slots: now.slots }
}

/// What was alive when a request ended: blocks of its own and of the requests inside of it.
#[pyclass(frozen, name = "Escaped", module = "ctxalloc")]
pub(in crate::python) struct PyEscaped {
    /// How many blocks.
    #[pyo3(get)]
    count: usize,
    /// Their bytes.
    #[pyo3(get)]
    bytes: usize,
    blocks: Option<Vec<LiveBlock>>,
}

impl PyEscaped {
    pub(super) fn new(count: usize, bytes: usize, blocks: Option<Vec<LiveBlock>>) -> Self {
        Self { count, bytes, blocks }
    }
}

#[pymethods]
impl PyEscaped {
    /// The blocks that the request itself made, a list of ``tracking.Block``, where its strategy knows them
    /// (``strategies.Tracked``, one of its own: several requests that share one see the blocks of all). Else None.
    #[getter]
    fn blocks<'py>(&self, py: Python<'py>) -> PyResult<Option<Vec<Bound<'py, PyBlock>>>> {
        self.blocks.clone().map(|blocks| tracked::to_python(py, blocks)).transpose()
    }

    fn __repr__(&self) -> String {
        format!("<ctxalloc.Escaped: {} blocks, {} bytes>", self.count, self.bytes)
    }

    /// Numbers: pickles and copies; the blocks stay behind, whose addresses are this process's.
    fn __reduce__<'py>(&self, py: Python<'py>) -> PyResult<(Bound<'py, PyAny>, (EscapedNumbers,))> {
        Ok((py.import("ctxalloc._native")?.getattr("_escaped")?, ((self.count, self.bytes),)))
    }
}
