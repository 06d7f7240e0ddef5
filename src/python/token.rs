//! `set_handler`, `reset` and the Token between them: `ContextVar.set` and `reset` on NumPy's own variable.

use super::errors::{with_cause, wrong_type};
use super::foreign::handler_in;
use super::handler::PyHandler;
use super::lookup::handler_for;
use super::numpy::Numpy;
use crate::error::Error;
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::prelude::*;
use std::sync::atomic::{AtomicBool, Ordering};

/// Restores what was selected before one ``set_handler()``: once, in the same Context (PEP 567).
#[pyclass(frozen, name = "Token", module = "ctxalloc")]
pub(super) struct PyToken {
    /// What `Selection::reset` takes.
    token: Py<PyAny>,
    used: AtomicBool,
}

#[pymethods]
impl PyToken {
    /// The handler that ``reset()`` restores.
    #[getter]
    fn old_handler<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyHandler>> {
        let numpy = Numpy::get(py)?;
        let old = numpy.selection().old_capsule(self.token.bind(py))?;
        PyHandler::of(py, handler_in(old.as_ref().unwrap_or(numpy.default_capsule(py)))?)
    }

    /// Whether ``reset()`` has used it.
    #[getter]
    fn used(&self) -> bool {
        self.used.load(Ordering::Relaxed)
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        let used = if self.used() { "used " } else { "" };
        let old = self.old_handler(py)?;
        Ok(format!("<ctxalloc.Token {used}old_handler={:?}>", old.get().handler().name()))
    }

    /// For the garbage collector: a token refers to its Context, which holds the token if a ContextVar does.
    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        visit.call(&self.token)
    }
}

/// Selects a handler in the running context, and in no other one; None selects NumPy's default.
///
/// Returns the Token that ``reset()`` takes; without a ``reset()`` the selection lasts as long as the context.
/// ``handler`` is a Handler or the name of one. For a block or a function ``use()`` is simpler::
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
    let token = numpy.selection().set(handler.get().capsule(py))?.unbind();
    Ok(PyToken { token, used: AtomicBool::new(false) })
}

/// Restores what was selected before the ``set_handler()`` that returned this token. Tokens may be used in any order.
///
/// RuntimeError: the token was used already. ValueError: this is not the Context of the token, which may still be used
/// in its own. After either error the selection is unchanged.
#[pyfunction]
#[pyo3(signature = (token, /))]
pub(super) fn reset(token: &Bound<'_, PyAny>) -> PyResult<()> {
    let py = token.py();
    let expected = "the Token that set_handler() returned";
    let token = token.cast::<PyToken>().map_err(|_| wrong_type("reset", expected, token))?;
    let numpy = Numpy::get(py)?;
    numpy.selection().reset(token.get().token.bind(py)).map_err(|error| explain(py, error))?;
    token.get().used.store(true, Ordering::Relaxed);
    Ok(())
}

/// Explains an error of `ContextVar.reset`, which becomes the cause.
fn explain(py: Python<'_>, error: PyErr) -> PyErr {
    let explained = if error.is_instance_of::<PyRuntimeError>(py) {
        PyErr::from(Error::TokenUsed)
    } else if error.is_instance_of::<PyValueError>(py) {
        PyErr::from(Error::TokenForeign)
    } else {
        return error;
    };
    with_cause(py, explained, error)
}
