//! `request(whole=True)`: how it is begun, and Python's domains MEM and OBJ. Who is selected on a thread: `selected`.
#![allow(unsafe_code, reason = "CPython's thread state and allocators")]

use super::asyncio::losing::{self, loses_work};
use super::domains::{Domain, GET, MEM, OBJ, RAW, SET, domain_function};
use super::errors::with_cause;
use super::eval_loop::eval_loop;
use super::fragile::with_fragile;
use super::overdraft;
use super::preloaded::{Found, look_at_selections, preloaded};
use super::profile::placed;
use super::selected::{self, is_attached, selected, selected_for_object};
use super::symbol::symbol;
use super::uncaught::{self, with_uncaught};
use crate::sync::Made;
use crate::unattributed::nobodys_bytes;
use crate::whole::{Allocator, Binding, Kind, Library, Profile};
use crate::whole::{attach, attach_mappings, by_group, file_of};
use pyo3::exceptions::{PyAttributeError, PyImportError, PyRuntimeError};
use pyo3::ffi;
use pyo3::prelude::*;
use std::collections::BTreeMap;
use std::ffi::{c_int, c_void};
use std::mem::transmute;
use std::ptr::{null, null_mut};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// It is being enabled, or is: by one thread.
static IS_BEGUN: AtomicBool = AtomicBool::new(false);

/// All of it is in place.
static IS_COUNTING: AtomicBool = AtomicBool::new(false);

/// The library of C, which users preload.
static LIBRARY: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/libctxalloc_whole.so"));

