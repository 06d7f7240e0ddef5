//! One table for a process, though every Rust extension module carries its own copy of this crate.
//!
//! The package's module owns the table and offers it in a capsule; [`init`] in another module joins it. The layout
//! (`#[repr(C)]` all through) is versioned by the capsule's name: a copy that knows another layout does not
//! find its name and says so.
#![allow(unsafe_code, reason = "a pointer from another copy of this crate")]

use crate::handler::{Handler, Table};
use pyo3::exceptions::{PyImportError, PyRuntimeError};
use pyo3::ffi;
use pyo3::prelude::*;
use std::ffi::CStr;

/// The attribute of `ctxalloc._native`; the number is the layout's version.
pub(super) const ATTRIBUTE: &str = "_table_3";
const CAPSULE: &CStr = c"ctxalloc._native._table_3";

/// The capsule that [`init`] looks for.
pub(super) fn capsule(py: Python<'_>) -> PyResult<Bound<'_, PyAny>> {
    let table = std::ptr::from_ref(Table::share()).cast_mut();
    // SAFETY: not NULL, a static name, no destructor: the table is immortal.
    let capsule = unsafe { ffi::PyCapsule_New(table.cast(), CAPSULE.as_ptr(), None) };
    // SAFETY: a new reference, or NULL with an exception set.
    unsafe { Bound::from_owned_ptr_or_err(py, capsule) }
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
    // SAFETY: a NUL-terminated name; attached.
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
    // SAFETY: the package put an immortal `Table` of this layout there (the capsule's name says so).
    if !Table::join(unsafe { &*table.cast::<Table>() }) {
        return Err(PyRuntimeError::new_err(
            "this extension used ctxalloc before ctxalloc::python::init(); make that the first line of its #[pymodule]",
        ));
    }
    super::errors::import(py)?;
    super::numpy::Numpy::get(py)?;
    super::exit::close_at_exit(py)
}

/// From now on a context in which nothing was selected uses NumPy's own default.
pub(super) fn use_default(handler: Handler) {
    Table::use_as_default(handler);
}
