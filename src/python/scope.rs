//! What a scope does: it selects its handler when it is entered and puts the old one back when it is left.
//!
//! A scope keeps its token while it is entered, and refuses to be entered twice. What leaves in another Context
//! changes nothing there and may still be left in its own: `contextvars` decides, we only say it clearly.
//! `scope_type.rs` makes it a Python object, `step.rs` an asynchronous one.

use super::handler::PyHandler;
use super::held::Held;
use super::numpy::Numpy;
use crate::handler::Handler;
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::ffi;
use pyo3::prelude::*;

/// A handler selected for a block or a function.
pub(super) struct Scope {
    handler: Handler,
    held: Held,
}

impl Scope {
    pub(super) fn new(handler: Handler) -> Self {
        Self { handler, held: Held::new() }
    }

    /// The handler it selects.
    #[inline]
    pub(super) fn handler<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyHandler>> {
        PyHandler::of(py, self.handler)
    }

    /// The token of an entered scope, for the collector.
    pub(super) fn token(&self) -> Option<*mut ffi::PyObject> {
        self.held.token()
    }

    #[inline]
    pub(super) fn enter<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyHandler>> {
        let numpy = Numpy::get(py)?;
        let handler = self.handler(py)?;
        if !self.held.begin() {
            return Err(self.entered_already());
        }
        match numpy.selection().set(numpy, handler.get().capsule(py)) {
            Ok(token) => {
                self.held.put(token);
                Ok(handler)
            }
            Err(error) => {
                self.held.clear();
                Err(error)
            }
        }
    }

    #[inline]
    pub(super) fn exit(&self, py: Python<'_>) -> PyResult<()> {
        let numpy = Numpy::get(py)?;
        let Some(token) = self.held.take(py) else { return Err(self.not_entered()) };
        match numpy.selection().reset(numpy, &token) {
            Ok(()) => {
                self.held.clear();
                Ok(())
            }
            // In a foreign Context nothing has changed: it may still be left in its own.
            Err(error) if error.is_instance_of::<PyValueError>(py) => {
                self.held.put(token);
                Err(self.entered_elsewhere(py, error))
            }
            Err(error) => {
                self.held.clear();
                Err(error)
            }
        }
    }

    /// What `repr` says.
    pub(super) fn text(&self) -> String {
        let entered = if self.held.is_in_use() { ", entered" } else { "" };
        format!("<ctxalloc.use({:?}){entered}>", self.handler.name())
    }

    #[cold]
    fn entered_already(&self) -> PyErr {
        PyRuntimeError::new_err(format!(
            "ctxalloc.use({:?}) is entered already; call use() again for a second scope",
            self.handler.name()
        ))
    }

    #[cold]
    fn not_entered(&self) -> PyErr {
        PyRuntimeError::new_err(format!(
            "ctxalloc.use({:?}) is not entered, so there is nothing to leave",
            self.handler.name()
        ))
    }

    #[cold]
    fn entered_elsewhere(&self, py: Python<'_>, cause: PyErr) -> PyErr {
        let error = PyValueError::new_err(format!(
            "ctxalloc.use({:?}) was entered in another Context than the one that leaves it; nothing was restored. \
             Enter and leave it in the same task or thread; a generator wants @ctxalloc.use(...) instead of a \
             `with` across its yield",
            self.handler.name()
        ));
        error.set_cause(py, Some(cause));
        error
    }
}
