//! What becomes of a whole request that was given a block beyond a limit: BudgetExceeded at its next step.
//!
//! CPython is given a pending call, which it makes between two instructions: that raises if the request is selected and
//! its own code may be [broken off](BreakingOff). Before 3.12 only the main thread makes such calls. On others the next
//! small block is refused that own code asks for. No exception is set asynchronously there
//! (`PyThreadState_SetAsyncExc`): where the call fails in which the block was granted, CPython raises it in the first
//! instruction of `__exit__`, of which nothing runs; and one that is taken back makes a traced function of 3.11 begin
//! without end. Where nothing is refused, the step that comes next asks
//! [`Seen::overdraft`](crate::handler::requests::Seen::overdraft).
#![allow(unsafe_code, reason = "CPython's thread states")]

use super::asyncio::losing::tells_of_errors;
use super::attached;
use super::breaking_off::{self, BreakingOff};
use super::exit::before_exit;
use super::gaps::Gaps;
use super::imported::Imported;
use super::observed::Observed;
use super::pending::SetAside;
use super::preloaded::preloaded;
use super::symbol::symbol;
use crate::handler::Handler;
use crate::handler::requests::{Begun, Payer, RequestHandle, is_untold, payer_of};
use crate::sync::Made;
use crate::whole::{NOT_RAISING, NOTED, OWED, RAISED, RAISING as IS_RAISING, REFUSES, TELLING};
use crate::whole::{Python as Loop, Runs, Thread, extent, handler_of, is_called_outside_of};
use pyo3::ffi;
use pyo3::prelude::*;
use std::cell::Cell;
use std::ffi::{CStr, c_int, c_void};
use std::mem::transmute;
use std::ptr::null_mut;

/// Gives the handler of the request that is selected on this thread.
type Selected = fn(&mut Thread) -> Option<Handler>;
type AddPending = unsafe extern "C" fn(extern "C" fn(*mut c_void) -> c_int, *mut c_void) -> c_int;
/// CPython's own, from 3.12 on: any thread of the interpreter makes the call, or (flags) the main one only.
type AddPendingAny = unsafe extern "C" fn(
    *mut ffi::PyInterpreterState,
    extern "C" fn(*mut c_void) -> c_int,
    *mut c_void,
    c_int,
) -> c_int;

/// How an exception is set.
struct Raising {
    breaking_off: BreakingOff,
    gaps: Gaps,
    /// `None`: what observes is taken for the request's own code.
    observed: Option<Observed>,
    pend: Option<AddPending>,
    pend_any: Option<AnyThreads>,
    python: Loop,
    /// Whether this thread has the GIL.
    is_attached: fn() -> bool,
    selected: Selected,
    /// Functions that allocate while they hold the lock that `set` takes.
    locked: Vec<(usize, usize)>,
}

/// How any thread is made to call [`tell`].
struct AnyThreads {
    add: AddPendingAny,
    interpreter: *mut ffi::PyInterpreterState,
}

// SAFETY: the interpreter is only passed to the function, which any thread may call; it lives as long as Python runs.
unsafe impl Send for AnyThreads {}
// SAFETY: its fields are only read, as above.
unsafe impl Sync for AnyThreads {}

static RAISING: Made<Raising> = Made::new();

/// Those of CPython 3.11 to 3.14, where they are visible.
const LOCKED: &[&CStr] = &[
    c"PyThreadState_New",
    c"_PyThreadState_New",
    c"PyInterpreterState_New",
    c"Py_NewInterpreter",
    c"Py_NewInterpreterFromConfig",
    c"_PyThread_CurrentFrames",
    c"_PyThread_CurrentExceptions",
    c"PyOS_BeforeFork",
    c"PyOS_AfterFork_Parent",
    c"PyOS_AfterFork_Child",
];

