//! Which MemoryErrors come from a refusal of the request's budgets; those become a BudgetExceeded.
//!
//! A budget refuses inside of a C function, which can only return NULL. NumPy or other C code then raises a
//! MemoryError, and that error knows nothing of the budget. So it is recognised by what it says of itself:
//!
//! - NumPy's error for a new array has the array's size. It comes from a refusal of that many bytes.
//! - An error without a message is C's (`PyErr_NoMemory`), and one of NumPy's messages names no size. It comes from a
//!   refusal if nothing was allocated in the request since that refusal.
//! - Rust code raises this crate's own error, which names the handler and the size. It comes from a refusal of that
//!   many bytes.
//! - In a whole request any other MemoryError comes from the last refusal.
//! - An error with any other message was raised by the program, or by another library. It is left as it is.
//!
//! So a program's own `raise MemoryError` without a message, right after a refusal that it handled, becomes a
//! BudgetExceeded too: nothing in the error tells it from C's.

use crate::error::Error;
use crate::python::asked::asked;
use crate::python::errors::{BudgetExceeded, RequestEnded, with_cause};
use crate::python::text::copied;
use crate::strategy::account::Refusal;
use pyo3::exceptions::PyMemoryError;
use pyo3::prelude::*;

/// NumPy's messages where an array could not grow (`array.resize`, `numpy.fromiter`).
const OF_NUMPY: [&str; 2] = ["cannot allocate memory for array", "cannot allocate array memory"];

/// Raises BudgetExceeded from `error` if it comes from one of these refusals, the youngest of which is first.
#[cold]
pub(super) fn raise(py: Python<'_>, error: &Bound<'_, PyAny>, refusals: &[Refusal], is_whole: bool) -> PyResult<()> {
    let is_budgets = error.is_instance(&py.get_type::<BudgetExceeded>())?;
    if refusals.is_empty() || is_budgets || !error.is_instance_of::<PyMemoryError>() {
        return Ok(());
    }
    // Without a text it is no error of C's or of ours.
    let Ok(message) = asked(py, error.str())? else { return Ok(()) };
    let message = copied(&message);
    let refusal = match size_of_array(error)? {
        Some(size_bytes) => refusals.iter().find(|refusal| fits(refusal, size_bytes)),
        // Its objects and native blocks are counted too, so something was nearly always allocated since; and other
        // libraries have messages of their own.
        None if is_whole => refusals.first(),
        None if is_of_c(&message) => refusals.iter().find(|refusal| refusal.is_last),
        None => refusals.iter().find(|refusal| is_of_rust(&message, refusal)),
    };
    let Some(refusal) = refusal else { return Ok(()) };
    Err(with_cause(py, PyErr::from(refusal.error.clone()), PyErr::from_value(error.clone())))
}

/// The same, as a value. None too where the request had ended and refuses what comes late.
#[cold]
pub(super) fn told(
    py: Python<'_>,
    error: &Bound<'_, PyAny>,
    refusals: &[Refusal],
    is_whole: bool,
) -> PyResult<Option<Py<PyAny>>> {
    match raise(py, error, refusals, is_whole) {
        Ok(()) => Ok(None),
        Err(refused) if refused.is_instance_of::<BudgetExceeded>(py) => Ok(Some(refused.into_value(py).into_any())),
        Err(ended) if ended.is_instance_of::<RequestEnded>(py) => Ok(None),
        Err(other) => Err(other),
    }
}

/// The size in bytes of the array that NumPy could not make: its `_ArrayMemoryError` has the shape and the type.
/// That is a property in Python: an interrupt may come out of it.
fn size_of_array(error: &Bound<'_, PyAny>) -> PyResult<Option<usize>> {
    let size = error.getattr("_total_size").and_then(|size| size.extract());
    Ok(asked(error.py(), size)?.ok())
}

/// Whether `PyErr_NoMemory` raised the error, or NumPy with one of its messages.
fn is_of_c(message: &str) -> bool {
    message.is_empty() || OF_NUMPY.contains(&message)
}

/// Whether Rust code raised the error for this refusal: it is the text of [`Error::OutOfMemory`] with that size.
fn is_of_rust(message: &str, refusal: &Refusal) -> bool {
    const BEFORE_THE_NAME: &str = "handler '";
    let Some(requested_bytes) = requested_bytes(refusal) else { return false };
    let text = Error::OutOfMemory { handler: "".into(), requested_bytes }.to_string();
    let ending = text.strip_prefix(BEFORE_THE_NAME);
    message.starts_with(BEFORE_THE_NAME) && ending.is_some_and(|ending| message.ends_with(ending))
}

/// Whether an array of that size was refused here.
fn fits(refusal: &Refusal, size_bytes: usize) -> bool {
    // An array without elements takes a byte or more.
    requested_bytes(refusal).is_some_and(|requested_bytes| size_bytes == requested_bytes || size_bytes == 0)
}

fn requested_bytes(refusal: &Refusal) -> Option<usize> {
    match refusal.error {
        Error::BudgetExceeded { requested_bytes, .. } | Error::RequestEnded { requested_bytes, .. } => {
            Some(requested_bytes)
        }
        _ => None,
    }
}
