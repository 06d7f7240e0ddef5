//! Which MemoryErrors are refusals of a request's budget, and what becomes of them.
//!
//! NumPy learns nothing but NULL, and so does the exception. What it says of itself must fit: NumPy's own error knows
//! the bytes of the array that it could not make. One that knows nothing counts where the refusal was the last thing
//! that the request asked for.

use crate::error::Error;
use crate::handler::lease::Refusal;
use crate::python::errors::BudgetExceeded;
use pyo3::exceptions::PyMemoryError;
use pyo3::prelude::*;

/// Raises BudgetExceeded from `error` if one of these refusals led to it.
#[cold]
pub(super) fn raise(py: Python<'_>, error: &Bound<'_, PyAny>, refusals: &[Refusal]) -> PyResult<()> {
    if refusals.is_empty()
        || !error.is_instance_of::<PyMemoryError>()
        || error.is_instance(&py.get_type::<BudgetExceeded>())?
    {
        return Ok(());
    }
    let Some(refusal) = refusals.iter().find(|refusal| led_to(refusal, error)) else { return Ok(()) };
    let exceeded = PyErr::from(refusal.error.clone());
    exceeded.set_cause(py, Some(PyErr::from_value(error.clone())));
    Err(exceeded)
}

fn led_to(refusal: &Refusal, error: &Bound<'_, PyAny>) -> bool {
    let Error::BudgetExceeded { requested_bytes, .. } = refusal.error else { return false };
    // NumPy's `_ArrayMemoryError` has the shape and the type of the array. An array without elements is a byte or more.
    match error.getattr("_total_size").and_then(|size| size.extract::<usize>()) {
        Ok(size) => size == requested_bytes || size == 0,
        Err(_) => refusal.is_last,
    }
}
