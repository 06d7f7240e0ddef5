//! What functions have in common that Python calls without pyo3: see `scope_type.rs` and `request/call.rs`.
//!
//! pyo3 does not know that this thread is attached while Python calls these functions, so it would delay the release of
//! a `Py` that is dropped in them. `raise` makes pyo3 know.
#![allow(unsafe_code, reason = "functions from CPython's C API")]

use super::errors::RustPanic;
use pyo3::ffi;
use pyo3::prelude::*;
use std::ffi::{CStr, c_int};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::null_mut;

/// A function or method of C.
pub(super) const fn method(
    name: &CStr,
    flags: c_int,
    function: ffi::PyMethodDefPointer,
    doc: &'static CStr,
) -> ffi::PyMethodDef {
    ffi::PyMethodDef { ml_name: name.as_ptr(), ml_meth: function, ml_flags: flags, ml_doc: doc.as_ptr() }
}

/// A function of this module.
pub(super) fn function_of<'py>(
    module: &Bound<'py, PyModule>,
    definition: ffi::PyMethodDef,
) -> PyResult<Bound<'py, PyAny>> {
    let name = module.name()?;
    let definition = Box::leak(Box::new(definition));
    // SAFETY: attached; the definition lives for ever, and the function takes its own references to the other two. It
    // is a new reference, or NULL with an exception set.
    unsafe {
        let function = ffi::PyCFunction_NewEx(definition, module.as_ptr(), name.as_ptr());
        Bound::from_owned_ptr_or_err(module.py(), function)
    }
}

/// # Safety
/// - this thread is attached for `'py`; `object` is an object that is borrowed for this call.
pub(super) unsafe fn borrowed<'py>(object: *mut ffi::PyObject) -> Bound<'py, PyAny> {
    // SAFETY: attached and an object, by contract; the `Bound` takes a reference of its own.
    unsafe { Bound::from_borrowed_ptr(Python::assume_attached(), object) }
}

/// What an entry point returns: the object, or NULL with an exception set. No panic gets past it.
#[inline]
pub(super) fn answer(work: impl FnOnce() -> PyResult<*mut ffi::PyObject>) -> *mut ffi::PyObject {
    match catch_unwind(AssertUnwindSafe(work)) {
        Ok(Ok(object)) => object,
        Ok(Err(error)) => raise(error),
        Err(_) => raise(RustPanic::new_err("ctxalloc panicked; please report it with the panic's message on stderr")),
    }
}

/// Sets the exception. `try_attach` makes pyo3 know that this thread is attached, so that it releases at once what it
/// drops.
#[cold]
fn raise(error: PyErr) -> *mut ffi::PyObject {
    let mut error = Some(error);
    Python::try_attach(|py| error.take().map(|error| error.restore(py)));
    if let Some(error) = error {
        // The interpreter is shutting down, when pyo3 attaches no thread any more.
        // SAFETY: attached all the same: only what Python calls calls this.
        error.restore(unsafe { Python::assume_attached() });
    }
    null_mut()
}