/// Finds what it takes. Where something is missing, nothing is raised before the next step.
pub(super) fn prepare(
    py: Python<'_>,
    python: Option<Loop>,
    is_attached: fn() -> bool,
    selected: Selected,
) -> PyResult<()> {
    let Some(python) = python else { return Ok(()) };
    // SAFETY: `int f(int (*)(void *), void *)`.
    let pend = symbol(c"Py_AddPendingCall").map(|found| unsafe { transmute::<*mut c_void, AddPending>(found) });
    let file: String = py.import("ctxalloc")?.getattr("__file__")?.extract()?;
    let folder = file.trim_end_matches(|character| character != '/').to_owned();
    let (breaking_off, gaps) = (BreakingOff::prepared(py, folder)?, Gaps::found(py)?);
    let observed = Observed::found(py);
    let pend_any = if py.version_info() < (3, 12) { None } else { symbol(c"_PyEval_AddPendingCall") }.map(|found| {
        // SAFETY: `int f(PyInterpreterState *, int (*)(void *), void *, int)` since 3.12. This thread is attached.
        unsafe {
            let add = transmute::<*mut c_void, AddPendingAny>(found);
            AnyThreads { add, interpreter: ffi::PyInterpreterState_Get() }
        }
    });
    let at = |name: &&CStr| symbol(name).and_then(|at| extent(at).map(|(bytes, _)| (at.addr(), bytes)));
    let locked = LOCKED.iter().filter_map(at).collect();
    RAISING.get_or_make(|| Raising {
        breaking_off,
        gaps,
        observed,
        pend,
        pend_any,
        python,
        is_attached,
        selected,
        locked,
    });
    Ok(())
}

/// Whether this is the thread that makes pending calls.
fn is_main_thread() -> bool {
    // SAFETY: two numbers of the system. A child of `fork` has one thread, which Python makes its main one.
    unsafe { libc::gettid() == libc::getpid() }
}

impl Raising {
    fn runs(&self, py: Python<'_>, around: usize) -> Runs {
        if self.is_observing(py) {
            return Runs::Imports; // CPython would remove what observes, and break off what is observed
        }
        let runs = match self.breaking_off.runs(py, around) {
            Runs::Own if self.python.is_uncaught() => Runs::AtEnds,
            runs => runs,
        };
        IMPORTED.set((runs == Runs::Imports, BETWEEN_LOOKS));
        runs
    }

    /// Whether a trace, profile or monitoring function runs on this thread.
    fn is_observing(&self, py: Python<'_>) -> bool {
        self.observed.as_ref().is_some_and(|observed| observed.is_running(py))
    }

    /// Whether an exception that is raised now would pass by handlers.
    fn is_in_gap(&self, py: Python<'_>) -> PyResult<bool> {
        self.gaps.have(&GET_FRAME.get(py)?.call0()?)
    }

    /// Whether Python can be made to call [`tell`] on this thread.
    fn pends(&self) -> bool {
        self.pend_any.is_some() || self.pend_main().is_some()
    }

    /// How the main thread is made to, where this is it.
    fn pend_main(&self) -> Option<AddPending> {
        self.pend.filter(|_| is_main_thread())
    }

    /// Whether the next thread that Python runs, which makes the call, is this one.
    fn is_next(&self) -> bool {
        (self.is_attached)() || self.pend_main().is_some()
    }

    /// Makes it. False: not now.
    fn pend(&self) -> bool {
        if let Some(pend) = self.pend_main() {
            // SAFETY: any thread may call it, with the GIL or without; it allocates nothing.
            return unsafe { pend(tell, null_mut()) } == 0;
        }
        let Some(AnyThreads { add, interpreter }) = &self.pend_any else { return false };
        if !is_called_outside_of(self.python, &self.locked) {
            return false;
        }
        // SAFETY: any thread may call it while Python runs; it takes the lock of the thread states, which is not held
        // here.
        let pend = || unsafe { add(*interpreter, tell, null_mut(), 0) == 0 };
        if (self.is_attached)() { pend() } else { before_exit(pend).unwrap_or(false) }
    }

    /// Called by what CPython has called: makes it again, and that is to look at the next step only.
    fn pend_a_step_further(&self) -> bool {
        SAME_STEP.set(AT_ONCE - 1);
        self.pend()
    }
}

