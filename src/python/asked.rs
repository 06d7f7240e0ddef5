//! Asking Python for what it need not have: ordinary errors mean "no", and all others go on.

use pyo3::exceptions::PyException;
use pyo3::prelude::*;

/// What Python answered, or the `Exception` that it raised, which the caller may drop or replace.
///
/// Whatever runs Python code may run a signal's handler too. So KeyboardInterrupt, SystemExit, CancelledError and
/// others that are no `Exception` are never dropped: they are returned as the error.
///
/// # Errors
/// An exception that is no `Exception`.
pub(super) fn asked<T>(py: Python<'_>, answer: PyResult<T>) -> PyResult<Result<T, PyErr>> {
    match answer {
        Err(error) if !error.is_instance_of::<PyException>(py) => Err(error),
        answer => Ok(answer),
    }
}
