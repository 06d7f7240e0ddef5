//! What the table is told of Python: how to attach to it, and how tracemalloc hears of Buffers.
//!
//! NumPy tells tracemalloc of its arrays itself, in a domain of its own, whatever handler made them; [`DOMAIN`] is for
//! what Rust and C own. Neither is counted twice.
#![allow(unsafe_code, reason = "CPython's C functions, found by name: in no limited API, but in every CPython")]

use super::exit;
use super::numpy::symbol;
use crate::handler::Table;
use crate::sync::Made;
use pyo3::exceptions::PyImportError;
use pyo3::ffi;
use pyo3::prelude::*;
use std::ffi::{c_int, c_uint, c_void};
use std::mem::MaybeUninit;

/// tracemalloc's domain of Buffers and of blocks from the C face: "cxal" in ASCII. NumPy's is 389047.
pub(super) const DOMAIN: c_uint = 0x6378_616c;

/// ImportError unless this is the main interpreter: what Python gives us lives as long as the process. The package asks
/// first, in `_main_interpreter.py`, before any class of ours is made; this is for builds of CPython where it cannot.
pub(super) fn require_main() -> PyResult<()> {
    // SAFETY: attached, as everybody is who imports a module.
    let interpreter = unsafe { ffi::PyInterpreterState_Get() };
    // SAFETY: the running interpreter. The main one has the number 0.
    if unsafe { ffi::PyInterpreterState_GetID(interpreter) } == 0 {
        return Ok(());
    }
    Err(PyImportError::new_err(
        "ctxalloc works in the main interpreter only, and this is a subinterpreter: import it in the main one",
    ))
}

/// Tells the table. Once, when the package is imported.
pub(super) fn announce(py: Python<'_>) -> PyResult<()> {
    let tracing: bool = py.import("tracemalloc")?.call_method0("is_tracing")?.extract()?;
    let tracer = Tracer::find(tracing).map(|tracer| TRACER.get_or_make(|| tracer));
    Table::install_python(attach, tracer.is_some().then_some(trace));
    Ok(())
}

/// # Safety
/// - `run` may be called with `data` on this thread, now.
unsafe extern "C" fn attach(run: unsafe extern "C" fn(data: *mut c_void), data: *mut c_void) {
    // SAFETY: passed on from the caller.
    let _ = exit::try_attach(|_| unsafe { run(data) });
}

static TRACER: Made<Tracer> = Made::new();

/// tracemalloc's functions, and how to see cheaply, without the GIL, that nobody traces.
struct Tracer {
    track: unsafe extern "C" fn(c_uint, usize, usize) -> c_int,
    untrack: unsafe extern "C" fn(c_uint, usize) -> c_int,
    get_allocator: unsafe extern "C" fn(c_int, *mut Allocator),
    /// The `malloc` of CPython's raw domain without tracemalloc, which puts its own there; unknown where it traced
    /// already when the package was imported.
    untraced: Option<*mut c_void>,
}

// SAFETY: functions, and an address that is only compared.
unsafe impl Send for Tracer {}
// SAFETY: as above.
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
        // SAFETY: fills the struct; may be called without the GIL.
        unsafe { (self.get_allocator)(PYMEM_DOMAIN_RAW, allocator.as_mut_ptr()) };
        // SAFETY: filled.
        unsafe { allocator.assume_init_ref() }.malloc
    }

    /// False where tracemalloc traces nothing for certain. True costs time and nothing else: others change that
    /// function too.
    fn may_trace(&self) -> bool {
        self.untraced != Some(self.raw_malloc())
    }
}

/// The table's `Trace`. Attaches only where somebody may trace.
unsafe extern "C" fn trace(block: *mut c_void, size_bytes: usize) {
    let Some(tracer) = TRACER.get() else { return };
    if exit::is_closed() || !tracer.may_trace() {
        return;
    }
    // Whether they trace is their answer, of no interest here: -2 where not.
    let _ = exit::try_attach(|_| {
        if size_bytes > 0 {
            // SAFETY: any address may be tracked; attached.
            unsafe { (tracer.track)(DOMAIN, block.addr(), size_bytes) }
        } else {
            // SAFETY: as above.
            unsafe { (tracer.untrack)(DOMAIN, block.addr()) }
        }
    });
}
