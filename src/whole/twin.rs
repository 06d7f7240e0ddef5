//! Samples and their twins: the blocks that would be in their places, which `preload.c` makes, resizes and frees.

use super::decider::{DECIDER, Decider, busy, is_profiled};
use super::nobodys;
use super::place::{Places, Record};
use super::sampling::{taken, taken_for_room, weight_of_taken};
use super::shared::{DONE, Kind, MADE, PASS, Thread};
use crate::handler::Handler;
use crate::handler::requests::Payer;
use crate::strategy::account::{Force, Weight};
use std::ffi::c_void;
use std::ptr::{NonNull, null_mut};

/// A block that is asked for.
#[derive(Debug, Clone, Copy)]
pub(super) struct Wanted {
    pub(super) kind: Kind,
    pub(super) size_bytes: usize,
    pub(super) align: usize,
    pub(super) zeroed: bool,
    pub(super) is_sample: bool,
    /// If it is a sample.
    pub(super) twin: Twin,
}

/// The block that would be in a sample's place.
#[derive(Debug, Clone, Copy)]
pub(super) enum Twin {
    None,
    New,
    /// This one, resized.
    Of(NonNull<c_void>),
}

impl Decider {
    /// Whether a block that becomes a sample had so much room before. Of malloc's only others are looked at.
    #[cold]
    pub(super) fn shrinks(&self, kind: Kind, twin: Twin, size_bytes: usize) -> bool {
        let Twin::Of(old) = twin else { return false };
        // SAFETY: a live block of this kind that is not placed, as `preload.c` said.
        kind != Kind::Native && unsafe { (self.twins.shrinks)(kind as u32, old.as_ptr(), size_bytes) }
    }

    /// Makes a sample, which is charged with this record, and its twin.
    pub(super) fn place_sample(
        &self,
        thread: &mut Thread,
        wanted: Wanted,
        payer: Payer,
        record: Record,
        handler: Handler,
    ) -> (u32, *mut u8) {
        let Wanted { kind, size_bytes, align, zeroed, twin, .. } = wanted;
        let (weight, drawn_bytes) = (record.weight(), record.drawn_bytes);
        let old = if let Twin::Of(old) = twin { old.as_ptr() } else { null_mut() };
        let mut room_bytes = 0;
        // SAFETY: a live block of this kind that is not placed, or none, and a place for the answer.
        let made = unsafe { (self.twins.make)(kind as u32, old, size_bytes, align, &raw mut room_bytes) };
        let Some(made) = NonNull::new(made.cast::<u8>()) else {
            // SAFETY: charged for this block.
            unsafe { payer.release(weight) };
            nobodys::add(thread, weight.bytes, self.binding.python.as_ref());
            return (PASS, null_mut());
        };
        let taken_bytes = if kind == Kind::Native { taken_for_room(room_bytes) } else { taken(kind, size_bytes) };
        let after = Weight { bytes: weight_of_taken(taken_bytes, drawn_bytes), ..weight };
        if after.bytes != weight.bytes {
            // SAFETY: charged with `weight`, for this block. What its allocator has for it is no question to a limit.
            unsafe { payer.reweigh(weight, after, Some(Force::Undo)) };
        }
        let record = Record::new(payer, room_bytes, after, drawn_bytes);
        match self.places.allocate_sample(kind, made, zeroed, record) {
            Some(block) => {
                if is_profiled() {
                    self.tell_made(block, after, (after.bytes / taken_bytes) as u64, handler);
                }
                (DONE, block.as_ptr())
            }
            None => {
                // SAFETY: charged for this block. What it has in its place is as large as was asked for.
                unsafe {
                    payer.release(after);
                    if zeroed {
                        made.write_bytes(0, size_bytes);
                    }
                }
                nobodys::add(thread, after.bytes, self.binding.python.as_ref());
                (MADE, made.as_ptr())
            }
        }
    }
}

/// The twin of a block, which is resized in its place; null: it has none.
///
/// # Safety
/// - called by `preload.c`: a live placed block.
pub(super) unsafe extern "C" fn twin(block: *mut c_void) -> *mut c_void {
    let (Some(decider), Some(block)) = (DECIDER.get(), NonNull::new(block.cast::<u8>())) else { return null_mut() };
    // SAFETY: a live placed block (this function's contract).
    unsafe { Places::twin(block, &decider.places.record(block)) }.cast()
}

/// A sample of `malloc` stays what it is, since its twin had room for the new size. Its twin is this one now, with so
/// much room.
///
/// # Safety
/// - called by `preload.c`: the thread is this one, and the block a live placed one with a twin.
pub(super) unsafe extern "C" fn keep(thread: *mut Thread, block: *mut c_void, twin: *mut c_void, room_bytes: usize) {
    let (Some(decider), Some(block)) = (DECIDER.get(), NonNull::new(block.cast::<u8>())) else { return };
    // SAFETY: this thread's own struct, and a live placed block with a twin (this function's contract), which is
    // charged as its record says. A thread that forks has taken all locks: there it stays charged as it was.
    unsafe {
        decider.places.set_twin(block, twin.cast());
        let old = decider.places.record(block);
        let Some(payer) = old.payer().filter(|_| !(*thread).is_forking()) else { return };
        if room_bytes == old.size_bytes {
            return;
        }
        let _busy = busy(&mut *thread);
        let bytes = weight_of_taken(taken_for_room(room_bytes), old.drawn_bytes);
        let after = Weight { bytes, ..old.weight() };
        payer.reweigh(old.weight(), after, Some(Force::Undo));
        decider.places.note_room(block, &old, room_bytes, after);
        if is_profiled() {
            (decider.binding.profile.resized)(block.addr().get(), block.addr().get(), after);
        }
    }
}
