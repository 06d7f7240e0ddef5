//! `ctxalloc.request()`: a request for a `with` block. Entering begins it, leaving ends it.
//!
//! A Request is for one block: its numbers stay readable after it. What selects, `scope.rs` shares with `use`; which
//! MemoryError is a refusal of ours, `refusal.rs` says.

mod budget;
mod refusal;
mod report;

pub(super) use budget::PyBudget;
pub(super) use report::{PyEscaped, PyRequestMetrics, PyStats, escaped_of, request_metrics, stats_of};

use super::bridge;
use super::handler::{PyHandler, capsule_of};
use super::held::Held;
use super::numpy::Numpy;
use super::scope::{deselect, entered_already, not_entered};
use super::step::{Step, Work};
use super::strategies::PyStrategy;
use crate::handler::Handler;
use crate::handler::requests::{AfterEnd, Begun, OVERDRAFT_BYTES, RequestHandle, Seen, Terms};
use crate::strategy::account::Stats;
use crate::strategy::{Budget, LiveBlock, Strategy};
use pyo3::exceptions::{PyRuntimeError, PyTypeError, PyValueError};
use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::prelude::*;
use pyo3::types::PyString;
use std::hash::{Hash, Hasher};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A stretch of work with memory, numbers and a limit of its own: what ``ctxalloc.request()`` makes.
///
/// For one ``with`` or ``async with`` block (RuntimeError: entered a second time); as a decorator it is a new one at
/// each call. ValueError on leaving: this is another Context than the one that entered it; nothing changes, and it may
/// still be left in its own. BudgetExceeded on leaving: the block ended with a MemoryError because a budget refused.
///
/// Two are equal where they are the same request: ``ctxalloc.current_request()`` is equal to what began it.
#[pyclass(frozen, eq, weakref, name = "Request", module = "ctxalloc")]
pub(super) struct PyRequest {
    wanted: Wanted,
    held: Held,
    phase: Mutex<Phase>,
}

/// What it was asked for.
#[derive(Clone, Default)]
struct Wanted {
    limit_bytes: Option<usize>,
    strategy: Option<Arc<dyn Strategy>>,
    name: Option<String>,
    budget: Option<Budget>,
    is_root: bool,
    after_end: AfterEnd,
    is_strict: bool,
}

enum Phase {
    New,
    Entered(Begun),
    Left {
        begun: Begun,
        end: Stats,
        blocks: Option<Vec<LiveBlock>>,
    },
    /// It was begun elsewhere, and is seen by who carries its handler.
    Carried(RequestHandle),
}

/// A request: memory, numbers and perhaps a limit of its own for a ``with`` or ``async with`` block, or for each call of a
/// function that it decorates::
///
///     >>> with ctxalloc.request(limit_bytes=ctxalloc.MiB, name="thumbnail") as scope:
///     ...     kept = numpy.zeros(100_000).sum(keepdims=True)
///     >>> scope.stats.peak_bytes, scope.escaped.count, scope.escaped.bytes
///     (800008, 1, 8)
///
/// ``limit_bytes``: the most that may be alive at one time. ``strategy``: where its blocks come from, instead of the
/// process's pool. ``name``: for messages. ``budget``: what it is charged to besides; inside of another request it is
/// charged to that one too, unless it is a root (``root=True``): what a server begins for each of its requests should be
/// one. Its arrays may outlive it for as long as they like, and are charged to it until they end.
///
/// ``after_end``: what becomes of arrays that are made under it after its end, by tasks that go on: ``"charge"`` counts and
/// limits them as before, ``"refuse"`` raises MemoryError, ``"detach"`` neither counts nor limits them.
///
/// Arrays of up to 1 KiB may go up to 64 KiB beyond a limit (``stats.overdraft_bytes`` tells): NumPy crashes where it is
/// refused some of its scalars. ``strict=True`` does without.
///
/// TypeError, ValueError: an argument is not as it must be; also on entering, where the strategy aligns to less than 16
/// bytes. RuntimeError on entering: inside of thousands of other requests.
#[pyfunction]
#[pyo3(signature = (
    *, limit_bytes = None, strategy = None, name = None, budget = None, root = None, after_end = None, strict = None
))]
pub(super) fn request(
    limit_bytes: Option<&Bound<'_, PyAny>>,
    strategy: Option<&Bound<'_, PyAny>>,
    name: Option<&Bound<'_, PyAny>>,
    budget: Option<&Bound<'_, PyAny>>,
    root: Option<&Bound<'_, PyAny>>,
    after_end: Option<&Bound<'_, PyAny>>,
    strict: Option<&Bound<'_, PyAny>>,
) -> PyResult<PyRequest> {
    let wanted = Wanted {
        limit_bytes: budget::limit_in("request", limit_bytes)?,
        strategy: strategy
            .map(|given| match given.cast::<PyStrategy>() {
                Ok(strategy) => Ok(strategy.get().strategy()),
                Err(_) => Err(wrong("strategy", given, "one of ctxalloc.strategies, or None for the process's pool")),
            })
            .transpose()?,
        name: budget::name_in("request", name)?,
        budget: budget
            .map(|given| match given.cast::<PyBudget>() {
                Ok(budget) => Ok(budget.get().budget().clone()),
                Err(_) => Err(wrong("budget", given, "a ctxalloc.Budget, or None")),
            })
            .transpose()?,
        is_root: flag_in("root", root)?,
        after_end: after_end.map(after_end_in).transpose()?.unwrap_or_default(),
        is_strict: flag_in("strict", strict)?,
    };
    Ok(PyRequest::new(wanted))
}

