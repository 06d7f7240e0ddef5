//! What finds functions of CPython's that have no name: where one of C's begins, and what is between Python's loop and
//! a function that it calls.

use crate::whole::Python as Loop;
use pyo3::exceptions::{PyException, PyMemoryError, PyRecursionError};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyCFunction;
use std::sync::{Arc, Mutex, PoisonError};

/// None of these functions, where who has replaced what is called for that has raised the error, or an audit hook: what
/// can be found without it is known. Any other error is not about this.
pub(super) fn or_none(py: Python<'_>, functions: PyResult<Vec<usize>>) -> PyResult<Vec<usize>> {
    functions.or_else(|error| {
        let is_ours = error.is_instance_of::<PyMemoryError>(py) || error.is_instance_of::<PyRecursionError>(py);
        if error.is_instance_of::<PyException>(py) && !is_ours { Ok(Vec::new()) } else { Err(error) }
    })
}

/// Where a function of C's begins; 0: it is none, as where somebody has replaced it.
#[allow(unsafe_code, reason = "a C function's address")]
pub(super) fn c_function(function: &Bound<'_, PyAny>) -> usize {
    let Ok(function) = function.cast::<PyCFunction>() else { return 0 };
    // SAFETY: a C function of Python's; it gives the address, and no reference.
    unsafe { ffi::PyCFunction_GetFunction(function.as_ptr()) }.map_or(0, |found| found as usize)
}

/// What stood between the loop and a function of Python's, each time that this was called.
pub(super) type Seen = Arc<Mutex<Vec<Vec<usize>>>>;

/// A function that notes what is between the loop and itself, and answers 1.
pub(super) fn noting(py: Python<'_>, python: Loop) -> PyResult<(Bound<'_, PyCFunction>, Seen)> {
    let seen = Seen::default();
    let to = Arc::clone(&seen);
    let note = PyCFunction::new_closure(py, None, None, move |_, _| {
        to.lock().unwrap_or_else(PoisonError::into_inner).push(python.functions_between());
        1
    })?;
    Ok((note, seen))
}
