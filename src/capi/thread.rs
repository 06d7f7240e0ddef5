//! The selection of a process without Python: this thread's. Its objects are blocks of `ctxalloc_new`.

use super::Selection;
use super::blocks;
use super::error::Refusal;
use crate::handler::Handler;
use std::ffi::c_void;

pub(super) struct OfThread;

impl Selection for OfThread {
    fn current() -> Result<Handler, Refusal> {
        Ok(crate::scope::current())
    }

    fn select(handler: Handler) -> Result<(), Refusal> {
        drop(crate::scope::set(handler));
        Ok(())
    }

    unsafe fn handler_of(object: *mut c_void) -> Result<Option<Handler>, Refusal> {
        blocks::handler_of(object).map(Some)
    }
}
