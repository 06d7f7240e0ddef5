//! Who is selected on a thread, for `src/whole`.
//!
//! The selection is NumPy's ContextVar, as everywhere. A copy of it is kept for each thread, with the version of the
//! Context that CPython counts at each switch. Whoever finds another version reads the ContextVar anew: that allocates
//! nothing, waits for nobody and runs no code. Without the GIL it reads what this thread's own Context has
//! (`own_context`).
#![allow(unsafe_code, reason = "CPython's thread state")]

use super::exit;
use super::named_capsules::Named;
use super::numpy::{Numpy, capsule_name};
use super::own_context::{Reader, State};
use super::selection::Selection;
use super::symbol::symbol;
use crate::handler::Handler;
use crate::handler::requests::handler_at;
use crate::sync::Made;
use crate::whole::{Thread, handler_of, word_of};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyCFunction;
use std::ffi::{CStr, c_int, c_void};
use std::mem::transmute;
use std::ptr::{null, null_mut};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

type GetState = unsafe extern "C" fn() -> *const c_void;
type VarGet = unsafe extern "C" fn(*mut ffi::PyObject, *mut ffi::PyObject, *mut *mut ffi::PyObject) -> c_int;

/// How Python is asked.
struct Asked {
    /// The thread state that has the GIL: of this thread, or (3.11) of any.
    attached: GetState,
    /// This thread's own.
    own: GetState,
    /// Where a thread state has the version of its Context, in bytes.
    version_at: usize,
    var: Py<PyAny>,
    get: VarGet,
    /// How what the variable has is looked into.
    capsules: Named,
    /// How the variable is read without the GIL, if it can be.
    reader: Option<Reader>,
}

static ASKED: Made<Asked> = Made::new();

/// Finds out how Python is asked, once. Returns whether only what was found the last time may be known
/// ([`Binding`](crate::whole::Binding)); the inner error says what is missing.
pub(super) fn prepare(py: Python<'_>) -> PyResult<Result<bool, String>> {
    let Selection::ContextVar { var, .. } = Numpy::get(py)?.selection() else {
        return Ok(Err("NumPy's ContextVar was not found (ctxalloc._native.selection)".to_owned()));
    };
    let found = |name: &CStr| symbol(name).ok_or_else(|| format!("this Python has no {name:?}"));
    let functions = || {
        let attached = found(c"PyThreadState_GetUnchecked").or_else(|_| found(c"_PyThreadState_UncheckedGet"))?;
        Ok((attached, found(c"PyGILState_GetThisThreadState")?, found(c"PyContextVar_Get")?))
    };
    let (attached, own, get) = match functions() {
        Ok(functions) => functions,
        Err(missing) => return Ok(Err(missing)),
    };
    // SAFETY: `PyThreadState *f(void)` for the two, and `int PyContextVar_Get(PyObject *, PyObject *, PyObject **)`.
    let (attached, own, get) = unsafe {
        (
            transmute::<*mut c_void, GetState>(attached),
            transmute::<*mut c_void, GetState>(own),
            transmute::<*mut c_void, VarGet>(get),
        )
    };
    let Some(version_at) = version_offset(py, own)? else {
        return Ok(Err("the layout of its thread state is not known".to_owned()));
    };
    let reader = Reader::tried(py, var.bind(py), State { own, context_at: version_at - size_of::<usize>() })?;
    let remembers = reader.is_none();
    let capsules = Named::tried(py, capsule_name(py)?)?;
    ASKED.get_or_make(|| Asked { attached, own, version_at, var: var.clone_ref(py), get, capsules, reader });
    Ok(Ok(remembers))
}

pub(super) fn is_prepared() -> bool {
    ASKED.get().is_some()
}

/// The selection may have changed in a way that no version tells.
pub(super) fn look_anew(thread: &mut Thread) {
    thread.version = STALE;
    let _ = selected(thread);
}

/// No Context's version.
const STALE: u64 = u64::MAX;

/// Where a thread state has the version of its Context: behind the pointer to that, which is found by looking where a
/// known Context is while it runs.
fn version_offset(py: Python<'_>, own: GetState) -> PyResult<Option<usize>> {
    const WORDS: usize = 64;
    let mut offsets = [None; 2];
    for offset in &mut offsets {
        let context = py.import("contextvars")?.call_method0("copy_context")?;
        let address = context.as_ptr().addr();
        let found = Arc::new(AtomicUsize::new(0));
        let to = Arc::clone(&found);
        let probe = PyCFunction::new_closure(py, None, None, move |_, _| {
            // SAFETY: this thread's state. Its Context is among the first WORDS words in every version, and the search
            // ends there.
            let words = unsafe { own() }.cast::<usize>();
            // SAFETY: the search ends at this thread's own Context, which is among those words.
            let at = (1..WORDS).find(|&word| unsafe { words.add(word).read() } == address);
            to.store(at.unwrap_or(0), Ordering::Relaxed);
        })?;
        context.call_method1("run", (probe,))?;
        *offset = Some(found.load(Ordering::Relaxed)).filter(|&word| word > 0);
    }
    let [first, second] = offsets;
    Ok(first.filter(|_| first == second).map(|word| (word + 1) * size_of::<usize>()))
}

