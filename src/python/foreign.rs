//! Handlers that others made. Any capsule that NumPy accepts is taken into the table, at the latest when it is first
//! seen. From then on it is a handler like any other, and immortal.
//!
//! NumPy calls a handler with the GIL held, and a foreign one may rely on that. Rust code may not hold it, and
//! therefore attaches to Python before it calls such a handler ([`Reach::WithGil`]).
#![allow(unsafe_code, reason = "foreign structs and their C functions")]

use super::numpy::struct_in;
use super::text::type_name;
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

/// The handler in a capsule that the user wants in the table, under `name` or its own.
///
/// # Errors
/// Those of the function `adopt` of the module.
pub(super) fn adopt_capsule(capsule: &Bound<'_, PyAny>, name: Option<&str>) -> PyResult<Handler> {
    let c_struct = struct_in(capsule).ok_or_else(|| not_a_handler(capsule))?;
    adopt_struct(capsule, c_struct, name)
}

/// The handler in a capsule that NumPy uses: found in the table, or adopted now. If its own name is taken or unreadable
/// it gets one made from its address.
#[inline]
pub(super) fn handler_in(capsule: &Bound<'_, PyAny>) -> PyResult<Handler> {
    let c_struct = struct_in(capsule).ok_or_else(|| not_a_handler(capsule))?;
    match handler_at(c_struct.as_ptr()) {
        Some(handler) => Ok(handler),
        None => adopt_on_sight(capsule, c_struct),
    }
}

#[cold]
fn adopt_on_sight(capsule: &Bound<'_, PyAny>, c_struct: NonNull<PyDataMem_Handler>) -> PyResult<Handler> {
    match try_adopt(capsule, c_struct, None) {
        Err(Error::NameTaken { name }) => adopt_struct(capsule, c_struct, Some(&at_address(&name, c_struct))),
        Err(Error::NameUnreadable | Error::NameEmpty) => {
            adopt_struct(capsule, c_struct, Some(&at_address("foreign", c_struct)))
        }
        outcome => outcome.map_err(PyErr::from),
    }
}

/// A name that no other handler has: the struct is at this address for ever.
fn at_address(name: &str, c_struct: NonNull<PyDataMem_Handler>) -> String {
    let suffix = format!("@{:#x}", c_struct.addr());
    let room = 126 - suffix.len();
    let end = (0..=room.min(name.len())).rev().find(|&end| name.is_char_boundary(end)).unwrap_or(0);
    format!("{}{suffix}", &name[..end])
}

fn adopt_struct(
    capsule: &Bound<'_, PyAny>,
    c_struct: NonNull<PyDataMem_Handler>,
    name: Option<&str>,
) -> PyResult<Handler> {
    try_adopt(capsule, c_struct, name).map_err(PyErr::from)
}

fn try_adopt(
    capsule: &Bound<'_, PyAny>,
    c_struct: NonNull<PyDataMem_Handler>,
    name: Option<&str>,
) -> Result<Handler, Error> {
    // Our reference exists before anybody can find the handler: the capsule's destructor may free the struct.
    let kept = capsule.clone().unbind();
    // SAFETY: the struct lives as long as its capsule (NEP 49), which `keep` keeps for ever. Its functions are called
    // attached, as NumPy calls them, and nothing is claimed of its alignment.
    let handler = unsafe { adopt(c_struct, Reach::WithGil, name, Extras::default()) }?;
    keep(handler, kept);
    Ok(handler)
}

/// Keeps the capsule in its handler's entry, for ever; selecting the handler sets this capsule. Does nothing for a
/// request's handler: its capsule would hold the request for ever too.
pub(super) fn keep(handler: Handler, capsule: Py<PyAny>) {
    if handler.is_request() {
        return;
    }
    let pointer = capsule.into_ptr();
    // Release pairs with the Acquire load in `python::handler::capsule_of`; Acquire, with the Release of another thread
    // that was first.
    let place = &handler.entry().capsule;
    if let Err(present) = place.compare_exchange(null_mut(), pointer.cast(), Ordering::AcqRel, Ordering::Acquire)
        && std::ptr::eq(present, pointer.cast())
    {
        // The same capsule a second time needs no second reference. Another capsule around the struct keeps its own.
        // SAFETY: the reference that `into_ptr` gave us; every caller is attached.
        unsafe { ffi::Py_DECREF(pointer) };
    }
}

fn not_a_handler(object: &Bound<'_, PyAny>) -> PyErr {
    let Ok(capsule) = object.cast::<PyCapsule>() else {
        return PyTypeError::new_err(format!(
            "a handler is a PyCapsule named 'mem_handler' (NEP 49), not an object of type '{}'",
            type_name(object)
        ));
    };
    // SAFETY: a capsule, whose name is NULL or a C string that lives as long as the capsule.
    let name = unsafe {
        let name = ffi::PyCapsule_GetName(capsule.as_ptr());
        (!name.is_null()).then(|| CStr::from_ptr(name))
    };
    let name = name.map_or_else(|| "no name".to_owned(), |name| format!("the name {name:?}"));
    PyValueError::new_err(format!("a handler's capsule is named 'mem_handler' (NEP 49); this one has {name}"))
}
