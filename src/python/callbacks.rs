//! `Callbacks` from Python: four addresses, or ctypes functions that lead back into Python.
//!
//! Functions that are Python's can only be called while it runs. Once it exits their blocks stay where they are: the
//! process is ending, and the modules that they would use are being taken apart.
#![allow(unsafe_code, reason = "addresses become functions")]

use super::exit;
use super::strategies::Options;
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
    // SAFETY: the duties are written down in the class, for whoever has addresses of C functions. Those that are Python's
    // are wrapped below, and what holds them is kept for ever.
    let callbacks = unsafe { Callbacks::new(functions, align) }?;
    if let Some(kept) = options.given("keep")? {
        // Handlers live for ever, and so must what they call.
        std::mem::forget(kept.unbind());
    }
    if options.maybe_flag("in_python")?.unwrap_or(false) {
        Ok(Arc::new(WhilePythonRuns(callbacks)))
    } else {
        Ok(Arc::new(callbacks))
    }
}

/// An address that C code gave out; NULL where there is none.
fn address(options: &Options<'_, '_>, name: &str) -> PyResult<*mut c_void> {
    let address = options.maybe(name, "an address, an int from 0 up", |value| value.extract::<usize>())?;
    Ok(std::ptr::with_exposed_provenance_mut(address.unwrap_or(0)))
}

/// Functions that are Python's: called attached, and not any more when Python exits.
struct WhilePythonRuns(Callbacks);

// SAFETY: what is not refused is the upstream's; a refusal changes nothing, and a block that is not released stays.
unsafe impl Strategy for WhilePythonRuns {
    fn alignment(&self) -> usize {
        self.0.alignment()
    }

    fn allocate(&self, size_bytes: usize) -> Option<NonNull<u8>> {
        exit::try_attach_before_exit(|_| self.0.allocate(size_bytes))?
    }

    fn allocate_zeroed(&self, size_bytes: usize) -> Option<NonNull<u8>> {
        exit::try_attach_before_exit(|_| self.0.allocate_zeroed(size_bytes))?
    }

    unsafe fn resize(&self, block: NonNull<u8>, new_size_bytes: usize) -> Option<NonNull<u8>> {
        // SAFETY: the caller's promises are the same.
        exit::try_attach_before_exit(|_| unsafe { self.0.resize(block, new_size_bytes) })?
    }

    unsafe fn release(&self, block: NonNull<u8>) {
        // SAFETY: the caller's promises are the same.
        let _ = exit::try_attach_before_exit(|_| unsafe { self.0.release(block) });
    }
}

impl fmt::Debug for WhilePythonRuns {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}
