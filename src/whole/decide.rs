//! The decision about a block: whose it is, whether it is charged, where it lies. What `preload.c` calls; where a block
//! is resized, `resize` decides.

use super::binding::Runs;
use super::decider::{DECIDER, Decider, any_is_charged, busy, is_profiled, remembers};
use super::nobodys;
use super::owed::told_by_null;
pub(super) use super::place::ALIGN;
use super::place::{Places, Record};
use super::samples::WINDOW;
pub(super) use super::sampling::EXACT_FROM;
use super::sampling::{counted, taken, weight_of_sample};
use super::shared::{DONE, GROWN, Kind, NOT_RAISING, PASS, RAISING, REFUSED, Thread, ZEROED};
use super::twin::{Twin, Wanted};
use super::{range, walk, walk::Answer};
use crate::handler::Handler;
use crate::handler::requests::{
    Beyond, Charged, charge, imports_around, is_counted, is_refused, may_import, tell_by_null,
};
use crate::os;
use crate::strategy::account::Weight;
use std::ffi::{c_int, c_void};
use std::ptr::{NonNull, null_mut};
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering};

/// Blocks that were freed while this thread held all locks (between the sides of `fork`): a list through their first
/// words. Whoever is next frees them.
static POSTPONED: [AtomicPtr<u8>; 3] = [const { AtomicPtr::new(null_mut()) }; 3];

/// Whether there are any.
/// - set: by whoever has put one into a list, behind that.
/// - cleared: by who is about to empty the lists.
static ARE_POSTPONED: AtomicBool = AtomicBool::new(false);

/// # Safety
/// - called by `preload.c`: the thread is this one, and `outcome` a place for the answer; `old` is NULL or a live small
///   block of this kind that is not placed, and not used again after `DONE` and `MADE`.
pub(super) unsafe extern "C" fn allocate(
    thread: *mut Thread,
    kind: u32,
    size_bytes: usize,
    align: usize,
    how: u32,
    old: *mut c_void,
    outcome: *mut u32,
) -> *mut c_void {
    // SAFETY: this thread's own struct, which nobody else has; the functions below pass it on and do not keep it.
    let thread = unsafe { &mut *thread };
    let asked = Asked { kind: Kind::of(kind), size_bytes, align, how, old };
    let (done, block) = match DECIDER.get().filter(|_| thread.is_plain()) {
        Some(decider) => match decider.selected(thread, asked.kind) {
            None if decider.pass(thread, asked) => (PASS, null_mut()),
            selected => allocate_slowly(thread, asked, Some(selected)),
        },
        None => allocate_slowly(thread, asked, None),
    };
    // SAFETY: a place for the answer (this function's contract).
    unsafe { outcome.write(done) };
    block.cast()
}

/// Whether a block that is nobody's stays that where it grows, since no request is selected on this thread; false where
/// [`allocate`] is to be asked. A list that grows asks this often, and it looks at little.
///
/// # Safety
/// - called by `preload.c`: the thread is this one.
pub(super) unsafe extern "C" fn grows_for_nobody(thread: *mut Thread) -> bool {
    // SAFETY: this thread's own struct, which nobody else has; the functions below pass it on and do not keep it.
    let thread = unsafe { &mut *thread };
    let Some(decider) = DECIDER.get().filter(|_| thread.is_plain()) else { return false };
    decider.selected(thread, Kind::Native).is_none()
}

/// This thread's `errno`, which has its value again when this is dropped: `malloc` changes it only where it fails.
struct Errno {
    place: *mut c_int,
    before: c_int,
}

impl Errno {
    fn kept() -> Self {
        let place = os::errno();
        // SAFETY: this thread's own, which is there as long as the thread.
        Self { place, before: unsafe { place.read() } }
    }
}

impl Drop for Errno {
    fn drop(&mut self) {
        // SAFETY: this thread's own, found by `kept` on this thread, which has not returned since.
        unsafe { self.place.write(self.before) };
    }
}

/// What `preload.c` is asked for.
#[derive(Debug, Clone, Copy)]
struct Asked {
    kind: Kind,
    size_bytes: usize,
    align: usize,
    how: u32,
    old: *mut c_void,
}

