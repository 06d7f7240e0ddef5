//! What a request reports: its numbers, and what outlived it. Plain values.

use crate::handler::requests;
use crate::python::tracked::{self, PyBlock};
use crate::strategy::LiveBlock;
use crate::strategy::account::{Stats, WholeStats};
use pyo3::prelude::*;

/// A request's numbers at one moment. Bytes are the sizes that were asked for. The numbers include those of requests
/// inside of this one.
#[pyclass(frozen, eq, hash, get_all, name = "Stats", module = "ctxalloc")]
#[derive(PartialEq, Eq, Hash)]
pub(in crate::python) struct PyStats {
    /// Bytes in blocks that are alive.
    live_bytes: usize,
    /// Blocks that are alive.
    live_blocks: usize,
    /// The most bytes that were alive at one time.
    peak_bytes: usize,
    /// All bytes that were ever allocated; a resize adds what the block grew by.
    total_bytes: u64,
    /// How many blocks were ever allocated.
    count: u64,
    /// How many allocations were refused, by its own limit or because it had ended.
    refused: u64,
    /// How many bytes it is above its limit, which arrays of up to 1 KiB may exceed: see ``request()``.
    overdraft_bytes: usize,
    /// What of it is arrays, native memory and objects; None unless the request counts that (``whole=True``).
    whole: Option<PyWholeStats>,
}

/// What a whole request holds: the parts of its ``live_bytes`` and of its ``peak_bytes``, and what was nobody's.
#[pyclass(frozen, eq, hash, get_all, name = "WholeStats", module = "ctxalloc")]
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(in crate::python) struct PyWholeStats {
    /// Bytes in arrays that are alive, and in what else is charged to it.
    array_bytes: usize,
    /// Bytes of native memory.
    native_bytes: usize,
    /// Bytes of Python objects.
    object_bytes: usize,
    /// The standard deviation of the estimate for blocks below 1 KiB.
    error_bytes: usize,
    /// How many blocks were given beyond a limit, because their callers do not survive a refusal.
    granted: u64,
    /// The most bytes that all three had together: ``Stats.peak_bytes``. The next three were alive then.
    peak_bytes: usize,
    /// Bytes in arrays at the peak.
    array_at_peak_bytes: usize,
    /// Bytes of native memory at the peak.
    native_at_peak_bytes: usize,
    /// Bytes of Python objects at the peak.
    object_at_peak_bytes: usize,
    /// Bytes that the process asked for between the request's beginning and its end, and that no request was charged:
    /// by libraries' own threads, and wherever no whole request is selected. What was freed since is part of it.
    /// ``coverage()`` tells by which threads.
    nobodys_bytes: u64,
}

impl PyWholeStats {
    pub(in crate::python) fn of(live_bytes: usize, peak_bytes: usize, parts: WholeStats) -> Self {
        Self {
            array_bytes: live_bytes.saturating_sub(parts.native_bytes + parts.object_bytes),
            native_bytes: parts.native_bytes,
            object_bytes: parts.object_bytes,
            error_bytes: parts.error_bytes,
            granted: parts.granted,
            peak_bytes,
            array_at_peak_bytes: parts.array_at_peak_bytes,
            native_at_peak_bytes: parts.native_at_peak_bytes,
            object_at_peak_bytes: parts.object_at_peak_bytes,
            nobodys_bytes: parts.nobodys_bytes,
        }
    }

    fn numbers(&self) -> WholeNumbers {
        let bytes = [self.array_bytes, self.native_bytes, self.object_bytes, self.error_bytes, self.peak_bytes];
        let at_peak = [self.array_at_peak_bytes, self.native_at_peak_bytes, self.object_at_peak_bytes];
        (bytes, at_peak, self.granted, self.nobodys_bytes)
    }

    fn from_numbers((bytes, at_peak, granted, nobodys_bytes): WholeNumbers) -> Self {
        let [array_bytes, native_bytes, object_bytes, error_bytes, peak_bytes] = bytes;
        let [array_at_peak_bytes, native_at_peak_bytes, object_at_peak_bytes] = at_peak;
        Self {
            array_bytes,
            native_bytes,
            object_bytes,
            error_bytes,
            granted,
            peak_bytes,
            array_at_peak_bytes,
            native_at_peak_bytes,
            object_at_peak_bytes,
            nobodys_bytes,
        }
    }
}

#[pymethods]
impl PyWholeStats {
    fn __repr__(&self) -> String {
        let Self { array_bytes, native_bytes, object_bytes, error_bytes, granted, peak_bytes, nobodys_bytes, .. } =
            self;
        let Self { array_at_peak_bytes, native_at_peak_bytes, object_at_peak_bytes, .. } = self;
        format!(
            "WholeStats(array_bytes={array_bytes}, native_bytes={native_bytes}, object_bytes={object_bytes}, \
             error_bytes={error_bytes}, granted={granted}, peak_bytes={peak_bytes}, \
             array_at_peak_bytes={array_at_peak_bytes}, native_at_peak_bytes={native_at_peak_bytes}, \
             object_at_peak_bytes={object_at_peak_bytes}, nobodys_bytes={nobodys_bytes})"
        )
    }

