//! What the table knows of Python: two functions that the Python face puts there, and nothing in a process without it.
//!
//! They stand in the table, not in a static: copies of this crate in other extension modules find them too.

use super::table::table;
use crate::sync::{AtomicPtr, Ordering};
use std::ffi::c_void;
use std::ptr::null_mut;

/// Runs `run(data)` on this thread, attached to Python, before it returns. Not at all once Python is shutting down.
pub(crate) type Attach = unsafe extern "C" fn(run: unsafe extern "C" fn(data: *mut c_void), data: *mut c_void);

/// Tells tracemalloc of a Buffer's block: that it is there (`block`, `size_bytes`), or gone (`block`, 0).
pub(crate) type Trace = unsafe extern "C" fn(block: *mut c_void, size_bytes: usize);

/// The functions, as they stand in the table.
#[repr(C)]
pub(super) struct Interpreter {
    attach: AtomicPtr<c_void>,
    trace: AtomicPtr<c_void>,
}

impl Interpreter {
    pub(super) fn none() -> Self {
        Self { attach: AtomicPtr::new(null_mut()), trace: AtomicPtr::new(null_mut()) }
    }
}

/// From now on there is Python. The functions stay callable for ever.
#[cfg(feature = "python")]
pub(crate) fn is_there(attach: Attach, trace: Option<Trace>) {
    let place = &table().interpreter;
    // Release pairs with the loads below, though functions are there all the time.
    place.trace.store(trace.map_or(null_mut(), |trace| trace as *mut c_void), Ordering::Release);
    place.attach.store(attach as *mut c_void, Ordering::Release);
}

/// Runs `work` attached to Python, or as it is in a process without; nothing where Python is shutting down. `work` must
/// not panic.
pub(crate) fn attached<R, W: FnOnce() -> R>(work: W) -> Option<R> {
    struct Job<W, R> {
        work: Option<W>,
        answer: Option<R>,
    }
    /// # Safety
    /// - `data` is a `Job` of these types that nobody else looks at.
    unsafe extern "C" fn run<R, W: FnOnce() -> R>(data: *mut c_void) {
        // SAFETY: says the caller.
        let job = unsafe { &mut *data.cast::<Job<W, R>>() };
        job.answer = job.work.take().map(|work| work());
    }
    let attach = table().interpreter.attach.load(Ordering::Acquire);
    if attach.is_null() {
        return Some(work());
    }
    // SAFETY: only `is_there` puts pointers here, of functions of this type.
    let attach = unsafe { std::mem::transmute::<*mut c_void, Attach>(attach) };
    let mut job = Job { work: Some(work), answer: None };
    // SAFETY: a job of these types, on this thread only, and alive until `attach` returns.
    unsafe { attach(run::<R, W>, (&raw mut job).cast()) };
    job.answer
}

/// Tells tracemalloc, where there is Python, of a block that is there (`size_bytes > 0`) or gone (0).
#[inline]
pub(crate) fn trace(block: *mut u8, size_bytes: usize) {
    let trace = table().interpreter.trace.load(Ordering::Acquire);
    if !trace.is_null() {
        // SAFETY: only `is_there` puts pointers here, of functions of this type.
        let trace = unsafe { std::mem::transmute::<*mut c_void, Trace>(trace) };
        // SAFETY: it takes any address.
        unsafe { trace(block.cast(), size_bytes) }
    }
}
