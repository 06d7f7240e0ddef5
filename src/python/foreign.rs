//! Handlers that others made: any capsule that NumPy would take is taken into the table, at the latest when it is
//! first seen. From then on it is a handler like any other, and immortal.
//!
//! NumPy calls a handler with the GIL held, so a foreign one may rely on it. Rust may not hold it, and therefore
//! attaches to Python first ([`Reach::WithGil`]).
#![allow(unsafe_code, reason = "foreign structs and their C functions")]

use super::numpy::struct_in;
use crate::error::Error;
use crate::handler::abi::PyDataMem_Handler;
use crate::handler::{Extras, Handler, Reach, adopt, handler_at};
use crate::sync::Ordering;
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyCapsule;
use std::ffi::CStr;
use std::ptr::{NonNull, null_mut};

/// The handler in a capsule, as the user asked for it: errors for whatever is not as it must be.
pub(super) fn adopt_capsule(capsule: &Bound<'_, PyAny>, name: Option<&str>) -> PyResult<Handler> {
    let face = struct_in(capsule).ok_or_else(|| not_a_handler(capsule))?;
    adopt_struct(capsule, face, name)
}

/// The handler in a capsule that NumPy has: known, or adopted now. Where its name is taken or unreadable it gets one
/// made from its address.
#[inline]
pub(super) fn handler_in(capsule: &Bound<'_, PyAny>) -> PyResult<Handler> {
    let face = struct_in(capsule).ok_or_else(|| not_a_handler(capsule))?;
    match handler_at(face.as_ptr()) {
        Some(handler) => Ok(handler),
        None => adopt_on_sight(capsule, face),
    }
}

#[cold]
fn adopt_on_sight(capsule: &Bound<'_, PyAny>, face: NonNull<PyDataMem_Handler>) -> PyResult<Handler> {
    match try_adopt(capsule, face, None) {
        Err(Error::NameTaken { name }) => adopt_struct(capsule, face, Some(&at_address(&name, face))),
        Err(Error::NameUnreadable | Error::NameEmpty) => {
            adopt_struct(capsule, face, Some(&at_address("foreign", face)))
        }
        outcome => outcome.map_err(PyErr::from),
    }
}

/// A name that no other handler has: its struct stands at this address for ever.
fn at_address(name: &str, face: NonNull<PyDataMem_Handler>) -> String {
    let suffix = format!("@{:#x}", face.addr());
    let room = 126 - suffix.len();
    let end = (0..=room.min(name.len())).rev().find(|&end| name.is_char_boundary(end)).unwrap_or(0);
    format!("{}{suffix}", &name[..end])
}

fn adopt_struct(capsule: &Bound<'_, PyAny>, face: NonNull<PyDataMem_Handler>, name: Option<&str>) -> PyResult<Handler> {
    try_adopt(capsule, face, name).map_err(PyErr::from)
}

fn try_adopt(
    capsule: &Bound<'_, PyAny>,
    face: NonNull<PyDataMem_Handler>,
    name: Option<&str>,
) -> Result<Handler, Error> {
    // The capsule is kept for ever (its destructor may free the struct), before anybody can find the handler.
    let kept = capsule.clone().unbind();
    // SAFETY: the struct lives as long as its capsule (NEP 49), which is kept below; its functions are called attached,
    // as NumPy would; nothing is known of the alignment.
    let handler = unsafe { adopt(face, Reach::WithGil, name, Extras::default()) }?;
    keep(handler, kept);
    Ok(handler)
}

/// Hangs the capsule on its handler, for ever; it is the one that selecting the handler will set. Not that of a request,
/// which it would hold for as long.
pub(super) fn keep(handler: Handler, capsule: Py<PyAny>) {
    if handler.is_request() {
        return;
    }
    let pointer = capsule.into_ptr();
    // AcqRel: publishes the object, or sees that another thread did. Pairs with the load in `python::handler`.
    let place = &handler.entry().capsule;
    if let Err(present) = place.compare_exchange(null_mut(), pointer.cast(), Ordering::AcqRel, Ordering::Acquire)
        && std::ptr::eq(present, pointer.cast())
    {
        // The same capsule once more: one reference is enough. Any other one stays alive beside it.
        // SAFETY: the reference that `into_ptr` gave us; attached, as every caller is.
        unsafe { ffi::Py_DECREF(pointer) };
    }
}

fn not_a_handler(object: &Bound<'_, PyAny>) -> PyErr {
    let Ok(capsule) = object.cast::<PyCapsule>() else {
        let kind = object.get_type().qualname().map_or_else(|_| "?".to_owned(), |name| name.to_string());
        return PyTypeError::new_err(format!(
            "a handler is a PyCapsule named 'mem_handler' (NEP 49), not an object of type '{kind}'"
        ));
    };
    // SAFETY: a capsule; its name is NULL or a C string that lives as long.
    let name = unsafe { ffi::PyCapsule_GetName(capsule.as_ptr()) };
    let name = if name.is_null() {
        "no name".to_owned()
    } else {
        // SAFETY: as above.
        format!("the name {:?}", unsafe { CStr::from_ptr(name) })
    };
    PyValueError::new_err(format!("a handler's capsule is named 'mem_handler' (NEP 49); this one has {name}"))
}
