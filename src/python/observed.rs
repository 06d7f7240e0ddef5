//! Whether what runs on this thread is a trace, profile or monitoring function, which CPython calls between the
//! instructions of other code.
#![allow(unsafe_code, reason = "a field of CPython's thread states")]

use super::symbol::symbol;
use pyo3::ffi;
use pyo3::prelude::*;
use std::ffi::c_void;
use std::mem::transmute;

type Change = unsafe extern "C" fn(*mut ffi::PyThreadState);

/// So many numbers at the start of a thread state are looked at; it has more.
const LOOKED_AT: usize = 64;

/// The place of `tracing` in CPython's thread states: how many such functions the thread is in.
pub(super) struct Observed {
    at: usize,
}

impl Observed {
    /// Finds it: it is the number that `PyThreadState_EnterTracing` raises by one. None: nothing, or more, was.
    pub(super) fn found(_py: Python<'_>) -> Option<Self> {
        let (enter, leave) = (symbol(c"PyThreadState_EnterTracing")?, symbol(c"PyThreadState_LeaveTracing")?);
        // SAFETY: `void f(PyThreadState *)` since 3.11.
        let [enter, leave] = [enter, leave].map(|found| unsafe { transmute::<*mut c_void, Change>(found) });
        // SAFETY: attached, as the argument shows, so this thread has a state.
        let state = unsafe { ffi::PyThreadState_Get() };
        // SAFETY: this thread's state, which only this thread changes while it is attached. It is longer than this in
        // each version, and aligned for pointers.
        let look = || unsafe { state.cast::<[i32; LOOKED_AT]>().read() };
        let before = look();
        // SAFETY: this thread's state; the two calls leave it as it was.
        unsafe { enter(state) };
        let within = look();
        // SAFETY: as it was entered.
        unsafe { leave(state) };
        let after = look();
        let mut raised =
            (0..LOOKED_AT).filter(|&at| before[at] == after[at] && before[at].wrapping_add(1) == within[at]);
        let at = raised.next()?;
        raised.next().is_none().then_some(Self { at })
    }

    /// Whether such a function runs on this thread.
    pub(super) fn is_running(&self, _py: Python<'_>) -> bool {
        // SAFETY: attached, as the argument shows. The number is within the thread's own state, by `found`.
        unsafe { ffi::PyThreadState_Get().cast::<i32>().add(self.at).read() > 0 }
    }
}
