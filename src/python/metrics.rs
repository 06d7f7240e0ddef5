//! The counters as plain tuples, for `ctxalloc.metrics` and the page: Python gives them names.

use super::request::PyWholeStats;
use super::tracked;
use crate::handler::requests::{Present, present};
use crate::metrics::{
    BudgetNumbers, Histogram, Series, Waits, budgets, made_room, pools, pools_resident_bytes, ready, snapshot, waits,
};
use crate::os;
use crate::strategy::system_limits;
use pyo3::exceptions::PyOSError;
use pyo3::prelude::*;
use std::path::PathBuf;

type HistogramNumbers = (Vec<(u64, u64)>, u64);
/// In tuples, since pyo3 knows those of up to twelve.
type SeriesNumbers = (
    (String, u64, u64, u64, u64, u64, u64, u64, u64, u64),
    (HistogramNumbers, HistogramNumbers, HistogramNumbers, HistogramNumbers),
    (u64, u64, u64, u64),
);
type ProcessNumbers = (u32, u64, u64, u64, u64, u64);

fn histogram(histogram: &Histogram) -> HistogramNumbers {
    (histogram.buckets().collect(), histogram.sum)
}

fn series(series: Series) -> SeriesNumbers {
    let histograms = (
        histogram(&series.peak_bytes),
        histogram(&series.refused_peak_bytes),
        histogram(&series.total_bytes),
        histogram(&series.waited_micros),
    );
    let numbers = (
        series.name,
        series.requests,
        series.refused_requests,
        series.refused_allocations,
        series.escaped_requests,
        series.escaped_blocks,
        series.escaped_bytes,
        series.max_peak_bytes,
        series.timed_out,
        series.turned_away,
    );
    let whole = (series.whole_requests, series.whole_array_bytes, series.whole_native_bytes, series.whole_object_bytes);
    (numbers, histograms, whole)
}

/// All counters, and the gauges of each process. RuntimeError: `CTXALLOC_METRICS_DIR` cannot be used.
#[pyfunction]
#[pyo3(name = "_metrics")]
pub(super) fn metrics(py: Python<'_>) -> PyResult<(Vec<SeriesNumbers>, Vec<ProcessNumbers>)> {
    let snapshot = py.detach(snapshot)?;
    let processes = snapshot.processes.iter().map(|process| {
        let gauges = process.gauges;
        let (live, escaping) = (gauges.live_requests, gauges.escaping_requests);
        (process.pid, live, gauges.live_bytes, escaping, gauges.escaped_bytes, gauges.waiting_requests)
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

type BudgetTuple = (u64, Option<u64>, String, Option<usize>, usize, usize, u64, usize, usize, usize, u64, u64);

/// All budgets that there are, the oldest first.
#[pyfunction]
#[pyo3(name = "_budgets")]
pub(super) fn all_budgets(py: Python<'_>) -> Vec<BudgetTuple> {
    let numbers = |budget: BudgetNumbers| {
        let BudgetNumbers { id, parent, name, limit_bytes, in_use_bytes, peak_bytes, refused, .. } = budget;
        let (reserved_bytes, waiting, max_waiting) = (budget.reserved_bytes, budget.waiting, budget.max_waiting);
        let (victims, reclaimed) = (budget.victims, budget.reclaimed_bytes);
        (
            id,
            parent,
            name,
            limit_bytes,
            in_use_bytes,
            peak_bytes,
            refused,
            reserved_bytes,
            waiting,
            max_waiting,
            victims,
            reclaimed,
        )
    };
    py.detach(budgets).into_iter().map(numbers).collect()
}

/// What was done in this process to make room: victims, and bytes that came back while reclaimers ran.
#[pyfunction]
#[pyo3(name = "_made_room")]
pub(super) fn room_made() -> (u64, u64) {
    let made = made_room();
    (made.victims, made.reclaimed_bytes)
}

type WaitsNumbers = (Option<String>, usize, f64, Option<f64>, String, u64);

/// The first of those who wait for room, in the order in which they came.
#[pyfunction]
#[pyo3(name = "_waits", signature = (count, /))]
pub(super) fn all_waits(py: Python<'_>, count: usize) -> Vec<WaitsNumbers> {
    let numbers = |one: Waits| {
        let Waits { name, reserve_bytes, waited, left, budget, budget_id } = one;
        (name, reserve_bytes, waited.as_secs_f64(), left.map(|left| left.as_secs_f64()), budget, budget_id)
    };
    py.detach(|| waits(count)).into_iter().map(numbers).collect()
}

/// Whether more requests should be sent to this process: for a readiness probe. It is ready until a budget that is
/// below no other one, as the process's or a service's, is full: 95 % of its limit are in use or reserved, or half as
/// many requests wait for it as may. It is ready again when at most 80 % are and nobody waits; between the two it is
/// what it was when somebody asked last, so that a balancer does not take it out and in all the time. Budgets without a
/// limit are never full, and tenants' are not asked.
#[pyfunction]
#[pyo3(name = "ready")]
pub(super) fn is_ready(py: Python<'_>) -> bool {
    py.detach(ready)
}

/// What the machine has, the control groups' limit, and above what they slow the process down, in bytes; None where it
/// is not said. ``root``: where the system's files are.
#[pyfunction]
#[pyo3(name = "_system_limits", signature = (root, /))]
pub(super) fn limits(py: Python<'_>, root: PathBuf) -> (Option<usize>, Option<usize>, Option<usize>) {
    let [machine, group, high] = py.detach(|| system_limits(&root));
    (machine, group, high)
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
