//! `Ended`: stands in a context for a request of which nothing is left.

use crate::strategy::Strategy;
use std::ptr::NonNull;

/// Refuses everything.
#[derive(Debug)]
pub(in crate::handler) struct Ended;

impl Ended {
    /// Its name, which no list shows.
    pub(in crate::handler) const NAME: &str = "a request that has ended";
}

// SAFETY: it hands out nothing.
unsafe impl Strategy for Ended {
    fn alignment(&self) -> usize {
        64
    }

    fn allocate(&self, _size_bytes: usize) -> Option<NonNull<u8>> {
        None
    }

    unsafe fn resize(&self, _block: NonNull<u8>, _new_size_bytes: usize) -> Option<NonNull<u8>> {
        None
    }

    unsafe fn release(&self, _block: NonNull<u8>) {}
}
