//! `ContextVar.set` and `reset` that a nested one may interrupt.
//!
//! Before CPython 3.12 whatever makes an object may collect garbage first, and `contextvar_set` makes some while it
//! reads the Context's variables without a reference to them. A finalizer that selects meanwhile freed what was being
//! read: that of a generator decorated with `use`, or the `free` of a handler that is written in Python. So a nested
//! change first takes a copy of the Context, which holds its variables, and the outermost one lets go of it. Since 3.12
//! only the evaluation loop collects.
#![allow(unsafe_code, reason = "C functions that stand for CPython's")]

use super::symbol::symbol;
use crate::sync::Made;
use pyo3::ffi::{self, PyObject};
use pyo3::prelude::*;
use std::cell::Cell;
use std::ffi::{c_int, c_void};
use std::ptr::null_mut;

/// `PyContextVar_Set`.
pub(super) type VarSet = unsafe extern "C" fn(*mut PyObject, *mut PyObject) -> *mut PyObject;
/// `PyContextVar_Reset`.
pub(super) type VarReset = unsafe extern "C" fn(*mut PyObject, *mut PyObject) -> c_int;
/// `PyContext_CopyCurrent`.
type CopyCurrent = unsafe extern "C" fn() -> *mut PyObject;

static REAL: Made<(VarSet, VarReset, CopyCurrent)> = Made::new();

/// The changes on a thread's stack.
struct Changes {
    depth: Cell<u32>,
    /// A list of the Contexts that the nested ones have copied; NULL where there is none.
    copies: Cell<*mut PyObject>,
}

thread_local! {
    static CHANGES: Changes = const { Changes { depth: Cell::new(0), copies: Cell::new(null_mut()) } };
}

/// The given functions where CPython collects nothing in them; else others that call them.
pub(super) fn nestable(py: Python<'_>, set: VarSet, reset: VarReset) -> (VarSet, VarReset) {
    let Some(copy) = symbol(c"PyContext_CopyCurrent").filter(|_| py.version_info() < (3, 12)) else {
        return (set, reset);
    };
    // SAFETY: `PyObject *PyContext_CopyCurrent(void)` since CPython 3.7.
    REAL.get_or_make(|| (set, reset, unsafe { std::mem::transmute::<*mut c_void, CopyCurrent>(copy) }));
    (nestable_set, nestable_reset)
}

/// Makes a change; None where a nested one cannot hold what the others read, with an exception set.
///
/// # Safety
/// - The caller is attached.
#[inline(always)]
unsafe fn changed<R>(copy: CopyCurrent, change: impl FnOnce() -> R) -> Option<R> {
    CHANGES.with(|changes| {
        let depth = changes.depth.get();
        // SAFETY: the caller is attached, which is all that this function asks for.
        if depth > 0 && !unsafe { hold_variables(changes, copy) } {
            return None;
        }
        changes.depth.set(depth + 1);
        let answer = change();
        changes.depth.set(depth);
        if depth == 0 && !changes.copies.get().is_null() {
            // SAFETY: a reference to the list, which `hold_variables` made; nobody takes it from here again.
            unsafe { ffi::Py_DecRef(changes.copies.replace(null_mut())) };
        }
        Some(answer)
    })
}

/// Holds the variables of the running Context until the outermost change is over; false with an exception set.
///
/// # Safety
/// - The caller is attached.
#[cold]
unsafe fn hold_variables(changes: &Changes, copy: CopyCurrent) -> bool {
    // SAFETY: the caller is attached. The list is this thread's own, made here with one reference; it takes one of its
    // own to the copy.
    unsafe {
        let context = copy();
        if context.is_null() {
            return false;
        }
        if changes.copies.get().is_null() {
            changes.copies.set(ffi::PyList_New(0));
        }
        let list = changes.copies.get();
        let is_held = !list.is_null() && ffi::PyList_Append(list, context) == 0;
        ffi::Py_DecRef(context);
        is_held
    }
}

unsafe extern "C" fn nestable_set(var: *mut PyObject, value: *mut PyObject) -> *mut PyObject {
    let Some(&(set, _, copy)) = REAL.get() else { return null_mut() };
    // SAFETY: the caller keeps the contract of `PyContextVar_Set`, which is called attached.
    unsafe { changed(copy, || set(var, value)) }.unwrap_or(null_mut())
}

unsafe extern "C" fn nestable_reset(var: *mut PyObject, token: *mut PyObject) -> c_int {
    let Some(&(_, reset, copy)) = REAL.get() else { return -1 };
    // SAFETY: the caller keeps the contract of `PyContextVar_Reset`, which is called attached.
    unsafe { changed(copy, || reset(var, token)) }.unwrap_or(-1)
}
