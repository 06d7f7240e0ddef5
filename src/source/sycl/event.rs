//! A submitted operation, and what makes the exit of the process wait for SYCL.

use super::library::{PENDING, Runtime};
use std::ptr::NonNull;
use std::sync::atomic::Ordering;

/// A submitted operation.
#[derive(Debug)]
pub struct Event {
    runtime: &'static Runtime,
    event: NonNull<std::ffi::c_void>,
    _hold: Hold,
}

/// While one exists, the exit of the process waits, for as long as `PATIENCE` says.
#[derive(Debug)]
pub(crate) struct Hold(());

impl Hold {
    pub(super) fn new() -> Self {
        PENDING.fetch_add(1, Ordering::SeqCst);
        Self(())
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        PENDING.fetch_sub(1, Ordering::Release);
    }
}

// SAFETY: SYCL's objects belong to no thread.
unsafe impl Send for Event {}

impl Event {
    pub(super) fn new(runtime: &'static Runtime, event: NonNull<std::ffi::c_void>) -> Self {
        Self { runtime, event, _hold: Hold::new() }
    }

    /// Waits until it has finished.
    pub fn wait(self) {
        if self.runtime.is_usable() {
            // SAFETY: the event is live: this value owns a reference to it, which its drop deletes.
            unsafe { (self.runtime.functions.wait_for)(self.event.as_ptr()) }
        }
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if self.runtime.is_usable() {
            // SAFETY: a reference that this value owns, deleted once. The operation itself goes on.
            unsafe { (self.runtime.functions.delete_event)(self.event.as_ptr()) }
        }
    }
}
