//! `Steps`: the application's coroutine, of which somebody looks at each step.
//!
//! A request that counts the whole of it may have been given more than a limit allows: its next step raises
//! BudgetExceeded there, and its end does. What waits in trio takes nothing but trio's own outcomes: an exception from
//! elsewhere leaves a nursery open, of which the loop dies, or a thread without its answer. There the step's own code
//! raises it. A step that is a cancellation raises nothing else: it is there for what the application cleans up.
//!
//! And where the last message was sent in a step, what of the request is alive is looked at when the step ends: that is
//! mostly when the application returns, and then nothing is. To ask the loop for another look took half as long as all
//! else that is done for a request.

use super::super::imported::{Imported, module};
use super::super::overdraft;
use super::super::request::PyRequest;
use super::coroutine::{Coroutine, Stepped};
use crate::python::interned::intern;
use pyo3::exceptions::{PyStopIteration, PyTypeError};
use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::prelude::*;
use pyo3::types::iterator::PySendResult;
use std::ptr::from_ref;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// The step of an application that runs, if one does.
#[derive(Default)]
pub(super) struct Running {
    /// Its thread; 0 while none runs. Others only compare it with their own, which is another.
    thread: AtomicUsize,
    /// Set when the request ended in this step with blocks alive; taken by the step's end. Only its thread uses it.
    is_unsettled: AtomicBool,
}

impl Running {
    /// Ends the request. What of it is alive is looked at when the step ends, if this is its thread.
    pub(super) fn close(&self, request: &Bound<'_, PyRequest>) -> PyResult<()> {
        if self.thread.load(Ordering::Relaxed) != this_thread() {
            return PyRequest::close(request);
        }
        if PyRequest::close_open(request)? {
            self.is_unsettled.store(true, Ordering::Relaxed);
        }
        Ok(())
    }

    fn begin(&self) {
        self.thread.store(this_thread(), Ordering::Relaxed);
    }

    /// Returns whether the request ended in this step with blocks alive.
    fn end(&self) -> bool {
        self.thread.store(0, Ordering::Relaxed);
        self.is_unsettled.load(Ordering::Relaxed) && self.is_unsettled.swap(false, Ordering::Relaxed)
    }
}

/// A number of the running thread's, which is not 0.
fn this_thread() -> usize {
    thread_local! {
        static MARK: u8 = const { 0 };
    }
    MARK.with(|mark| from_ref(mark).addr())
}

/// What a step does with its exchange.
pub(super) struct Calls {
    pub(super) running: for<'a> fn(&'a Bound<'_, PyAny>) -> PyResult<&'a Running>,
    /// Leaves the request. Returns whether nothing is left to do.
    pub(super) finish: fn(&Bound<'_, PyAny>) -> PyResult<bool>,
}

/// A coroutine around the application's. Its value is None where all is done, else the exchange.
#[pyclass(frozen, name = "_Steps", module = "ctxalloc._native")]
pub(super) struct Steps {
    exchange: Py<PyAny>,
    calls: &'static Calls,
    request: Py<PyRequest>,
    inner: Coroutine,
}

impl Steps {
    /// Around what the application returned or raised: where it is no coroutine of Python's own, around one that awaits
    /// it.
    pub(super) fn around<'py>(
        exchange: &Bound<'py, PyAny>,
        calls: &'static Calls,
        request: &Py<PyRequest>,
        called: PyResult<Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, Self>> {
        static AWAITING: Imported = Imported::new("ctxalloc.asgi", "_awaiting");
        static RAISING: Imported = Imported::new("ctxalloc.asgi", "_raising");
        let py = exchange.py();
        let own = |made: Bound<'py, PyAny>| {
            Coroutine::of(&made)?.ok_or_else(|| PyTypeError::new_err(format!("{made} is no coroutine")))
        };
        let inner = match called {
            Ok(called) => match Coroutine::of(&called)? {
                Some(inner) => inner,
                None => own(AWAITING.get(py)?.call1((called,))?)?,
            },
            Err(error) => own(RAISING.get(py)?.call1((error,))?)?,
        };
        Bound::new(py, Self { exchange: exchange.clone().unbind(), calls, request: request.clone_ref(py), inner })
    }

