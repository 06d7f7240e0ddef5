//! Python's domains of memory, and who allocates for each: `PyMem_GetAllocator` and `PyMem_SetAllocator`.
#![allow(unsafe_code, reason = "CPython's functions, by name")]

use super::symbol::symbol;
use crate::whole::Allocator;
use std::ffi::{CStr, c_int, c_void};
use std::mem::transmute;

/// `PyMemAllocatorDomain`.
pub(super) const RAW: c_int = 0;
pub(super) const MEM: c_int = 1;
pub(super) const OBJ: c_int = 2;

pub(super) const GET: &CStr = c"PyMem_GetAllocator";
pub(super) const SET: &CStr = c"PyMem_SetAllocator";

pub(super) type Domain = unsafe extern "C" fn(c_int, *mut Allocator);

/// [`GET`] or [`SET`].
///
/// # Errors
/// What is missing.
pub(super) fn domain_function(name: &CStr) -> Result<Domain, String> {
    let found = symbol(name).ok_or_else(|| format!("this Python has no {name:?}"))?;
    // SAFETY: `void f(PyMemAllocatorDomain, PyMemAllocatorEx *)` for both.
    Ok(unsafe { transmute::<*mut c_void, Domain>(found) })
}
