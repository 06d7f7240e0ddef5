//! What a Python caller sees where Rust panics: an exception, its selection as before, and the next call works.

use pyo3::prelude::*;

/// Panics with ``message`` in the caller's handler: ``pyo3_runtime.PanicException``.
#[pyfunction]
pub fn panic_here(py: Python<'_>, message: String) -> PyResult<()> {
    ctxalloc::python::scope(py, || panic!("{message}"))
}

/// A Rust future that panics with ``message``. Awaiting it raises ``RustPanic``.
#[pyfunction]
pub fn panic_in_future(py: Python<'_>, message: String) -> PyResult<Bound<'_, PyAny>> {
    ctxalloc::python::future_into_py(py, panicking(message))
}

async fn panicking(message: String) -> PyResult<()> {
    panic!("{message}")
}