/// Whether the request that is selected on this thread is told of a small block as soon as its code goes on.
pub(super) fn tells_soon() -> bool {
    RAISING.get().is_some_and(Raising::pends)
}

thread_local! {
    /// Whether a module was imported when this thread looked last, and how many bytes it is given until it looks again.
    /// Without a destructor: threads allocate to their end.
    static IMPORTED: Cell<(bool, usize)> = const { Cell::new((false, 0)) };
}

/// What a thread is given for an import before it looks again: a look takes as long as some hundred blocks.
const BETWEEN_LOOKS: usize = 256 << 10;

/// Whether a module was imported just now, and so many bytes are little.
pub(super) fn still_imports(bytes: usize) -> bool {
    let (is_imported, left) = IMPORTED.get();
    let is_little = is_imported && bytes <= left;
    if is_little {
        IMPORTED.set((true, left - bytes));
    }
    is_little
}

/// A whole request begins. The imports that it is begun within are not its own.
pub(super) fn begins(begun: &Begun) {
    let Some(py) = attached::here().filter(|_| RAISING.get().is_some()) else { return };
    let around = breaking_off::imports_around(py);
    if around > 0 {
        begun.note_imports_around(around);
        IMPORTED.set((false, 0));
    }
}

/// Whose code runs on this thread. Where nobody knows, all is refused; but what is imported may give the GIL up, as
/// `os.getcwd` does. `around`: how many imports are not the request's own.
pub(super) fn runs(around: usize) -> Runs {
    let Some((raising, py)) = RAISING.get().zip(attached::here()) else {
        return if IMPORTED.get().0 { Runs::Imports } else { Runs::Own };
    };
    let _pending = SetAside::new(py);
    raising.runs(py, around)
}

/// Whether a trace, profile or monitoring function runs on this thread.
pub(super) fn is_observing() -> bool {
    RAISING.get().zip(attached::here()).is_some_and(|(raising, py)| raising.is_observing(py))
}

/// Whether an exception is set on this thread.
pub(super) fn is_raising() -> bool {
    attached::here().is_some_and(PyErr::occurred)
}

/// This thread was given a block beyond a limit of this request's: a small one, or another; or a small one while it is
/// about to be told. Called in the middle of an allocation.
pub(super) fn overdrawn(thread: &mut Thread, payer: Payer, is_small: bool) {
    let Some(raising) = RAISING.get() else { return };
    // Another thread may have made the call that was for this one.
    let is_perhaps_lost = raising.pends() && !is_main_thread();
    if !payer.is_untold() {
        // A refusal told it meanwhile, and what comes after that is refused again.
        if thread.raising == IS_RAISING && is_perhaps_lost {
            thread.raising = NOT_RAISING;
        }
        return;
    }
    if thread.raising == NOTED && !is_small && !is_perhaps_lost {
        thread.raising = IS_RAISING;
        return;
    }
    // Its own code runs, or that of a request inside of it which counts its arrays only.
    let pays_for = |word| handler_of(word).is_some_and(|handler| payer.pays_for(handler));
    let is_idle = matches!(thread.raising, NOT_RAISING | RAISED | REFUSES)
        || (matches!(thread.raising, NOTED | IS_RAISING) && is_perhaps_lost)
        || (thread.raising == OWED && is_perhaps_lost && !is_small);
    if is_idle && pays_for(thread.account) && raising.pends() {
        set(raising, thread, if is_small { NOTED } else { IS_RAISING });
    }
}

/// Sets the exception that this thread owes.
pub(super) fn raise(thread: &mut Thread) {
    // While a module is imported it stays owed. Without the GIL `overdrawn` has asked for what can be had.
    if let Some(raising) = RAISING.get().filter(|_| thread.raising == OWED && !still_imports(1))
        && (!raising.pends() || raising.is_next())
    {
        set(raising, thread, IS_RAISING);
    }
}

static GET_FRAME: Imported = Imported::new("sys", "_getframe");

