//! `ContextVar.set` and `reset` during which CPython collects no garbage.
//!
//! Before CPython 3.12 whatever makes an object may collect first, and `contextvar_set` makes some while it reads the
//! Context's variables without a reference to them. A finalizer that sets a variable of its own then frees what is
//! being read: that of a generator decorated with `use`, or the `free` of a handler that is written in Python. Since
//! 3.12 only the evaluation loop collects.
#![allow(unsafe_code, reason = "C functions that stand for CPython's")]

use crate::sync::Made;
use pyo3::ffi::{PyGC_Disable, PyGC_Enable, PyObject};
use pyo3::prelude::*;
use std::ffi::c_int;
use std::ptr::null_mut;

/// `PyContextVar_Set`.
pub(super) type VarSet = unsafe extern "C" fn(*mut PyObject, *mut PyObject) -> *mut PyObject;
/// `PyContextVar_Reset`.
pub(super) type VarReset = unsafe extern "C" fn(*mut PyObject, *mut PyObject) -> c_int;

static REAL: Made<(VarSet, VarReset)> = Made::new();

/// The given functions where CPython collects nothing in them; else others that call them.
pub(super) fn uncollected(py: Python<'_>, set: VarSet, reset: VarReset) -> (VarSet, VarReset) {
    if py.version_info() >= (3, 12) {
        return (set, reset);
    }
    REAL.get_or_make(|| (set, reset));
    (uncollected_set, uncollected_reset)
}

/// Collects nothing meanwhile. A thread that calls `gc.disable()` just while `change` runs a finalizer is not heard.
///
/// # Safety
/// - The caller is attached.
unsafe fn without_collecting<R>(change: impl FnOnce() -> R) -> R {
    // SAFETY: the caller is attached, which is all that this function asks for.
    let collects = unsafe { PyGC_Disable() } != 0;
    let answer = change();
    if collects {
        // SAFETY: the caller is still attached.
        unsafe { PyGC_Enable() };
    }
    answer
}

unsafe extern "C" fn uncollected_set(var: *mut PyObject, value: *mut PyObject) -> *mut PyObject {
    let Some((set, _)) = REAL.get() else { return null_mut() };
    // SAFETY: the caller keeps the contract of `PyContextVar_Set`, which is called attached.
    unsafe { without_collecting(|| set(var, value)) }
}

unsafe extern "C" fn uncollected_reset(var: *mut PyObject, token: *mut PyObject) -> c_int {
    let Some((_, reset)) = REAL.get() else { return -1 };
    // SAFETY: the caller keeps the contract of `PyContextVar_Reset`, which is called attached.
    unsafe { without_collecting(|| reset(var, token)) }
}
