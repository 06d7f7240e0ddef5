//! `ctxalloc.request()`: a lease of a slot for a `with` block. Entering takes it, leaving ends it.
//!
//! A Request is for one block: its numbers stay readable after it. What selects, `scope.rs` shares with `use`; which
//! MemoryError is a refusal of ours, `refusal.rs` says; past the ceiling, `leases.rs` warns.

mod budget;
mod leases;
mod refusal;
mod report;

pub(super) use budget::PyBudget;
pub(super) use leases::{LeaseMetrics, ceiling, metrics, set_ceiling};
pub(super) use report::{PyEscaped, PyStats};

use super::bridge;
use super::handler::{PyHandler, capsule_of};
use super::held::Held;
use super::numpy::Numpy;
use super::scope::{deselect, entered_already, not_entered};
use super::step::{Step, Work};
use super::strategies::PyStrategy;
use crate::handler::Handler;
use crate::handler::lease::{Lease, Stats, Terms};
use crate::strategy::{Budget, LiveBlock, Strategy};
use pyo3::exceptions::{PyRuntimeError, PyTypeError};
use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::prelude::*;
use pyo3::types::PyString;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A stretch of work with memory, numbers and a limit of its own: what ``ctxalloc.request()`` makes.
///
/// For one ``with`` or ``async with`` block (RuntimeError: entered a second time); as a decorator it is a new one at
/// each call. ValueError on leaving: this is another Context than the one that entered it; nothing changes, and it may
/// still be left in its own. BudgetExceeded on leaving: the block ended with a MemoryError because a budget refused.
#[pyclass(frozen, name = "Request", module = "ctxalloc")]
pub(super) struct PyRequest {
    wanted: Wanted,
    held: Held,
    phase: Mutex<Phase>,
}

/// What it was asked for.
#[derive(Clone)]
struct Wanted {
    limit_bytes: Option<usize>,
    strategy: Option<Arc<dyn Strategy>>,
    name: Option<String>,
    budget: Option<Budget>,
}

enum Phase {
    New,
    Entered(Lease),
    Left { lease: Lease, end: Stats, blocks: Option<Vec<LiveBlock>> },
}

/// A request: memory, numbers and perhaps a limit of its own for a ``with`` or ``async with`` block, or for each call of a
/// function that it decorates::
///
///     >>> with ctxalloc.request(limit_bytes=ctxalloc.MiB, name="thumbnail") as scope:
///     ...     kept = numpy.zeros(100_000).sum(keepdims=True)
///     >>> scope.stats.peak_bytes, scope.escaped.count, scope.escaped.bytes
///     (800008, 1, 8)
///
/// ``limit_bytes``: the most that may be alive at one time. ``strategy``: where its blocks come from, instead of an arena
/// of its own. ``name``: for messages. ``budget``: what it is charged to besides; inside of another request it is
/// charged to that one too. Its arrays may outlive it for as long as they like.
///
/// Past the ceiling of slots (``ctxalloc.leases``) it is served from the shared pool, uncounted and unlimited, and says
/// so in a RuntimeWarning. TypeError, ValueError: an argument is not as it must be; also on entering, where the
/// strategy aligns to less than 16 bytes.
#[pyfunction]
#[pyo3(signature = (*, limit_bytes = None, strategy = None, name = None, budget = None))]
pub(super) fn request(
    limit_bytes: Option<&Bound<'_, PyAny>>,
    strategy: Option<&Bound<'_, PyAny>>,
    name: Option<&Bound<'_, PyAny>>,
    budget: Option<&Bound<'_, PyAny>>,
) -> PyResult<PyRequest> {
    let wanted = Wanted {
        limit_bytes: budget::limit_in("request", limit_bytes)?,
        strategy: strategy
            .map(|given| match given.cast::<PyStrategy>() {
                Ok(strategy) => Ok(strategy.get().strategy()),
                Err(_) => Err(wrong("strategy", given, "one of ctxalloc.strategies, or None for an arena")),
            })
            .transpose()?,
        name: budget::name_in("request", name)?,
        budget: budget
            .map(|given| match given.cast::<PyBudget>() {
                Ok(budget) => Ok(budget.get().budget().clone()),
                Err(_) => Err(wrong("budget", given, "a ctxalloc.Budget, or None")),
            })
            .transpose()?,
    };
    Ok(PyRequest::new(wanted))
}

