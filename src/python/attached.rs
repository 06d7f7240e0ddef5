//! Whether this thread is attached to Python (holds the GIL): the limited API has no function for that.
#![allow(unsafe_code, reason = "CPython's thread states")]

use super::symbol::symbol;
use crate::sync::Made;
use pyo3::ffi;
use pyo3::prelude::*;
use std::ffi::c_void;

type State = unsafe extern "C" fn() -> *mut ffi::PyThreadState;

/// The token that proves it, where this thread is attached.
pub(super) fn here<'py>() -> Option<Python<'py>> {
    static STATE: Made<Option<State>> = Made::new();
    // The name until CPython 3.12 is the second one.
    let names = [c"PyThreadState_GetUnchecked", c"_PyThreadState_UncheckedGet"];
    let state = (*STATE.get_or_make(|| {
        // SAFETY: both are `PyThreadState *(void)`, and live as long as the process.
        let function = |found| unsafe { std::mem::transmute::<*mut c_void, State>(found) };
        names.into_iter().find_map(symbol).map(function)
    }))?;
    // SAFETY: both functions may be called on any thread, attached or not, and the second one while there is an
    // interpreter: it is not asked where the first one finds none. Before 3.12 the first one returns the state of
    // whichever thread holds the GIL, so the two are compared. If they agree this thread is attached, and stays so
    // while its caller runs.
    unsafe {
        let current = state();
        let is_here = !current.is_null() && current == ffi::PyGILState_GetThisThreadState();
        is_here.then(|| Python::assume_attached())
    }
}
