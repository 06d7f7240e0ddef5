//! Which functions ask Python for memory in a piece of code: those on the native stack of each block, up to Python's
//! loop. So functions are found that have no name.
//!
//! For that, others stand before Python's allocators for a moment. What a tool that came meanwhile has kept of them
//! stays valid: they are never freed.
#![allow(unsafe_code, reason = "CPython's allocators")]

use super::domains::{Domain, GET, MEM, OBJ, SET, domain_function};
use crate::os;
use crate::whole::{Allocator, Python as Loop};
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use std::ffi::{c_int, c_void};
use std::mem::transmute;
use std::ptr::null_mut;
use std::sync::{Mutex, PoisonError};

type Malloc = unsafe extern "C" fn(*mut c_void, usize) -> *mut c_void;
type Calloc = unsafe extern "C" fn(*mut c_void, usize, usize) -> *mut c_void;
type Realloc = unsafe extern "C" fn(*mut c_void, *mut c_void, usize) -> *mut c_void;
type Free = unsafe extern "C" fn(*mut c_void, *mut c_void);

/// What stands before an allocator of Python's. All that it does it leaves to that.
struct Watch {
    before: Allocator,
    python: Loop,
    /// The thread that is watched.
    thread: u32,
    /// Each function once; `None`: it has been taken away.
    found: Mutex<Option<Vec<usize>>>,
}

impl Watch {
    /// Puts it before the allocator of a domain.
    fn begin(_py: Python<'_>, domain: c_int, python: Loop, (get, set): (Domain, Domain)) -> &'static Self {
        let mut before = Allocator { words: [null_mut(); 5] };
        // SAFETY: a domain, and a place for its allocator; this thread has the GIL.
        unsafe { get(domain, &raw mut before) };
        let thread = os::thread_number();
        let watch: &Self = Box::leak(Box::new(Self { before, python, thread, found: Mutex::new(Some(Vec::new())) }));
        let mut own = watch.allocator();
        // SAFETY: this thread has the GIL; each block goes to its maker, also once this is taken away.
        unsafe { set(domain, &raw mut own) };
        watch
    }

    fn allocator(&'static self) -> Allocator {
        Allocator {
            words: [
                std::ptr::from_ref(self).cast_mut().cast(),
                malloc as Malloc as *mut c_void,
                calloc as Calloc as *mut c_void,
                realloc as Realloc as *mut c_void,
                free as Free as *mut c_void,
            ],
        }
    }

    /// Takes it away, unless somebody stands before it: then it passes on what it is asked for.
    fn end(&'static self, _py: Python<'_>, domain: c_int, (get, set): (Domain, Domain)) -> Vec<usize> {
        let (mut now, mut before) = (Allocator { words: [null_mut(); 5] }, self.before);
        // SAFETY: as in `begin`.
        unsafe {
            get(domain, &raw mut now);
            if now.words == self.allocator().words {
                set(domain, &raw mut before);
            }
        }
        self.found.lock().unwrap_or_else(PoisonError::into_inner).take().unwrap_or_default()
    }

    fn note(&self) {
        if os::thread_number() != self.thread {
            return;
        }
        if let Some(found) = &mut *self.found.lock().unwrap_or_else(PoisonError::into_inner) {
            for function in self.python.functions_between() {
                if !found.contains(&function) {
                    found.push(function);
                }
            }
        }
    }
}

/// # Safety
/// - `watch` is one: Python calls this with the `ctx` that it was given.
unsafe fn watch_at(watch: *mut c_void) -> &'static Watch {
    // SAFETY: a Watch (this function's contract), and it lives for ever.
    unsafe { &*watch.cast::<Watch>() }
}

/// # Safety
/// - as `malloc` of a PyMemAllocatorEx, whose `ctx` is a Watch. So are the others.
unsafe extern "C" fn malloc(watch: *mut c_void, size_bytes: usize) -> *mut c_void {
    // SAFETY: this function's contract; the function before it is called as Python would.
    unsafe {
        let watch = watch_at(watch);
        watch.note();
        let [context, malloc, ..] = watch.before.words;
        transmute::<*mut c_void, Malloc>(malloc)(context, size_bytes)
    }
}

/// # Safety
/// - see `malloc`.
unsafe extern "C" fn calloc(watch: *mut c_void, count: usize, size_bytes: usize) -> *mut c_void {
    // SAFETY: as in `malloc`.
    unsafe {
        let watch = watch_at(watch);
        watch.note();
        let [context, _, calloc, ..] = watch.before.words;
        transmute::<*mut c_void, Calloc>(calloc)(context, count, size_bytes)
    }
}

/// # Safety
/// - see `malloc`.
unsafe extern "C" fn realloc(watch: *mut c_void, block: *mut c_void, size_bytes: usize) -> *mut c_void {
    // SAFETY: as in `malloc`.
    unsafe {
        let watch = watch_at(watch);
        watch.note();
        let [context, _, _, realloc, _] = watch.before.words;
        transmute::<*mut c_void, Realloc>(realloc)(context, block, size_bytes)
    }
}

/// # Safety
/// - see `malloc`.
unsafe extern "C" fn free(watch: *mut c_void, block: *mut c_void) {
    // SAFETY: as in `malloc`.
    unsafe {
        let [context, .., free] = watch_at(watch).before.words;
        transmute::<*mut c_void, Free>(free)(context, block);
    }
}

/// The functions that ask Python for memory, and those that call them, up to the loop, while this is done.
pub(super) fn asking(py: Python<'_>, python: Loop, work: impl FnOnce() -> PyResult<()>) -> PyResult<Vec<usize>> {
    let function = |name| domain_function(name).map_err(PyRuntimeError::new_err);
    let functions = (function(GET)?, function(SET)?);
    let begun = [MEM, OBJ].map(|domain| (domain, Watch::begin(py, domain, python, functions)));
    let done = work();
    let found = begun.map(|(domain, watch)| watch.end(py, domain, functions)).concat();
    done.map(|()| found)
}
