//! `ctxalloc.use(...)`: a handler for a `with` or `async with` block, or for a function.
//!
//! A scope keeps its token while it is entered, and refuses to be entered twice. What leaves in another Context
//! changes nothing there and may still be left in its own: `contextvars` decides, we only say it clearly.

use super::handler::{PyHandler, handler_for};
use super::numpy::Numpy;
use pyo3::exceptions::{PyRuntimeError, PyStopIteration, PyValueError};
use pyo3::prelude::*;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// A handler selected for a block or a function. Made by ``ctxalloc.use()``.
#[pyclass(frozen, name = "Scope", module = "ctxalloc")]
pub(super) struct PyScope {
    handler: Py<PyHandler>,
    /// What `Selection::reset` wants, while the scope is entered.
    token: Mutex<Option<Py<PyAny>>>,
}

/// Selects a handler for a ``with`` or ``async with`` block, or as a decorator for a function, a coroutine function,
/// a generator or an async generator.
///
/// ``handler`` is a Handler, the name of one, or None for NumPy's default. The block gets the Handler (``as``).
#[pyfunction]
#[pyo3(name = "use", signature = (handler, /))]
pub(super) fn use_(handler: &Bound<'_, PyAny>) -> PyResult<PyScope> {
    Ok(PyScope { handler: handler_for(handler)?.unbind(), token: Mutex::new(None) })
}

impl PyScope {
    fn token(&self) -> MutexGuard<'_, Option<Py<PyAny>>> {
        // Nothing panics while it is held; if it did, the token would be as good as before.
        self.token.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn name(&self) -> &'static str {
        self.handler.get().handler().name()
    }

    fn enter(&self, py: Python<'_>) -> PyResult<Py<PyHandler>> {
        let numpy = Numpy::get(py)?;
        let mut token = self.token();
        if token.is_some() {
            return Err(PyRuntimeError::new_err(format!(
                "ctxalloc.use({:?}) is entered already; call use() again for a second scope",
                self.name()
            )));
        }
        *token = Some(numpy.selection().set(numpy, self.handler.get().capsule(py))?);
        Ok(self.handler.clone_ref(py))
    }

    fn exit(&self, py: Python<'_>) -> PyResult<()> {
        let numpy = Numpy::get(py)?;
        let Some(token) = self.token().take() else {
            return Err(PyRuntimeError::new_err(format!(
                "ctxalloc.use({:?}) is not entered, so there is nothing to leave",
                self.name()
            )));
        };
        numpy.selection().reset(numpy, token.bind(py)).map_err(|error| {
            if !error.is_instance_of::<PyValueError>(py) {
                return error;
            }
            *self.token() = Some(token);
            let explained = PyValueError::new_err(format!(
                "ctxalloc.use({:?}) was entered in another Context than the one that leaves it; nothing was restored. \
                 Enter and leave it in the same task or thread; a generator wants @ctxalloc.use(...) instead of a \
                 `with` across its yield",
                self.name()
            ));
            explained.set_cause(py, Some(error));
            explained
        })
    }
}

#[pymethods]
impl PyScope {
    /// The handler it selects.
    #[getter]
    fn handler(&self, py: Python<'_>) -> Py<PyHandler> {
        self.handler.clone_ref(py)
    }

    fn __enter__(&self, py: Python<'_>) -> PyResult<Py<PyHandler>> {
        self.enter(py)
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, py: Python<'_>, _exception: &Bound<'_, PyAny>) -> PyResult<()> {
        self.exit(py)
    }

    fn __aenter__(slf: Bound<'_, Self>) -> Step {
        Step { scope: slf.unbind(), entering: true }
    }

    #[pyo3(signature = (*_exception))]
    fn __aexit__(slf: Bound<'_, Self>, _exception: &Bound<'_, PyAny>) -> Step {
        Step { scope: slf.unbind(), entering: false }
    }

    /// The function, run in this scope at each call; works for coroutine functions and (async) generators too.
    fn __call__<'py>(&self, py: Python<'py>, function: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        py.import("ctxalloc._decorate")?.call_method1("in_scope", (&self.handler, function))
    }

    fn __repr__(&self) -> String {
        let entered = if self.token().is_some() { ", entered" } else { "" };
        format!("<ctxalloc.use({:?}){entered}>", self.name())
    }
}

/// What `__aenter__` and `__aexit__` return: awaited, it acts at once in the Context of whoever awaits it.
#[pyclass(frozen, name = "_Step", module = "ctxalloc")]
pub(super) struct Step {
    scope: Py<PyScope>,
    entering: bool,
}

#[pymethods]
impl Step {
    fn __await__(slf: Bound<'_, Self>) -> Bound<'_, Self> {
        slf
    }

    fn __iter__(slf: Bound<'_, Self>) -> Bound<'_, Self> {
        slf
    }

    fn __next__(&self, py: Python<'_>) -> PyResult<()> {
        let scope = self.scope.get();
        let value = if self.entering { Some(scope.enter(py)?) } else { scope.exit(py).map(|()| None)? };
        Err(PyStopIteration::new_err(value))
    }
}
