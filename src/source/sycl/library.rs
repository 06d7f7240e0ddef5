//! The functions of dpctl's C library that are used here, each looked up once. Their shapes are those of dpctl's
//! `syclinterface` headers, unchanged from 0.17 to 0.22.

use crate::error::Error;
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
    /// SYCL's threads do not survive `fork`: a child must not call it.
    process: u32,
}

static LOADED: Made<Runtime> = Made::new();

/// This process is a child of the one that loaded SYCL. Set on the one thread that a child begins with, before anything
/// else runs there; so Relaxed.
static FORKED: AtomicBool = AtomicBool::new(false);

/// The process is on its way out: SYCL takes itself down, and is not called any more.
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
                        // SAFETY: dpctl declares it so in its headers.
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
    /// Loads the library at `path`: `libDPCTLSyclInterface.so` in the folder of the Python package dpctl. Once for a
    /// process: what is loaded already is the answer to every later call.
    ///
    /// # Errors
    /// [`Error::Sycl`]: there is none at `path`, or it is not dpctl's.
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
        // SAFETY: its initialisers are dpctl's, says the caller.
        let library = unsafe { Library::new(path) }.map_err(failed)?;
        // SAFETY: as above.
        let functions = unsafe { Functions::of(&library) }.map_err(failed)?;
        std::mem::forget(library); // its functions stay callable for ever
        // A flag, since SYCL is about to be called often, and `getpid` is a call of the system's.
        // SAFETY: a function of this process, for ever, which stores to a static and nothing else.
        if unsafe { libc::pthread_atfork(None, None, Some(forked)) } != 0 {
            return Err(Error::Sycl {
                what: "no memory to learn of forks, in which SYCL must not be called".into(),
                advice: "free something",
            });
        }
        // Called before SYCL's own, which stands in the list since the library was loaded. Where there is no room for one
        // more, memory that is freed at the very end is not protected. Racers may each enter it; a second call does nothing.
        // SAFETY: a function of this process, for ever.
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

    /// What to say where it is not.
    pub(super) fn require_usable(&self) -> Result<(), Error> {
        if self.is_usable() {
            return Ok(());
        }
        Err(Error::Sycl {
            what: format!(
                "SYCL cannot be used in process {}, a fork of {} or at its end",
                std::process::id(),
                self.process
            ),
            advice: "start workers with multiprocessing's 'spawn' or 'forkserver'",
        })
    }
}

/// What was submitted and is not over.
pub(super) static PENDING: AtomicUsize = AtomicUsize::new(0);

/// How long the end of the process waits for what is pending.
const PATIENCE: Duration = Duration::from_secs(10);

extern "C" fn forked() {
    FORKED.store(true, Ordering::Relaxed);
}

/// SYCL would take itself down under its own running work, and the process with it (a pure virtual call).
extern "C" fn end() {
    let begun = Instant::now();
    // Acquire pairs with the Release of an event's end. In a child of `fork` what the parent waits for never ends here.
    let is_ours = LOADED.get().is_some_and(Runtime::is_usable);
    while is_ours && PENDING.load(Ordering::Acquire) > 0 && begun.elapsed() < PATIENCE {
        sleep(Duration::from_millis(1));
    }
    // Who calls SYCL counts itself first and looks at the flag then (`Queue::begin_call`); here it is the other way round. In
    // one order of all four, one of the two sees the other.
    ENDED.store(true, Ordering::SeqCst);
    while is_ours && PENDING.load(Ordering::SeqCst) > 0 && begun.elapsed() < PATIENCE {
        sleep(Duration::from_millis(1));
    }
}
