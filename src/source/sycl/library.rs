//! The functions of dpctl's C library that this folder uses, each looked up once. Their types are those of dpctl's
//! `syclinterface` headers, unchanged from 0.17 to 0.22.

use crate::error::Error;
use crate::os;
use crate::sync::Made;
use libloading::Library;
use std::ffi::{c_char, c_int, c_void};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::sleep;
use std::time::{Duration, Instant};

/// Any of the library's opaque handles.
pub(super) type Ref = *mut c_void;

/// dpctl's C library, loaded for as long as the process lives.
#[derive(Debug)]
pub struct Runtime {
    pub(super) functions: Functions,
    path: PathBuf,
    /// The process that loaded it. SYCL's threads do not survive `fork`, so a child must not call it.
    process: u32,
}

static LOADED: Made<Runtime> = Made::new();

/// Set in a child of the process that loaded SYCL, by the child's only thread before anything else runs there (hence
/// Relaxed). Never cleared.
static FORKED: AtomicBool = AtomicBool::new(false);

/// Set when the process exits: SYCL shuts down and must not be called any more. Never cleared.
static ENDED: AtomicBool = AtomicBool::new(false);

macro_rules! functions {
    ($($field:ident = $name:literal: fn($($argument:ty),*) $(-> $answer:ty)?;)*) => {
        #[derive(Debug)]
        pub(super) struct Functions {
            $(pub(super) $field: unsafe extern "C" fn($($argument),*) $(-> $answer)?,)*
        }

        impl Functions {
            /// # Safety
            /// - `library` is dpctl's: its functions have these types.
            unsafe fn of(library: &Library) -> Result<Self, libloading::Error> {
                Ok(Self {
                    $($field: {
                        // SAFETY: the library is dpctl's (this function's contract), whose headers declare this type.
                        let symbol = unsafe {
                            library.get::<unsafe extern "C" fn($($argument),*) $(-> $answer)?>(concat!($name, "\0").as_bytes())
                        };
                        *symbol?
                    },)*
                })
            }
        }
    };
}

functions! {
    default_selector = "DPCTLDefaultSelector_Create": fn() -> Ref;
    filter_selector = "DPCTLFilterSelector_Create": fn(*const c_char) -> Ref;
    delete_selector = "DPCTLDeviceSelector_Delete": fn(Ref);
    device_from = "DPCTLDevice_CreateFromSelector": fn(Ref) -> Ref;
    has_aspect = "DPCTLDevice_HasAspect": fn(Ref, c_int) -> bool;
    device_name = "DPCTLDevice_GetName": fn(Ref) -> *mut c_char;
    delete_text = "DPCTLCString_Delete": fn(*mut c_char);
    delete_device = "DPCTLDevice_Delete": fn(Ref);
    queue_for = "DPCTLQueue_CreateForDevice": fn(Ref, Ref, c_int) -> Ref;
    copy_queue = "DPCTLQueue_Copy": fn(Ref) -> Ref;
    same_queue = "DPCTLQueue_AreEq": fn(Ref, Ref) -> bool;
    queue_device = "DPCTLQueue_GetDevice": fn(Ref) -> Ref;
    same_device = "DPCTLDevice_AreEq": fn(Ref, Ref) -> bool;
    queue_context = "DPCTLQueue_GetContext": fn(Ref) -> Ref;
    same_context = "DPCTLContext_AreEq": fn(Ref, Ref) -> bool;
    context_devices = "DPCTLContext_DeviceCount": fn(Ref) -> usize;
    delete_context = "DPCTLContext_Delete": fn(Ref);
    wait = "DPCTLQueue_Wait": fn(Ref);
    memcpy = "DPCTLQueue_Memcpy": fn(Ref, *mut c_void, *const c_void, usize) -> Ref;
    memset = "DPCTLQueue_Memset": fn(Ref, *mut c_void, u8, usize) -> Ref;
    delete_queue = "DPCTLQueue_Delete": fn(Ref);
    allocate_device = "DPCTLaligned_alloc_device": fn(usize, usize, Ref) -> Ref;
    allocate_shared = "DPCTLaligned_alloc_shared": fn(usize, usize, Ref) -> Ref;
    allocate_host = "DPCTLaligned_alloc_host": fn(usize, usize, Ref) -> Ref;
    free = "DPCTLfree_with_queue": fn(Ref, Ref);
    pointer_type = "DPCTLUSM_GetPointerType": fn(*const c_void, Ref) -> c_int;
    wait_for = "DPCTLEvent_Wait": fn(Ref);
    delete_event = "DPCTLEvent_Delete": fn(Ref);
}

