//! The C heap by function pointers, as C code would hand it over. Their context is not looked at.

use std::ffi::c_void;

pub(crate) unsafe extern "C" fn malloc(_: *mut c_void, size: usize) -> *mut c_void {
    // SAFETY: any size.
    unsafe { libc::malloc(size) }
}

pub(crate) unsafe extern "C" fn calloc(_: *mut c_void, nelem: usize, elsize: usize) -> *mut c_void {
    // SAFETY: any sizes.
    unsafe { libc::calloc(nelem, elsize) }
}

pub(crate) unsafe extern "C" fn realloc(_: *mut c_void, ptr: *mut c_void, new_size: usize) -> *mut c_void {
    // SAFETY: the caller passes a live block of these functions.
    unsafe { libc::realloc(ptr, new_size) }
}

pub(crate) unsafe extern "C" fn free(_: *mut c_void, ptr: *mut c_void, _: usize) {
    // SAFETY: the caller gives up a block of these functions.
    unsafe { libc::free(ptr) }
}
