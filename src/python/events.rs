//! The event hook from Python: `ctxalloc.set_event_hook`.
//!
//! A Python hook is [`call`] with the callable as its user data: the hook owns a reference. A hook from C comes back from
//! `set_event_hook` in a capsule, which it takes again: whoever sets a hook for a while can put the old one back.
#![allow(unsafe_code, reason = "a C hook, and the references that it holds")]

use super::pending::PutAside;
use super::{bridge, exit};
use crate::handler::events::{EventHook, Hook, MAX_WATCHED, set_event_hook as set, unwatched};
use pyo3::exceptions::{PyRuntimeWarning, PyTypeError};
use pyo3::ffi;
use pyo3::prelude::*;
use std::ffi::{CStr, CString, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};

/// What a C hook is wrapped in on its way through Python.
const CAPSULE: &CStr = c"ctxalloc.event_hook";

/// Has ``hook(inp, outp, size)`` called for every block that any handler makes, resizes or frees; None ends it.
///
/// A new block: ``(None, address, size)``, and ``(None, None, size)`` where there was no memory. A resized one:
/// ``(old_address, new_address, size)``. One that is about to be freed: ``(address, None, 0)``; no other block has its
/// address before the hook returns. NumPy's arrays under every handler, its own
/// default included, and Rust's Buffers are all told; threads without Python wait for the GIL to tell. What the hook
/// itself allocates or frees is not told. An exception in it goes to ``sys.unraisablehook``.
///
/// Returns the hook that was there before, or None. (One that C code set comes in a capsule, which can be set again.)
/// TypeError: neither callable nor None. RuntimeWarning: there are handlers of whose arrays it will hear nothing, see
/// the C guide::
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
    // A foreign handler that C selected is in the table from now on: the hook is to hear of it.
    bridge::current(py)?;
    let hook = hook.map(to_c).transpose()?;
    // SAFETY: `call` may be called by any thread that is attached, for ever; what a capsule of ours holds was a hook.
    let before = unsafe { set(hook) };
    let before = before.map(|before| from_c(py, before)).transpose()?;
    let deaf = unwatched();
    if !deaf.is_empty() {
        let message = format!(
            "the event hook hears nothing of NumPy arrays in these handlers: {}; their structs are read-only, or they are \
             past the first {MAX_WATCHED} foreign ones",
            deaf.join(", ")
        );
        let message = CString::new(message).expect("names have no NUL");
        PyErr::warn(py, &py.get_type::<PyRuntimeWarning>(), &message, 1)?;
    }
    Ok(before)
}

fn to_c(hook: Bound<'_, PyAny>) -> PyResult<Hook> {
    // SAFETY: any object may be asked; anything but a capsule of this name gives 0.
    if unsafe { ffi::PyCapsule_IsValid(hook.as_ptr(), CAPSULE.as_ptr()) } != 0 {
        // SAFETY: a valid capsule of this name, which only `from_c` makes.
        let function = unsafe { ffi::PyCapsule_GetPointer(hook.as_ptr(), CAPSULE.as_ptr()) };
        // SAFETY: as above.
        let user_data = unsafe { ffi::PyCapsule_GetContext(hook.as_ptr()) };
        // SAFETY: `from_c` put a hook's function there.
        let function = unsafe { std::mem::transmute::<*mut c_void, EventHook>(function) };
        return Ok(Hook { function, user_data });
    }
    if !hook.is_callable() {
        let kind = hook.get_type().qualname()?;
        return Err(PyTypeError::new_err(format!(
            "an event hook is a callable(inp, outp, size) or None, which ends it; got '{kind}'"
        )));
    }
    Ok(Hook { function: call, user_data: hook.into_ptr().cast() })
}

/// The hook that was taken out: the callable, whose reference the caller gets, or a capsule around a C hook.
fn from_c(py: Python<'_>, hook: Hook) -> PyResult<Bound<'_, PyAny>> {
    if std::ptr::fn_addr_eq(hook.function, call as EventHook) {
        let callable: *mut ffi::PyObject = hook.user_data.cast();
        if !runs_with_the_gil(py)? {
            // A thread may have read the hook and not called it yet: this reference stays for it.
            // SAFETY: a callable that the hook held; attached.
            unsafe { ffi::Py_INCREF(callable) };
        }
        // SAFETY: the reference that the hook held.
        return Ok(unsafe { Bound::from_owned_ptr(py, callable) });
    }
    // SAFETY: a function is not NULL, the name is static, no destructor.
    let capsule = unsafe { ffi::PyCapsule_New(hook.function as *mut c_void, CAPSULE.as_ptr(), None) };
    // SAFETY: a new reference, or NULL with an exception set.
    let capsule = unsafe { Bound::from_owned_ptr_or_err(py, capsule) }?;
    // SAFETY: a capsule; any pointer may be its context.
    unsafe { ffi::PyCapsule_SetContext(capsule.as_ptr(), hook.user_data) };
    Ok(capsule)
}

fn runs_with_the_gil(py: Python<'_>) -> PyResult<bool> {
    match py.import("sys")?.getattr_opt("_is_gil_enabled")? {
        Some(is_enabled) => is_enabled.call0()?.extract(),
        None => Ok(true),
    }
}

/// The C hook behind a Python one.
///
/// # Safety
/// - attached; `user_data` is a callable that the hook holds.
unsafe extern "C" fn call(inp: *mut c_void, outp: *mut c_void, size_bytes: usize, user_data: *mut c_void) {
    if exit::is_closed() {
        return;
    }
    // SAFETY: attached, says the caller.
    let py = unsafe { Python::assume_attached() };
    // SAFETY: a callable that the hook holds until it is replaced, which needs what we hold.
    let hook = unsafe { Bound::from_borrowed_ptr(py, user_data.cast()) };
    // An array may die while an exception is on its way.
    let _pending = PutAside::new(py);
    let address = |block: *mut c_void| (!block.is_null()).then(|| block.addr());
    // A panic of Rust that the hook called comes out of pyo3 as a panic again. It was reported, and must not reach C.
    let told = catch_unwind(AssertUnwindSafe(|| {
        if let Err(error) = hook.call1((address(inp), address(outp), size_bytes)) {
            error.write_unraisable(py, Some(&hook));
        }
    }));
    if let Err(payload) = told {
        // What a panic carries may itself panic when it is dropped: it stays.
        std::mem::forget(payload);
    }
}
