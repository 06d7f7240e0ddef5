//! `Callbacks` from Python: four addresses of C functions, or ctypes functions, which may call back into Python.
//!
//! A function that runs Python code can be called only while Python runs. When Python exits its blocks are not freed
//! any more: the process is ending, and the modules that the function would use are being taken apart.
#![allow(unsafe_code, reason = "addresses become functions")]

use super::exit;
use super::options::{Options, no_bool};
use super::pending::SetAside;
use crate::strategy::{CallbackFunctions, Callbacks, Strategy};
use pyo3::prelude::*;
use std::ffi::c_void;
use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;

/// The strategy that the options describe.
pub(super) fn callbacks(options: &Options<'_, '_>) -> PyResult<Arc<dyn Strategy>> {
    let at = |name| address(options, name);
    let (ctx, malloc, calloc, realloc, free) = (at("ctx")?, at("malloc")?, at("calloc")?, at("realloc")?, at("free")?);
    // SAFETY: the class demands that each address is 0 or that of a C function with this signature.
    let functions = unsafe { CallbackFunctions::at(ctx, malloc, calloc, realloc, free) };
    let align = options.maybe_size("align")?.unwrap_or(1);
    // SAFETY: the class states what `Callbacks` requires of the functions, and whoever gives an address promises it.
    // The objects that own the functions are kept below; functions that may run Python code are called attached
    // (`OfObjects`).
    let callbacks = unsafe { Callbacks::new(functions, align) }?;
    let Some(objects) = options.given("keep")? else { return Ok(Arc::new(callbacks)) };
    let in_python = options.maybe_flag("in_python")?.unwrap_or(false);
    Ok(Arc::new(OfObjects { callbacks, in_python, _objects: objects.unbind() }))
}

/// The address in an option; NULL if it was not given.
fn address(options: &Options<'_, '_>, name: &str) -> PyResult<*mut c_void> {
    let address = options.maybe(name, "an address, an int from 0 up", |value| no_bool(value)?.extract::<usize>())?;
    Ok(std::ptr::with_exposed_provenance_mut(address.unwrap_or(0)))
}

/// Callbacks whose functions belong to Python objects, which live as long as the strategy. Functions that may run
/// Python code are called attached, and not at all when Python exits.
struct OfObjects {
    callbacks: Callbacks,
    in_python: bool,
    _objects: Py<PyAny>,
}

impl OfObjects {
    fn call<R>(&self, work: impl FnOnce(&Callbacks) -> R) -> Option<R> {
        if self.in_python {
            exit::try_attach_before_exit(|py| {
                // NumPy frees what it made before an exception while that is pending.
                let _pending = SetAside::new(py);
                work(&self.callbacks)
            })
        } else {
            Some(work(&self.callbacks))
        }
    }
}

// SAFETY: every call is passed on to `Callbacks`, which keeps the contract, or refused. A refused allocation or resize
// changes nothing, and a block whose release is refused stays allocated.
unsafe impl Strategy for OfObjects {
    fn alignment(&self) -> usize {
        self.callbacks.alignment()
    }

    fn allocate(&self, size_bytes: usize) -> Option<NonNull<u8>> {
        self.call(|callbacks| callbacks.allocate(size_bytes))?
    }

    fn allocate_zeroed(&self, size_bytes: usize) -> Option<NonNull<u8>> {
        self.call(|callbacks| callbacks.allocate_zeroed(size_bytes))?
    }

    unsafe fn resize(&self, block: NonNull<u8>, new_size_bytes: usize) -> Option<NonNull<u8>> {
        // SAFETY: `block` is one of `callbacks`, which made all blocks of this strategy, and not in use during the
        // call.
        self.call(|callbacks| unsafe { callbacks.resize(block, new_size_bytes) })?
    }

    unsafe fn release(&self, block: NonNull<u8>) {
        // SAFETY: `block` is one of `callbacks`, which made all blocks of this strategy, and is never used again.
        let _ = self.call(|callbacks| unsafe { callbacks.release(block) });
    }
}

impl fmt::Debug for OfObjects {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.callbacks.fmt(f)
    }
}