    /// Numbers can be pickled and copied, as ``Stats`` can.
    fn __reduce__<'py>(&self, py: Python<'py>) -> PyResult<(Bound<'py, PyAny>, (WholeNumbers,))> {
        Ok((py.import("ctxalloc._native")?.getattr("_whole_stats")?, (self.numbers(),)))
    }
}

/// Makes a pickled WholeStats again.
#[pyfunction]
#[pyo3(name = "_whole_stats", signature = (numbers, /))]
pub(in crate::python) fn whole_stats_of(numbers: WholeNumbers) -> PyWholeStats {
    PyWholeStats::from_numbers(numbers)
}

impl PyStats {
    pub(super) fn with_parts(stats: Stats, parts: Option<WholeStats>) -> Self {
        let whole = parts.map(|parts| PyWholeStats::of(stats.live_bytes, stats.peak_bytes, parts));
        Self { whole, ..Self::from(stats) }
    }
}

impl From<Stats> for PyStats {
    fn from(stats: Stats) -> Self {
        Self {
            whole: None,
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
        let Self { live_bytes, live_blocks, peak_bytes, total_bytes, count, refused, overdraft_bytes, whole } = self;
        let whole = whole.map_or_else(String::new, |whole| format!(", whole={}", whole.__repr__()));
        format!(
            "Stats(live_bytes={live_bytes}, live_blocks={live_blocks}, peak_bytes={peak_bytes}, \
             total_bytes={total_bytes}, count={count}, refused={refused}, overdraft_bytes={overdraft_bytes}{whole})"
        )
    }

    /// Numbers can be pickled and copied, so that a worker process can send them to its parent.
    fn __reduce__<'py>(&self, py: Python<'py>) -> PyResult<Pickled<'py>> {
        let Self { live_bytes, live_blocks, peak_bytes, total_bytes, count, refused, overdraft_bytes, whole } = *self;
        let numbers = (live_bytes, live_blocks, peak_bytes, total_bytes, count, refused, overdraft_bytes);
        let parts = whole.map(|whole| whole.numbers());
        Ok((py.import("ctxalloc._native")?.getattr("_stats")?, (numbers, parts)))
    }
}

type StatsNumbers = (usize, usize, usize, u64, u64, u64, usize);
type Pickled<'py> = (Bound<'py, PyAny>, (StatsNumbers, Option<WholeNumbers>));
type WholeNumbers = ([usize; 5], [usize; 3], u64, u64);
type EscapedNumbers = (usize, usize);

/// Makes a pickled Stats again.
#[pyfunction]
#[pyo3(name = "_stats", signature = (numbers, parts = None, /))]
pub(in crate::python) fn stats_of(numbers: StatsNumbers, parts: Option<WholeNumbers>) -> PyStats {
    let (live_bytes, live_blocks, peak_bytes, total_bytes, count, refused, overdraft_bytes) = numbers;
    let whole = parts.map(PyWholeStats::from_numbers);
    PyStats { live_bytes, live_blocks, peak_bytes, total_bytes, count, refused, overdraft_bytes, whole }
}

/// Makes a pickled Escaped again.
#[pyfunction]
#[pyo3(name = "_escaped", signature = (numbers, /))]
pub(in crate::python) fn escaped_of(numbers: EscapedNumbers) -> PyEscaped {
    PyEscaped::new(numbers.0, numbers.1, None)
}

/// How many requests there are and were, in this process.
#[pyclass(frozen, eq, hash, get_all, name = "RequestMetrics", module = "ctxalloc")]
#[derive(PartialEq, Eq, Hash)]
pub(in crate::python) struct PyRequestMetrics {
    /// How many were ever begun.
    begun: u64,
    /// How many exist now: those that have not ended, and those that arrays, tasks or capsules still refer to.
    present: usize,
    /// How many slots were made, of some 512 bytes each: as many as there were ever requests at one time.
    slots: usize,
}

#[pymethods]
impl PyRequestMetrics {
    fn __repr__(&self) -> String {
        let Self { begun, present, slots } = self;
        format!("RequestMetrics(begun={begun}, present={present}, slots={slots})")
    }
}

/// How many requests there are and were, in this process.
#[pyfunction]
pub(in crate::python) fn request_metrics() -> PyRequestMetrics {
    let now = requests::request_counts();
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
    /// The blocks that the request itself made, a list of ``tracking.Block``. None if its strategy does not know them:
    /// give it a ``strategies.Tracked`` of its own (requests that share one see each other's blocks).
    #[getter]
    fn blocks<'py>(&self, py: Python<'py>) -> PyResult<Option<Vec<Bound<'py, PyBlock>>>> {
        self.blocks.clone().map(|blocks| tracked::to_python(py, blocks)).transpose()
    }

    fn __repr__(&self) -> String {
        format!("<ctxalloc.Escaped: {} blocks, {} bytes>", self.count, self.bytes)
    }

    /// Pickles and copies the numbers, without the blocks, whose addresses mean nothing in another process.
    fn __reduce__<'py>(&self, py: Python<'py>) -> PyResult<(Bound<'py, PyAny>, (EscapedNumbers,))> {
        Ok((py.import("ctxalloc._native")?.getattr("_escaped")?, ((self.count, self.bytes),)))
    }
}
