//! The decision about a block that is resized: who pays for what it grows by, and whose it is where its request has
//! ended. The decision about a new one: `decide`.

use super::binding::Runs;
use super::decide::{answer_to_arrow, die};
use super::decider::{DECIDER, Decider, busy, is_profiled};
use super::owed::told_by_null;
use super::place::Record;
use super::range;
use super::sampling::{EXACT_FROM, weight_of_sample};
use super::shared::{DONE, Kind, PASS, REFUSED, Thread, handler_of};
use super::walk::Answer;
use crate::handler::Handler;
use crate::handler::requests::{Beyond, Handed, Payer, imports_around, may_import};
use crate::strategy::account::{Force, Weight};
use std::ffi::c_void;
use std::ptr::{NonNull, null_mut};

/// # Safety
/// - called by `preload.c`: the thread is this one, `block` a live placed block of this kind, `outcome` a place.
pub(super) unsafe extern "C" fn resize(
    thread: *mut Thread,
    kind: u32,
    block: *mut c_void,
    size_bytes: usize,
    outcome: *mut u32,
) -> *mut c_void {
    let (Some(decider), Some(block)) = (DECIDER.get(), NonNull::new(block)) else { die("resized before it began") };
    // SAFETY: this thread's own struct, which nobody else has.
    let thread = unsafe { &mut *thread };
    if thread.is_forking() {
        // This thread has taken all locks. Whoever resizes in a function that `fork` calls is refused.
        // SAFETY: a place for the answer (this function's contract).
        unsafe { outcome.write(REFUSED) };
        return null_mut();
    }
    // SAFETY: a live placed block, and a place for the answer (this function's contract).
    unsafe {
        let is_object = Kind::of(kind) != Kind::Native || thread.object > 0;
        let answer = || decider.answer(size_bytes, is_object);
        let (done, moved) = decider.resize(thread, Kind::of(kind), block.cast(), size_bytes, || None, answer);
        outcome.write(done);
        moved.cast()
    }
}

/// Resizes a placed block of a pool of Arrow's. `PASS`: it is to be a new one.
///
/// # Safety
/// - `block` is one, is aligned to no more than [`ALIGN`](super::place::ALIGN), and is not used again after `DONE`.
pub(super) unsafe fn resize_for(
    thread: &mut Thread,
    owner: impl FnOnce() -> Option<Handler>,
    block: NonNull<u8>,
    size_bytes: usize,
) -> (u32, *mut u8) {
    match DECIDER.get() {
        // SAFETY: a live placed block of native memory, not used again after `DONE` (this function's contract).
        Some(decider) if !thread.is_forking() => unsafe {
            decider.resize(thread, Kind::Native, block, size_bytes, owner, answer_to_arrow)
        },
        _ => (REFUSED, null_mut()),
    }
}

impl Decider {
    /// Whether a block is to be a new one since it is a sample. A small block that is resized is drawn as a new one is,
    /// by all of its new size, whether it was a sample or not, and is the request's that resizes it. So a sample stands
    /// for no more after many steps than after one. All that matters is that samples and others are treated alike:
    /// `preload.c` resizes the twins of those that have one, as it resizes others, and Arrow's are drawn where they
    /// grow.
    fn is_drawn_anew(old: &Record, size_bytes: usize) -> bool {
        old.has_twin() || old.drawn_bytes > 0 && size_bytes > old.size_bytes
    }

