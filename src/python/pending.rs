//! An exception that is already pending when C code calls us: arrays are freed during unwinding, and in a cleanup after
//! a failure.
//!
//! Python code cannot run properly while an exception is set: an import fails because of it, a call reports it as its
//! own. So we set it aside first and restore it at the end. If our own work raised another exception, the older one
//! becomes its `__context__`.
#![allow(unsafe_code, reason = "CPython's error indicator, which pyo3 reads only together with a panic")]

use pyo3::ffi;
use pyo3::prelude::*;
use std::ptr::null_mut;

/// Sets the pending exception aside, if there is one, until this guard is dropped.
pub(super) struct SetAside<'py> {
    raised: Raised,
    _attached: Python<'py>,
}

/// The three references of the error indicator: owned, each perhaps NULL.
struct Raised {
    kind: *mut ffi::PyObject,
    value: *mut ffi::PyObject,
    traceback: *mut ffi::PyObject,
}

impl<'py> SetAside<'py> {
    pub(super) fn new(py: Python<'py>) -> Self {
        Self { raised: Raised::fetch(py), _attached: py }
    }
}

impl Drop for SetAside<'_> {
    fn drop(&mut self) {
        let py = self._attached;
        let Raised { kind, value, traceback } = self.raised;
        if kind.is_null() {
            return;
        }
        let newer = Raised::fetch(py);
        if newer.kind.is_null() {
            // SAFETY: attached; these are the three references that `fetch` took, and they are given back once.
            unsafe { ffi::PyErr_Restore(kind, value, traceback) };
            return;
        }
        let (older, newer) = (self.raised.normalized(py), newer.normalized(py));
        if older.value != newer.value {
            // SAFETY: two different exception objects, as `normalized` made them; the call takes over our reference to
            // the older one.
            unsafe { ffi::PyException_SetContext(newer.value, older.value) };
        } else {
            // SAFETY: both are the same exception, to which we own two references and need one.
            unsafe { ffi::Py_DECREF(older.value) };
        }
        for left in [older.kind, older.traceback] {
            // SAFETY: references of our own, or NULL; the exception holds its traceback itself.
            unsafe { ffi::Py_XDECREF(left) };
        }
        // SAFETY: attached; the three references of the newer exception, given back once.
        unsafe { ffi::PyErr_Restore(newer.kind, newer.value, newer.traceback) };
    }
}

impl Raised {
    /// Takes the pending exception, if there is one.
    fn fetch(_: Python<'_>) -> Self {
        let (mut kind, mut value, mut traceback) = (null_mut(), null_mut(), null_mut());
        // SAFETY: attached, as the argument shows; the three places are ours to write.
        unsafe { ffi::PyErr_Fetch(&raw mut kind, &raw mut value, &raw mut traceback) };
        Self { kind, value, traceback }
    }

    /// The same exception with an exception object as its value, which has its traceback. There is one: `kind` is not
    /// NULL.
    fn normalized(&self, _: Python<'_>) -> Self {
        let Self { mut kind, mut value, mut traceback } = *self;
        // SAFETY: attached, as the argument shows. The three references are ours, and the call replaces them by others
        // that are; then `value` is an exception, and `traceback` its traceback or NULL.
        unsafe {
            ffi::PyErr_NormalizeException(&raw mut kind, &raw mut value, &raw mut traceback);
            if !traceback.is_null() {
                ffi::PyException_SetTraceback(value, traceback);
            }
        }
        Self { kind, value, traceback }
    }
}
