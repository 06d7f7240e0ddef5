//! How values are shown in messages and in `repr`.

use super::asked::asked;
use pyo3::prelude::*;

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
    Ok(asked(object.py(), object.repr())?.map_or_else(|_| "?".to_owned(), |text| text.to_string()))
}

/// `type(object).__qualname__`, or `?` where that raises. CPython's own getter: it runs nobody's code.
pub(super) fn type_name(object: &Bound<'_, PyAny>) -> String {
    object.get_type().qualname().map_or_else(|_| "?".to_owned(), |name| name.to_string())
}