/// A function of its own: while no request is selected, a program's own code and data are to stay in the processor's
/// caches, and most of what this needs is not looked at then. `selected`: whose the block is, if that is known.
#[inline(never)]
fn allocate_slowly(thread: &mut Thread, asked: Asked, selected: Option<Option<Handler>>) -> (u32, *mut u8) {
    let _kept = Errno::kept();
    let Asked { kind, size_bytes, align, how, old } = asked;
    if thread.refusing == size_bytes as u64 && size_bytes > 0 {
        thread.refusing = 0;
        thread.left = i64::MAX / 2; // what the error takes is not counted
        return (REFUSED, null_mut());
    }
    let is_sample = size_bytes < EXACT_FROM && thread.settle(remembers());
    match DECIDER.get() {
        // It stays nobody's, and is not one more that is.
        Some(decider) if how & GROWN != 0 && !decider.is_counted(thread, selected) => (PASS, null_mut()),
        Some(decider) if thread.may_decide() => {
            let twin = if align > WINDOW { Twin::None } else { NonNull::new(old).map_or(Twin::New, Twin::Of) };
            let wanted = Wanted { kind, size_bytes, align, zeroed: how & ZEROED != 0, is_sample, twin };
            let is_object = kind != Kind::Native || thread.object > 0;
            let ask = |thread: &mut Thread| selected.unwrap_or_else(|| decider.selected(thread, kind));
            decider.allocate(thread, wanted, ask, || decider.answer(size_bytes, is_object))
        }
        _ => {
            Decider::look_soon_if_owed(thread); // `settle` has put the next look off
            (PASS, null_mut())
        }
    }
}

/// A block of a pool of Arrow's, which has a request of its own where the thread has none.
pub(super) fn allocate_for(
    thread: &mut Thread,
    owner: impl FnOnce() -> Option<Handler>,
    size_bytes: usize,
    align: usize,
) -> (u32, *mut u8) {
    let mut is_sample = false;
    if size_bytes < EXACT_FROM {
        thread.left -= i64::from(counted(Kind::Native, size_bytes));
        if thread.left >= 0 {
            return (PASS, null_mut());
        }
        is_sample = thread.settle(remembers());
    }
    match DECIDER.get() {
        Some(decider) if thread.may_decide() => {
            let twin = Twin::None;
            let wanted = Wanted { kind: Kind::Native, size_bytes, align, zeroed: false, is_sample, twin };
            let ask = |thread: &mut Thread| {
                if any_is_charged() { (decider.binding.selected)(thread).or_else(owner) } else { None }
            };
            decider.allocate(thread, wanted, ask, answer_to_arrow)
        }
        _ => {
            Decider::look_soon_if_owed(thread); // `settle` has put the next look off
            (PASS, null_mut())
        }
    }
}

pub(super) fn answer_to_arrow() -> Answer {
    Answer::refuse_if(walk::is_called_by_a_reader())
}

/// Whether a block is a placed one of native memory.
pub(super) fn is_native(block: *const u8) -> bool {
    DECIDER.get().is_some_and(|decider| decider.places.contains(Kind::Native, block))
}

/// Whether this thread's request, or else `owner`, pays for a block that was nobody's and grows.
pub(super) fn pays_for_growth(thread: &mut Thread, owner: impl FnOnce() -> Option<Handler>) -> bool {
    any_is_charged() && selected(thread).or_else(owner).is_some_and(is_counted)
}

/// Whether a module is imported on this thread, within more calls than so many.
pub(super) fn imports(around: usize) -> bool {
    DECIDER.get().is_some_and(|decider| (decider.binding.runs)(around) == Runs::Imports)
}

/// The handler of the request that is selected on this thread.
pub(super) fn selected(thread: &mut Thread) -> Option<Handler> {
    let decider = DECIDER.get().filter(|_| thread.may_decide())?;
    (decider.binding.selected)(busy(thread).0)
}

