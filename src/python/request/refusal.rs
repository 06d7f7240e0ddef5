//! Which MemoryErrors are refusals of a request's budget, and what becomes of them.
//!
//! NumPy learns nothing but NULL, and so does the exception. What it says of itself must fit: NumPy's own error knows
//! the bytes of the array that it could not make. One that knows nothing counts where the refusal was the last thing
//! that the request asked for, unless a `raise` statement made it: that is the program's own.

use crate::error::Error;
use crate::python::errors::BudgetExceeded;
use crate::strategy::account::Refusal;
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
    let size = size_of(error);
    if size.is_none() && raised_by_python(error).unwrap_or(false) {
        return Ok(());
    }
    let Some(refusal) = refusals.iter().find(|refusal| led_to(refusal, size)) else { return Ok(()) };
    let exceeded = PyErr::from(refusal.error.clone());
    exceeded.set_cause(py, Some(PyErr::from_value(error.clone())));
    Err(exceeded)
}

/// The bytes of the array that NumPy could not make: its `_ArrayMemoryError` has the shape and the type.
fn size_of(error: &Bound<'_, PyAny>) -> Option<usize> {
    error.getattr("_total_size").and_then(|size| size.extract()).ok()
}

/// Whether the traceback begins at a `raise` statement, and not at a call of C or Rust code.
fn raised_by_python(error: &Bound<'_, PyAny>) -> PyResult<bool> {
    let mut place = error.getattr("__traceback__")?;
    loop {
        let next = place.getattr("tb_next")?;
        if next.is_none() {
            break;
        }
        place = next;
    }
    let code = place.getattr("tb_frame")?.getattr("f_code")?.getattr("co_code")?;
    let instruction = code.get_item(place.getattr("tb_lasti")?)?;
    let raise = error.py().import("opcode")?.getattr("opmap")?.get_item("RAISE_VARARGS")?;
    instruction.eq(raise)
}

fn led_to(refusal: &Refusal, size: Option<usize>) -> bool {
    let (Error::BudgetExceeded { requested_bytes, .. } | Error::RequestEnded { requested_bytes, .. }) = refusal.error
    else {
        return false;
    };
    match size {
        Some(size) => size == requested_bytes || size == 0, // an array without elements takes a byte or more
        None => refusal.is_last,
    }
}
