//! How values are shown in messages and in `repr`.

use pyo3::prelude::*;

/// The Debug text of a strategy in Python's syntax: `Aligned { align: 64 }` becomes `Aligned(align=64)`.
pub(super) fn in_python_syntax(debug: &str) -> String {
    let text = debug.replace(" { ", "(").replace(" }", ")").replace(": ", "=");
    text.replace("=true", "=True").replace("=false", "=False")
}

/// `repr(object)`, or `?` where that raises.
pub(super) fn repr_of(object: &Bound<'_, PyAny>) -> String {
    object.repr().map_or_else(|_| "?".to_owned(), |text| text.to_string())
}

/// `type(object).__qualname__`, or `?` where that raises.
pub(super) fn type_name(object: &Bound<'_, PyAny>) -> String {
    object.get_type().qualname().map_or_else(|_| "?".to_owned(), |name| name.to_string())
}
