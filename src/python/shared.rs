//! One table for the process, although every Rust extension module carries its own copy of this crate.
//!
//! The package's module owns the table and offers it in a capsule; [`init`] makes another module use it. The capsule's
//! name has the version of the layout (`#[repr(C)]` throughout): a copy that was built for another layout finds no
//! capsule of its name, and says so.
#![allow(unsafe_code, reason = "a pointer from another copy of this crate")]

use super::capsule;
use crate::handler::{Handler, Table};
use pyo3::exceptions::{PyImportError, PyRuntimeError};
use pyo3::ffi;
use pyo3::prelude::*;
use std::ffi::CStr;

/// The attribute of `ctxalloc._native`; the number is the layout's version.
pub(super) const ATTRIBUTE: &str = "_table_3";
const CAPSULE: &CStr = c"ctxalloc._native._table_3";

/// The capsule that [`init`] looks for.
pub(super) fn table_capsule(py: Python<'_>) -> PyResult<Bound<'_, PyAny>> {
    capsule::new(py, std::ptr::from_ref(Table::share()).cast(), CAPSULE)
}

/// Makes this extension module use the table of the package `ctxalloc`. The first line of your `#[pymodule]`.
///
/// ```ignore
/// #[pymodule_init]
/// fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
///     ctxalloc::python::init(module.py())
/// }
/// ```
///
/// # Errors
/// ImportError where `ctxalloc` is not installed or its table has another layout than this crate's version knows;
/// RuntimeError where this module used a table of its own before.
pub fn init(py: Python<'_>) -> PyResult<()> {
    super::interpreter::require_main()?;
    py.import("ctxalloc")?;
    // SAFETY: this thread is attached, and the name ends with NUL.
    let table = unsafe { ffi::PyCapsule_Import(CAPSULE.as_ptr(), 0) };
    if table.is_null() {
        let cause = PyErr::take(py);
        let error = PyImportError::new_err(format!(
            "the installed package ctxalloc has no {ATTRIBUTE}, the table this extension was built for; \
             install ctxalloc {} or rebuild the extension",
            env!("CARGO_PKG_VERSION")
        ));
        error.set_cause(py, cause);
        return Err(error);
    }
    // SAFETY: only the package makes a capsule of this name, around its immortal `Table`, whose layout the name tells.
    if !Table::join(unsafe { &*table.cast::<Table>() }) {
        return Err(PyRuntimeError::new_err(
            "this extension used ctxalloc before ctxalloc::python::init(); make that the first line of its #[pymodule]",
        ));
    }
    super::errors::import(py)?;
    super::numpy::Numpy::get(py)?;
    super::exit::close_at_exit(py)
}

/// Makes NumPy's own default the handler of Rust contexts in which nothing was selected.
pub(super) fn use_default(handler: Handler) {
    Table::use_as_default(handler);
}
