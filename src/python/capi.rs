//! The C API for extension modules: the table of functions in the capsule `ctxalloc._C_API`.
//!
//! It selects in NumPy's ContextVar on a thread that is attached to Python, and in Rust's thread-local on any other.
#![allow(unsafe_code, reason = "objects from C")]

use super::bridge;
use super::foreign::adopt_capsule;
use super::handler::capsule_of;
use super::numpy::Numpy;
use super::pending::SetAside;
use super::{attached, capsule, inspect};
use crate::capi::{self, Api, PythonFunctions, Refusal, Selection, answer, shielded};
use crate::error::Error;
use crate::handler::abi::PyDataMem_Handler;
use crate::handler::{Handler, handler_at};
use crate::scope;
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use std::ffi::{CStr, c_char, c_void};
use std::ptr::{NonNull, from_ref, null, null_mut};

/// The capsule's name: where `PyCapsule_Import` finds it, in `python/ctxalloc/__init__.py`.
const CAPSULE: &CStr = c"ctxalloc._C_API";

static API: Api = Api::new::<OfContext>(PythonFunctions { raise, handler_of, capsule: capsule_for, adopt });

/// The capsule around the table.
pub(super) fn api(py: Python<'_>) -> PyResult<Bound<'_, PyAny>> {
    capsule::new(py, from_ref(&API).cast(), CAPSULE)
}

/// The selection in NumPy's ContextVar, or in Rust's thread-local where the thread is not attached.
struct OfContext;

impl Selection for OfContext {
    fn current() -> Result<Handler, Refusal> {
        match attached::here() {
            Some(py) => with_python(py, bridge::current),
            None => Ok(scope::current()),
        }
    }

    fn select(handler: Handler) -> Result<(), Refusal> {
        let Some(py) = attached::here() else {
            drop(scope::set(handler));
            return Ok(());
        };
        handler.require_host_accessible()?; // NumPy writes to what it is given
        with_python(py, |py| {
            let numpy = Numpy::get(py)?;
            numpy.selection().set(&capsule_of(py, handler)?).map(drop)
        })
    }

    unsafe fn handler_of(array: *mut c_void) -> Result<Option<Handler>, Refusal> {
        let py = attached::here().ok_or(Error::NoPython)?;
        // SAFETY: the trait's contract: `array` is an object, which the caller holds during the call.
        let array = unsafe { Bound::from_borrowed_ptr(py, array.cast()) };
        with_python(py, |_| inspect::owner_of(&array))
    }
}

/// Runs `work` with the pending exception set aside. If `work` fails, its own exception is set, with that one as its
/// `__context__`.
fn with_python<'py, R>(py: Python<'py>, work: impl FnOnce(Python<'py>) -> PyResult<R>) -> Result<R, Refusal> {
    let _pending = SetAside::new(py);
    let mut work = Some(work);
    let mut run = || {
        work.take().map(|work| {
            work(py).map_err(|error| {
                error.restore(py);
                Refusal::Raised
            })
        })
    };
    // `try_attach` makes pyo3 count this thread as attached, so that a `Py` that `work` drops is released at once.
    let answer = Python::try_attach(|_| run()).flatten().or_else(run);
    answer.expect("run in one of the two ways")
}

/// `raise`: sets the Python exception for the last error, if this thread is attached.
unsafe extern "C" fn raise() {
    shielded((), || {
        let (Some(py), Some(last)) = (attached::here(), capi::last()) else { return };
        let _pending = SetAside::new(py);
        match last {
            Ok(error) => PyErr::from(error).restore(py),
            Err(message) => PyRuntimeError::new_err(message).restore(py),
        }
    });
}

/// `handler_of`.
///
/// # Safety
/// - `array` is NULL or an object that the caller holds.
unsafe extern "C" fn handler_of(array: *mut c_void) -> *const PyDataMem_Handler {
    answer(null(), || {
        let array = NonNull::new(array).ok_or(Error::NullArgument { argument: "array" })?;
        // SAFETY: not NULL, so an object that the caller holds, by contract.
        let handler = unsafe { OfContext::handler_of(array.as_ptr()) }?;
        Ok(handler.map_or(null(), Handler::as_ptr))
    })
}

/// `capsule`.
unsafe extern "C" fn capsule_for(c_struct: *const PyDataMem_Handler) -> *mut c_void {
    answer(null_mut(), || {
        let py = attached::here().ok_or(Error::NoPython)?;
        let handler = handler_at(c_struct).ok_or(Error::NotRegistered { address: c_struct.addr() })?;
        Ok(with_python(py, |py| capsule_of(py, handler))?.into_ptr().cast())
    })
}

/// `adopt`.
///
/// # Safety
/// - `capsule` is NULL or an object that the caller holds;
/// - `name` is NULL or a C string.
unsafe extern "C" fn adopt(capsule: *mut c_void, name: *const c_char) -> *const PyDataMem_Handler {
    answer(null(), || {
        let py = attached::here().ok_or(Error::NoPython)?;
        let capsule = NonNull::new(capsule).ok_or(Error::NullArgument { argument: "capsule" })?;
        // SAFETY: not NULL, so an object that the caller holds, by contract.
        let capsule = unsafe { Bound::from_borrowed_ptr(py, capsule.as_ptr().cast()) };
        let handler = with_python(py, |_| {
            if name.is_null() {
                return adopt_capsule(&capsule, None);
            }
            // SAFETY: not NULL, so a C string, by contract.
            let name = unsafe { CStr::from_ptr(name) }.to_string_lossy();
            adopt_capsule(&capsule, Some(&name))
        })?;
        Ok(handler.as_ptr())
    })
}
