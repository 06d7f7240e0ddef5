//! An exception that is on its way when C calls us: a free in the middle of unwinding, a cleanup after a failure.
//!
//! CPython may not be asked anything while one is set (an import fails with it, a call answers with it), so it is put
//! aside first, and back at the end; behind an exception that came of our own work it stays as its `__context__`.
#![allow(unsafe_code, reason = "CPython's error indicator, which pyo3 reads only together with a panic")]

use pyo3::ffi;
use pyo3::prelude::*;
use std::ptr::null_mut;

/// The pending exception, put aside while this lives. Nothing, where there is none.
pub(super) struct PutAside<'py> {
    raised: Raised,
    _attached: Python<'py>,
}

/// The error indicator's three references: owned, each perhaps NULL.
struct Raised {
    kind: *mut ffi::PyObject,
    value: *mut ffi::PyObject,
    traceback: *mut ffi::PyObject,
}

impl<'py> PutAside<'py> {
    pub(super) fn new(py: Python<'py>) -> Self {
        Self { raised: Raised::fetch(py), _attached: py }
    }
}

impl Drop for PutAside<'_> {
    fn drop(&mut self) {
        let py = self._attached;
        let Raised { kind, value, traceback } = self.raised;
        if kind.is_null() {
            return;
        }
        let newer = Raised::fetch(py);
        if newer.kind.is_null() {
            // SAFETY: attached; the three references that `fetch` took, given back.
            unsafe { ffi::PyErr_Restore(kind, value, traceback) };
            return;
        }
        let (older, newer) = (self.raised.normalized(py), newer.normalized(py));
        if older.value != newer.value {
            // SAFETY: two exceptions, as normalized; the reference to the older one is given away.
            unsafe { ffi::PyException_SetContext(newer.value, older.value) };
        } else {
            // SAFETY: our own reference; the same exception once more needs only one.
            unsafe { ffi::Py_DECREF(older.value) };
        }
        for left in [older.kind, older.traceback] {
            // SAFETY: our own references, or NULL; the exception holds its traceback by itself.
            unsafe { ffi::Py_XDECREF(left) };
        }
        // SAFETY: attached; the three references of the newer one, given back.
        unsafe { ffi::PyErr_Restore(newer.kind, newer.value, newer.traceback) };
    }
}

impl Raised {
    /// Takes what is set, if anything is.
    fn fetch(_: Python<'_>) -> Self {
        let (mut kind, mut value, mut traceback) = (null_mut(), null_mut(), null_mut());
        // SAFETY: attached, with room for three references.
        unsafe { ffi::PyErr_Fetch(&raw mut kind, &raw mut value, &raw mut traceback) };
        Self { kind, value, traceback }
    }

    /// With an exception object as the value, which knows its traceback. Not for nothing.
    fn normalized(&self, _: Python<'_>) -> Self {
        let Self { mut kind, mut value, mut traceback } = *self;
        // SAFETY: attached; a kind that is not NULL, and references of ours, which are replaced by such.
        unsafe { ffi::PyErr_NormalizeException(&raw mut kind, &raw mut value, &raw mut traceback) };
        if !traceback.is_null() {
            // SAFETY: an exception and its traceback.
            unsafe { ffi::PyException_SetTraceback(value, traceback) };
        }
        Self { kind, value, traceback }
    }
}
