//! `ContextVar.set` and `reset` during which CPython collects no garbage.
//!
//! Before CPython 3.12 whatever makes an object may collect first, and `contextvar_set` makes some while it reads the
//! Context's variables without a reference to them. A finalizer that sets a variable of its own then frees what is being
//! read: a generator decorated with `use`, or the `free` of a handler that is written in Python. Since 3.12 only the
//! evaluation loop collects.
#![allow(unsafe_code, reason = "C functions that stand for CPython's")]

use super::selection::{VarReset, VarSet};
use crate::sync::Made;
use pyo3::ffi::{PyGC_Disable, PyGC_Enable, PyObject};
use pyo3::prelude::*;
use std::ffi::c_int;

static REAL: Made<(VarSet, VarReset)> = Made::new();

/// The given functions, where nothing is collected in them; else others that call them.
pub(super) fn uncollected(py: Python<'_>, set: VarSet, reset: VarReset) -> (VarSet, VarReset) {
    if py.version_info() >= (3, 12) {
        return (set, reset);
    }
    REAL.get_or_make(|| (set, reset));
    (uncollected_set, uncollected_reset)
}

/// The caller is attached.
fn without_collecting<R>(change: impl FnOnce() -> R) -> R {
    // SAFETY: both are called attached, and change only whether the interpreter collects.
    let collects = unsafe { PyGC_Disable() } != 0;
    let answer = change();
    if collects {
        // SAFETY: as above.
        unsafe { PyGC_Enable() };
    }
    answer
}

unsafe extern "C" fn uncollected_set(var: *mut PyObject, value: *mut PyObject) -> *mut PyObject {
    let Some((set, _)) = REAL.get() else { return std::ptr::null_mut() };
    // SAFETY: the caller keeps the contract of `PyContextVar_Set`, which is called attached.
    without_collecting(|| unsafe { set(var, value) })
}

unsafe extern "C" fn uncollected_reset(var: *mut PyObject, token: *mut PyObject) -> c_int {
    let Some((_, reset)) = REAL.get() else { return -1 };
    // SAFETY: the caller keeps the contract of `PyContextVar_Reset`, which is called attached.
    without_collecting(|| unsafe { reset(var, token) })
}
