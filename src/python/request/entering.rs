//! `async with` of a request that reserves memory: it is entered at once where there is room, and else
//! `python/ctxalloc/_room.py` waits for it.

use super::admission::PyAdmission;
use crate::python::imported::Imported;
use crate::python::interned::intern;
use pyo3::exceptions::PyStopIteration;
use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::prelude::*;
use std::sync::OnceLock;

/// Enters the Request if that needs no waiting; else its place in the queue.
pub(super) type EnterOrWait = fn(request: &Bound<'_, PyAny>) -> PyResult<Option<PyAdmission>>;

/// A coroutine that enters a Request in the Context of the task that awaits it, and suspends only if it has to wait.
/// Unless it is awaited it does nothing.
#[pyclass(frozen, name = "_Entering", module = "ctxalloc")]
pub(super) struct Entering {
    request: Py<PyAny>,
    enter_or_wait: EnterOrWait,
    /// The coroutine that waits, once it has to.
    waits: OnceLock<Py<PyAny>>,
}

impl Entering {
    pub(super) fn new(request: Py<PyAny>, enter_or_wait: EnterOrWait) -> Self {
        Self { request, enter_or_wait, waits: OnceLock::new() }
    }

    /// Enters it, which is a StopIteration; or what the coroutine that waits yields first.
    fn begin<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        static WAIT: Imported = Imported::new("ctxalloc._room", "wait");
        let request = self.request.bind(py);
        let Some(admission) = (self.enter_or_wait)(request)? else {
            return Err(PyStopIteration::new_err(self.request.clone_ref(py)));
        };
        // An admission that nobody takes over leaves the queue.
        let waits = WAIT.get(py)?.call1((request, admission))?;
        self.waits.get_or_init(|| waits.unbind()).bind(py).call_method1(intern!(py, "send"), (py.None(),))
    }
}

#[pymethods]
impl Entering {
    fn __await__(slf: Bound<'_, Self>) -> Bound<'_, Self> {
        slf
    }

    fn __iter__(slf: Bound<'_, Self>) -> Bound<'_, Self> {
        slf
    }

    fn __next__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        match self.waits.get() {
            Some(waits) => waits.bind(py).call_method1(intern!(py, "send"), (py.None(),)),
            None => self.begin(py),
        }
    }

    /// `send`, `throw` and `close` make it a `collections.abc.Coroutine`, which asyncio and type checkers require.
    #[pyo3(signature = (value, /))]
    fn send<'py>(&self, py: Python<'py>, value: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        match self.waits.get() {
            Some(waits) => waits.bind(py).call_method1(intern!(py, "send"), (value,)),
            None => self.begin(py),
        }
    }

    #[pyo3(signature = (kind, error = None, _traceback = None, /))]
    fn throw<'py>(
        &self,
        py: Python<'py>,
        kind: Bound<'py, PyAny>,
        error: Option<Bound<'py, PyAny>>,
        _traceback: Option<Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let error = error.unwrap_or(kind);
        match self.waits.get() {
            Some(waits) => waits.bind(py).call_method1(intern!(py, "throw"), (error,)),
            None => Err(PyErr::from_value(error)),
        }
    }

    fn close(&self, py: Python<'_>) -> PyResult<()> {
        match self.waits.get() {
            Some(waits) => waits.call_method0(py, intern!(py, "close")).map(drop),
            None => Ok(()),
        }
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        if let Some(waits) = self.waits.get() {
            visit.call(waits)?;
        }
        visit.call(&self.request)
    }
}