    /// One step. `owes`: what nobody was told of is told as soon as the application's own code runs.
    fn run<'py>(&self, py: Python<'py>, owes: bool, step: impl FnOnce() -> Stepped<'py>) -> Stepped<'py> {
        let (exchange, request) = (self.exchange.bind(py), &self.request);
        let running = (self.calls.running)(exchange)?;
        running.begin();
        let stepped = if request.get().is_whole() { Self::told(request.get(), owes, step) } else { step() };
        if running.end() {
            PyRequest::settle_open(request.bind(py))?;
        }
        match stepped? {
            PySendResult::Return(_) => {
                let is_done = (self.calls.finish)(exchange)?;
                let left = if is_done { None } else { Some(exchange) };
                Ok(PySendResult::Return(left.into_pyobject(py)?.into_any()))
            }
            suspended => Ok(suspended),
        }
    }

    /// One step of a whole request. BudgetExceeded: it ended, and nobody was told yet of what was beyond its limit.
    fn told<'py>(request: &PyRequest, owes: bool, step: impl FnOnce() -> Stepped<'py>) -> Stepped<'py> {
        if let Some(handler) = request.begun_handler().filter(|_| owes) {
            overdraft::owe_what_is_untold(handler);
        }
        let stepped = step();
        overdraft::ends();
        match stepped {
            Ok(PySendResult::Return(value)) => request.overdraft(false).map(|()| PySendResult::Return(value)),
            other => other,
        }
    }

    fn step<'py>(&self, value: &Bound<'py, PyAny>) -> Stepped<'py> {
        let (py, request) = (value.py(), self.request.get());
        let owes = request.is_whole() && is_trios(py);
        if !owes && let Err(overdraft) = request.overdraft(false) {
            return self.thrown(py, overdraft.into_value(py).into_bound(py).into_any());
        }
        self.run(py, owes, || self.inner.send(value))
    }

    fn thrown<'py>(&self, py: Python<'py>, error: Bound<'py, PyAny>) -> Stepped<'py> {
        self.run(py, false, || self.inner.throw(error))
    }
}

/// Whether this is a step of one of trio's tasks. It may be a guest in asyncio's loop.
#[pyfunction]
#[pyo3(name = "_is_trios")]
pub(in crate::python) fn is_trios(py: Python<'_>) -> bool {
    let trio = module(py, intern!(py, "trio")).filter(|trio| !trio.is_none());
    trio.and_then(|trio| trio.getattr(intern!(py, "lowlevel")).ok())
        .is_some_and(|lowlevel| lowlevel.call_method0(intern!(py, "current_task")).is_ok())
}

/// As generators tell it.
fn told<'py>(py: Python<'py>, stepped: Stepped<'py>) -> PyResult<Bound<'py, PyAny>> {
    match stepped? {
        PySendResult::Next(value) => Ok(value),
        // In a tuple, or a value that is one would be taken for the arguments.
        PySendResult::Return(value) => Err(PyStopIteration::new_err((value.into_pyobject(py)?.unbind(),))),
    }
}

#[pymethods]
impl Steps {
    fn __await__(slf: Bound<'_, Self>) -> Bound<'_, Self> {
        slf
    }

    fn __iter__(slf: Bound<'_, Self>) -> Bound<'_, Self> {
        slf
    }

    /// None is its end, with None as the value: no exception is made for that.
    fn __next__<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        match self.step(py.None().bind(py))? {
            PySendResult::Return(value) if value.is_none() => Ok(None),
            stepped => told(py, Ok(stepped)).map(Some),
        }
    }

    /// `send`, `throw` and `close` make it a `collections.abc.Coroutine`, which asyncio requires.
    #[pyo3(signature = (value, /))]
    fn send<'py>(&self, value: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        told(value.py(), self.step(value))
    }

    #[pyo3(signature = (kind, error = None, traceback = None, /))]
    fn throw<'py>(
        &self,
        py: Python<'py>,
        kind: Bound<'py, PyAny>,
        error: Option<Bound<'py, PyAny>>,
        traceback: Option<Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        // A single argument is the exception itself: CPython deprecates the other form from 3.12 on.
        let stepped = self.thrown(py, error.unwrap_or(kind));
        drop(traceback);
        told(py, stepped)
    }

    fn close(&self, py: Python<'_>) -> PyResult<()> {
        self.inner.close(py)
    }

    #[getter]
    fn exchange<'py>(&self, py: Python<'py>) -> Bound<'py, PyAny> {
        self.exchange.bind(py).clone()
    }

    // What tools look at that show what a task waits for (`asyncio.print_call_graph`).

    #[getter]
    fn cr_await<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        self.inner.object().bind(py).getattr(intern!(py, "cr_await"))
    }

    #[getter]
    fn cr_frame<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        self.inner.object().bind(py).getattr(intern!(py, "cr_frame"))
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        visit.call(&self.exchange)?;
        visit.call(&self.request)?;
        visit.call(self.inner.object())
    }
}
