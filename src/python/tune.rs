//! Replays and summaries of recordings, for `_replay.py` and `_recommend.py` of the package.

use super::recording::PyRecording;
use crate::counters::UNNAMED;
use crate::recording::Recording;
use crate::tune::{Choice, Plan, Planner, Route, Summary, Summed, replay_routes};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyMemoryView};
use std::collections::HashMap;
use std::path::PathBuf;

/// Plans the replay of a recording, or of one route of it, and writes the plan to a file, for [`replayed`] in a process
/// of its own. What the recording says, by name. Whoever waits for it may be interrupted.
///
/// OSError, ValueError: a file of the recording cannot be read any more, or was changed. RuntimeError: it contradicts
/// itself, or the plan cannot be written.
#[pyfunction]
#[pyo3(name = "_plan", signature = (recording, target, /, *, route=None, on_one_thread=false))]
pub(super) fn planned<'py>(
    py: Python<'py>,
    recording: &PyRecording,
    target: PathBuf,
    route: Option<&str>,
    on_one_thread: bool,
) -> PyResult<Bound<'py, PyDict>> {
    let recording = recording.recording();
    let route = route.map(|route| recorded_name(recording, route));
    let mut planner = py.detach(|| Planner::new(recording, route, on_one_thread))?;
    while py.detach(|| planner.read())? {
        py.check_signals()?;
    }
    let facts = py.detach(|| {
        let plan = planner.finish();
        plan.write(&target).map(|()| plan.facts())
    })?;
    let numbers = PyDict::new(py);
    for (name, value) in [
        ("events", facts.events),
        ("threads", facts.threads as u64),
        ("threads_at_once", facts.threads_at_once as u64),
        ("requests", facts.requests),
        ("unfinished", facts.unfinished),
        ("torn", facts.torn),
        ("with_others", facts.with_others),
        ("left_out", facts.left_out),
        ("unordered_peaks", facts.unordered_peaks),
        ("blocks", facts.blocks),
        ("freed_elsewhere", facts.freed_elsewhere),
        ("peak_live_bytes", facts.peak_live_bytes),
        ("live_at_end_bytes", facts.live_at_end_bytes),
    ] {
        numbers.set_item(name, value)?;
    }
    Ok(numbers)
}

/// Replays a plan under a strategy, with others for some routes: numbers by name, of which those of memory are None
/// where the system does not say. ValueError: there is no such strategy; RuntimeError: the replay failed.
#[pyfunction]
#[pyo3(name = "_replay", signature = (plan, strategy, /, *, by_route=None))]
pub(super) fn replayed<'py>(
    py: Python<'py>,
    plan: PathBuf,
    strategy: &str,
    by_route: Option<HashMap<String, String>>,
) -> PyResult<Bound<'py, PyDict>> {
    let found = py.detach(|| {
        let choice = Choice::named(strategy)?;
        // One strategy for all routes that have it, as pasted advice does: they share its memory.
        let mut named = HashMap::from([(strategy.to_owned(), choice.clone())]);
        let mut routes = HashMap::new();
        for (route, strategy) in by_route.unwrap_or_default() {
            if !named.contains_key(&strategy) {
                named.insert(strategy.clone(), Choice::named(&strategy)?);
            }
            routes.insert(route, named[&strategy].clone());
        }
        Ok::<_, PyErr>(replay_routes(&Plan::read(&plan)?, &choice, &routes)?)
    })?;
    let numbers = PyDict::new(py);
    for (name, value) in [
        ("time_ns", found.time.as_nanos() as u64),
        ("cpu_ns", found.cpu.as_nanos() as u64),
        ("cpu_first_half_ns", found.cpu_first_half.as_nanos() as u64),
        ("faults", found.faults),
        ("faults_first_half", found.faults_first_half),
        ("compared", found.compared),
    ] {
        numbers.set_item(name, value)?;
    }
    numbers.set_item("peak_resident_bytes", found.peak_resident_bytes)?;
    numbers.set_item("resident_bytes_after", found.resident_bytes_after)?;
    Ok(numbers)
}

