//! A stretch of a server's request: its record is in the Context, and its handler is selected.
//!
//! What a signal's handler raises may come between any two bytecodes. Here entering is one call and leaving is one, so
//! no exception of that kind leaves a thread selected in a request that has ended.
//!
//! A whole request that was given a block beyond its limit is told here at the latest, before a word of what the step
//! has made is sent.

use super::lookup::handler_for;
use super::numpy::Numpy;
use super::overdraft;
use super::request::{PyRequest, serving_variable};
use super::token_cell::TokenCell;
use crate::python::interned::intern;
use pyo3::exceptions::{PyRuntimeError, PyStopAsyncIteration, PyStopIteration, PyValueError};
use pyo3::gc::{PyTraverseError, PyVisit};
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

impl ServingStep {
    /// The request, if it counts the whole of itself.
    fn whole<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyRequest>>> {
        let request = self.serving.bind(py).getattr(intern!(py, "request"))?.cast_into::<PyRequest>().ok();
        Ok(request.filter(|request| request.get().is_whole()))
    }

    fn deselect(&self, py: Python<'_>) -> PyResult<()> {
        let (Some(token), Some(mark)) = (self.token.take(py), self.mark.take(py)) else { return Ok(()) };
        match Numpy::get(py)?.selection().reset(&token) {
            Ok(()) => serving_variable().map_or(Ok(()), |variable| variable.reset(&mark)),
            Err(error) if error.is_instance_of::<PyValueError>(py) => Ok(()),
            Err(error) => Err(error),
        }
    }
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
        let token = match selection.set(handler.get().capsule(py)) {
            Ok(token) => token,
            Err(error) => {
                variable.reset(&mark)?;
                return Err(error);
            }
        };
        self.mark.put(mark);
        self.token.put(token);
        Ok(())
    }

    /// In another Context, where it was thrown away and closed, nothing is selected and nothing changes.
    /// BudgetExceeded: nobody was told yet of what the request was given beyond its limit.
    #[pyo3(signature = (_kind, error, _traceback, /))]
    fn __exit__(
        &self,
        py: Python<'_>,
        _kind: &Bound<'_, PyAny>,
        error: &Bound<'_, PyAny>,
        _traceback: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        overdraft::ends();
        self.deselect(py)?;
        let is_done = error.is_none()
            || error.is_instance_of::<PyStopIteration>()
            || error.is_instance_of::<PyStopAsyncIteration>();
        match self.whole(py)? {
            Some(request) if is_done => request.get().overdraft(false),
            _ => Ok(()),
        }
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        visit.call(&self.serving)?;
        self.mark.traverse(&visit)?;
        self.token.traverse(&visit)
    }
}