fn flag_in(option: &str, given: Option<&Bound<'_, PyAny>>) -> PyResult<bool> {
    let Some(given) = given else { return Ok(false) };
    given.extract().map_err(|_| wrong(option, given, "True or False"))
}

fn after_end_in(given: &Bound<'_, PyAny>) -> PyResult<AfterEnd> {
    const WANTED: &str = "'charge', 'refuse' or 'detach'";
    let Ok(text) = given.cast::<PyString>() else { return Err(wrong("after_end", given, WANTED)) };
    match &*text.to_string_lossy() {
        "charge" => Ok(AfterEnd::Charge),
        "refuse" => Ok(AfterEnd::Refuse),
        "detach" => Ok(AfterEnd::Detach),
        other => Err(PyValueError::new_err(format!("request(after_end={other:?}): give {WANTED}"))),
    }
}

/// The request that the running context is in, from whatever depth, task or thread carries it; None in none::
///
///     >>> def helper():
///     ...     return ctxalloc.current_request().stats.live_bytes
///     >>> with ctxalloc.request():
///     ...     array = numpy.ones(1000)
///     ...     helper()
///     8000
///
/// Equal to the Request that began it.
#[pyfunction]
pub(super) fn current_request(py: Python<'_>) -> PyResult<Option<PyRequest>> {
    let capsule = Numpy::get(py)?.current_capsule(py)?; // holds the request while we look at it
    let handler = super::foreign::handler_in(&capsule)?;
    Ok(RequestHandle::by(handler).map(|handle| {
        let wanted = Wanted { name: Some(handle.name().into_owned()), ..Wanted::default() };
        PyRequest { wanted, held: Held::new(), phase: Mutex::new(Phase::Carried(handle)) }
    }))
}

fn wrong(option: &str, given: &Bound<'_, PyAny>, wanted: &str) -> PyErr {
    let shown = given.repr().map_or_else(|_| "?".to_owned(), |shown| shown.to_string());
    PyTypeError::new_err(format!("request({option}={shown}): give {wanted}"))
}

impl PartialEq for PyRequest {
    fn eq(&self, other: &Self) -> bool {
        std::ptr::eq(self, other) || self.handler_word().is_some_and(|own| other.handler_word() == Some(own))
    }
}