/// What a recording says of its routes, those with the most requests first, and of all together: with how many routes
/// and requests are left out, where it has more than `most`. `first`: the one that comes before all others. Whoever
/// waits for it may be interrupted. OSError, ValueError: a file of the recording cannot be read any more, or was
/// changed.
#[pyfunction]
#[pyo3(name = "_recorded_routes", signature = (recording, most, /, *, first=None))]
pub(super) fn recorded_routes<'py>(
    py: Python<'py>,
    recording: &PyRecording,
    most: usize,
    first: Option<&str>,
) -> PyResult<Told<'py>> {
    let recording = recording.recording();
    let mut summary = py.detach(|| Summary::new(recording));
    while py.detach(|| summary.read())? {
        py.check_signals()?;
    }
    let Summed { mut routes, whole, programs } = py.detach(|| summary.finish());
    let whole = numbers_of(py, whole)?;
    whole.set_item("processor_ns", recording.processor_ns())?;
    let programs = programs.into_iter().map(|program| numbers_of(py, program)).collect::<PyResult<Vec<_>>>()?;
    whole.set_item("programs", programs)?;
    let first = first.map(|first| recorded_name(recording, first));
    if let Some(at) = first.and_then(|first| routes.iter().position(|route| route.name == first)) {
        routes[..=at].rotate_right(1);
    }
    let left: Vec<_> = routes.drain(most.min(routes.len())..).map(|route| route.requests).collect();
    let found = routes.into_iter().map(|route| numbers_of(py, route)).collect::<PyResult<_>>()?;
    Ok((found, whole, left.len(), left.iter().sum()))
}

/// Routes, all together, and how many routes are left out with how many requests.
type Told<'py> = (Vec<Bound<'py, PyDict>>, Bound<'py, PyDict>, usize, u64);

/// The name as it is recorded: requests without one are told as `unnamed`.
fn recorded_name<'a>(recording: &Recording, route: &'a str) -> &'a str {
    let is_none = route == UNNAMED && !recording.names().iter().any(|name| name == UNNAMED);
    if is_none { "" } else { route }
}

/// A sequence of ints that takes eight bytes for each.
fn sequence<'py>(py: Python<'py>, numbers: &[u64]) -> PyResult<Bound<'py, PyAny>> {
    let bytes: Vec<u8> = numbers.iter().flat_map(|number| number.to_ne_bytes()).collect();
    PyMemoryView::from(PyBytes::new(py, &bytes).as_any())?.call_method1("cast", ("Q",))
}

fn numbers_of(py: Python<'_>, route: Route) -> PyResult<Bound<'_, PyDict>> {
    let numbers = PyDict::new(py);
    for (name, value) in [
        ("requests", route.requests),
        ("refused_requests", route.refused_requests),
        ("refused_by_budgets", route.refused_by_budgets),
        ("duration_ns", route.duration_ns),
        ("blocks", route.blocks),
        ("total_bytes", route.total_bytes),
        ("zeroed_bytes", route.zeroed_bytes),
        ("resizes", route.resizes),
        ("moved", route.moved),
        ("freed_elsewhere", route.freed_elsewhere),
        ("escaped_blocks", route.escaped_blocks),
        ("escaped_bytes", route.escaped_bytes),
        ("lasting_blocks", route.lasting_blocks),
        ("max_concurrent", route.max_concurrent),
        ("peak_live_bytes", route.peak_live_bytes),
    ] {
        numbers.set_item(name, value)?;
    }
    numbers.set_item("page_faults", route.page_faults)?;
    numbers.set_item("open_processor_ns", route.open_processor_ns)?;
    numbers.set_item("refused_by", route.refused_by)?;
    numbers.set_item("handlers", route.handlers)?;
    numbers.set_item("name", route.name)?;
    numbers.set_item("peak_bytes", sequence(py, &route.peak_bytes)?)?;
    numbers.set_item("gaps_ns", sequence(py, &route.gaps_ns)?)?;
    numbers.set_item("alone_ns", sequence(py, &route.alone_ns)?)?;
    numbers.set_item("alone_processor_ns", sequence(py, &route.alone_processor_ns)?)?;
    numbers.set_item("sizes", route.sizes)?;
    Ok(numbers)
}
