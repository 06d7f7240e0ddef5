//! `Callbacks` from Python: four addresses, or ctypes functions that lead back into Python.
//!
//! Functions that are Python's can only be called while it runs. Once it exits their blocks stay where they are: the
//! process is ending, and the modules that they would use are being taken apart.
#![allow(unsafe_code, reason = "addresses become functions")]

use super::exit;
use super::strategies::{Options, no_bool};
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
    // SAFETY: whoever gave the addresses vouches for what is there; the class says so.
    let functions = unsafe { CallbackFunctions::at(ctx, malloc, calloc, realloc, free) };
    let align = options.maybe_size("align")?.unwrap_or(1);
    // SAFETY: the duties are written down in the class, for whoever has addresses of C functions. The objects behind them
    // are kept below, and those that are Python's are called as these want to be.
    let callbacks = unsafe { Callbacks::new(functions, align) }?;
    let Some(objects) = options.given("keep")? else { return Ok(Arc::new(callbacks)) };
    let in_python = options.maybe_flag("in_python")?.unwrap_or(false);
    Ok(Arc::new(OfObjects { callbacks, in_python, _objects: objects.unbind() }))
}

/// An address that C code gave out; NULL where there is none.
fn address(options: &Options<'_, '_>, name: &str) -> PyResult<*mut c_void> {
    let address = options.maybe(name, "an address, an int from 0 up", |value| no_bool(value)?.extract::<usize>())?;
    Ok(std::ptr::with_exposed_provenance_mut(address.unwrap_or(0)))
}

/// Functions of Python objects, which live as long as the strategy: a handler's is for ever. Where they are Python's they
/// are called attached, and not any more when Python exits.
struct OfObjects {
    callbacks: Callbacks,
    in_python: bool,
    _objects: Py<PyAny>,
}

impl OfObjects {
    fn call<R>(&self, work: impl FnOnce(&Callbacks) -> R) -> Option<R> {
        if self.in_python {
            exit::try_attach_before_exit(|_| work(&self.callbacks))
        } else {
            Some(work(&self.callbacks))
        }
    }
}

// SAFETY: what is not refused is the upstream's; a refusal changes nothing, and a block that is not released stays.
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
        // SAFETY: the caller's promises are the same.
        self.call(|callbacks| unsafe { callbacks.resize(block, new_size_bytes) })?
    }

    unsafe fn release(&self, block: NonNull<u8>) {
        // SAFETY: the caller's promises are the same.
        let _ = self.call(|callbacks| unsafe { callbacks.release(block) });
    }
}

impl fmt::Debug for OfObjects {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.callbacks.fmt(f)
    }
}
