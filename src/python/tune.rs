//! Replays and summaries of recordings, for `_replay.py` and `_recommend.py` of the package.

use crate::recording::Recording;
use crate::tune::{Choice, Plan, Route, replay, routes};
use pyo3::prelude::*;
use pyo3::types::PyDict;
use std::path::PathBuf;

fn opened(path: &PathBuf) -> PyResult<Recording> {
    Ok(Recording::open(path)?)
}

/// Replays a recording, or one route of it, under a strategy: numbers by name, of which those of memory are None where
/// the system does not say. For a process of its own. ValueError: there is no such strategy, or the file is no
/// recording; RuntimeError: the replay failed.
#[pyfunction]
#[pyo3(name = "_replay", signature = (path, strategy, /, *, route=None, on_one_thread=false))]
pub(super) fn replayed<'py>(
    py: Python<'py>,
    path: PathBuf,
    strategy: &str,
    route: Option<&str>,
    on_one_thread: bool,
) -> PyResult<Bound<'py, PyDict>> {
    let (facts, found) = py.detach(|| {
        let choice = Choice::named(strategy)?;
        let plan = Plan::new(&opened(&path)?, route, on_one_thread)?;
        Ok::<_, PyErr>((plan.facts(), replay(&plan, &choice)?))
    })?;
    let numbers = PyDict::new(py);
    for (name, value) in [
        ("time_ns", found.time.as_nanos() as u64),
        ("cpu_ns", found.cpu.as_nanos() as u64),
        ("cpu_first_half_ns", found.cpu_first_half.as_nanos() as u64),
        ("faults", found.faults),
        ("faults_first_half", found.faults_first_half),
        ("compared", found.compared),
        ("events", facts.events),
        ("threads", facts.threads as u64),
        ("requests", facts.requests),
        ("unfinished", facts.unfinished),
        ("left_out", facts.left_out),
        ("unordered_peaks", facts.unordered_peaks),
        ("blocks", facts.blocks),
        ("freed_elsewhere", facts.freed_elsewhere),
        ("peak_live_bytes", facts.peak_live_bytes),
        ("live_at_end_bytes", facts.live_at_end_bytes),
    ] {
        numbers.set_item(name, value)?;
    }
    numbers.set_item("peak_resident_bytes", found.peak_resident_bytes)?;
    numbers.set_item("resident_bytes_after", found.resident_bytes_after)?;
    Ok(numbers)
}

/// What a recording says of each route, and of all together: the last one, without a name. ValueError: the file is no
/// recording.
#[pyfunction]
#[pyo3(name = "_recorded_routes", signature = (path, /))]
pub(super) fn recorded_routes(py: Python<'_>, path: PathBuf) -> PyResult<Vec<Bound<'_, PyDict>>> {
    let found = py.detach(|| Ok::<_, PyErr>(routes(&opened(&path)?)))?;
    found.into_iter().map(|route| numbers_of(py, route)).collect()
}

fn numbers_of(py: Python<'_>, route: Route) -> PyResult<Bound<'_, PyDict>> {
    let numbers = PyDict::new(py);
    for (name, value) in [
        ("requests", route.requests),
        ("refused_requests", route.refused_requests),
        ("duration_ns", route.duration_ns),
        ("blocks", route.blocks),
        ("total_bytes", route.total_bytes),
        ("zeroed_bytes", route.zeroed_bytes),
        ("resizes", route.resizes),
        ("moved", route.moved),
        ("freed_elsewhere", route.freed_elsewhere),
        ("escaped_blocks", route.escaped_blocks),
        ("escaped_bytes", route.escaped_bytes),
        ("max_concurrent", route.max_concurrent),
        ("peak_live_bytes", route.peak_live_bytes),
    ] {
        numbers.set_item(name, value)?;
    }
    numbers.set_item("name", route.name)?;
    numbers.set_item("peak_bytes", route.peak_bytes)?;
    numbers.set_item("escaped_ns", route.escaped_ns)?;
    numbers.set_item("gaps_ns", route.gaps_ns)?;
    numbers.set_item("sizes", route.sizes)?;
    Ok(numbers)
}
