//! `set_handler`, `reset` and the Token between them: `ContextVar.set` and `reset` on NumPy's own variable.

use super::errors::wrong_type;
use super::foreign::handler_in;
use super::handler::{PyHandler, handler_for};
use super::numpy::Numpy;
use crate::error::Error;
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::prelude::*;
use std::sync::atomic::{AtomicBool, Ordering};

/// Puts back what was selected before one ``set_handler()``: once, in the same Context (PEP 567).
#[pyclass(frozen, name = "Token", module = "ctxalloc")]
pub(super) struct PyToken {
    /// What `Selection::reset` wants.
    token: Py<PyAny>,
    used: AtomicBool,
}

#[pymethods]
impl PyToken {
    /// The handler that ``reset()`` puts back.
    #[getter]
    fn old_handler<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyHandler>> {
        let numpy = Numpy::get(py)?;
        let old = numpy.selection().old_capsule(self.token.bind(py))?;
        PyHandler::of(py, handler_in(old.as_ref().unwrap_or(numpy.default_capsule(py)))?)
    }

    /// Whether ``reset()`` took it.
    #[getter]
    fn used(&self) -> bool {
        self.used.load(Ordering::Relaxed)
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        let used = if self.used() { "used " } else { "" };
        let old = self.old_handler(py)?;
        Ok(format!("<ctxalloc.Token {used}old_handler={:?}>", old.get().handler().name()))
    }

    /// Its Context may hold it: a token kept in a ContextVar.
    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        visit.call(&self.token)
    }
}

/// Selects a handler in the running context, and in no other one; None selects NumPy's default.
///
/// Returns the Token that ``reset()`` takes; without it the selection lasts as long as the context. ``handler`` is a
/// Handler or the name of one. For a block or a function ``use()`` is simpler::
///
///     >>> token = ctxalloc.set_handler("aligned64")
///     >>> ctxalloc.current().name
///     'aligned64'
///     >>> ctxalloc.reset(token)
///     >>> ctxalloc.current().name
///     'default_allocator'
///
/// UnknownHandlerError (a ValueError): no handler has that name.
#[pyfunction]
#[pyo3(signature = (handler, /))]
pub(super) fn set_handler(handler: &Bound<'_, PyAny>) -> PyResult<PyToken> {
    let py = handler.py();
    let numpy = Numpy::get(py)?;
    let handler = handler_for(handler)?;
    let token = numpy.selection().set(numpy, handler.get().capsule(py))?.unbind();
    Ok(PyToken { token, used: AtomicBool::new(false) })
}

/// Puts back what was selected before the ``set_handler()`` that gave this token, in whatever order tokens are used.
///
/// RuntimeError: the token was used already. ValueError: this is another Context than the token's own; it stays
/// good there. Nothing changes then.
#[pyfunction]
#[pyo3(signature = (token, /))]
pub(super) fn reset(token: &Bound<'_, PyAny>) -> PyResult<()> {
    let py = token.py();
    let wanted = "the Token that set_handler() returned";
    let token = token.cast::<PyToken>().map_err(|_| wrong_type("reset", wanted, token))?;
    let numpy = Numpy::get(py)?;
    numpy.selection().reset(numpy, token.get().token.bind(py)).map_err(|error| explain(py, error))?;
    token.get().used.store(true, Ordering::Relaxed);
    Ok(())
}

/// `ContextVar.reset`'s errors in our words, with the original as the cause.
fn explain(py: Python<'_>, error: PyErr) -> PyErr {
    let explained = if error.is_instance_of::<PyRuntimeError>(py) {
        PyErr::from(Error::TokenUsed)
    } else if error.is_instance_of::<PyValueError>(py) {
        PyErr::from(Error::TokenForeign)
    } else {
        return error;
    };
    explained.set_cause(py, Some(error));
    explained
}
