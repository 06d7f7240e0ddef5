//! What the table learns of Python: how to attach to it, and how tracemalloc learns of Buffers.
//!
//! NumPy itself tells tracemalloc of its arrays, whatever handler made them, in a domain of its own. [`DOMAIN`] is for
//! what Rust and C own, so that nothing is counted twice.
#![allow(unsafe_code, reason = "CPython's C functions, found by name: in no limited API, but in every CPython")]

use super::exit;
use super::symbol::symbol;
use crate::handler::Table;
use crate::sync::Made;
use pyo3::exceptions::PyImportError;
use pyo3::ffi;
use pyo3::prelude::*;
use std::ffi::{c_int, c_uint, c_void};
use std::mem::MaybeUninit;

/// tracemalloc's domain of Buffers and of blocks from the C API: "cxal" in ASCII. NumPy's is 389047.
pub(super) const DOMAIN: c_uint = 0x6378_616c;

/// ImportError unless this is the main interpreter: what we keep of Python is kept as long as the process. The package
/// checks first, in `_main_interpreter.py`, before any class of ours is made; this check is for builds of CPython where
/// that one cannot be made.
pub(super) fn require_main() -> PyResult<()> {
    // SAFETY: this thread is attached, as it is importing a module, so there is a running interpreter to ask.
    let number = unsafe { ffi::PyInterpreterState_GetID(ffi::PyInterpreterState_Get()) };
    if number == 0 {
        return Ok(());
    }
    Err(PyImportError::new_err(
        "ctxalloc works in the main interpreter only, and this is a subinterpreter: import it in the main one",
    ))
}

/// Gives the table its two functions. Called once, when the package is imported.
pub(super) fn announce(py: Python<'_>) -> PyResult<()> {
    let tracing: bool = py.import("tracemalloc")?.call_method0("is_tracing")?.extract()?;
    let tracer = Tracer::find(tracing).map(|tracer| TRACER.get_or_make(|| tracer));
    Table::install_python(attach, tracer.is_some().then_some(trace));
    Ok(())
}

/// Calls `run` attached to Python; not at all once Python exits.
///
/// # Safety
/// - `run` may be called with `data`, on this thread, before this function returns.
unsafe extern "C" fn attach(run: unsafe extern "C" fn(data: *mut c_void), data: *mut c_void) {
    // SAFETY: `run` is called once, with its `data`, on this thread, as this function's own contract allows.
    let _ = exit::try_attach(|_| unsafe { run(data) });
}

static TRACER: Made<Tracer> = Made::new();

/// tracemalloc's functions, and what tells cheaply, without the GIL, that it is not tracing.
struct Tracer {
    track: unsafe extern "C" fn(c_uint, usize, usize) -> c_int,
    untrack: unsafe extern "C" fn(c_uint, usize) -> c_int,
    get_allocator: unsafe extern "C" fn(c_int, *mut Allocator),
    /// The `malloc` of CPython's raw domain while tracemalloc is off: when it starts it puts its own there. None if it
    /// was tracing already when the package was imported.
    untraced: Option<*mut c_void>,
}

// SAFETY: C functions may be called from any thread, and `untraced` is compared, never read through.
unsafe impl Send for Tracer {}
// SAFETY: nothing in it changes after it is made, so threads only read it.
unsafe impl Sync for Tracer {}

/// CPython's `PyMemAllocatorEx`.
#[repr(C)]
struct Allocator {
    ctx: *mut c_void,
    malloc: *mut c_void,
    calloc: *mut c_void,
    realloc: *mut c_void,
    free: *mut c_void,
}

impl Tracer {
    fn find(tracing: bool) -> Option<Self> {
        let (track, untrack) = (symbol(c"PyTraceMalloc_Track")?, symbol(c"PyTraceMalloc_Untrack")?);
        let get_allocator = symbol(c"PyMem_GetAllocator")?;
        let mut tracer = Self {
            // SAFETY: `int PyTraceMalloc_Track(unsigned int, uintptr_t, size_t)` since CPython 3.7.
            track: unsafe {
                std::mem::transmute::<*mut c_void, unsafe extern "C" fn(c_uint, usize, usize) -> c_int>(track)
            },
            // SAFETY: `int PyTraceMalloc_Untrack(unsigned int, uintptr_t)` since CPython 3.7.
            untrack: unsafe {
                std::mem::transmute::<*mut c_void, unsafe extern "C" fn(c_uint, usize) -> c_int>(untrack)
            },
            // SAFETY: `void PyMem_GetAllocator(PyMemAllocatorDomain, PyMemAllocatorEx *)` since CPython 3.5.
            get_allocator: unsafe {
                std::mem::transmute::<*mut c_void, unsafe extern "C" fn(c_int, *mut Allocator)>(get_allocator)
            },
            untraced: None,
        };
        tracer.untraced = (!tracing).then(|| tracer.raw_malloc());
        Some(tracer)
    }

    fn raw_malloc(&self) -> *mut c_void {
        const PYMEM_DOMAIN_RAW: c_int = 0;
        let mut allocator = MaybeUninit::uninit();
        // SAFETY: `PyMem_GetAllocator` may be called without the GIL, and writes all of the struct.
        unsafe {
            (self.get_allocator)(PYMEM_DOMAIN_RAW, allocator.as_mut_ptr());
            allocator.assume_init_ref().malloc
        }
    }

    /// False if tracemalloc is certainly off. True may be wrong, as others replace that `malloc` too; that costs only
    /// time.
    fn may_trace(&self) -> bool {
        self.untraced != Some(self.raw_malloc())
    }
}

/// The table's `Trace`. It attaches only where tracemalloc may be on.
unsafe extern "C" fn trace(block: *mut c_void, size_bytes: usize) {
    let Some(tracer) = TRACER.get() else { return };
    if exit::is_closed() || !tracer.may_trace() {
        return;
    }
    // SAFETY: attached; both functions take any number as an address, and dereference none. What they return (-2 where
    // tracemalloc is off) is of no use here.
    let _ = exit::try_attach(|_| unsafe {
        if size_bytes > 0 {
            (tracer.track)(DOMAIN, block.addr(), size_bytes)
        } else {
            (tracer.untrack)(DOMAIN, block.addr())
        }
    });
}
