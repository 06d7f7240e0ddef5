//! The counters as plain tuples, for `ctxalloc.metrics` and the page: Python gives them names.

use super::request::PyWholeStats;
use super::tracked;
use crate::handler::requests::{Present, present};
use crate::metrics::{BudgetNumbers, Histogram, Series, budgets, pools, pools_resident_bytes, snapshot};
use crate::os;
use pyo3::exceptions::PyOSError;
use pyo3::prelude::*;

type HistogramNumbers = (Vec<(u64, u64)>, u64);
type SeriesNumbers = (String, [u64; 7], HistogramNumbers, HistogramNumbers, HistogramNumbers, (u64, u64, u64, u64));
type ProcessNumbers = (u32, u64, u64, u64, u64);

fn histogram(histogram: &Histogram) -> HistogramNumbers {
    (histogram.buckets().collect(), histogram.sum)
}

fn series(series: Series) -> SeriesNumbers {
    (
        series.name,
        [
            series.requests,
            series.refused_requests,
            series.refused_allocations,
            series.escaped_requests,
            series.escaped_blocks,
            series.escaped_bytes,
            series.max_peak_bytes,
        ],
        histogram(&series.peak_bytes),
        histogram(&series.refused_peak_bytes),
        histogram(&series.total_bytes),
        (series.whole_requests, series.whole_array_bytes, series.whole_native_bytes, series.whole_object_bytes),
    )
}

/// All counters, and the gauges of each process. RuntimeError: `CTXALLOC_METRICS_DIR` cannot be used.
#[pyfunction]
#[pyo3(name = "_metrics")]
pub(super) fn metrics(py: Python<'_>) -> PyResult<(Vec<SeriesNumbers>, Vec<ProcessNumbers>)> {
    let snapshot = py.detach(snapshot)?;
    let processes = snapshot.processes.iter().map(|process| {
        let gauges = process.gauges;
        (process.pid, gauges.live_requests, gauges.live_bytes, gauges.escaping_requests, gauges.escaped_bytes)
    });
    Ok((snapshot.series.into_iter().map(series).collect(), processes.collect()))
}

type PresentNumbers<'py> = (
    String,
    f64,
    bool,
    bool,
    usize,
    usize,
    Option<usize>,
    Option<String>,
    Option<Vec<Bound<'py, tracked::PyBlock>>>,
    Option<PyWholeStats>,
);

/// The requests that are present now, the oldest first.
#[pyfunction]
#[pyo3(name = "_present_requests")]
pub(super) fn present_requests(py: Python<'_>) -> PyResult<Vec<PresentNumbers<'_>>> {
    let numbers = |request: Present| {
        let escapes = request.escapes.map(|blocks| tracked::to_python(py, blocks)).transpose()?;
        let age_seconds = request.age.as_secs_f64();
        let whole = request.whole.map(|parts| PyWholeStats::of(request.live_bytes, request.peak_bytes, parts));
        let Present { name, has_ended, is_root, live_bytes, peak_bytes, limit_bytes, parent, .. } = request;
        Ok((name, age_seconds, has_ended, is_root, live_bytes, peak_bytes, limit_bytes, parent, escapes, whole))
    };
    py.detach(present).into_iter().map(numbers).collect()
}

type BudgetTuple = (u64, Option<u64>, String, Option<usize>, usize, usize, u64);

/// All budgets that there are, the oldest first.
#[pyfunction]
#[pyo3(name = "_budgets")]
pub(super) fn all_budgets(py: Python<'_>) -> Vec<BudgetTuple> {
    let numbers = |budget: BudgetNumbers| {
        let BudgetNumbers { id, parent, name, limit_bytes, in_use_bytes, peak_bytes, refused } = budget;
        (id, parent, name, limit_bytes, in_use_bytes, peak_bytes, refused)
    };
    py.detach(budgets).into_iter().map(numbers).collect()
}

/// The bytes that all pools have in use, and that they keep for later.
#[pyfunction]
#[pyo3(name = "_pools")]
pub(super) fn pool_bytes(py: Python<'_>) -> (usize, usize) {
    let bytes = py.detach(pools);
    (bytes.in_use, bytes.warm)
}

/// The bytes of all pools that are in memory, or None: the system does not say.
#[pyfunction]
#[pyo3(name = "_pools_resident")]
pub(super) fn pool_resident(py: Python<'_>) -> Option<usize> {
    py.detach(pools_resident_bytes)
}

/// The resident memory of this process (RSS) in bytes. OSError: the system does not say.
#[pyfunction]
#[pyo3(name = "_resident_bytes")]
pub(super) fn resident_bytes() -> PyResult<usize> {
    os::resident_bytes().ok_or_else(|| PyOSError::new_err("this system does not say how much memory a process has"))
}
