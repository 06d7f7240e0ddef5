//! What a scope does: entering selects its handler, leaving restores the one before.
//!
//! A scope keeps its token while it is entered, and refuses to be entered twice. Leaving it in another Context changes
//! nothing there, and it may still be left in its own: `contextvars` decides that, and we explain it.
//! `scope_type.rs` makes it a Python object.

use super::errors::with_cause;
use super::handler::PyHandler;
use super::numpy::Numpy;
use super::token_cell::TokenCell;
use crate::handler::{Handler, Held};
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::ffi;
use pyo3::prelude::*;

/// A handler selected for a block or a function.
pub(super) struct Scope {
    handler: Handler,
    /// Keeps a request's handler valid for as long as this scope exists.
    _held: Held,
    token: TokenCell,
}

impl Scope {
    pub(super) fn new(handler: Handler) -> Self {
        let held = Held::on(handler);
        Self { handler: held.handler(), _held: held, token: TokenCell::new() }
    }

    /// The handler it selects.
    #[inline]
    pub(super) fn handler<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyHandler>> {
        PyHandler::of(py, self.handler)
    }

    /// The token of an entered scope, for the collector.
    pub(super) fn token(&self) -> Option<*mut ffi::PyObject> {
        self.token.token()
    }

    #[inline]
    pub(super) fn enter<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyHandler>> {
        let numpy = Numpy::get(py)?;
        let handler = self.handler(py)?;
        if !self.token.begin() {
            return Err(entered_already(&self.name()));
        }
        match numpy.selection().set(handler.get().capsule(py)) {
            Ok(token) => {
                self.token.put(token);
                Ok(handler)
            }
            Err(error) => {
                self.token.clear();
                Err(error)
            }
        }
    }

    #[inline]
    pub(super) fn exit(&self, py: Python<'_>) -> PyResult<()> {
        let Some(token) = self.token.take(py) else { return Err(not_entered(&self.name())) };
        deselect(py, &self.token, token, &|| self.name())
    }

    /// Its name in messages.
    #[cold]
    fn name(&self) -> String {
        format!("ctxalloc.use({:?})", self.handler.name())
    }

    /// Its `repr`.
    pub(super) fn text(&self) -> String {
        let entered = if self.token.is_in_use() { ", entered" } else { "" };
        format!("<{}{entered}>", self.name())
    }
}

/// Restores what was selected before the token that was taken from `cell`. In a foreign Context nothing changes, and
/// the token goes back into `cell`: the scope or request called `name` may still be left in its own Context.
#[inline]
pub(super) fn deselect(
    py: Python<'_>,
    cell: &TokenCell,
    token: Bound<'_, PyAny>,
    name: &dyn Fn() -> String,
) -> PyResult<()> {
    let numpy = Numpy::get(py)?;
    match numpy.selection().reset(&token) {
        Ok(()) => {
            cell.clear();
            Ok(())
        }
        Err(error) if error.is_instance_of::<PyValueError>(py) => {
            cell.put(token);
            Err(entered_elsewhere(py, &name(), error))
        }
        Err(error) => {
            cell.clear();
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
    let message = format!(
        "{name} was entered in another Context than the one that leaves it; nothing was restored. \
         Enter and leave it in the same task or thread; for a generator, use @{function}(...) instead of a \
         `with` across its yield"
    );
    with_cause(py, PyValueError::new_err(message), cause)
}