/// The library that is to be preloaded.
#[pyfunction]
#[pyo3(name = "_whole_library")]
pub(super) fn library(py: Python<'_>) -> Option<Bound<'_, pyo3::types::PyBytes>> {
    Some(pyo3::types::PyBytes::new(py, LIBRARY))
}

/// How many bytes were asked for that no request was charged, since it was enabled.
#[pyfunction]
#[pyo3(name = "_whole_nobodys_bytes")]
pub(super) fn nobodys() -> u64 {
    nobodys_bytes()
}

/// The same by the threads that asked: by their pool's name, or by their library. None: it is not enabled.
#[pyfunction]
#[pyo3(name = "_whole_nobodys")]
pub(super) fn nobodys_by_group() -> Option<BTreeMap<String, u64>> {
    selected::is_prepared().then(by_group)
}

/// Begins to count for requests that ask for it. RuntimeError: it cannot be had here; it says why and what to do.
#[pyfunction]
#[pyo3(name = "_whole_enable")]
pub(super) fn enable(py: Python<'_>) -> PyResult<()> {
    let since = Instant::now();
    while IS_BEGUN.swap(true, Ordering::AcqRel) {
        if !IS_COUNTING.load(Ordering::Acquire) {
            // Another thread enables it, which lets others run meanwhile: a request that began now would miss blocks.
            wait_for_another(py, since)?;
            continue;
        }
        if !counts_objects() {
            return Err(PyRuntimeError::new_err(
                "request(whole=True) cannot be had any more: a tool has put another allocator of Python's in the place \
                 of ctxalloc's, as memray --trace-python-allocators does at its end where it was started first; start \
                 it after `import ctxalloc` with CTXALLOC_WHOLE=1",
            ));
        }
        return Ok(());
    }
    begin(py).inspect_err(|_| IS_BEGUN.store(false, Ordering::Release)).map_err(|why| why.into_error(py))
}

/// Lets another thread enable it, for a moment; not for ever, since that one may not be there, in a child of `fork`.
fn wait_for_another(py: Python<'_>, since: Instant) -> PyResult<()> {
    const LONG: Duration = Duration::from_secs(10);
    if since.elapsed() > LONG {
        return Err(PyRuntimeError::new_err(
            "request(whole=True) cannot be had: another thread has been making it ready for ten seconds; enable it \
             before threads start and the process forks, by CTXALLOC_WHOLE=1 in the environment",
        ));
    }
    py.detach(|| thread::sleep(Duration::from_millis(1)));
    py.check_signals()
}

/// Why the library is not there, and what to do.
fn not_loaded(py: Python<'_>) -> PyResult<&'static str> {
    Ok(if environment(py, "LD_PRELOAD")?.contains("libctxalloc_whole") {
        "LD_PRELOAD names its library, but that is not loaded: where the file does not exist or cannot be read, where \
         Python is linked statically or runs with more rights than the user, and where LD_PRELOAD was set after the \
         start, it has no effect"
    } else {
        "its library is not loaded. Start the program by `ctxalloc run --whole`, or with \
         LD_PRELOAD=\"$(python -m ctxalloc whole)\" in the environment"
    })
}

/// Whether what Python's allocator is asked for on this thread is counted. What this takes itself is not: far from a
/// look, which draws a number anew that may be what it was.
fn counts_objects() -> bool {
    const BYTES: usize = 64;
    const FAR: i64 = 1 << 20;
    let Some(preloaded) = preloaded().library() else { return false };
    let replace_left = |left| {
        // SAFETY: this thread's struct, which lives as long as the thread; nobody else has a reference to it here.
        unsafe { &mut *(preloaded.library.thread)() }.replace_left(left)
    };
    let before = replace_left(FAR);
    // SAFETY: this thread has the GIL, as its caller shows; NULL may be freed too.
    unsafe { ffi::PyObject_Free(ffi::PyObject_Malloc(BYTES)) };
    replace_left(before) != FAR
}

/// What the environment says; empty: nothing.
fn environment(py: Python<'_>, name: &str) -> PyResult<String> {
    py.import("os")?.getattr("environ")?.call_method1("get", (name, ""))?.extract()
}

/// Why it cannot be had.
enum Why {
    Text(String),
    /// Python was asked something, and raised this.
    Raised(PyErr),
}

impl Why {
    /// A RuntimeError, also where a module has not what is asked of it. Anything else that Python raised is not about
    /// this, but a signal handler's, an interrupt, or no memory: as it is.
    fn into_error(self, py: Python<'_>) -> PyErr {
        let (text, cause) = match self {
            Self::Text(text) => (text, None),
            Self::Raised(error) if !is_of_a_module(py, &error) => return error,
            Self::Raised(error) => (error.to_string(), Some(error)),
        };
        let error = PyRuntimeError::new_err(format!("request(whole=True) cannot be had in this process: {text}"));
        match cause {
            Some(cause) => with_cause(py, error, cause),
            None => error,
        }
    }
}

fn is_of_a_module(py: Python<'_>, error: &PyErr) -> bool {
    error.is_instance_of::<PyImportError>(py) || error.is_instance_of::<PyAttributeError>(py)
}

impl From<String> for Why {
    fn from(text: String) -> Self {
        Self::Text(text)
    }
}

impl From<&str> for Why {
    fn from(text: &str) -> Self {
        Self::Text(text.into())
    }
}

impl From<PyErr> for Why {
    fn from(error: PyErr) -> Self {
        Self::Raised(error)
    }
}

fn begin(py: Python<'_>) -> Result<(), Why> {
    let preloaded = match preloaded() {
        Found::Here(preloaded) => preloaded,
        Found::OfAnotherVersion => {
            return Err("the library in LD_PRELOAD is of another version of ctxalloc: name that which \
                        `python -m ctxalloc whole` prints now"
                .into());
        }
        Found::Nothing => return Err(not_loaded(py)?.into()),
    };
    if !preloaded.is_first {
        return Err("another library stands before it: name ctxalloc's first in LD_PRELOAD".into());
    }
    let sysconfig = py.import("sysconfig")?;
    let no_gil = sysconfig.call_method1("get_config_var", ("Py_GIL_DISABLED",))?;
    if no_gil.is_truthy()? {
        return Err("this Python is free-threaded: its collector finds objects only in its own memory".into());
    }
    let tracing = py.import("tracemalloc").and_then(|module| module.call_method0("is_tracing")?.is_truthy());
    if tracing? {
        return Err("tracemalloc is tracing, and would take its hooks away when it stops: start it afterwards".into());
    }
    if environment(py, "PYTHONMALLOC")?.starts_with("mimalloc") {
        return Err("PYTHONMALLOC=mimalloc takes Python's objects from an allocator of its own: leave it out".into());
    }
    let counts_mappings = match environment(py, "CTXALLOC_WHOLE_MMAP")?.as_str() {
        "" | "0" => false,
        "1" => true,
        other => return Err(format!("the environment says CTXALLOC_WHOLE_MMAP={other:?}; give 1, or remove it").into()),
    };
    let arenas = counts_mappings.then(arenas).transpose()?;
    let remembers = selected::prepare(py)??;
    let domains = Domains::found(py)?;
    let makers = domains.as_ref().map_or([null_mut(); 6], Domains::makers);
    let python = match eval_loop(py)? {
        Some(python) => {
            let asking = uncaught::asking(py, python)?;
            let python = with_uncaught(py, with_fragile(py, python, &asking)?, &asking)?;
            Some(python.with_allocator(makers))
        }
        None => None,
    };
    losing::prepare(py)?;
    overdraft::prepare(py, python, is_attached, selected)?;
    let profile = Profile { made: placed::made, freed: placed::freed, resized: placed::resized };
    let (overdrawn, tells_soon, owes) = (overdraft::overdrawn, overdraft::tells_soon, overdraft::raise);
    let (runs, still_imports) = (overdraft::runs, overdraft::still_imports);
    let binding = Binding {
        selected,
        selected_for_object,
        overdrawn,
        tells_soon,
        runs,
        owes,
        is_observing: overdraft::is_observing,
        is_raising: overdraft::is_raising,
        still_imports,
        remembers,
        python,
        loses_work,
        is_behind_a_tool,
        profile,
    };
    let get = domain_function(GET)?;
    let before = makers_of_objects(get);
    attach(&preloaded.library, binding)?;
    if let Some(arenas) = arenas {
        attach_mappings(&preloaded.library, arenas);
    }
    if let Some(domains) = domains {
        domains.hook(py, &preloaded.library);
    }
    OBJECTS.get_or_make(|| Objects { get, known: [before, makers_of_objects(get)] });
    look_at_selections(selected::look_anew);
    IS_COUNTING.store(true, Ordering::Release);
    Ok(())
}

/// CPython's `PyObjectArenaAllocator`.
#[repr(C)]
struct Arenas {
    ctx: *mut c_void,
    alloc: *const c_void,
    free: *const c_void,
}

/// The function that maps memory for Python's allocator of small objects.
fn arenas() -> Result<*const c_void, Why> {
    let get = symbol(c"PyObject_GetArenaAllocator").ok_or("this Python has no PyObject_GetArenaAllocator")?;
    let mut own = Arenas { ctx: null_mut(), alloc: null(), free: null() };
    // SAFETY: `void PyObject_GetArenaAllocator(PyObjectArenaAllocator *)`, with a place for the answer, and the GIL.
    unsafe { transmute::<*mut c_void, unsafe extern "C" fn(*mut Arenas)>(get)(&raw mut own) };
    Ok(own.alloc)
}

/// Who makes Python's objects: Python itself or we, unless a tool stands before us.
struct Objects {
    get: Domain,
    /// The addresses of `malloc` without our hooks and with them.
    known: [usize; 2],
}

static OBJECTS: Made<Objects> = Made::new();

fn makers_of_objects(get: Domain) -> usize {
    let mut now = Allocator { words: [null_mut(); 5] };
    // SAFETY: a domain, and a place for its allocator; Python copies it under a lock that it holds for nothing else.
    unsafe { get(OBJ, &raw mut now) };
    now.words[1].addr()
}

/// See [`Binding`]. It allocates nothing.
fn is_behind_a_tool() -> bool {
    OBJECTS.get().is_some_and(|objects| !objects.known.contains(&makers_of_objects(objects.get)))
}

/// Python's domains and their allocators.
struct Domains {
    set: Domain,
    own: [(Kind, c_int, Allocator); 2],
    /// The domain RAW, where the other two are Python's allocator of small objects, which gives that each block that it
    /// does not know.
    raw: Option<Allocator>,
}

impl Domains {
    /// `None`: Python's objects come from malloc, which counts them already.
    fn found(py: Python<'_>) -> Result<Option<Self>, Why> {
        if environment(py, "PYTHONMALLOC")?.starts_with("malloc") {
            return Ok(None);
        }
        let (get, set) = (domain_function(GET)?, domain_function(SET)?);
        let of = |domain| {
            let mut own = Allocator { words: [null_mut(); 5] };
            // SAFETY: a domain, and a place for its allocator; this thread has the GIL.
            unsafe { get(domain, &raw mut own) };
            own
        };
        let own = [(Kind::Mem, MEM), (Kind::Obj, OBJ)].map(|(kind, domain)| (kind, domain, of(domain)));
        // What has a `ctx` or is in another library stands before Python's own: its debug hooks, memray.
        let python = file_of(get as *const c_void);
        let is_pythons = |own: &Allocator| {
            own.words[0].is_null() && own.words[1..].iter().all(|&function| file_of(function) == python)
        };
        let raw = of(RAW);
        let are_pythons = is_pythons(&raw) && own.iter().all(|(.., own)| is_pythons(own));
        Ok(Some(Self { set, own, raw: are_pythons.then_some(raw) }))
    }

    /// The functions that make and resize: `malloc`, `calloc` and `realloc`, behind `ctx`.
    fn makers(&self) -> [*mut c_void; 6] {
        let [(.., mem), (.., obj)] = &self.own;
        let of = |at: usize| if at < 3 { mem.words[1 + at] } else { obj.words[at - 2] };
        std::array::from_fn(of)
    }

    /// Puts the hooks in their places.
    fn hook(self, _py: Python<'_>, library: &Library) {
        for (kind, domain, own) in self.own {
            let mut hook = own;
            // SAFETY: called with the GIL, as the argument shows. The hooks pass on what they do not place, so blocks
            // of before are freed by their maker.
            unsafe {
                let raw = self.raw.as_ref().map_or(null(), std::ptr::from_ref);
                (library.hook)(kind as u32, &raw const own, raw, &raw mut hook);
                (self.set)(domain, &raw mut hook);
            }
        }
    }
}
