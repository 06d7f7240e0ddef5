//! The event hook from Python: `ctxalloc.set_event_hook`.
//!
//! A Python hook is the C function [`call`] with the callable as its user data, to which the hook owns a reference.
//! `set_event_hook` returns a hook that C code set in a capsule, and accepts that capsule again: whoever sets a hook
//! for a while can restore the one before.
#![allow(unsafe_code, reason = "a C hook, and the references that it holds")]

use super::pending::SetAside;
use super::text::type_name;
use super::{bridge, capsule, exit};
use crate::handler::events::{EventHook, Hook, MAX_WATCHED, set_event_hook as set, unwatched};
use pyo3::exceptions::{PyRuntimeWarning, PyTypeError};
use pyo3::ffi;
use pyo3::prelude::*;
use std::ffi::{CStr, CString, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};

/// The name of the capsule in which a C hook passes through Python.
const CAPSULE: &CStr = c"ctxalloc.event_hook";

/// Calls ``hook(inp, outp, size)`` for every block that any handler makes, resizes or frees; None ends that.
///
/// A new block: ``(None, address, size)``, or ``(None, None, size)`` if there was no memory. A resized one:
/// ``(old_address, new_address, size)``. One that is about to be freed: ``(address, None, 0)``; no other block gets its
/// address before the hook returns. Sizes are in bytes. The hook is called for NumPy's arrays under every handler,
/// NumPy's default included, and for Rust's Buffers; a thread that is not attached to Python waits for the GIL to call
/// it. It is not called for what it allocates or frees itself. An exception in it goes to ``sys.unraisablehook``.
///
/// Returns the hook before, or None. A hook that C code set is returned in a capsule, which can be set again.
///
/// TypeError: neither a callable nor None. RuntimeWarning: the hook is not called for arrays of some handlers, which
/// the message lists; the C guide says why::
///
///     >>> events = []
///     >>> before = ctxalloc.set_event_hook(lambda *event: events.append(event))
///     >>> array = numpy.empty(1000)
///     >>> ctxalloc.set_event_hook(before)  # doctest: +ELLIPSIS
///     <function <lambda> at ...>
///     >>> events[0] == (None, array.ctypes.data, 8000)
///     True
#[pyfunction]
#[pyo3(signature = (hook, /))]
pub(super) fn set_event_hook<'py>(
    py: Python<'py>,
    hook: Option<Bound<'py, PyAny>>,
) -> PyResult<Option<Bound<'py, PyAny>>> {
    // Takes a foreign handler that C code selected into the table, so that the hook is called for its blocks.
    bridge::current(py)?;
    let hook = hook.map(to_c).transpose()?;
    // SAFETY: any attached thread may call `call`, at any time. A hook from one of our capsules was accepted before,
    // from whoever promised the same of it.
    let before = unsafe { set(hook) };
    let before = before.map(|before| from_c(py, before)).transpose()?;
    let unwatched_names = unwatched();
    if !unwatched_names.is_empty() {
        let message = format!(
            "the event hook is not called for NumPy arrays of these handlers: {}; their structs are read-only, or they \
             are not among the first {MAX_WATCHED} foreign ones",
            unwatched_names.join(", ")
        );
        let message = CString::new(message).expect("names have no NUL");
        PyErr::warn(py, &py.get_type::<PyRuntimeWarning>(), &message, 1)?;
    }
    Ok(before)
}

fn to_c(hook: Bound<'_, PyAny>) -> PyResult<Hook> {
    if let Some(function) = capsule::pointer_in(&hook, CAPSULE) {
        // SAFETY: only `from_c` makes capsules of this name: around a hook's function, with its user data as the
        // context.
        let (function, user_data) = unsafe {
            let function = std::mem::transmute::<*mut c_void, EventHook>(function.as_ptr());
            (function, ffi::PyCapsule_GetContext(hook.as_ptr()))
        };
        return Ok(Hook { function, user_data });
    }
    if !hook.is_callable() {
        return Err(PyTypeError::new_err(format!(
            "an event hook is a callable(inp, outp, size) or None, which ends it; got '{}'",
            type_name(&hook)
        )));
    }
    Ok(Hook { function: call, user_data: hook.into_ptr().cast() })
}

/// The Python object for a hook that was replaced: the callable, or a capsule around a C hook.
fn from_c(py: Python<'_>, hook: Hook) -> PyResult<Bound<'_, PyAny>> {
    if std::ptr::fn_addr_eq(hook.function, call as EventHook) {
        let callable: *mut ffi::PyObject = hook.user_data.cast();
        if !runs_with_the_gil(py)? {
            // Another thread may have read the hook and be about to call it: one reference is left for it, and never
            // dropped.
            // SAFETY: the callable is alive, as the hook still owns a reference; attached.
            unsafe { ffi::Py_INCREF(callable) };
        }
        // SAFETY: the reference that the hook owned, which is ours now that the hook was replaced.
        return Ok(unsafe { Bound::from_owned_ptr(py, callable) });
    }
    let capsule = capsule::new(py, hook.function as *const c_void, CAPSULE)?;
    // SAFETY: a capsule; its context may be any pointer.
    unsafe { ffi::PyCapsule_SetContext(capsule.as_ptr(), hook.user_data) };
    Ok(capsule)
}

fn runs_with_the_gil(py: Python<'_>) -> PyResult<bool> {
    match py.import("sys")?.getattr_opt("_is_gil_enabled")? {
        Some(is_enabled) => is_enabled.call0()?.extract(),
        None => Ok(true),
    }
}

/// The C hook that calls a Python one.
///
/// # Safety
/// - this thread is attached to Python;
/// - `user_data` is the callable to which the hook owns a reference.
unsafe extern "C" fn call(inp: *mut c_void, outp: *mut c_void, size_bytes: usize, user_data: *mut c_void) {
    if exit::is_closed() {
        return;
    }
    // SAFETY: attached, by contract. The callable stays alive during the call: replacing the hook takes the GIL, or
    // leaves a reference where there is none (`from_c`); and `hook` is one more.
    let (py, hook) = unsafe {
        let py = Python::assume_attached();
        (py, Bound::from_borrowed_ptr(py, user_data.cast()))
    };
    // An array may be freed while an exception is pending.
    let _pending = SetAside::new(py);
    let address = |block: *mut c_void| (!block.is_null()).then(|| block.addr());
    // pyo3 turns a Rust panic inside of the hook into a panic here again. It was reported, and must not unwind into C.
    let outcome = catch_unwind(AssertUnwindSafe(|| {
        if let Err(error) = hook.call1((address(inp), address(outp), size_bytes)) {
            error.write_unraisable(py, Some(&hook));
        }
    }));
    if let Err(payload) = outcome {
        // The payload may panic when it is dropped, so it is not.
        std::mem::forget(payload);
    }
}
