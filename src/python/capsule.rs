//! PyCapsules: C pointers that travel through Python under a name, which says what they point to.
#![allow(unsafe_code, reason = "CPython's functions for capsules")]

use pyo3::ffi;
use pyo3::prelude::*;
use std::ffi::{CStr, c_void};
use std::ptr::NonNull;

/// A new capsule around something that lives as long as the process: it has no destructor. ValueError: NULL.
pub(super) fn new<'py>(py: Python<'py>, pointer: *const c_void, name: &'static CStr) -> PyResult<Bound<'py, PyAny>> {
    // SAFETY: this thread is attached, and the name, which the capsule does not copy, is static. `PyCapsule_New`
    // returns a new reference, or NULL with an exception set.
    unsafe { Bound::from_owned_ptr_or_err(py, ffi::PyCapsule_New(pointer.cast_mut(), name.as_ptr(), None)) }
}

/// The pointer in `object` if that is a capsule with this name; None for any other object.
pub(super) fn pointer_in(object: &Bound<'_, PyAny>, name: &CStr) -> Option<NonNull<c_void>> {
    // SAFETY: this thread is attached, and `PyCapsule_IsValid` takes any object. What it accepts is a capsule of this
    // name, as `PyCapsule_GetPointer` requires.
    unsafe {
        if ffi::PyCapsule_IsValid(object.as_ptr(), name.as_ptr()) == 0 {
            return None;
        }
        NonNull::new(ffi::PyCapsule_GetPointer(object.as_ptr(), name.as_ptr()))
    }
}
