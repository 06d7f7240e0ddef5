//! C functions of CPython that the limited API leaves out, found by name in the running process.
#![allow(unsafe_code, reason = "dlsym")]

use std::ffi::{CStr, c_void};

/// The address of a C function that this process has loaded; None where there is none of that name.
pub(super) fn symbol(name: &CStr) -> Option<*mut c_void> {
    // SAFETY: the name ends with NUL; `RTLD_DEFAULT` searches what the process has loaded, and changes nothing.
    let address = unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) };
    (!address.is_null()).then_some(address)
}