    /// `PASS`: the block is to be a new one. `owner`: as for a new one.
    ///
    /// # Safety
    /// - `block` is a live placed block of this kind; after `DONE` it is not used again.
    unsafe fn resize(
        &self,
        thread: &mut Thread,
        kind: Kind,
        block: NonNull<u8>,
        size_bytes: usize,
        owner: impl FnOnce() -> Option<Handler>,
        answer: impl FnOnce() -> Answer,
    ) -> (u32, *mut u8) {
        let may_decide = thread.may_decide();
        let thread = busy(thread);
        // SAFETY: the block is live and placed (this function's contract).
        let old = unsafe { self.places.record(block) };
        let Some(payer) = old.payer() else { die("a block was resized after it was freed") };
        if Self::is_drawn_anew(&old, size_bytes) {
            return (PASS, null_mut());
        }
        let growth = size_bytes.saturating_sub(old.size_bytes);
        // SAFETY: the block is charged to it.
        if growth > 0 && size_bytes >= EXACT_FROM && unsafe { payer.has_ended() } {
            // Its limit is not that of whoever goes on with it, and who lets it grow pays.
            let selected = if may_decide { (self.binding.selected)(thread.0).or_else(owner) } else { None };
            return match selected.filter(|_| range::may_be_had(growth)) {
                // SAFETY: the block is live and placed (this function's contract), and the record and the payer are its
                // own.
                Some(handler) => unsafe {
                    self.hand_over(thread.0, kind, (block, old, payer), size_bytes, handler, answer)
                },
                None => (PASS, null_mut()),
            };
        }
        if !range::may_be_had(growth) {
            // SAFETY: the block is charged to it.
            let _ = unsafe { payer.is_refused(growth) };
            return (REFUSED, null_mut());
        }
        let (is_sample, drawn_bytes) = (old.drawn_bytes > 0, old.drawn_bytes);
        let bytes = if is_sample { weight_of_sample(kind, size_bytes, drawn_bytes) } else { size_bytes };
        let (before, after) = (old.weight(), Weight { bytes, is_sample, ..old.weight() });
        let more_bytes = after.bytes.saturating_sub(before.bytes);
        // As a new one: small ones that Python asks for have what lies beyond the limit, too.
        let is_in_reserve = is_sample && payer.is_in_reserve(more_bytes, Beyond::ToldInReserve);
        // SAFETY: the block is charged with `before`.
        if !unsafe { payer.reweigh(before, after, is_in_reserve.then_some(Force::Undo)) } {
            let waits = |runs| is_sample && handler_of(thread.0.account).is_some() && self.waits(runs);
            let has_reserve = |beyond| payer.is_in_reserve(more_bytes, beyond);
            let still_imports = (self.binding.still_imports)(more_bytes) && has_reserve(Beyond::ToldInImport);
            let is_told_soon = match if still_imports { Answer::Grant } else { answer() } {
                answer @ (Answer::Refuse | Answer::RefusePython) => match (self.binding.runs)(payer.imports_around()) {
                    Runs::Imports if has_reserve(Beyond::ToldInImport) => is_sample,
                    _ if answer == Answer::Refuse => return told_by_null(thread.0),
                    Runs::AtEnds if has_reserve(Beyond::ToldAtEnds) => true,
                    runs if waits(runs) && has_reserve(Beyond::ToldInReserve) => true,
                    _ => return told_by_null(thread.0),
                },
                Answer::Grant | Answer::Pass => still_imports && is_sample,
            };
            // SAFETY: the block is charged with `before`.
            unsafe { payer.reweigh(before, after, Some(Force::Grant)) };
            self.overdrawn(thread.0, payer, is_told_soon);
        }
        let record = Record::new(payer, size_bytes, after, drawn_bytes);
        // SAFETY: the block is live and of this kind.
        if let Some(moved) = unsafe { self.places.resize(kind, block, record) } {
            if is_profiled() {
                (self.binding.profile.resized)(block.addr().get(), moved.addr().get(), after);
            }
            return (DONE, moved.as_ptr());
        }
        // SAFETY: the block is as it was, and charged with `after`.
        unsafe { payer.reweigh(after, before, Some(Force::Undo)) };
        (REFUSED, null_mut())
    }

    /// A block of a request that has ended grows: from now on who has this handler pays. `PASS`: nobody pays, or the
    /// block is to be a new one.
    ///
    /// # Safety
    /// - the block is a live placed one of this kind with this record and payer; after `DONE` it is not used again.
    unsafe fn hand_over(
        &self,
        thread: &mut Thread,
        kind: Kind,
        (block, old, payer): (NonNull<u8>, Record, Payer),
        size_bytes: usize,
        handler: Handler,
        answer: impl FnOnce() -> Answer,
    ) -> (u32, *mut u8) {
        let (before, after) = (old.weight(), Weight { bytes: size_bytes, is_sample: false, ..old.weight() });
        // SAFETY: the block is charged to `payer` with `before`, until somebody else pays.
        let mut handed = unsafe { payer.hand_over(handler, before, after, None) };
        if matches!(handed, Handed::Refused) {
            match answer() {
                Answer::Grant => {}
                Answer::Pass => return (PASS, null_mut()),
                Answer::Refuse | Answer::RefusePython => {
                    let is_imports = (self.binding.runs)(imports_around(handler)) == Runs::Imports;
                    if !is_imports || !may_import(handler, after.bytes.saturating_sub(before.bytes)) {
                        return told_by_null(thread);
                    }
                }
            }
            // SAFETY: the block is still charged to `payer` with `before`: a refusal changes nothing.
            handed = unsafe { payer.hand_over(handler, before, after, Some(Force::Grant)) };
            if let Handed::To(payer) = handed {
                self.overdrawn(thread, payer, false);
            }
        }
        let Handed::To(payer) = handed else { return (PASS, null_mut()) };
        // SAFETY: the block is live and of this kind; where it is not resized it keeps its size, and its new payer.
        unsafe {
            match self.places.resize(kind, block, Record::new(payer, size_bytes, after, 0)) {
                Some(moved) => {
                    if is_profiled() {
                        (self.binding.profile.freed)(block.addr().get());
                        self.tell_made(moved, after, 1, handler);
                    }
                    (DONE, moved.as_ptr())
                }
                None => {
                    payer.reweigh(after, before, Some(Force::Undo));
                    self.places.note(block, &old, Record::new(payer, old.size_bytes, before, old.drawn_bytes));
                    (REFUSED, null_mut())
                }
            }
        }
    }
}
