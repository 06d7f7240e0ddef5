//! `Steps`: the application's coroutine, where its request counts the whole of it.
#![allow(unsafe_code, reason = "PyIter_Send drives a coroutine, which is no iterator to pyo3")]

use super::super::overdraft::Guard;
use super::super::request::PyRequest;
use super::last::is_coroutine;
use pyo3::exceptions::PyStopIteration;
use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyIterator;
use pyo3::types::iterator::PySendResult;

/// A coroutine around the application's: where the request was given more than a limit allows, its next step raises
/// BudgetExceeded there, and its end does.
#[pyclass(frozen, name = "_Steps", module = "ctxalloc._native")]
pub(super) struct Steps {
    request: Py<PyRequest>,
    inner: Py<PyAny>,
}

type Stepped<'py> = PyResult<PySendResult<'py>>;

impl Steps {
    /// What the application returned, in steps if its request is whole and this is a coroutine of Python's own.
    pub(super) fn around<'py>(request: &Py<PyRequest>, called: Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        if !request.get().is_whole() || !is_coroutine(&called)? {
            return Ok(called);
        }
        let py = called.py();
        Ok(Bound::new(py, Self { request: request.clone_ref(py), inner: called.unbind() })?.into_any())
    }

    /// One step, in which an exception may be set for this thread: what was not raised by its end is taken back.
    fn guarded<'py>(&self, py: Python<'py>, step: impl FnOnce() -> Stepped<'py>) -> Stepped<'py> {
        let guard = self.request.get().begun_handler().and_then(Guard::begin);
        let stepped = step();
        if let Some(guard) = guard {
            guard.end(py);
        }
        match stepped {
            Ok(PySendResult::Return(value)) => {
                self.request.get().overdraft(false).map(|()| PySendResult::Return(value))
            }
            other => other,
        }
    }

    fn step<'py>(&self, value: &Bound<'py, PyAny>) -> Stepped<'py> {
        let py = value.py();
        if let Err(overdraft) = self.request.get().overdraft(false) {
            return self.thrown(py, overdraft.into_value(py).into_bound(py).into_any());
        }
        self.guarded(py, || {
            // SAFETY: this is a coroutine (`around`). It is passed to `PyIter_Send` only, which takes coroutines.
            unsafe { self.inner.bind(py).cast_unchecked::<PyIterator>() }.send(value)
        })
    }

    fn thrown<'py>(&self, py: Python<'py>, error: Bound<'py, PyAny>) -> Stepped<'py> {
        self.guarded(py, || match self.inner.bind(py).call_method1(intern!(py, "throw"), (error,)) {
            Err(error) if error.is_instance_of::<PyStopIteration>(py) => {
                Ok(PySendResult::Return(error.value(py).getattr(intern!(py, "value"))?))
            }
            thrown => thrown.map(PySendResult::Next),
        })
    }
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

    fn __next__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        told(py, self.step(py.None().bind(py)))
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
        self.inner.bind(py).call_method0(intern!(py, "close")).map(drop)
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        visit.call(&self.request)?;
        visit.call(&self.inner)
    }
}