fn wrong(option: &str, given: &Bound<'_, PyAny>, wanted: &str) -> PyErr {
    let shown = given.repr().map_or_else(|_| "?".to_owned(), |shown| shown.to_string());
    PyTypeError::new_err(format!("request({option}={shown}): give {wanted}"))
}

impl PyRequest {
    fn new(wanted: Wanted) -> Self {
        Self { wanted, held: Held::new(), phase: Mutex::new(Phase::New) }
    }

    /// Never locked while Python runs.
    fn phase(&self) -> MutexGuard<'_, Phase> {
        self.phase.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn enter(&self, py: Python<'_>) -> PyResult<()> {
        if !self.held.begin() {
            return Err(entered_already(&self.text()));
        }
        match self.select(py) {
            Ok(token) => {
                self.held.put(token);
                Ok(())
            }
            Err(error) => {
                self.held.clear();
                Err(error)
            }
        }
    }

    /// Takes the lease and selects its handler; or does nothing.
    fn select<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let capsule = capsule_of(py, self.begin(py)?)?;
        let numpy = Numpy::get(py)?;
        numpy.selection().set(numpy, &capsule).inspect_err(|_| *self.phase() = Phase::New)
    }

    /// Takes the lease; for the one that may enter.
    fn begin(&self, py: Python<'_>) -> PyResult<Handler> {
        if !matches!(*self.phase(), Phase::New) {
            return Err(self.used());
        }
        let lease = self.wanted.lease(py)?;
        let handler = lease.handler();
        *self.phase() = Phase::Entered(lease);
        Ok(handler)
    }

    pub(super) fn exit(&self, py: Python<'_>, error: Option<&Bound<'_, PyAny>>) -> PyResult<()> {
        let Some(token) = self.held.take(py) else { return Err(not_entered(&self.text())) };
        let left = deselect(py, &self.held, token, &|| self.text());
        if self.held.is_in_use() {
            return left; // still entered, in another Context
        }
        let refused = self.end(py, error);
        left.and(refused)
    }

    /// Ends the lease, and says whether `error` is one of its refusals.
    fn end(&self, py: Python<'_>, error: Option<&Bound<'_, PyAny>>) -> PyResult<()> {
        let mut phase = self.phase();
        let Phase::Entered(mut lease) = std::mem::replace(&mut *phase, Phase::New) else { return Ok(()) };
        let blocks = if lease.stats().live_blocks == 0 { None } else { lease.live_blocks() };
        let end = lease.end();
        let refusals = if error.is_some() { lease.take_refusals() } else { Vec::new() };
        *phase = Phase::Left { lease, end, blocks };
        drop(phase);
        match error {
            Some(error) => refusal::raise(py, error, &refusals),
            None => Ok(()),
        }
    }

    fn with_lease<R>(&self, read: impl FnOnce(&Lease) -> R) -> PyResult<R> {
        match &*self.phase() {
            Phase::New => Err(PyRuntimeError::new_err(format!(
                "{} is not entered yet, so there is nothing to tell; enter it with `with` or `async with`",
                self.text()
            ))),
            Phase::Entered(lease) | Phase::Left { lease, .. } => Ok(read(lease)),
        }
    }

    /// How it is called in messages: takes no lock.
    fn text(&self) -> String {
        match &self.wanted.name {
            Some(name) => format!("ctxalloc.request(name={name:?})"),
            None => "ctxalloc.request()".to_owned(),
        }
    }

    #[cold]
    fn used(&self) -> PyErr {
        PyRuntimeError::new_err(format!(
            "{} was entered and left before, and is for one block; call request() again for a second one",
            self.text()
        ))
    }
}

impl Wanted {
    /// A lease on these terms, inside of the running context's request. Past the ceiling: with a warning.
    fn lease(&self, py: Python<'_>) -> PyResult<Lease> {
        let lease = Lease::take(Terms {
            name: self.name.clone(),
            limit_bytes: self.limit_bytes,
            budget: self.budget.clone(),
            strategy: self.strategy.clone(),
            outer: Some(bridge::current(py)?),
        })?;
        if !lease.is_private() {
            leases::warn(py)?;
        }
        Ok(lease)
    }
}

