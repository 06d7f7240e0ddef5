//! Layer 8: the C interface, what `include/ctxalloc.h` declares. The header has the documentation; comments here add
//! only what it leaves out.
//!
//! ```text
//!   a C program ──links──► ctxalloc_set_handler, ...   (feature `capi`: exports.rs)    the thread's selection
//!   an extension of Python ──capsule ctxalloc._C_API──► Api                            NumPy's ContextVar
//! ```
//! Both are the same functions over two kinds of [`Selection`]. None lets a panic out. A call that fails changes
//! nothing, and leaves its error for [`error`]. C names a handler by the address of its NEP 49 struct: the address is
//! looked up, and never followed before it is found.
#![allow(unsafe_code, reason = "C pointers")]

#[cfg(feature = "python")]
mod api;
mod blocks;
mod draft;
mod error;
#[cfg(feature = "capi")]
mod exports;
mod forms;
mod hook;
mod list;
mod register;
mod select;
#[cfg(feature = "capi")]
mod thread;
mod view;

pub(crate) use error::Refusal;
#[cfg(feature = "python")]
pub(crate) use {api::Api, api::PythonFunctions, error::answer, error::last, error::shielded};

use crate::error::Error;
use crate::handler::abi::PyDataMem_Handler;
use crate::handler::{Handler, handler_at};
use std::ffi::c_void;

/// Where the current handler is kept.
pub(crate) trait Selection {
    /// The handler that is current on this thread.
    fn current() -> Result<Handler, Refusal>;
    /// Selects a handler.
    fn select(handler: Handler) -> Result<(), Refusal>;
    /// The handler of an object, whatever objects are here; nothing where it has none.
    ///
    /// # Safety
    /// - `object` is an object of that kind, and not NULL.
    unsafe fn handler_of(object: *mut c_void) -> Result<Option<Handler>, Refusal>;
}

/// The crate's version, as `ctxalloc_version()` tells it.
const VERSION: *const std::ffi::c_char = concat!(env!("CARGO_PKG_VERSION"), "\0").as_ptr().cast();

/// The handler with this struct.
fn registered(c_struct: *const PyDataMem_Handler) -> Result<Handler, Refusal> {
    Ok(handler_at(c_struct).ok_or(Error::NotRegistered { address: c_struct.addr() })?)
}
