//! What becomes of a whole request that was given a block beyond a limit: BudgetExceeded at its next step.
//!
//! In Python code that runs on this thread the exception is set asynchronously (`PyThreadState_SetAsyncExc`): the call
//! of native code that took the block raises it as it returns. CPython may raise it later than that (cpython#139622),
//! and then it must not meet other code. So it is set only under a [`Guard`], which whoever runs the request's code on
//! this thread holds meanwhile, and which takes back what was not raised. Where there is none, the step that comes next
//! asks [`Seen::overdraft`](crate::handler::requests::Seen::overdraft).
#![allow(unsafe_code, reason = "CPython's thread states")]

use super::imported::Imported;
use super::preloaded::preloaded;
use super::symbol::symbol;
use crate::handler::Handler;
use crate::handler::requests::{Payer, RequestHandle, payer_of};
use crate::sync::Made;
use crate::whole::{NOT_RAISING, OWED, RAISED, RAISING as IS_RAISING};
use crate::whole::{Python as Loop, Thread, extent, handler_of, is_called_outside_of, word_of};
use pyo3::exceptions::PyMemoryError;
use pyo3::ffi;
use pyo3::intern;
use pyo3::prelude::*;
use std::ffi::{CStr, c_int, c_ulong, c_void};
use std::mem::transmute;
use std::ptr::null_mut;

type GetIdent = unsafe extern "C" fn() -> c_ulong;
type SetAsync = unsafe extern "C" fn(c_ulong, *mut ffi::PyObject) -> c_int;

/// How an exception is set.
struct Raising {
    ident: GetIdent,
    set: SetAsync,
    /// What makes the BudgetExceeded when CPython raises it.
    class: Py<PyAny>,
    python: Loop,
    /// Whether this thread has the GIL.
    is_attached: fn() -> bool,
    /// Functions that allocate while they hold the lock that `set` takes.
    locked: Vec<(usize, usize)>,
}

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
pub(super) fn prepare(py: Python<'_>, python: Option<Loop>, is_attached: fn() -> bool) -> PyResult<()> {
    static CLASS: Imported = Imported::new("ctxalloc._errors", "_Overdraft");
    let class = CLASS.get(py)?.clone().unbind();
    let (Some(ident), Some(set), Some(python)) =
        (symbol(c"PyThread_get_thread_ident"), symbol(c"PyThreadState_SetAsyncExc"), python)
    else {
        return Ok(());
    };
    // SAFETY: `unsigned long f(void)`, and `int f(unsigned long, PyObject *)`.
    let (ident, set) = unsafe { (transmute::<*mut c_void, GetIdent>(ident), transmute::<*mut c_void, SetAsync>(set)) };
    let at = |name: &&CStr| symbol(name).and_then(|at| extent(at).map(|(bytes, _)| (at.addr(), bytes)));
    let locked = LOCKED.iter().filter_map(at).collect();
    RAISING.get_or_make(|| Raising { ident, set, class, python, is_attached, locked });
    Ok(())
}

/// This thread was given a block beyond a limit of this request's. Called in the middle of an allocation.
pub(super) fn overdrawn(thread: &mut Thread, payer: Payer) {
    // Its own code runs, or that of a request inside of it which counts its arrays only.
    let pays_for = |word| handler_of(word).is_some_and(|handler| payer.pays_for(handler));
    let is_idle = matches!(thread.raising, NOT_RAISING | RAISED);
    if RAISING.get().is_some() && is_idle && pays_for(thread.guard) && pays_for(thread.account) {
        thread.raising = OWED;
        raise(thread);
    }
}

/// Sets the exception that this thread owes, if it has the GIL: native code that gave that up takes blocks too. Called
/// in the middle of an allocation.
pub(super) fn raise(thread: &mut Thread) {
    let Some(raising) = RAISING.get() else { return };
    if thread.raising != OWED || thread.guard == 0 || !(raising.is_attached)() {
        return;
    }
    if !is_called_outside_of(raising.python, &raising.locked) {
        return;
    }
    thread.raising = IS_RAISING;
    // SAFETY: this thread has the GIL, and is in no function of CPython's that holds the lock of the thread states. The
    // class lives as long as the process. What was set before is a class too, of which there are other references.
    unsafe { (raising.set)((raising.ident)(), raising.class.as_ptr()) };
}

