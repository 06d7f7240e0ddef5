//! `async with ctxalloc.use(...)` and `ctxalloc.request(...)`: what `__aenter__` and `__aexit__` return.

use super::request::PyRequest;
use super::scope_type::scope_in;
use pyo3::exceptions::PyStopIteration;
use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::prelude::*;

/// A coroutine that enters or leaves a scope in the Context of whoever awaits it, and never waits. One that is not
/// awaited does nothing.
#[pyclass(frozen, name = "_Step", module = "ctxalloc")]
pub(super) struct Step {
    /// A Scope or a Request, as the work says.
    pub(super) subject: Py<PyAny>,
    pub(super) work: Work,
}

/// What there is to do.
pub(super) enum Work {
    EnterScope,
    ExitScope,
    EnterRequest,
    /// With the exception that ended the block.
    ExitRequest {
        error: Option<Py<PyAny>>,
    },
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
        let subject = self.subject.bind(py);
        let value = match &self.work {
            Work::EnterScope => Some(scope_in(subject).enter(py)?.into_any().unbind()),
            Work::ExitScope => scope_in(subject).exit(py).map(|()| None)?,
            Work::EnterRequest => {
                subject.cast::<PyRequest>()?.get().enter(py)?;
                Some(self.subject.clone_ref(py))
            }
            Work::ExitRequest { error } => {
                let error = error.as_ref().map(|error| error.bind(py));
                subject.cast::<PyRequest>()?.get().exit(py, error).map(|()| None)?
            }
        };
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
        if let Work::ExitRequest { error: Some(error) } = &self.work {
            visit.call(error)?;
        }
        visit.call(&self.subject)
    }
}
