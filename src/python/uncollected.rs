//! What must not be interrupted by a collection of garbage, which runs finalizers: any code.
//!
//! Before CPython 3.12 whatever makes an object may collect first. `contextvar_set` and `contextvar_del` make some
//! while they read the Context's variables without a reference to them, and before they write what is new. A finalizer
//! that selects meanwhile freed what was being read; one that makes an array had the variable keep what was being taken
//! away: a request that had ended stayed selected. Since 3.12 only the evaluation loop collects.
#![allow(unsafe_code, reason = "C functions that stand for CPython's")]

use crate::sync::Made;
use pyo3::ffi::{self, PyObject};
use pyo3::prelude::*;
use std::ffi::c_int;
use std::ptr::null_mut;

/// Keeps the garbage collector from starting until it is dropped.
pub(super) struct Uncollected {
    was_enabled: bool,
}

impl Uncollected {
    pub(super) fn new(_: Python<'_>) -> Self {
        // SAFETY: attached, as the argument shows.
        unsafe { Self::begin() }
    }

    /// # Safety
    /// - This thread is attached.
    #[inline]
    unsafe fn begin() -> Self {
        // SAFETY: attached (this function's contract).
        Self { was_enabled: unsafe { ffi::PyGC_Disable() } != 0 }
    }
}

impl Drop for Uncollected {
    #[inline]
    fn drop(&mut self) {
        if self.was_enabled {
            // SAFETY: attached: the guard is a local variable of a function that stays attached until it returns.
            unsafe { ffi::PyGC_Enable() };
        }
    }
}

/// `PyContextVar_Set`.
pub(super) type VarSet = unsafe extern "C" fn(*mut PyObject, *mut PyObject) -> *mut PyObject;
/// `PyContextVar_Reset`.
pub(super) type VarReset = unsafe extern "C" fn(*mut PyObject, *mut PyObject) -> c_int;

static REAL: Made<(VarSet, VarReset)> = Made::new();

/// The given functions where CPython collects nothing in them; else others that call them.
pub(super) fn uncollected(py: Python<'_>, set: VarSet, reset: VarReset) -> (VarSet, VarReset) {
    if !collects_anywhere(py) {
        return (set, reset);
    }
    REAL.get_or_make(|| (set, reset));
    (uncollected_set, uncollected_reset)
}

/// Whether whatever makes an object may collect garbage.
pub(super) fn collects_anywhere(py: Python<'_>) -> bool {
    py.version_info() < (3, 12)
}

unsafe extern "C" fn uncollected_set(var: *mut PyObject, value: *mut PyObject) -> *mut PyObject {
    let Some((set, _)) = REAL.get() else { return null_mut() };
    // SAFETY: the caller keeps the contract of `PyContextVar_Set`, which is called attached.
    unsafe {
        let _uncollected = Uncollected::begin();
        set(var, value)
    }
}

unsafe extern "C" fn uncollected_reset(var: *mut PyObject, token: *mut PyObject) -> c_int {
    let Some((_, reset)) = REAL.get() else { return -1 };
    // SAFETY: the caller keeps the contract of `PyContextVar_Reset`, which is called attached.
    unsafe {
        let _uncollected = Uncollected::begin();
        reset(var, token)
    }
}