/// This thread's own struct.
fn own<R>(work: impl FnOnce(&mut Thread) -> R) -> Option<R> {
    let preloaded = preloaded().library()?;
    // SAFETY: this thread's struct, which lives as long as the thread; `work` cannot keep the reference.
    Some(work(unsafe { &mut *(preloaded.library.thread)() }))
}

/// While it is there, an exception may be set for the request whose code runs on this thread.
#[derive(Debug, Clone, Copy)]
pub(super) struct Guard {
    own: u64,
    before: u64,
}

impl Guard {
    /// One for a stretch of work that is neither suspended nor moved to another thread.
    pub(super) fn begin(handler: Handler) -> Option<Self> {
        let word = word_of(handler);
        RAISING.get()?;
        own(|thread| Self { own: word, before: std::mem::replace(&mut thread.guard, word) })
    }

    /// One for a `with` block, if none of the frames that are running can be suspended within it.
    pub(super) fn of_block(py: Python<'_>, handler: Handler) -> PyResult<Option<Self>> {
        if RAISING.get().is_none() || may_be_suspended(py)? {
            return Ok(None);
        }
        Ok(Self::begin(handler))
    }

    /// Ends it, on its thread (on another one nothing happens), and takes back what was not raised.
    pub(super) fn end(self, _py: Python<'_>) {
        own(|thread| {
            if thread.guard != self.own {
                return;
            }
            thread.guard = self.before;
            if std::mem::replace(&mut thread.raising, NOT_RAISING) == IS_RAISING
                && let Some(raising) = RAISING.get()
            {
                // SAFETY: this thread has the GIL, as the argument shows, and is called by Python code.
                unsafe { (raising.set)((raising.ident)(), null_mut()) };
            }
        });
    }
}

/// Whether a generator, a coroutine or a greenlet is running on this thread: the block may then last while other code
/// runs.
fn may_be_suspended(py: Python<'_>) -> PyResult<bool> {
    /// `CO_GENERATOR | CO_COROUTINE | CO_ASYNC_GENERATOR`.
    const SUSPENDS: u32 = 0x20 | 0x80 | 0x200;
    static GET_FRAME: Imported = Imported::new("sys", "_getframe");
    static MODULES: Imported = Imported::new("sys", "modules");
    let mut frame = GET_FRAME.get(py)?.call0()?;
    while !frame.is_none() {
        if frame.getattr(intern!(py, "f_code"))?.getattr(intern!(py, "co_flags"))?.extract::<u32>()? & SUSPENDS != 0 {
            return Ok(true);
        }
        frame = frame.getattr(intern!(py, "f_back"))?;
    }
    let greenlet = MODULES.get(py)?.call_method1(intern!(py, "get"), (intern!(py, "greenlet"),))?;
    if greenlet.is_none() {
        return Ok(false);
    }
    Ok(!greenlet.call_method0(intern!(py, "getcurrent"))?.getattr(intern!(py, "parent"))?.is_none())
}

/// The exception that was set for this thread: CPython raises it now.
#[pyfunction]
#[pyo3(name = "_whole_overdraft")]
pub(super) fn overdraft(py: Python<'_>) -> Py<PyAny> {
    let guard = own(|thread| {
        thread.raising = RAISED;
        thread.guard
    });
    // A request inside that counts its arrays only is not the one whose limit it was.
    let request = guard.and_then(handler_of).and_then(payer_of).and_then(RequestHandle::from_handler);
    let error = match request.and_then(|request| request.seen().last_overdraft()) {
        Some(error) => PyErr::from(error),
        None => PyMemoryError::new_err("native code was given memory beyond the request's limit"),
    };
    error.into_value(py).into_any()
}