/// The request that is selected on this thread: its handler.
pub(super) fn selected(thread: &mut Thread) -> Option<Handler> {
    let asked = ASKED.get()?;
    if exit::is_closed() {
        return None;
    }
    // SAFETY: it may be called by any thread while Python runs: after its end `is_closed`. A thread's own state lives
    // until that thread gives it up, so its version may be read, which nobody else writes.
    let (own, version) = unsafe {
        let own = (asked.own)();
        if own.is_null() {
            return None;
        }
        (own, own.byte_add(asked.version_at).cast::<u64>().read())
    };
    // SAFETY: it may be called by any thread, and Python runs.
    let attached = || unsafe { (asked.attached)() };
    // From 3.12 on a thread asks for its own: one that is attached by another state is in another interpreter.
    let may_ask = match &asked.reader {
        Some(reader) if reader.is_of_any_thread() => true,
        Some(_) => [own, null()].contains(&attached()),
        None => attached() == own,
    };
    // What was found the last time is only for where nobody can be asked: whoever sets NumPy's variable itself, as
    // asgiref does to carry a Context on, changes no version.
    if thread.changes > 0 || !may_ask {
        let is_known = thread.state == own && thread.version == version;
        return if is_known { handler_of(thread.account) } else { None };
    }
    // SAFETY: this thread's state, and Python runs. Without a reader it is attached, so the thread has the GIL.
    let handler = unsafe {
        match &asked.reader {
            Some(reader) => read(asked, reader, own),
            None => ask(asked),
        }
    };
    remember(thread, own, version, handler)
}

/// The same where Python asks for a small object: then this thread has the GIL, and its state is the attached one.
pub(super) fn selected_for_object(thread: &mut Thread) -> Option<Handler> {
    let asked = ASKED.get()?;
    let Some(reader) = asked.reader.as_ref().filter(|_| thread.changes == 0 && !exit::is_closed()) else {
        return selected(thread);
    };
    // SAFETY: Python runs; a state that is attached to this thread lives, and so does its Context.
    unsafe {
        let attached = (asked.attached)();
        if attached.is_null() {
            return selected(thread);
        }
        let version = attached.byte_add(asked.version_at).cast::<u64>().read();
        remember(thread, attached, version, read(asked, reader, attached))
    }
}

#[inline]
fn remember(thread: &mut Thread, own: *const c_void, version: u64, handler: Option<Handler>) -> Option<Handler> {
    thread.state = own;
    thread.version = version;
    thread.account = handler.map_or(0, word_of);
    handler
}

/// What NumPy's variable has where this thread runs. `PyContextVar_Get` would have the variable keep what it finds:
/// also what a foreign `reset` is about to take away, which makes memory first.
///
/// # Safety
/// - `own` is this thread's state, and Python runs.
#[inline(always)]
unsafe fn read(asked: &Asked, reader: &Reader, own: *const c_void) -> Option<Handler> {
    // SAFETY: this function's contract. What the variable has lives as long as the Context, in which this thread is.
    unsafe { reader.value(own).and_then(|value| handler_in(asked, value.as_ptr())) }
}

/// Whether this thread has the GIL.
pub(super) fn is_attached() -> bool {
    let Some(asked) = ASKED.get().filter(|_| !exit::is_closed()) else { return false };
    // SAFETY: both may be called by any thread while Python runs.
    let (attached, own) = unsafe { ((asked.attached)(), (asked.own)()) };
    !own.is_null() && attached == own
}

/// # Safety
/// - this thread has the GIL.
unsafe fn ask(asked: &Asked) -> Option<Handler> {
    let mut capsule = null_mut();
    // SAFETY: the thread has the GIL. NumPy's variable has a default, so no exception is set; reading it allocates
    // nothing and calls nobody. The capsule is in the Context, so this reference is not the last.
    unsafe {
        if (asked.get)(asked.var.as_ptr(), null_mut(), &raw mut capsule) != 0 || capsule.is_null() {
            return None;
        }
        let handler = handler_in(asked, capsule);
        ffi::Py_DECREF(capsule);
        handler
    }
}

/// The request's handler in what NumPy's variable has. Needs no GIL.
///
/// # Safety
/// - `value` is an object that lives, and that nobody changes meanwhile. If it is a capsule of NumPy's name, it has
///   NumPy's struct.
#[inline(never)]
unsafe fn handler_in(asked: &Asked, value: *mut ffi::PyObject) -> Option<Handler> {
    // SAFETY: an object that lives and does not change (this function's contract).
    unsafe { asked.capsules.pointer_in(value) }.and_then(|c_struct| handler_at(c_struct.cast()))
}
