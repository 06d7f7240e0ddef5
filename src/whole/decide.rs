//! The decision about a block: whose it is, whether it is charged, where it lies. What `preload.c` calls; where a block
//! is resized, `resize` decides.

use super::binding::{Binding, Runs};
use super::nobodys;
pub(super) use super::place::ALIGN;
use super::place::{Places, Record};
pub(super) use super::sampling::EXACT_FROM;
use super::sampling::{counted, taken, weight_of_sample};
use super::shared::{
    DONE, GROWN, Kind, NOT_RAISING, NOTED, OWED, PASS, RAISED, RAISING, REFUSED, REFUSED_ONE, REFUSES, Thread, ZEROED,
    handler_of,
};
use super::{range, walk, walk::Answer};
use crate::handler::Handler;
use crate::handler::requests::{
    Beyond, Charged, Payer, charge, imports_around, is_counted, is_refused, is_untold, may_import, tell_by_null,
};
use crate::strategy::account::{WHOLE_REQUESTS, Weight};
use crate::sync::Made;
use std::ffi::c_void;
use std::ptr::{NonNull, null_mut};
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering};

/// Whether a profile runs. It orders nothing: who is told late is told of fewer blocks.
static IS_PROFILED: AtomicBool = AtomicBool::new(false);

/// Begins or ends to tell of each block.
pub(crate) fn profile(is_profiled: bool) {
    IS_PROFILED.store(is_profiled, Ordering::Relaxed);
}

pub(super) fn is_profiled() -> bool {
    IS_PROFILED.load(Ordering::Relaxed)
}

pub(super) struct Decider {
    pub(super) places: Places,
    pub(super) binding: Binding,
}

pub(super) static DECIDER: Made<Decider> = Made::new();

/// Whether the binding knows only what it found the last time.
fn remembers() -> bool {
    DECIDER.get().is_some_and(|decider| decider.binding.remembers)
}

pub(super) fn begin(places: Places, binding: Binding) {
    DECIDER.get_or_make(|| Decider { places, binding });
}

/// Blocks that were freed while this thread held all locks (between the sides of `fork`): a list through their first
/// words. Whoever is next frees them.
static POSTPONED: [AtomicPtr<u8>; 3] = [const { AtomicPtr::new(null_mut()) }; 3];

/// Marks the thread as busy until it is dropped: what is allocated meanwhile is nobody's.
pub(super) struct Busy<'a>(pub(super) &'a mut Thread);

impl Drop for Busy<'_> {
    fn drop(&mut self) {
        self.0.busy -= 1;
    }
}

pub(super) fn busy(thread: &mut Thread) -> Busy<'_> {
    thread.busy += 1;
    Busy(thread)
}

/// # Safety
/// - called by `preload.c`: the thread is this one, and `outcome` a place for the answer.
pub(super) unsafe extern "C" fn allocate(
    thread: *mut Thread,
    kind: u32,
    size_bytes: usize,
    align: usize,
    how: u32,
    outcome: *mut u32,
) -> *mut c_void {
    // SAFETY: this thread's own struct, which nobody else has; the functions below pass it on and do not keep it.
    let thread = unsafe { &mut *thread };
    if thread.refusing == size_bytes as u64 && size_bytes > 0 {
        thread.refusing = 0;
        thread.left = i64::MAX / 2; // what the error takes is not counted
        // SAFETY: a place for the answer (this function's contract).
        unsafe { outcome.write(REFUSED) };
        return null_mut();
    }
    let is_sample = size_bytes < EXACT_FROM && thread.settle(remembers());
    let (done, block) = match DECIDER.get() {
        // It stays nobody's, and is not one more that is.
        Some(decider) if how & GROWN != 0 && !decider.is_counted(thread) => (PASS, null_mut()),
        Some(decider) if thread.may_decide() => {
            let zeroed = how & ZEROED != 0;
            let wanted = Wanted { kind: Kind::of(kind), size_bytes, align, zeroed, is_sample };
            let is_object = wanted.kind != Kind::Native || thread.object > 0;
            decider.allocate(thread, wanted, || None, || decider.answer(size_bytes, is_object))
        }
        _ => {
            Decider::look_soon_if_owed(thread); // `settle` has put the next look off
            (PASS, null_mut())
        }
    };
    // SAFETY: a place for the answer (this function's contract).
    unsafe { outcome.write(done) };
    block.cast()
}

/// A block that is asked for.
#[derive(Debug, Clone, Copy)]
struct Wanted {
    kind: Kind,
    size_bytes: usize,
    align: usize,
    zeroed: bool,
    is_sample: bool,
}

