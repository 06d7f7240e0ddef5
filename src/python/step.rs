//! What `__aenter__` and `__aexit__` of a Scope or a Request return.

use super::uncollected::Uncollected;
use crate::unattributed::unattributed;
use pyo3::exceptions::PyStopIteration;
use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::prelude::*;

/// Enters or leaves `subject`, and returns what `await` evaluates to. `error` is the exception that ended the block.
pub(super) type Work = fn(subject: &Bound<'_, PyAny>, error: Option<&Bound<'_, PyAny>>) -> PyResult<Option<Py<PyAny>>>;

/// A coroutine that does its work in the Context of the task that awaits it, and never suspends. Unless it is awaited
/// it does nothing.
#[pyclass(frozen, name = "_Step", module = "ctxalloc")]
pub(super) struct Step {
    subject: Py<PyAny>,
    error: Option<Py<PyAny>>,
    work: Work,
}

impl Step {
    /// It is nobody's: a block is left although its request may have no more memory.
    pub(super) fn object(
        py: Python<'_>,
        subject: Py<PyAny>,
        error: Option<Py<PyAny>>,
        work: Work,
    ) -> PyResult<Bound<'_, Self>> {
        let unattributed = unattributed();
        let _uncollected = unattributed.is_some().then(|| Uncollected::new(py)); // a finalizer's blocks are somebody's
        Bound::new(py, Self { subject, error, work })
    }
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
        let error = self.error.as_ref().map(|error| error.bind(py));
        let value = (self.work)(self.subject.bind(py), error)?;
        Err(PyStopIteration::new_err(value))
    }

    /// `send`, `throw` and `close` make it a `collections.abc.Coroutine`, which asyncio and type checkers require.
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
        visit.call(&self.error)?;
        visit.call(&self.subject)
    }
}
