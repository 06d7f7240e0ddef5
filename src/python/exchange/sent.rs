//! `Sent`: what `send` returns for a message of whose sending something becomes of the exchange.

use super::coroutine::{Coroutine, Stepped};
use pyo3::exceptions::{PyOSError, PyStopIteration};
use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::prelude::*;
use pyo3::types::iterator::PySendResult;

/// A coroutine around the server's, which sends a message. When the last one is sent the account closes. The ContextVar
/// is not touched: this may be another task.
#[pyclass(frozen, name = "_Sent", module = "ctxalloc._native")]
pub(super) struct Sent {
    /// The `Exchange` whose message this is.
    exchange: Py<PyAny>,
    after: &'static After,
    sending: Coroutine,
}

/// What becomes of an exchange.
pub(super) struct After {
    /// The message was sent.
    pub(super) sent_whole: fn(&Bound<'_, PyAny>) -> PyResult<()>,
    /// The client has gone.
    pub(super) is_gone: fn(&Bound<'_, PyAny>) -> PyResult<()>,
}

impl Sent {
    pub(super) fn new(exchange: Py<PyAny>, after: &'static After, sending: Coroutine) -> Self {
        Self { exchange, after, sending }
    }

    fn step<'py>(&self, value: &Bound<'py, PyAny>) -> Stepped<'py> {
        self.after(value.py(), self.sending.send(value))
    }

    /// What becomes of the exchange after a step.
    fn after<'py>(&self, py: Python<'py>, step: Stepped<'py>) -> Stepped<'py> {
        match &step {
            Ok(PySendResult::Next(_)) => {}
            Ok(PySendResult::Return(_)) => {
                (self.after.sent_whole)(self.exchange.bind(py))?;
            }
            // What servers raise where the client has gone (ASGI 2.4).
            Err(error) if error.is_instance_of::<PyOSError>(py) => {
                (self.after.is_gone)(self.exchange.bind(py))?;
            }
            Err(_) => {}
        }
        step
    }
}

#[pymethods]
impl Sent {
    fn __await__(slf: Bound<'_, Self>) -> Bound<'_, Self> {
        slf
    }

    fn __iter__(slf: Bound<'_, Self>) -> Bound<'_, Self> {
        slf
    }

    fn __next__<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        match self.step(py.None().bind(py))? {
            PySendResult::Next(value) => Ok(Some(value)),
            PySendResult::Return(_) => Ok(None),
        }
    }

    /// `send`, `throw` and `close` make it a `collections.abc.Coroutine`, which asyncio requires.
    #[pyo3(signature = (value, /))]
    fn send<'py>(&self, value: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        match self.step(value)? {
            PySendResult::Next(value) => Ok(value),
            PySendResult::Return(_) => Err(PyStopIteration::new_err(())),
        }
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
        let step = self.sending.throw(error.unwrap_or(kind));
        drop(traceback);
        match self.after(py, step)? {
            PySendResult::Next(value) => Ok(value),
            PySendResult::Return(_) => Err(PyStopIteration::new_err(())),
        }
    }

    fn close(&self, py: Python<'_>) -> PyResult<()> {
        self.sending.close(py)
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        visit.call(&self.exchange)?;
        visit.call(self.sending.object())
    }
}