impl Runtime {
    /// Loads the library at `path`: `libDPCTLSyclInterface.so` in the folder of the Python package dpctl. It is loaded
    /// once per process; later calls return the one that is loaded.
    ///
    /// # Errors
    /// [`Error::Sycl`] if there is no library at `path`, or it is not dpctl's.
    ///
    /// # Safety
    /// - a library at `path` that has dpctl's symbols is dpctl's (0.17 or later).
    pub unsafe fn load(path: &Path) -> Result<&'static Self, Error> {
        if let Some(loaded) = LOADED.get() {
            return Ok(loaded);
        }
        let failed = |error: libloading::Error| Error::Sycl {
            what: format!("dpctl's library could not be loaded from {}: {error}", path.display()),
            advice: "install the extra that brings it: pip install ctxalloc[usm]",
        };
        // SAFETY: a library with these symbols is dpctl's (this function's contract), whose initialisers may run here.
        let (library, functions) = unsafe {
            let library = Library::new(path).map_err(failed)?;
            let functions = Functions::of(&library).map_err(failed)?;
            (library, functions)
        };
        std::mem::forget(library); // never unloaded: its functions stay callable
        // A flag instead of comparing `getpid`, which is a system call, before each call of SYCL.
        if !os::at_fork(None, None, Some(forked)) {
            return Err(Error::Sycl {
                what: "no memory to learn of forks, in which SYCL must not be called".into(),
                advice: "free something",
            });
        }
        // Runs before SYCL's own exit function, which was registered when the library was loaded. If there is no room
        // for one more, memory freed at the very end is not protected. Racing threads may each register it; a second
        // run does nothing.
        // SAFETY: `end` takes nothing, and this code is never unloaded.
        let _ = unsafe { libc::atexit(end) };
        Ok(LOADED.get_or_make(|| Self { functions, path: path.into(), process: std::process::id() }))
    }

    /// Where the library was loaded from.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether SYCL may be called: not in a child of `fork`, and not while the process ends.
    #[expect(clippy::unused_self, reason = "there is something to be used")]
    pub(super) fn is_usable(&self) -> bool {
        !ENDED.load(Ordering::SeqCst) && !FORKED.load(Ordering::Relaxed)
    }

    /// # Errors
    /// [`Error::Sycl`] if SYCL must not be called.
    pub(super) fn require_usable(&self) -> Result<(), Error> {
        if self.is_usable() { Ok(()) } else { Err(self.unusable()) }
    }

    /// Why SYCL must not be called.
    pub(super) fn unusable(&self) -> Error {
        Error::Sycl {
            what: format!(
                "SYCL cannot be used in process {}, a fork of {} or at its end",
                std::process::id(),
                self.process
            ),
            advice: "start workers with multiprocessing's 'spawn' or 'forkserver'",
        }
    }
}

/// The number of submitted operations that have not finished, and of calls of SYCL under way.
pub(super) static PENDING: AtomicUsize = AtomicUsize::new(0);

/// How long the exit of the process waits for pending operations.
const PATIENCE: Duration = Duration::from_secs(10);

extern "C" fn forked() {
    FORKED.store(true, Ordering::Relaxed);
}

/// Waits for pending work: otherwise SYCL would shut down under it and end the process by a pure virtual call.
extern "C" fn end() {
    let begun = Instant::now();
    // Acquire pairs with the Release of a `Hold`'s drop. In a child of `fork` nothing is waited for: the parent's work
    // never finishes there.
    let is_ours = LOADED.get().is_some_and(Runtime::is_usable);
    while is_ours && PENDING.load(Ordering::Acquire) > 0 && begun.elapsed() < PATIENCE {
        sleep(Duration::from_millis(1));
    }
    // A caller of SYCL increments PENDING and then reads ENDED (`Queue::begin_call`). Here ENDED is stored, and then
    // PENDING is read. All four are SeqCst, so at least one of the two sees the other.
    ENDED.store(true, Ordering::SeqCst);
    let begun = Instant::now(); // a thread that never stops had all of the first: its last call is waited for too
    while is_ours && PENDING.load(Ordering::SeqCst) > 0 && begun.elapsed() < PATIENCE {
        sleep(Duration::from_millis(1));
    }
}
