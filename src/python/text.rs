//! How values are shown in messages and in `repr`.

use super::asked::asked;
use pyo3::prelude::*;
use pyo3::types::PyString;

/// The Debug text of a strategy in Python's syntax: `Aligned { align: 64 }` becomes `Aligned(align=64)`.
pub(super) fn in_python_syntax(debug: &str) -> String {
    let text = debug.replace(" { ", "(").replace(" }", ")").replace(": ", "=");
    text.replace("=true", "=True").replace("=false", "=False")
}

/// `repr(object)`, or `?` where that raises an `Exception`.
///
/// # Errors
/// Another exception that it raises: an interrupt.
pub(super) fn repr_of(object: &Bound<'_, PyAny>) -> PyResult<String> {
    Ok(asked(object.py(), object.repr())?.map_or_else(|_| "?".to_owned(), |text| copied(&text)))
}

/// `type(object).__qualname__`, or `?` where that raises. CPython's own getter: it runs nobody's code.
pub(super) fn type_name(object: &Bound<'_, PyAny>) -> String {
    object.get_type().qualname().map_or_else(|_| "?".to_owned(), |name| copied(&name))
}

/// The text of a `str`. Not `to_string`: that calls `PyObject_Str`, which runs the handlers of signals first, and pyo3
/// drops what they raise.
pub(super) fn copied(text: &Bound<'_, PyString>) -> String {
    text.to_string_lossy().into_owned()
}
