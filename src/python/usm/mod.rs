//! `ctxalloc.usm`, the part in Rust: queues that are shared with dpctl, blocks, the buffer protocol, DLPack, copies.
//! The package `python/ctxalloc/usm` finds dpctl and makes arrays of these; it is their only user.

mod dlpack;
mod memory;
mod queue;
mod view;

pub(super) use dlpack::{DlpackOwner, usm_dlpack, usm_from_dlpack};
pub(super) use memory::PyMemory;
pub(super) use queue::PyQueue;
pub(super) use view::PyView;

use crate::handler::{Handler, handler};
use pyo3::prelude::*;

/// The handler with that name. Those of SYCL's default queue are registered when they are first named: who names one
/// wants dpctl loaded, or to hear that it is missing.
pub(super) fn handler_named(py: Python<'_>, name: &str) -> PyResult<Option<Handler>> {
    let found = handler(name);
    if found.is_some() || !["usm_shared", "usm_host", "usm_device"].contains(&name) {
        return Ok(found);
    }
    py.import("ctxalloc.usm")?.call_method1("_register_defaults", (name,))?;
    Ok(handler(name))
}