impl Decider {
    /// The handler of the request that is selected where a block of this kind is asked for.
    #[inline(always)]
    fn selected(&self, thread: &mut Thread, kind: Kind) -> Option<Handler> {
        if !any_is_charged() {
            return None;
        }
        let is_object = kind != Kind::Native || thread.object > 0;
        let ask = if is_object { self.binding.selected_for_object } else { self.binding.selected };
        ask(thread)
    }

    /// Leaves a block to the next allocator, since no request is selected on this thread, on which nothing else is to
    /// be done; false, and nothing was done, if more is to be looked at than that.
    #[inline(always)]
    fn pass(&self, thread: &mut Thread, asked: Asked) -> bool {
        let Asked { kind, size_bytes, how, .. } = asked;
        let Some(nobodys) = thread.nobodys else { return false };
        if !thread.has_looked() || size_bytes >= range::ASKED_FROM || ARE_POSTPONED.load(Ordering::Relaxed) {
            return false;
        }
        let is_small = size_bytes < EXACT_FROM;
        let is_counted = if is_small { thread.settle_again(self.binding.remembers) } else { how & GROWN == 0 };
        if is_counted {
            let bytes =
                if is_small { weight_of_sample(kind, size_bytes, counted(kind, size_bytes)) } else { size_bytes };
            nobodys.fetch_add(bytes as u64, Ordering::Relaxed);
        }
        true
    }

    /// `ask`: whose it is. `answer`: what is done where a limit has no room for it.
    fn allocate(
        &self,
        thread: &mut Thread,
        wanted: Wanted,
        ask: impl FnOnce(&mut Thread) -> Option<Handler>,
        answer: impl FnOnce() -> Answer,
    ) -> (u32, *mut u8) {
        const PASSED: (u32, *mut u8) = (PASS, null_mut());
        let Wanted { kind, size_bytes, align, zeroed, is_sample, twin } = wanted;
        let is_small = size_bytes < EXACT_FROM;
        let thread = busy(thread);
        self.free_postponed();
        let selected = ask(thread.0);
        if thread.0.raising != NOT_RAISING {
            self.look_what_is_owed(thread.0, selected);
        }
        if is_small && !is_sample {
            let is_new = !matches!(twin, Twin::Of(_));
            return self.look_at_no_sample(thread.0, kind, is_new, selected, answer);
        }
        let drawn_bytes = if is_small { counted(kind, size_bytes) } else { 0 };
        let bytes = if is_small { weight_of_sample(kind, size_bytes, drawn_bytes) } else { size_bytes };
        if !range::may_be_had(size_bytes) {
            // Nobody makes it. It is in no number: a peak would have it for ever.
            let is_refused = selected.is_some_and(|handler| is_refused(handler, bytes)) && answer().refuses();
            return if is_refused { (REFUSED, null_mut()) } else { PASSED };
        }
        let Some(handler) = selected else {
            nobodys::add(thread.0, bytes, self.binding.python.as_ref());
            return PASSED;
        };
        let weight = Weight { bytes, is_object: kind != Kind::Native || thread.0.object > 0, is_sample: is_small };
        let beyond = if is_small && thread.0.is_told_now() { Beyond::Untold } else { Beyond::Refuse };
        let charged = match charge(handler, weight, beyond) {
            // Whoever shrinks a block goes on without a look at the answer.
            Charged::Refused if is_small && self.shrinks(kind, twin, size_bytes) => {
                charge(handler, weight, Beyond::Untold)
            }
            Charged::Refused => match self.charge_beyond(thread.0, handler, weight, answer) {
                Ok(charged) => charged,
                Err(answer) => return answer,
            },
            Charged::To(payer) if is_small && (payer.is_untold() || thread.0.raising == RAISING) => {
                self.overdrawn(thread.0, payer, true);
                Charged::To(payer)
            }
            charged => charged,
        };
        let Charged::To(payer) = charged else {
            nobodys::add(thread.0, bytes, self.binding.python.as_ref());
            return PASSED;
        };
        let record = Record::new(payer, size_bytes, weight, drawn_bytes);
        if is_small && !matches!(twin, Twin::None) {
            return self.place_sample(thread.0, wanted, payer, record, handler);
        }
        match self.places.allocate(kind, align, zeroed, record) {
            Some(block) => {
                if is_profiled() {
                    let stands_for = if is_small { bytes / taken(kind, size_bytes) } else { 1 };
                    self.tell_made(block, weight, stands_for as u64, handler);
                }
                (DONE, block.as_ptr())
            }
            None => {
                // SAFETY: charged above, for this block.
                unsafe { payer.release(weight) };
                nobodys::add(thread.0, bytes, self.binding.python.as_ref());
                PASSED
            }
        }
    }