#[pymethods]
impl PyRequest {
    fn __enter__(slf: PyRef<'_, Self>) -> PyResult<PyRef<'_, Self>> {
        slf.enter(slf.py())?;
        Ok(slf)
    }

    #[pyo3(signature = (kind, error, traceback, /))]
    fn __exit__(
        &self,
        py: Python<'_>,
        kind: &Bound<'_, PyAny>,
        error: Option<&Bound<'_, PyAny>>,
        traceback: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let _ = (kind, traceback);
        self.exit(py, error)
    }

    fn __aenter__(slf: Py<Self>) -> Step {
        Step { subject: slf.into_any(), work: Work::EnterRequest }
    }

    #[pyo3(signature = (kind, error, traceback, /))]
    fn __aexit__(
        slf: Py<Self>,
        kind: &Bound<'_, PyAny>,
        error: Option<Py<PyAny>>,
        traceback: &Bound<'_, PyAny>,
    ) -> Step {
        let _ = (kind, traceback);
        Step { subject: slf.into_any(), work: Work::ExitRequest { error } }
    }

    /// The function, each of whose calls is a request of its own on these terms; works for coroutine functions and (async)
    /// generators too.
    #[pyo3(signature = (function, /))]
    fn __call__<'py>(slf: &Bound<'py, Self>, function: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        slf.py().import("ctxalloc._decorate")?.getattr("in_request")?.call1((slf, function))
    }

    /// A new request on the same terms.
    fn _again(&self) -> Self {
        Self::new(self.wanted.clone())
    }

    /// Begins it without selecting its handler, for one that is selected a step at a time.
    fn _begin<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyHandler>> {
        if !self.held.begin() {
            return Err(entered_already(&self.text()));
        }
        let begun = self.begin(py).and_then(|handler| PyHandler::of(py, handler));
        if begun.is_err() {
            self.held.clear();
        }
        begun
    }

    /// Ends what `_begin` began.
    #[pyo3(signature = (error, /))]
    fn _end(&self, py: Python<'_>, error: Option<&Bound<'_, PyAny>>) -> PyResult<()> {
        let refused = self.end(py, error);
        self.held.clear();
        refused
    }

    /// Its name: the one it was given, or a number. RuntimeError before it is entered, here and below.
    #[getter]
    fn name<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyString>> {
        self.with_lease(|lease| PyString::new(py, lease.name()))
    }

    /// The handler that it selects. RuntimeError after its end too: its slot may be another request's by then.
    #[getter]
    fn handler<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyHandler>> {
        let over = || {
            PyRuntimeError::new_err(format!(
                "{} has ended, and what it had may be another request's by now; ask handler_of() for an array's handler",
                self.text()
            ))
        };
        let handler = self.with_lease(Lease::handler)?;
        if matches!(*self.phase(), Phase::Left { .. }) {
            return Err(over());
        }
        PyHandler::of(py, handler)
    }

    /// Its own budget, under what it is charged to: what a part of it may be charged to.
    #[getter]
    fn budget(&self) -> PyResult<PyBudget> {
        self.with_lease(|lease| PyBudget::from(lease.budget().clone()))
    }

    /// Whether it has a slot of its own: False past the ceiling, where nothing is counted or limited.
    #[getter]
    fn is_private(&self) -> PyResult<bool> {
        self.with_lease(Lease::is_private)
    }

    /// Its numbers so far, after its end too: then they go on to change with what outlives it.
    #[getter]
    fn stats(&self) -> PyResult<PyStats> {
        self.with_lease(|lease| PyStats::from(lease.stats()))
    }

    /// What was alive at its end. None before, and past the ceiling.
    #[getter]
    fn escaped(&self) -> Option<PyEscaped> {
        match &*self.phase() {
            Phase::Left { end, blocks, lease } if lease.is_private() => {
                Some(PyEscaped::new(end.live_blocks, end.live_bytes, blocks.clone()))
            }
            _ => None,
        }
    }

    fn __repr__(&self) -> String {
        let state = match &*self.phase() {
            Phase::New => "not entered",
            Phase::Entered(_) => "entered",
            Phase::Left { .. } => "left",
        };
        format!("<{}, {state}>", self.text())
    }

    /// A token refers to its Context, which may hold whoever holds this.
    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        self.held.traverse(&visit)
    }
}
