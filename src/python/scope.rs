//! What a scope does: it selects its handler when it is entered and puts the old one back when it is left.
//!
//! A scope keeps its token while it is entered, and refuses to be entered twice. What leaves in another Context
//! changes nothing there and may still be left in its own: `contextvars` decides, we only say it clearly.
//! `scope_type.rs` makes it a Python object, `step.rs` an asynchronous one.

use super::handler::PyHandler;
use super::held::Held as TokenHeld;
use super::numpy::Numpy;
use crate::handler::{Handler, Held};
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::ffi;
use pyo3::prelude::*;

/// A handler selected for a block or a function.
pub(super) struct Scope {
    handler: Handler,
    /// As long as there is this scope a request's handler stays good.
    _kept: Held,
    held: TokenHeld,
}

impl Scope {
    pub(super) fn new(handler: Handler) -> Self {
        let kept = Held::on(handler);
        Self { handler: kept.handler(), _kept: kept, held: TokenHeld::new() }
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
            return Err(entered_already(&self.name()));
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
        let Some(token) = self.held.take(py) else { return Err(not_entered(&self.name())) };
        deselect(py, &self.held, token, &|| self.name())
    }

    /// How it is called in messages.
    #[cold]
    fn name(&self) -> String {
        format!("ctxalloc.use({:?})", self.handler.name())
    }

    /// What `repr` says.
    pub(super) fn text(&self) -> String {
        let entered = if self.held.is_in_use() { ", entered" } else { "" };
        format!("<{}{entered}>", self.name())
    }
}

/// Puts back what was selected before the token that was taken from `held`. In a foreign Context nothing changes, and
/// `held` keeps it: what is called `name` may still be left in its own.
#[inline]
pub(super) fn deselect(
    py: Python<'_>,
    held: &TokenHeld,
    token: Bound<'_, PyAny>,
    name: &dyn Fn() -> String,
) -> PyResult<()> {
    let numpy = Numpy::get(py)?;
    match numpy.selection().reset(numpy, &token) {
        Ok(()) => {
            held.clear();
            Ok(())
        }
        Err(error) if error.is_instance_of::<PyValueError>(py) => {
            held.put(token);
            Err(entered_elsewhere(py, &name(), error))
        }
        Err(error) => {
            held.clear();
            Err(error)
        }
    }
}

#[cold]
pub(super) fn entered_already(name: &str) -> PyErr {
    let (function, _) = name.split_once('(').unwrap_or((name, ""));
    let function = function.trim_start_matches("ctxalloc.");
    PyRuntimeError::new_err(format!("{name} is entered already; call {function}() again for a second scope"))
}

#[cold]
pub(super) fn not_entered(name: &str) -> PyErr {
    PyRuntimeError::new_err(format!("{name} is not entered, so there is nothing to leave"))
}

#[cold]
fn entered_elsewhere(py: Python<'_>, name: &str, cause: PyErr) -> PyErr {
    let (function, _) = name.split_once('(').unwrap_or((name, ""));
    let error = PyValueError::new_err(format!(
        "{name} was entered in another Context than the one that leaves it; nothing was restored. \
         Enter and leave it in the same task or thread; a generator wants @{function}(...) instead of a \
         `with` across its yield"
    ));
    error.set_cause(py, Some(cause));
    error
}
