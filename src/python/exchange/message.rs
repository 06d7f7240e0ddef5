//! What a message of ASGI says, in the types that servers and frameworks write it in.

use super::super::imported::Imported;
use crate::python::interned::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyInt, PyList, PyString};

/// Whether an object is this str.
pub(super) fn is_text(object: &Bound<'_, PyAny>, text: &str) -> bool {
    object.cast::<PyString>().is_ok_and(|object| object == text)
}

/// Whether an answer of this status may be that of a handler of an exception.
pub(super) fn is_error(status: &Bound<'_, PyAny>) -> PyResult<bool> {
    match status.cast_exact::<PyInt>() {
        Ok(status) => Ok(status.extract::<i64>().is_ok_and(|status| status >= 400)),
        Err(_) => status.ge(400),
    }
}

/// A message as it is now: who has sent it may change it, or send another one in the same object, before it goes.
pub(super) fn as_it_is<'py>(message: &Bound<'py, PyDict>) -> PyResult<Bound<'py, PyDict>> {
    let py = message.py();
    let kept = message.copy()?;
    if let Some(headers) = kept.get_item(intern!(py, "headers"))?
        && let Ok(headers) = headers.cast_exact::<PyList>()
    {
        kept.set_item(intern!(py, "headers"), headers.get_slice(0, headers.len()))?;
    }
    Ok(kept)
}

/// The exception that is being handled, or None: then the answer may be that of its handler.
pub(super) fn handled(py: Python<'_>) -> PyResult<Bound<'_, PyAny>> {
    static EXCEPTION: Imported = Imported::new("sys", "exception");
    EXCEPTION.get(py)?.call0()
}