/// A block of a pool of Arrow's, which has a request of its own where the thread has none. For a small one so many
/// bytes are counted down.
pub(super) fn allocate_for(
    thread: &mut Thread,
    owner: impl FnOnce() -> Option<Handler>,
    size_bytes: usize,
    align: usize,
    counted_bytes: usize,
) -> (u32, *mut u8) {
    let mut is_sample = false;
    if size_bytes < EXACT_FROM {
        thread.left -= counted_bytes as i64;
        if thread.left >= 0 {
            return (PASS, null_mut());
        }
        is_sample = thread.settle(remembers());
    }
    match DECIDER.get() {
        Some(decider) if thread.may_decide() => {
            let wanted = Wanted { kind: Kind::Native, size_bytes, align, zeroed: false, is_sample };
            decider.allocate(thread, wanted, owner, answer_to_arrow)
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

/// Whether there is a request that blocks may be charged to. Relaxed: a thread that has one selected knows of it.
fn any_is_charged() -> bool {
    WHOLE_REQUESTS.load(Ordering::Relaxed) > 0
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
    /// `owner`: whose it is where the thread has no request. `answer`: what is done where a limit has no room for it.
    fn allocate(
        &self,
        thread: &mut Thread,
        wanted: Wanted,
        owner: impl FnOnce() -> Option<Handler>,
        answer: impl FnOnce() -> Answer,
    ) -> (u32, *mut u8) {
        const PASSED: (u32, *mut u8) = (PASS, null_mut());
        let Wanted { kind, size_bytes, align, zeroed, is_sample } = wanted;
        let is_small = size_bytes < EXACT_FROM;
        let thread = busy(thread);
        self.free_postponed();
        let selected = if any_is_charged() { (self.binding.selected)(thread.0).or_else(owner) } else { None };
        if thread.0.raising == REFUSED_ONE {
            self.look_who_dropped(thread.0, selected);
        }
        if thread.0.raising == OWED {
            (self.binding.owes)(thread.0);
            Self::look_soon_if_owed(thread.0);
        }
        if is_small && (!is_sample || thread.0.resize > 0) {
            if thread.0.raising != REFUSES {
                return PASSED;
            }
            let may_be_refused = thread.0.resize == 0 && kind != Kind::Native;
            if may_be_refused && self.refuses_now(thread.0, selected, answer) {
                return (REFUSED, null_mut());
            }
            Self::look_soon_if_owed(thread.0);
            return PASSED;
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
        let mut charged = charge(handler, weight, beyond);
        if matches!(charged, Charged::Refused) {
            let still_imports = (self.binding.still_imports)(bytes) && may_import(handler, bytes);
            let runs = || (self.binding.runs)(imports_around(handler));
            let beyond = match if still_imports { Answer::Grant } else { answer() } {
                answer @ (Answer::Refuse | Answer::RefusePython) => match runs() {
                    Runs::Imports => Beyond::ToldInImport,
                    _ if answer == Answer::Refuse => return told_by_null(thread.0),
                    // CPython does not survive each NULL in its loop, and there somebody's work may be lost.
                    Runs::AtEnds => Beyond::ToldAtEnds,
                    runs if is_small && self.waits(runs) => Beyond::ToldInReserve,
                    _ => {
                        if is_small {
                            tell_by_null(handler); // where its own code asks
                        }
                        return told_by_null(thread.0);
                    }
                },
                Answer::Grant => Beyond::Told,
                Answer::Pass => {
                    nobodys::add(thread.0, bytes, self.binding.python.as_ref());
                    return PASSED;
                }
            };
            charged = charge(handler, weight, beyond);
            match charged {
                Charged::To(payer) => self.overdrawn(thread.0, payer, is_small),
                Charged::Refused => return told_by_null(thread.0),
                Charged::Nobody => {}
            }
        } else if let Charged::To(payer) = charged
            && is_small
            && (payer.is_untold() || thread.0.raising == RAISING)
        {
            self.overdrawn(thread.0, payer, true);
        }
        let Charged::To(payer) = charged else {
            nobodys::add(thread.0, bytes, self.binding.python.as_ref());
            return PASSED;
        };
        let record = Record::new(payer, size_bytes, weight, drawn_bytes);
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

    /// Whether the block is the first one that a request's own code asks for, since a small one was given to it where
    /// nothing may be refused.
    #[cold]
    fn refuses_now(&self, thread: &mut Thread, selected: Option<Handler>, answer: impl FnOnce() -> Answer) -> bool {
        let Some(handler) = selected.filter(|&handler| is_untold(handler)) else {
            thread.raising = NOT_RAISING; // others run, or somebody told it
            return false;
        };
        if (self.binding.is_observing)() {
            thread.look_soon(); // what is observed may ask for much less than what observes
            return false;
        }
        let runs_own = || matches!((self.binding.runs)(imports_around(handler)), Runs::Own);
        if answer().refuses() && runs_own() {
            thread.refused_in = self.called_by_loop();
            thread.raising = REFUSED_ONE;
            thread.look_soon();
            return true;
        }
        false
    }

    fn called_by_loop(&self) -> u64 {
        self.binding.python.map_or(0, |python| python.called_by_loop()) as u64
    }

    /// One block was refused, and this is the next one. Where the error goes on, that is of a traceback; where the same
    /// call goes on without an error, it has dropped that, and another block is to be refused.
    #[cold]
    fn look_who_dropped(&self, thread: &mut Thread, selected: Option<Handler>) {
        thread.raising = NOT_RAISING;
        let Some(handler) = selected.filter(|&handler| is_untold(handler)) else { return };
        if thread.refused_in != 0 && !(self.binding.is_raising)() && thread.refused_in == self.called_by_loop() {
            thread.raising = REFUSES;
        } else {
            tell_by_null(handler);
        }
    }

    /// Whether a small block that Python asks for is rather granted than refused where this code runs: the request that
    /// is selected is told soon, or nobody could be told.
    pub(super) fn waits(&self, runs: Runs) -> bool {
        runs == Runs::Others || (self.binding.tells_soon)()
    }

    pub(super) fn overdrawn(&self, thread: &mut Thread, payer: Payer, is_small: bool) {
        (self.binding.overdrawn)(thread, payer, is_small);
        let is_told = || handler_of(thread.account).is_some() && (self.binding.tells_soon)();
        if matches!(thread.raising, NOT_RAISING | RAISED | REFUSES) && !is_told() {
            thread.raising = REFUSES;
            thread.look_soon();
        }
        Self::look_soon_if_owed(thread);
    }

    /// The thread may have the GIL at its next block, whatever the size of that, or its own code may ask for it.
    fn look_soon_if_owed(thread: &mut Thread) {
        match thread.raising {
            OWED => thread.look_soon(),
            REFUSES => thread.look_again(),
            _ => {}
        }
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
        if POSTPONED.iter().any(|list| !list.load(Ordering::Relaxed).is_null()) {
            self.free_all_postponed();
        }
    }

    #[cold]
    #[inline(never)]
    fn free_all_postponed(&self) {
        for (kind, list) in [Kind::Native, Kind::Mem, Kind::Obj].into_iter().zip(&POSTPONED) {
            // Acquire pairs with the Release in `postpone`.
            let mut next = NonNull::new(list.swap(null_mut(), Ordering::Acquire));
            while let Some(block) = next {
                // SAFETY: a placed block that was given up; `postpone` wrote the link into it. It has 16 bytes at
                // least: the pool's blocks are multiples of 64, and only 32 are before it.
                unsafe {
                    next = NonNull::new(block.cast::<*mut u8>().read());
                    self.release(kind, block);
                }
            }
        }
    }

    /// # Safety
    /// - `block` is a placed block of this kind that was given up.
    unsafe fn release(&self, kind: Kind, block: NonNull<u8>) {
        // SAFETY: the block is placed (this function's contract), so it has a record.
        let record = unsafe { self.places.record(block) };
        let Some(payer) = record.payer() else { die("a block was freed twice") };
        if is_profiled() {
            (self.binding.profile.freed)(block.addr().get());
        }
        // SAFETY: the block was given up, and charged with this weight; its memory goes first, since the payer's end
        // may do anything.
        unsafe {
            self.places.release(kind, block, &record);
            payer.release(record.weight());
        }
    }

    /// Whether a request is charged what this thread makes.
    fn is_counted(&self, thread: &mut Thread) -> bool {
        thread.may_decide() && (self.binding.selected)(busy(thread).0).is_some_and(is_counted)
    }
}

/// # Safety
/// - called by `preload.c`: the thread is this one, `block` a placed block of this kind that is given up.
pub(super) unsafe extern "C" fn release(thread: *mut Thread, kind: u32, block: *mut c_void) {
    let (Some(decider), Some(block)) = (DECIDER.get(), NonNull::new(block.cast::<u8>())) else { return };
    // SAFETY: this thread's own struct, which nobody else has.
    let thread = unsafe { &mut *thread };
    if thread.is_forking() {
        postpone(kind, block);
        return;
    }
    // SAFETY: a block that is given up (this function's contract).
    unsafe {
        let _busy = busy(thread);
        decider.release(Kind::of(kind), block);
    }
}

fn postpone(kind: u32, block: NonNull<u8>) {
    let list = &POSTPONED[Kind::of(kind) as usize];
    let mut first = list.load(Ordering::Relaxed);
    loop {
        // SAFETY: the block was given up, and has room for a pointer (`free_postponed`).
        unsafe { block.cast::<*mut u8>().write(first) };
        // Release pairs with the Acquire in `free_postponed`.
        match list.compare_exchange_weak(first, block.as_ptr(), Ordering::Release, Ordering::Relaxed) {
            Ok(_) => return,
            Err(now) => first = now,
        }
    }
}

/// # Safety
/// - `block` is a live placed block.
pub(super) unsafe extern "C" fn usable(block: *mut c_void) -> usize {
    let (Some(decider), Some(block)) = (DECIDER.get(), NonNull::new(block.cast::<u8>())) else { return 0 };
    // SAFETY: the block is placed and live (this function's contract), so it has a record.
    unsafe { decider.places.record(block) }.size_bytes
}

/// The refusal of a block. Nothing is to come after it for what the request was given before.
pub(super) fn told_by_null(thread: &mut Thread) -> (u32, *mut u8) {
    if matches!(thread.raising, NOTED | REFUSES | REFUSED_ONE) {
        thread.raising = NOT_RAISING;
        if let Some(handler) = handler_of(thread.account) {
            tell_by_null(handler);
        }
    }
    (REFUSED, null_mut())
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
