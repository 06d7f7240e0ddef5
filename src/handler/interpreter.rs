//! What the table knows of Python: two functions that the Python layer installs there. In a process without Python
//! there are none.
//!
//! They are in the table, not in a static: copies of this crate in other extension modules find them too.

use crate::sync::{AtomicPtr, Ordering};
use std::ffi::c_void;
use std::ptr::null_mut;

/// Runs `run(data)` on this thread, attached to Python, before it returns. Not at all once Python is shutting down.
pub(crate) type Attach = unsafe extern "C" fn(run: unsafe extern "C" fn(data: *mut c_void), data: *mut c_void);

/// Tells tracemalloc that a block is there (`block`, `size_bytes`), or gone (`block`, 0).
pub(crate) type Trace = unsafe extern "C" fn(block: *mut c_void, size_bytes: usize);

/// The two functions. Laid out for C: part of the table.
#[repr(C)]
pub(super) struct Interpreter {
    attach: AtomicPtr<c_void>,
    trace: AtomicPtr<c_void>,
}

impl Interpreter {
    pub(super) fn none() -> Self {
        Self { attach: AtomicPtr::new(null_mut()), trace: AtomicPtr::new(null_mut()) }
    }

    /// Installs Python's callbacks. They stay callable for ever.
    #[cfg(feature = "python")]
    pub(super) fn install(&self, attach: Attach, trace: Option<Trace>) {
        // Release pairs with the loads below, though the functions are there all the time.
        self.trace.store(trace.map_or(null_mut(), |trace| trace as *mut c_void), Ordering::Release);
        self.attach.store(attach as *mut c_void, Ordering::Release);
    }

    /// Runs `work` attached to Python, or as it is in a process without Python. `None`: Python is shutting down, and
    /// `work` did not run. `work` must not panic.
    pub(super) fn attached<R, W: FnOnce() -> R>(&self, work: W) -> Option<R> {
        struct Job<W, R> {
            work: Option<W>,
            answer: Option<R>,
        }
        /// # Safety
        /// - `data` is a `Job` of these types that nobody else looks at.
        unsafe extern "C" fn run<R, W: FnOnce() -> R>(data: *mut c_void) {
            // SAFETY: `attached` below passes its own job, of these types, and does not touch it until `attach`
            // returns.
            let job = unsafe { &mut *data.cast::<Job<W, R>>() };
            job.answer = job.work.take().map(|work| work());
        }
        let attach = self.attach.load(Ordering::Acquire);
        if attach.is_null() {
            return Some(work());
        }
        let mut job = Job { work: Some(work), answer: None };
        // SAFETY: `install` alone stores non-NULL pointers here, of functions of this type. `run` gets a job of its own
        // types, which lives on this thread's stack until `attach` returns.
        unsafe {
            let attach = std::mem::transmute::<*mut c_void, Attach>(attach);
            attach(run::<R, W>, (&raw mut job).cast());
        }
        job.answer
    }

    /// Tells tracemalloc, where there is Python, of a block that is there (`size_bytes > 0`) or gone (0).
    #[inline]
    pub(super) fn trace(&self, block: *mut u8, size_bytes: usize) {
        let trace = self.trace.load(Ordering::Acquire);
        if !trace.is_null() {
            // SAFETY: `install` alone stores non-NULL pointers here, of functions of this type; it takes any address.
            unsafe {
                let trace = std::mem::transmute::<*mut c_void, Trace>(trace);
                trace(block.cast(), size_bytes);
            }
        }
    }
}