impl Eq for PyRequest {}

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

    /// Begins it and selects its handler; or does nothing.
    fn select<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let capsule = capsule_of(py, self.begin(py)?)?;
        let numpy = Numpy::get(py)?;
        numpy.selection().set(numpy, &capsule).inspect_err(|_| *self.phase() = Phase::New)
    }

    /// Begins it; for the one that may enter.
    fn begin(&self, py: Python<'_>) -> PyResult<Handler> {
        if !matches!(*self.phase(), Phase::New) {
            return Err(self.used());
        }
        let begun = self.wanted.begin(py)?;
        let handler = begun.handler();
        *self.phase() = Phase::Entered(begun);
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

    /// Ends the request, and says whether `error` is one of its refusals.
    fn end(&self, py: Python<'_>, error: Option<&Bound<'_, PyAny>>) -> PyResult<()> {
        let mut phase = self.phase();
        let mut begun = match std::mem::replace(&mut *phase, Phase::New) {
            Phase::Entered(begun) => begun,
            other => {
                *phase = other; // it has ended already
                return Ok(());
            }
        };
        let end = begun.end();
        let blocks = if end.live_blocks == 0 { None } else { begun.live_blocks() };
        let refusals = if error.is_some() { begun.take_refusals() } else { Vec::new() };
        *phase = Phase::Left { begun, end, blocks };
        drop(phase);
        match error {
            Some(error) => refusal::raise(py, error, &refusals),
            None => Ok(()),
        }
    }

    /// What `read` says of the request; None before it is entered.
    fn if_begun<R>(&self, read: impl FnOnce(&Seen) -> R) -> Option<R> {
        match &*self.phase() {
            Phase::New => None,
            Phase::Entered(begun) | Phase::Left { begun, .. } => Some(read(begun)),
            Phase::Carried(handle) => Some(read(handle.seen())),
        }
    }

    /// The same; an error before it is entered.
    fn with_request<R>(&self, read: impl FnOnce(&Seen) -> R) -> PyResult<R> {
        self.if_begun(read).ok_or_else(|| {
            PyRuntimeError::new_err(format!(
                "{} is not entered yet, so there is nothing to tell; enter it with `with` or `async with`",
                self.text()
            ))
        })
    }

    /// What no other request has, once it is begun.
    fn handler_word(&self) -> Option<Handler> {
        self.if_begun(|request| request.handler())
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
    /// A request on these terms: a root, or inside of the running context's request.
    fn begin(&self, py: Python<'_>) -> PyResult<Begun> {
        Ok(Begun::begin(Terms {
            name: self.name.clone(),
            limit_bytes: self.limit_bytes,
            overdraft_bytes: if self.is_strict { 0 } else { OVERDRAFT_BYTES },
            budget: self.budget.clone(),
            strategy: self.strategy.clone(),
            outer: if self.is_root { None } else { Some(bridge::current(py)?) },
            after_end: self.after_end,
            is_of_this_thread: true,
        })?)
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

    /// A new request on the same terms. A server's request is a root, has a name where the terms have none, and is charged
    /// to a budget (which one, its server knows) where the terms name none.
    #[pyo3(signature = (*, root = None, name = None, budget = None))]
    fn _again(&self, root: Option<bool>, name: Option<String>, budget: Option<&Bound<'_, PyBudget>>) -> Self {
        let mut wanted = self.wanted.clone();
        wanted.is_root = root.unwrap_or(wanted.is_root);
        wanted.name = wanted.name.or(name);
        wanted.budget = wanted.budget.or_else(|| budget.map(|budget| budget.get().budget().clone()));
        Self::new(wanted)
    }

    /// The budget that the terms name.
    #[getter]
    fn _wanted_budget(&self) -> Option<PyBudget> {
        self.wanted.budget.clone().map(PyBudget::from)
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

    /// Raises BudgetExceeded from `error` if a refusal of this request's led to it, before its end or after it. A refusal is
    /// told once.
    #[pyo3(signature = (error, /))]
    fn _raise_refusal(&self, py: Python<'_>, error: &Bound<'_, PyAny>) -> PyResult<()> {
        let refusals = match &*self.phase() {
            Phase::Entered(begun) | Phase::Left { begun, .. } => begun.take_refusals(),
            Phase::New | Phase::Carried(_) => Vec::new(),
        };
        refusal::raise(py, error, &refusals)
    }

    /// Its name: the one it was given, or a number. RuntimeError before it is entered, here and below.
    #[getter]
    fn name<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyString>> {
        self.with_request(|request| PyString::new(py, &request.name()))
    }

    /// The handler that it selects. RuntimeError after its end where nothing is left of it.
    #[getter]
    fn handler<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyHandler>> {
        let handler = self.with_request(|request| request.handler())?;
        if RequestHandle::by(handler).is_none() {
            return Err(PyRuntimeError::new_err(format!(
                "{} has ended and nothing of it is left, so it has no handler any more",
                self.text()
            )));
        }
        PyHandler::of(py, handler)
    }

    /// Its own budget, under what it is charged to: what a part of it may be charged to.
    #[getter]
    fn budget(&self) -> PyResult<PyBudget> {
        self.with_request(|request| PyBudget::from(request.budget()))
    }

    /// Its numbers so far, after its end too: then they go on to change with what outlives it.
    #[getter]
    fn stats(&self) -> PyResult<PyStats> {
        self.with_request(|request| PyStats::from(request.stats()))
    }

    /// What was alive at its end. None before, and in what ``current_request()`` gave: ask the Request that began it.
    #[getter]
    fn escaped(&self) -> Option<PyEscaped> {
        match &*self.phase() {
            Phase::Left { end, blocks, .. } => Some(PyEscaped::new(end.live_blocks, end.live_bytes, blocks.clone())),
            _ => None,
        }
    }

    /// By the request that it is: TypeError before it is one.
    fn __hash__(&self) -> PyResult<u64> {
        let Some(handler) = self.handler_word() else {
            return Err(PyTypeError::new_err(format!("{} is not entered yet, so it has no hash yet", self.text())));
        };
        let mut hasher = std::hash::DefaultHasher::new();
        handler.hash(&mut hasher);
        Ok(hasher.finish())
    }

    fn __repr__(&self) -> String {
        let state = match &*self.phase() {
            Phase::New => "not entered",
            Phase::Entered(_) => "entered",
            Phase::Left { .. } => "left",
            Phase::Carried(_) => "carried",
        };
        format!("<{}, {state}>", self.text())
    }

    /// A token refers to its Context, which may hold whoever holds this.
    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        self.held.traverse(&visit)
    }
}
