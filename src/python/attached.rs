//! Whether this thread is attached to Python (holds the GIL): the limited API has no function for it.
#![allow(unsafe_code, reason = "CPython's thread states")]

use super::numpy::symbol;
use crate::sync::Made;
use pyo3::ffi;
use pyo3::prelude::*;
use std::ffi::c_void;

type State = unsafe extern "C" fn() -> *mut ffi::PyThreadState;

/// The proof, where this thread is attached.
pub(super) fn here<'py>() -> Option<Python<'py>> {
    static STATE: Made<Option<State>> = Made::new();
    // What it was called before CPython 3.13, and since.
    let names = [c"PyThreadState_GetUnchecked", c"_PyThreadState_UncheckedGet"];
    let state = (*STATE.get_or_make(|| {
        // SAFETY: the two functions have this type, and live as long as the process.
        let function = |found| unsafe { std::mem::transmute::<*mut c_void, State>(found) };
        names.into_iter().find_map(symbol).map(function)
    }))?;
    // SAFETY: may be called in any state, on any thread.
    let current = unsafe { state() };
    // Before 3.12 `current` is whichever thread's holds the GIL. NULL first: nothing else is asked of an interpreter
    // that is gone.
    // SAFETY: as above.
    if current.is_null() || current != unsafe { ffi::PyGILState_GetThisThreadState() } {
        return None;
    }
    // SAFETY: this thread's state is the current one: it is attached, and stays so while this call lasts.
    Some(unsafe { Python::assume_attached() })
}