    /// A limit has no room for the block: it is charged beyond that, or is nobody's, or (the error) this is the answer.
    #[cold]
    #[inline(never)]
    pub(super) fn charge_beyond(
        &self,
        thread: &mut Thread,
        handler: Handler,
        weight: Weight,
        answer: impl FnOnce() -> Answer,
    ) -> Result<Charged, (u32, *mut u8)> {
        let is_small = weight.is_sample;
        let still_imports = (self.binding.still_imports)(weight.bytes) && may_import(handler, weight.bytes);
        let runs = || (self.binding.runs)(imports_around(handler));
        let beyond = match if still_imports { Answer::Grant } else { answer() } {
            answer @ (Answer::Refuse | Answer::RefusePython) => match runs() {
                Runs::Imports => Beyond::ToldInImport,
                _ if answer == Answer::Refuse => return Err(told_by_null(thread)),
                // CPython does not survive each NULL in its loop, and there somebody's work may be lost.
                Runs::AtEnds => Beyond::ToldAtEnds,
                runs if is_small && self.waits(runs) => Beyond::ToldInReserve,
                _ => {
                    if is_small {
                        tell_by_null(handler); // where its own code asks
                    }
                    return Err(told_by_null(thread));
                }
            },
            Answer::Grant => Beyond::Told,
            Answer::Pass => return Ok(Charged::Nobody),
        };
        let charged = charge(handler, weight, beyond);
        match charged {
            Charged::To(payer) => self.overdrawn(thread, payer, is_small),
            Charged::Refused => return Err(told_by_null(thread)),
            Charged::Nobody => {}
        }
        Ok(charged)
    }

    /// For a profile that runs.
    pub(super) fn tell_made(&self, block: NonNull<u8>, weight: Weight, stands_for: u64, handler: Handler) {
        let may_look = weight.is_object || !(self.binding.is_behind_a_tool)();
        (self.binding.profile.made)(block.addr().get(), weight, stands_for, handler, may_look);
    }

    /// What is done where a limit has no room.
    #[cold]
    pub(super) fn answer(&self, size_bytes: usize, is_object: bool) -> Answer {
        let Some(python) = self.binding.python else { return Answer::Grant };
        if !is_object && (self.binding.is_behind_a_tool)() {
            return Answer::Grant;
        }
        match walk::answer_to_callers(python, size_bytes, is_object) {
            Answer::Refuse | Answer::RefusePython if (self.binding.loses_work)(size_bytes < EXACT_FROM) => {
                Answer::Grant
            }
            answer => answer,
        }
    }

    #[inline]
    fn free_postponed(&self) {
        if ARE_POSTPONED.load(Ordering::Relaxed) {
            self.free_all_postponed();
        }
    }

    #[cold]
    #[inline(never)]
    fn free_all_postponed(&self) {
        // Acquire pairs with the Release in `postpone`: the lists have what was put there before.
        ARE_POSTPONED.swap(false, Ordering::Acquire);
        for (kind, list) in [Kind::Native, Kind::Mem, Kind::Obj].into_iter().zip(&POSTPONED) {
            // Acquire pairs with the Release in `postpone`.
            let mut next = NonNull::new(list.swap(null_mut(), Ordering::Acquire));
            while let Some(block) = next {
                // SAFETY: a placed block that was given up; `postpone` wrote the link into it. It has 16 bytes at
                // least: the pool's blocks are multiples of 64, and only 32 are before it.
                unsafe {
                    next = NonNull::new(block.cast::<*mut u8>().read());
                    self.release(kind, block); // whose twin went at once
                }
            }
        }
    }

