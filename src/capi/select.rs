//! Which handler: set, get, and what one is called.

use super::error::{Refusal, answer};
use super::{Selection, registered};
use crate::handler::abi::PyDataMem_Handler;
use crate::handler::{Handler, default_handler};
use std::ffi::{c_char, c_int};
use std::ptr::null;

/// `ctxalloc_set_handler`.
pub(super) extern "C" fn set_handler<S: Selection>(face: *const PyDataMem_Handler) -> *const PyDataMem_Handler {
    answer(null(), || {
        let handler = if face.is_null() { default_handler() } else { registered(face)? };
        Ok(replace::<S>(handler)?.as_ptr())
    })
}

/// Selects a handler, and answers which one was selected.
pub(super) fn replace<S: Selection>(handler: Handler) -> Result<Handler, Refusal> {
    let before = S::current()?;
    S::select(handler)?;
    Ok(before)
}

/// `ctxalloc_get_handler`.
pub(super) extern "C" fn get_handler<S: Selection>() -> *const PyDataMem_Handler {
    answer(null(), || Ok(S::current()?.as_ptr()))
}

/// `ctxalloc_default_handler`.
pub(super) extern "C" fn get_default() -> *const PyDataMem_Handler {
    answer(null(), || Ok(default_handler().as_ptr()))
}

fn meant<S: Selection>(face: *const PyDataMem_Handler) -> Result<Handler, Refusal> {
    if face.is_null() { S::current() } else { registered(face) }
}

/// `ctxalloc_handler_name`.
pub(super) extern "C" fn handler_name<S: Selection>(face: *const PyDataMem_Handler) -> *const c_char {
    answer(null(), || Ok(name_in_c(meant::<S>(face)?)))
}

/// The name in a handler's struct, as NumPy tells it: NUL-terminated, for ever. Not the table's where it was adopted
/// under another.
pub(super) fn name_in_c(handler: Handler) -> *const c_char {
    // SAFETY: the struct is immortal; only the address of its first field is taken.
    unsafe { &raw const (*handler.as_ptr()).name }.cast()
}

/// `ctxalloc_handler_version`.
pub(super) extern "C" fn handler_version<S: Selection>(face: *const PyDataMem_Handler) -> c_int {
    answer(-1, || Ok(c_int::from(meant::<S>(face)?.version())))
}

/// `ctxalloc_handler_alignment`.
pub(super) extern "C" fn handler_alignment<S: Selection>(face: *const PyDataMem_Handler) -> usize {
    answer(0, || Ok(meant::<S>(face)?.alignment()))
}
