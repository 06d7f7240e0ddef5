//! A stretch of a server's request: its record is in the Context, and its handler is selected.
//!
//! What a signal's handler raises may come between any two bytecodes. Here entering is one call and leaving is one, so
//! no exception of that kind leaves a thread selected in a request that has ended.

use super::lookup::handler_for;
use super::numpy::Numpy;
use super::request::serving_variable;
use super::token_cell::TokenCell;
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::intern;
use pyo3::prelude::*;

/// For ``with``: the application's call, or one part of the body. It is entered once.
#[pyclass(frozen, name = "_ServingStep", module = "ctxalloc._native")]
pub(super) struct ServingStep {
    serving: Py<PyAny>,
    /// Of the record in the Context.
    mark: TokenCell,
    /// Of the selection.
    token: TokenCell,
}

#[pymethods]
impl ServingStep {
    #[new]
    #[pyo3(signature = (serving, /))]
    fn new(serving: Py<PyAny>) -> Self {
        Self { serving, mark: TokenCell::new(), token: TokenCell::new() }
    }

    fn __enter__(&self, py: Python<'_>) -> PyResult<()> {
        let selection = Numpy::get(py)?.selection();
        let handler = handler_for(&self.serving.bind(py).getattr(intern!(py, "handler"))?)?;
        let variable = serving_variable()
            .ok_or_else(|| PyRuntimeError::new_err("no ContextVar was named for the requests of servers"))?;
        if !(self.mark.begin() && self.token.begin()) {
            return Err(PyRuntimeError::new_err("a step of a request is entered once"));
        }
        let mark = variable.set(self.serving.bind(py))?;
        match selection.set(handler.get().capsule(py)) {
            Ok(token) => {
                self.mark.put(mark);
                self.token.put(token);
                Ok(())
            }
            Err(error) => {
                variable.reset(&mark)?;
                Err(error)
            }
        }
    }

    /// In another Context, where it was thrown away and closed, nothing is selected and nothing changes.
    #[pyo3(signature = (_kind, _error, _traceback, /))]
    fn __exit__(
        &self,
        py: Python<'_>,
        _kind: &Bound<'_, PyAny>,
        _error: &Bound<'_, PyAny>,
        _traceback: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let (Some(token), Some(mark)) = (self.token.take(py), self.mark.take(py)) else { return Ok(()) };
        match Numpy::get(py)?.selection().reset(&token) {
            Ok(()) => serving_variable().map_or(Ok(()), |variable| variable.reset(&mark)),
            Err(error) if error.is_instance_of::<PyValueError>(py) => Ok(()),
            Err(error) => Err(error),
        }
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        visit.call(&self.serving)?;
        self.mark.traverse(&visit)?;
        self.token.traverse(&visit)
    }
}
