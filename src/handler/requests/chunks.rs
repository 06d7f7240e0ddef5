//! `Chunks`: where the slots of requests lie, those of every copy of this crate. It tells whether a struct is a
//! request's.

use super::super::word::SLOT_BYTES;
use crate::sync::AtomicPtr;
use std::ffi::c_void;
use std::ptr::{NonNull, null_mut};
use std::sync::atomic::Ordering;

/// Slots side by side.
#[repr(C)]
struct Chunk {
    start: *const c_void,
    bytes: usize,
    next: *mut Chunk,
}

/// A list of immortal chunks, the newest first. Part of the table, hence laid out for C.
#[repr(C)]
pub(in crate::handler) struct Chunks {
    newest: AtomicPtr<c_void>,
}

impl Chunks {
    pub(in crate::handler) fn none() -> Self {
        Self { newest: AtomicPtr::new(null_mut()) }
    }

    /// Adds a chunk of complete, immortal slots.
    pub(super) fn add(&self, start: *const c_void, bytes: usize) {
        let mut newest = self.newest.load(Ordering::Relaxed);
        let chunk = Box::into_raw(Box::new(Chunk { start, bytes, next: newest.cast() }));
        // AcqRel: publishes the slots. Pairs with the load in `slot_around`.
        while let Err(newer) = self.newest.compare_exchange(newest, chunk.cast(), Ordering::AcqRel, Ordering::Relaxed) {
            newest = newer;
            // SAFETY: a chunk of our own, which nobody else knows yet.
            unsafe { (*chunk).next = newest.cast() };
        }
    }

    /// Calls `visit` with the start of each slot, of all copies of this crate.
    pub(super) fn for_each_slot(&self, mut visit: impl FnMut(NonNull<c_void>)) {
        // Acquire pairs with the exchange in `add`.
        let mut next = self.newest.load(Ordering::Acquire).cast::<Chunk>();
        // SAFETY: `add` alone stores pointers here, of values that live for ever and do not change.
        while let Some(chunk) = unsafe { next.as_ref() } {
            let starts = (0..chunk.bytes).step_by(SLOT_BYTES).map(|offset| chunk.start.wrapping_byte_add(offset));
            starts.filter_map(|start| NonNull::new(start.cast_mut())).for_each(&mut visit);
            next = chunk.next;
        }
    }

    /// The slot in which this address lies, and how far into it.
    #[inline]
    pub(super) fn slot_around(&self, address: *const c_void) -> Option<(NonNull<c_void>, usize)> {
        // Acquire pairs with the exchange in `add`.
        let mut next = self.newest.load(Ordering::Acquire).cast::<Chunk>();
        loop {
            // SAFETY: `add` alone stores pointers here, of values that live for ever and do not change.
            let chunk = unsafe { next.as_ref() }?;
            let offset = address.addr().wrapping_sub(chunk.start.addr());
            if offset < chunk.bytes {
                let slot = chunk.start.wrapping_byte_add(offset - offset % SLOT_BYTES);
                return NonNull::new(slot.cast_mut()).map(|slot| (slot, offset % SLOT_BYTES));
            }
            next = chunk.next;
        }
    }
}
