//! `async with ctxalloc.use(...)`: what `__aenter__` and `__aexit__` return.

use super::scope_type::scope_in;
use pyo3::exceptions::PyStopIteration;
use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::prelude::*;

/// A coroutine that enters or leaves a scope in the Context of whoever awaits it, and never waits. One that is not
/// awaited does nothing.
#[pyclass(frozen, name = "_Step", module = "ctxalloc")]
pub(super) struct Step {
    /// A Scope.
    pub(super) scope: Py<PyAny>,
    pub(super) entering: bool,
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
        let scope = scope_in(self.scope.bind(py));
        let value = if self.entering { Some(scope.enter(py)?.unbind()) } else { scope.exit(py).map(|()| None)? };
        Err(PyStopIteration::new_err(value))
    }

    /// `send`, `throw` and `close` make it a `collections.abc.Coroutine`, which asyncio and type checkers ask for.
    #[pyo3(signature = (_value, /))]
    fn send(&self, py: Python<'_>, _value: &Bound<'_, PyAny>) -> PyResult<()> {
        self.__next__(py)
    }

    #[pyo3(signature = (kind, error = None, _traceback = None, /))]
    fn throw(
        &self,
        kind: Bound<'_, PyAny>,
        error: Option<Bound<'_, PyAny>>,
        _traceback: Option<Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        Err(PyErr::from_value(error.unwrap_or(kind)))
    }

    #[expect(clippy::unused_self, reason = "Python's protocol: nothing is open that could be closed")]
    fn close(&self) {}

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        visit.call(&self.scope)
    }
}
