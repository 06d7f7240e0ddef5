//! What Python calls of a Request: first what everybody may call, then what our middlewares, decorators and tasks of
//! Rust do (`_...`). pyo3 wants all of it in one block. `__enter__` and `__exit__` are in `block.rs`.

use super::admission::PyAdmission;
use super::entering::Entering;
use super::report::{PyEscaped, PyStats};
use super::terms::Arguments;
use super::{Phase, PyRequest, refusal};
use crate::handler::requests::RequestHandle;
use crate::python::budget::PyBudget;
use crate::python::handler::PyHandler;
use crate::python::imported::Imported;
use crate::python::scope::entered_already;
use crate::python::step::Step;
use crate::python::sums::{SiteNumbers, SumNumbers};
use pyo3::exceptions::{PyRuntimeError, PyTypeError};
use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::prelude::*;
use pyo3::types::{PyString, PyTuple};
use std::hash::{Hash, Hasher};
use std::sync::PoisonError;

#[pymethods]
impl PyRequest {
    fn __aenter__<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        if slf.get().reserves() {
            let entering = Entering::new(slf.clone().unbind().into_any(), |request| {
                Self::enter_or_wait(request.cast::<Self>()?, true)
            });
            return Ok(Bound::new(slf.py(), entering)?.into_any());
        }
        let step = Step::object(slf.py(), slf.clone().unbind().into_any(), None, |request, _| {
            request.cast::<Self>()?.get().enter(request.py())?;
            Ok(Some(request.clone().unbind()))
        });
        Ok(step?.into_any())
    }

    #[pyo3(signature = (kind, error, traceback, /))]
    fn __aexit__<'py>(
        slf: &Bound<'py, Self>,
        kind: &Bound<'py, PyAny>,
        error: Option<Py<PyAny>>,
        traceback: &Bound<'py, PyAny>,
    ) -> PyResult<Bound<'py, Step>> {
        let _ = (kind, traceback);
        Step::object(slf.py(), slf.clone().unbind().into_any(), error, |request, error| {
            Self::exit(request.cast::<Self>()?, error)?;
            Ok(None)
        })
    }

    /// Decorates a function: each call is a request of its own on these terms. Works for coroutine functions and
    /// (async) generators too.
    #[pyo3(signature = (function, /))]
    fn __call__<'py>(slf: &Bound<'py, Self>, function: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        slf.py().import("ctxalloc._decorate")?.getattr("in_request")?.call1((slf, function))
    }

    /// Pickles by its terms, as decorated functions need it that go to other processes. TypeError: it was entered, or
    /// its terms name a budget or a strategy.
    fn __reduce__<'py>(&self, py: Python<'py>) -> PyResult<(Bound<'py, PyAny>, Bound<'py, PyTuple>)> {
        if !matches!(*self.phase(), Phase::New) {
            return Err(PyTypeError::new_err(format!(
                "{} was entered, and belongs to this process; pickle terms that nobody has entered",
                self.text()
            )));
        }
        let request = py.import("ctxalloc")?.getattr("request")?;
        let anew =
            py.import("functools")?.getattr("partial")?.call((request,), Some(&self.arguments().in_dict(py)?))?;
        Ok((anew, PyTuple::empty(py)))
    }

    /// The name that it was given, or a number. RuntimeError: it is not entered yet; so for the other attributes.
    #[getter]
    fn name<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyString>> {
        self.with_request(|request| PyString::new(py, &request.name()))
    }

    /// The handler that it selects. RuntimeError: it has ended, and nothing of it is left.
    #[getter]
    fn handler<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyHandler>> {
        let handler = self.with_request(|request| request.handler())?;
        if RequestHandle::from_handler(handler).is_none() {
            return Err(PyRuntimeError::new_err(format!(
                "{} has ended and nothing of it is left, so it has no handler any more",
                self.text()
            )));
        }
        PyHandler::of(py, handler)
    }

    /// Its own budget, which is below those that it is charged to. Parts of the request can be charged to it.
    #[getter]
    fn budget(&self) -> PyResult<PyBudget> {
        self.with_request(|request| PyBudget::from(request.budget()))
    }

    /// Its numbers so far. They can be read after its end too, and change then with the blocks that outlive it.
    #[getter]
    fn stats(&self) -> PyResult<PyStats> {
        self.with_request(|request| PyStats::with_parts(request.stats(), request.whole()))
    }

    /// By how many bytes the process grew beside its pools, with ``measure_unseen=True``: what went other ways than
    /// handlers, less what was freed. None before its end, and where another request was open, or a root was begun,
    /// meanwhile: then nobody can tell whose it is. Work of other threads is part of it.
    #[getter]
    fn unseen_growth_bytes(&self) -> Option<i64> {
        match &*self.phase() {
            Phase::Begun { begun, left: Some(_) } => begun.unseen_growth_bytes(),
            _ => None,
        }
    }

    /// What was alive at its end and outlives it. None before its end, and always for what ``current_request()``
    /// returned: ask the Request that began it. Where it ends in a task of asyncio, the step that is running may still
    /// hold what its code has let go of, so the numbers may become smaller until the loop has had its turn, and for
    /// 0.11 s after that.
    #[getter]
    fn escaped(&self) -> Option<PyEscaped> {
        match &*self.phase() {
            Phase::Begun { begun, left: Some(left) } => Some(left.escaped(begun)),
            _ => None,
        }
    }

    /// The hash of the request. TypeError: it is not entered yet.
    fn __hash__(&self) -> PyResult<u64> {
        let Some(handler) = self.begun_handler() else {
            return Err(PyTypeError::new_err(format!("{} is not entered yet, so it has no hash yet", self.text())));
        };
        let mut hasher = std::hash::DefaultHasher::new();
        handler.hash(&mut hasher);
        Ok(hasher.finish())
    }

    fn __repr__(&self) -> String {
        let state = match &*self.phase() {
            Phase::New => "not entered",
            Phase::Begun { left: None, .. } => "entered",
            Phase::Begun { .. } => "left",
            Phase::Carried(_) => "carried",
        };
        format!("<{}, {state}>", self.text())
    }

    /// For the garbage collector: the token refers to its Context, which may refer to this Request.
    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        self.token.traverse(&visit)?;
        // Where the lock is taken, somebody uses it just now: then it is no garbage.
        match self.phase.try_hold().as_deref() {
            Some(Phase::Begun { left: Some(left), .. }) => left.traverse(&visit),
            _ => Ok(()),
        }
    }

    /// Takes the reservation, or a place in the queue, for a Rust task (`admit`). Unless it `selects`, the request is
    /// begun then as by `_begin`.
    #[pyo3(signature = (*, selects = true))]
    fn _admission(slf: &Bound<'_, Self>, selects: bool) -> PyResult<PyAdmission> {
        let (prepared, timeout) = slf.get().prepare(slf.py())?;
        Self::waiting(slf, prepared, timeout, selects)
    }

    /// Enters it if that needs no waiting, and returns None; else its place in the queue. Unless it `selects`, it is
    /// begun as by `_begin`.
    #[pyo3(signature = (selects, /))]
    fn _enter_or_wait(slf: &Bound<'_, Self>, selects: bool) -> PyResult<Option<PyAdmission>> {
        Self::enter_or_wait(slf, selects)
    }

    /// A new request on the same terms. A server's request is a root, has a name where the terms have none, and is
    /// charged to a budget (which one, its server knows) where the terms name none; `sites`: which code made what it
    /// holds is noted.
    #[pyo3(signature = (*, root = None, name = None, budget = None, sites = false))]
    fn _again(
        &self,
        py: Python<'_>,
        root: Option<bool>,
        name: Option<String>,
        budget: Option<&Bound<'_, PyBudget>>,
        sites: bool,
    ) -> PyResult<Self> {
        self.anew(py, root, name.map(Into::into), budget.map(Bound::get), sites)
    }

    /// Begins a new request on the same terms, as `_again` and `__enter__` do: for a server (`served`).
    #[pyo3(signature = (root, name, budget, sites = false, /))]
    fn _serve(
        &self,
        py: Python<'_>,
        root: bool,
        name: Option<String>,
        budget: Option<&Bound<'_, PyBudget>>,
        sites: bool,
    ) -> PyResult<Self> {
        self.served(py, root, name.map(Into::into), budget.map(Bound::get), sites)
    }

    /// Which code made what it holds, as sums: of all, what its memory refused, by calls. None where nobody asked.
    pub(super) fn _sites(&self) -> Option<(SumNumbers, u64, Vec<SiteNumbers>)> {
        self.sited.as_ref().map(|seen| seen.numbers())
    }

    /// Ends it, if it has not ended, and leaves the selection alone: this may be another task.
    fn _close(slf: &Bound<'_, Self>) -> PyResult<()> {
        Self::close(slf)
    }

    /// What it is refused for, if `error` is the cancellation of its task because it was chosen to make room: then the
    /// task is cancelled no longer. For middlewares, which answer it.
    #[pyo3(signature = (error, /))]
    fn _chosen_of(&self, py: Python<'_>, error: &Bound<'_, PyAny>) -> PyResult<Option<Py<PyAny>>> {
        static REFUSED: Imported = Imported::new("ctxalloc._errors", "BudgetExceeded");
        let cancelling = self.cancelling.lock().unwrap_or_else(PoisonError::into_inner).take();
        match cancelling.map_or(Ok(()), |cancelling| cancelling.end(py, Some(error))) {
            Err(refused) if refused.value(py).is_instance(REFUSED.get(py)?)? => {
                Ok(Some(refused.into_value(py).into_any()))
            }
            other => other.map(|()| None),
        }
    }

    /// Whether its task is to be cancelled when it is chosen to make room.
    #[getter]
    fn _cancels_if_chosen(&self) -> bool {
        self.arguments().cancel_if_chosen
    }

    /// Calls the function as soon as it is settled what has escaped: now, or a turn of the event loop later. One
    /// function only.
    #[pyo3(signature = (function, /))]
    fn _when_settled(&self, py: Python<'_>, function: Py<PyAny>) -> PyResult<()> {
        let mut function = Some(function);
        if let Phase::Begun { left: Some(left), .. } = &mut *self.phase() {
            left.tell_later(&mut function);
        }
        function.map_or(Ok(()), |function| function.call0(py).map(drop))
    }

    /// Settles what has escaped now.
    #[pyo3(name = "_settle")]
    fn settle_py(slf: &Bound<'_, Self>) -> PyResult<()> {
        Self::settle(slf)
    }

    /// Whether the terms reserve memory, so that entering may wait.
    #[getter]
    fn _reserves(&self) -> bool {
        self.reserves()
    }

    /// The same terms without a reservation, for a server whose request gets none: it has an account all the same, but
    /// is none of those that have ended, whose peaks say what a request needs.
    fn _unreserved(&self, py: Python<'_>) -> Self {
        let arguments = self.arguments().clone_ref(py);
        Self::new(Arguments { reserve: None, timeout: None, max_waiting: None, is_uncounted: true, ..arguments })
    }

    /// The budget that the terms name.
    #[getter]
    fn _wanted_budget(&self) -> Option<PyBudget> {
        self.arguments().budget.clone().map(PyBudget::from)
    }

    /// The limit that the terms name.
    #[getter]
    fn _wanted_limit_bytes(&self) -> Option<usize> {
        self.arguments().limit_bytes
    }

    /// Begins the request without selecting its handler, for a generator, which selects it in each of its steps.
    fn _begin<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyHandler>> {
        if !self.token.begin() {
            return Err(entered_already(&self.text()));
        }
        let begun = self.begin(py).and_then(|handler| PyHandler::of(py, handler));
        if begun.is_err() {
            self.token.clear();
        }
        begun
    }

    /// Ends what `_begin` began.
    #[pyo3(signature = (error, /))]
    fn _end(slf: &Bound<'_, Self>, error: Option<&Bound<'_, PyAny>>) -> PyResult<()> {
        let ended = Self::end_told(slf, error, Ok(()));
        slf.get().token.clear();
        ended
    }

    /// BudgetExceeded: nobody was told yet of what it was given beyond a limit.
    fn _tell(&self) -> PyResult<()> {
        self.overdraft(false)
    }

    /// For each error the BudgetExceeded of this request that led to it, before its end or after it, or None. A refusal
    /// is told once: together for errors that came together.
    #[pyo3(signature = (errors, /))]
    fn _refusals_of(&self, py: Python<'_>, errors: Vec<Bound<'_, PyAny>>) -> PyResult<Vec<Option<Py<PyAny>>>> {
        let (refusals, is_whole) = match &*self.phase() {
            Phase::Begun { begun, .. } => (begun.take_refusals(), begun.whole().is_some()),
            Phase::New | Phase::Carried(_) => (Vec::new(), false),
        };
        errors.iter().map(|error| refusal::told(py, error, &refusals, is_whole)).collect()
    }
}
