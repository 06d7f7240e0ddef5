//! Calls of Python objects without a tuple of their arguments: pyo3 makes one for each call, as the limited API of
//! CPython 3.11 has no `PyObject_Vectorcall`. Each CPython since 3.9 has it.
#![allow(unsafe_code, reason = "a C function found by name")]

use super::symbol::symbol;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyTuple;
use std::ffi::c_void;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicPtr, Ordering};

type Vectorcall = unsafe extern "C" fn(
    *mut ffi::PyObject,
    *const *mut ffi::PyObject,
    usize,
    *mut ffi::PyObject,
) -> *mut ffi::PyObject;

/// `PY_VECTORCALL_ARGUMENTS_OFFSET`: the callee may use the place before the first argument, as bound methods do.
const ARGUMENTS_OFFSET: usize = 1 << (usize::BITS - 1);

#[inline]
fn vectorcall() -> Option<Vectorcall> {
    // The function; NULL before it was looked for, and where there is none. No lock: who looks twice finds the same.
    static FOUND: AtomicPtr<c_void> = AtomicPtr::new(null_mut());
    let mut found = FOUND.load(Ordering::Relaxed);
    if found.is_null() {
        found = symbol(c"PyObject_Vectorcall")?;
        FOUND.store(found, Ordering::Relaxed);
    }
    // SAFETY: `PyObject *PyObject_Vectorcall(PyObject *callable, PyObject *const *args, size_t nargsf, PyObject
    // *kwnames)` since CPython 3.9.
    Some(unsafe { std::mem::transmute::<*mut c_void, Vectorcall>(found) })
}

/// What `callable` returns for up to three arguments.
#[inline]
pub(super) fn call<'py, const N: usize>(
    callable: &Bound<'py, PyAny>,
    arguments: [&Bound<'py, PyAny>; N],
) -> PyResult<Bound<'py, PyAny>> {
    const { assert!(N <= 3, "there is no place for more") };
    let Some(vectorcall) = vectorcall() else { return callable.call1(PyTuple::new(callable.py(), arguments)?) };
    let mut places = [null_mut(); 4];
    for (place, argument) in places[1..].iter_mut().zip(arguments) {
        *place = argument.as_ptr();
    }
    // SAFETY: attached; `N` objects that are borrowed for the call, with a place before them that the callee may
    // write to, and no names. It returns a new reference, or NULL with an exception set.
    unsafe {
        let called = vectorcall(callable.as_ptr(), places.as_mut_ptr().add(1), N | ARGUMENTS_OFFSET, null_mut());
        Bound::from_owned_ptr_or_err(callable.py(), called)
    }
}