/// Sees to it that the exception is raised, if that can be done now; else it is owed, or a block is refused in its
/// place. Called in the middle of an allocation.
fn set(raising: &Raising, thread: &mut Thread, state: u32) {
    if !raising.pends() {
        thread.refuse_its_own();
        return;
    }
    SAME_STEP.set(0);
    // Where this thread is not the next, another one may make the call, and this one still owes it.
    let is_made_here = raising.pend() && raising.is_next();
    thread.raising = if is_made_here { state } else { OWED };
}

thread_local! {
    /// How many more of the calls that come next are no step further. Without a destructor: threads allocate to their
    /// end.
    static SAME_STEP: Cell<u8> = const { Cell::new(0) };
}

/// CPython makes a call at once that a call has added, so often in the main thread (`MAXPENDINGCALLS_MAIN` of its
/// `pycore_ceval.h`; others: three times as often).
const AT_ONCE: u8 = 32;

/// Called by Python between two instructions of whatever code runs on this thread. It raises if that is the
/// request's own.
extern "C" fn tell(_: *mut c_void) -> c_int {
    if attached::here().is_none() {
        return 0;
    }
    Python::try_attach(told).unwrap_or(0)
}

fn told(py: Python<'_>) -> c_int {
    let is_noted = own(|thread| matches!(thread.raising, NOTED | IS_RAISING | OWED | REFUSES)).unwrap_or(false);
    let Some(raising) = RAISING.get().filter(|_| is_noted) else { return 0 };
    let become_ = |state| own(|thread| thread.raising = state);
    let same_step = SAME_STEP.get();
    if same_step > 0 {
        SAME_STEP.set(same_step - 1);
        if raising.pend() {
            return 0;
        }
    }
    if raising.is_observing(py) {
        // Once more, until the code that is observed goes on: a profile function is called after each of C's.
        if !raising.pend_a_step_further() {
            become_(OWED);
        }
        return 0;
    }
    let payer = own(raising.selected).flatten().and_then(payer_of).and_then(RequestHandle::from_handler);
    let Some(request) = payer.filter(|request| request.seen().is_untold()) else {
        become_(NOT_RAISING); // others run, or somebody told it; its end tells too
        return 0;
    };
    become_(TELLING);
    let (is_raised, state) = tell_of(py, raising, &request);
    own(|thread| match state {
        REFUSES => thread.refuse_its_own(),
        OWED => {
            thread.raising = OWED;
            thread.look_again(); // its own code may go on meanwhile
        }
        _ => thread.raising = state,
    });
    if is_raised { -1 } else { 0 }
}

/// Raises what tells the request, if its own code runs. Returns whether it has, and what the thread's state is then.
fn tell_of(py: Python<'_>, raising: &Raising, request: &RequestHandle) -> (bool, u32) {
    if !matches!(raising.runs(py, request.seen().imports_around()), Runs::Own) {
        return (false, OWED);
    }
    if tells_of_errors(py).unwrap_or(false) {
        return (false, OWED);
    }
    if raising.is_in_gap(py).unwrap_or(false) {
        // A step further it may be in none; but a loop may make such calls there alone. A refusal meets its handlers.
        return (false, if raising.pend_a_step_further() { REFUSES } else { OWED });
    }
    let Some(error) = request.seen().overdraft(false) else { return (false, NOT_RAISING) };
    PyErr::from(error).restore(py);
    (true, RAISED)
}

/// This thread's own struct.
fn own<R>(work: impl FnOnce(&mut Thread) -> R) -> Option<R> {
    let preloaded = preloaded().library()?;
    // SAFETY: this thread's struct, which lives as long as the thread; `work` cannot keep the reference.
    Some(work(unsafe { &mut *(preloaded.library.thread)() }))
}

/// What nobody was told of is told as soon as the own code of the request with this handler runs.
pub(super) fn owe_what_is_untold(handler: Handler) {
    if RAISING.get().is_some() && is_untold(handler) {
        own(|thread| {
            thread.raising = OWED;
            thread.look_soon();
        });
    }
}

/// A whole request's block ends, or a step of it: what told it has been made.
pub(super) fn ends() {
    if RAISING.get().is_some() {
        own(|thread| {
            if thread.raising == RAISED {
                thread.raising = NOT_RAISING;
            }
        });
    }
}