    /// Returns its twin, which is the caller's from now on; null: it has none.
    ///
    /// # Safety
    /// - `block` is a placed block of this kind that was given up.
    unsafe fn release(&self, kind: Kind, block: NonNull<u8>) -> *mut u8 {
        // SAFETY: the block is placed (this function's contract), so it has a record.
        let record = unsafe { self.places.record(block) };
        let Some(payer) = record.payer() else { die("a block was freed twice") };
        if is_profiled() {
            (self.binding.profile.freed)(block.addr().get());
        }
        // SAFETY: the block was given up, and charged with this weight; its memory goes first, since the payer's end
        // may do anything.
        unsafe {
            let twin = Places::twin(block, &record);
            self.places.release(kind, block, &record);
            payer.release(record.weight());
            twin
        }
    }

    /// Whether a request is charged what this thread makes. `selected`: which one that is, if it is known.
    fn is_counted(&self, thread: &mut Thread, selected: Option<Option<Handler>>) -> bool {
        match selected {
            Some(selected) => selected.is_some_and(is_counted),
            None => thread.may_decide() && (self.binding.selected)(busy(thread).0).is_some_and(is_counted),
        }
    }
}

/// Returns its twin, which is the caller's from now on; null: it has none.
///
/// # Safety
/// - called by `preload.c`: the thread is this one, `block` a placed block of this kind that is given up.
pub(super) unsafe extern "C" fn release(thread: *mut Thread, kind: u32, block: *mut c_void) -> *mut c_void {
    let (Some(decider), Some(block)) = (DECIDER.get(), NonNull::new(block.cast::<u8>())) else { return null_mut() };
    // SAFETY: this thread's own struct, which nobody else has.
    let thread = unsafe { &mut *thread };
    // SAFETY: a block that is given up (this function's contract). One that is postponed has its twin no longer.
    unsafe {
        if !thread.is_forking() {
            let _busy = busy(thread);
            return decider.release(Kind::of(kind), block).cast();
        }
        let twin = Places::twin(block, &decider.places.record(block));
        if !twin.is_null() {
            decider.places.set_twin(block, null_mut());
        }
        postpone(kind, block);
        twin.cast()
    }
}

fn postpone(kind: u32, block: NonNull<u8>) {
    let list = &POSTPONED[Kind::of(kind) as usize];
    let mut first = list.load(Ordering::Relaxed);
    loop {
        // SAFETY: the block was given up, and has room for a pointer (`free_all_postponed`).
        unsafe { block.cast::<*mut u8>().write(first) };
        // Release pairs with the Acquire in `free_all_postponed`.
        match list.compare_exchange_weak(first, block.as_ptr(), Ordering::Release, Ordering::Relaxed) {
            Ok(_) => break,
            Err(now) => first = now,
        }
    }
    // Release pairs with the Acquire in `free_all_postponed`.
    ARE_POSTPONED.store(true, Ordering::Release);
}

/// # Safety
/// - `block` is a live placed block.
pub(super) unsafe extern "C" fn usable(block: *mut c_void) -> usize {
    let (Some(decider), Some(block)) = (DECIDER.get(), NonNull::new(block.cast::<u8>())) else { return 0 };
    // SAFETY: the block is placed and live (this function's contract), so it has a record.
    unsafe { decider.places.record(block) }.size_bytes
}

/// Ends the process, as glibc does where a program misuses `free`.
#[cold]
pub(super) fn die(what: &str) -> ! {
    for text in ["ctxalloc: ", what, "\n"] {
        // SAFETY: bytes that are there; a failure changes nothing.
        unsafe { libc::write(2, text.as_ptr().cast(), text.len()) };
    }
    std::process::abort()
}

#[cfg(test)]
mod tests {
    use super::{Errno, os};

    #[test]
    fn errno_is_what_it_was_before() {
        // SAFETY: this thread's own, which nobody else writes.
        unsafe {
            os::errno().write(libc::ENOTTY);
            let kept = Errno::kept();
            os::errno().write(libc::EAGAIN);
            drop(kept);
            assert_eq!(os::errno().read(), libc::ENOTTY);
        }
    }
}
