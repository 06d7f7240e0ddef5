//! The Rust part of `ctxalloc.usm`: queues that are shared with dpctl, blocks, the buffer protocol, DLPack, copies.
//! Its only user is the package `python/ctxalloc/usm`, which finds dpctl and makes arrays of these.

mod dlpack;
mod memory;
mod queue;
mod view;

pub(super) use dlpack::{DlpackOwner, usm_dlpack, usm_from_dlpack};
pub(super) use memory::PyMemory;
pub(super) use queue::PyQueue;
pub(super) use view::PyView;
