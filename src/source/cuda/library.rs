//! The driver's functions that this folder uses, each looked up once, and whether they may be called. The names with
//! `_v2` are what cuda.h maps the plain ones to.

use super::failure::{Failure, NOT_FOUND};
use crate::error::Error;
use crate::os;
use crate::sync::Made;
use libloading::Library;
use std::ffi::{c_char, c_int, c_uint, c_void};
use std::path::{Path, PathBuf};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread::sleep;
use std::time::{Duration, Instant};

/// Any of the driver's opaque handles.
pub(super) type Ref = *mut c_void;

/// More devices than any machine has.
pub(super) const MAX_DEVICES: usize = 64;

/// The CUDA driver, loaded for as long as the process lives.
#[derive(Debug)]
pub struct CudaDriver {
    pub(super) functions: Functions,
    path: PathBuf,
    /// Its version, as `1000 * major + 10 * minor`.
    version: c_int,
    devices: usize,
    /// The process that loaded it: a child of it must not call it.
    process: u32,
    /// The primary context of each device, once it was retained.
    pub(super) contexts: [AtomicPtr<c_void>; MAX_DEVICES],
    pub(super) spare_events: Mutex<Vec<Spare>>,
    last_failure: Mutex<Option<Failure>>,
    /// The first call that found a context lost. Never cleared.
    lost: Mutex<Option<Failure>>,
}

/// An event of a device's primary context that nobody uses.
#[derive(Debug)]
pub(super) struct Spare {
    pub(super) ordinal: usize,
    pub(super) event: Ref,
}

// SAFETY: the driver's events belong to no thread.
unsafe impl Send for Spare {}

static LOADED: Made<CudaDriver> = Made::new();

/// Set in a child of the process that loaded the driver, by the child's only thread before anything else runs there
/// (hence Relaxed). Never cleared.
static FORKED: AtomicBool = AtomicBool::new(false);

/// Set when the process exits. Never cleared.
static ENDED: AtomicBool = AtomicBool::new(false);

/// The number of calls under way.
static CALLS: AtomicUsize = AtomicUsize::new(0);

/// How long the exit of the process waits for calls under way.
const PATIENCE: Duration = Duration::from_secs(10);

macro_rules! functions {
    (
        required { $($field:ident = $name:literal: fn($($argument:ty),*);)* }
        optional { $($extra:ident = $other:literal: fn($($kind:ty),*);)* }
    ) => {
        #[derive(Debug)]
        pub(super) struct Functions {
            $(pub(super) $field: unsafe extern "C" fn($($argument),*) -> c_int,)*
            $(pub(super) $extra: Option<unsafe extern "C" fn($($kind),*) -> c_int>,)*
        }

        impl Functions {
            /// # Errors
            /// The name of a function that the library does not have.
            ///
            /// # Safety
            /// - `library` is the CUDA driver, or has its symbols with their types.
            unsafe fn of(library: &Library) -> Result<Self, &'static str> {
                Ok(Self {
                    $($field: {
                        // SAFETY: the library is the driver (this function's contract), whose header declares this
                        // type.
                        let symbol = unsafe {
                            library.get::<unsafe extern "C" fn($($argument),*) -> c_int>(concat!($name, "\0").as_bytes())
                        };
                        *symbol.map_err(|_| $name)?
                    },)*
                    $($extra: {
                        // SAFETY: the symbol has this type in each driver that has it (cuda.h); one that is too old
                        // does not.
                        let symbol = unsafe {
                            library.get::<unsafe extern "C" fn($($kind),*) -> c_int>(concat!($other, "\0").as_bytes())
                        };
                        symbol.ok().map(|symbol| *symbol)
                    },)*
                })
            }
        }
    };
}

functions! {
    required {
        init = "cuInit": fn(c_uint);
        version = "cuDriverGetVersion": fn(*mut c_int);
        device_count = "cuDeviceGetCount": fn(*mut c_int);
        device = "cuDeviceGet": fn(*mut c_int, c_int);
        device_name = "cuDeviceGetName": fn(*mut c_char, c_int, c_int);
        attribute = "cuDeviceGetAttribute": fn(*mut c_int, c_int, c_int);
        retain = "cuDevicePrimaryCtxRetain": fn(*mut Ref, c_int);
        context_state = "cuDevicePrimaryCtxGetState": fn(c_int, *mut c_uint, *mut c_int);
        push = "cuCtxPushCurrent_v2": fn(Ref);
        pop = "cuCtxPopCurrent_v2": fn(*mut Ref);
        register = "cuMemHostRegister_v2": fn(Ref, usize, c_uint);
        unregister = "cuMemHostUnregister": fn(Ref);
        allocate_host = "cuMemHostAlloc": fn(*mut Ref, usize, c_uint);
        free_host = "cuMemFreeHost": fn(Ref);
        device_pointer = "cuMemHostGetDevicePointer_v2": fn(*mut u64, Ref, c_uint);
        pointer_attribute = "cuPointerGetAttribute": fn(Ref, c_int, u64);
        allocate_managed = "cuMemAllocManaged": fn(*mut u64, usize, c_uint);
        free_managed = "cuMemFree_v2": fn(u64);
        create_event = "cuEventCreate": fn(*mut Ref, c_uint);
        record = "cuEventRecord": fn(Ref, Ref);
        query = "cuEventQuery": fn(Ref);
    }
    optional {
        record_context = "cuCtxRecordEvent": fn(Ref, Ref);
        is_capturing = "cuStreamIsCapturing": fn(Ref, *mut c_int);
        stream_context = "cuStreamGetCtx": fn(Ref, *mut Ref);
        launch_host = "cuLaunchHostFunc": fn(Ref, extern "C" fn(Ref), Ref);
        exchange_capture_mode = "cuThreadExchangeStreamCaptureMode": fn(*mut c_int);
    }
}

/// A call of the driver under way: the exit of the process waits for it.
#[derive(Debug)]
pub(super) struct Call(());

impl Drop for Call {
    fn drop(&mut self) {
        CALLS.fetch_sub(1, Ordering::Release);
    }
}

impl CudaDriver {
    /// Loads the driver: `libcuda.so.1` as the system finds it, or the library at `path`. It is loaded once per
    /// process; later calls return the one that is loaded. No context is made.
    ///
    /// # Errors
    /// [`Error::Cuda`] if there is no such library, or it cannot be used: the toolkit's stub, no device, a driver that
    /// does not fit the kernel's module. The message says which, and what to do.
    ///
    /// # Safety
    /// - the library that is found is NVIDIA's driver, or has its symbols with their types.
    pub unsafe fn load(path: Option<&Path>) -> Result<&'static Self, Error> {
        if let Some(loaded) = LOADED.get() {
            return Ok(loaded);
        }
        let path = path.unwrap_or(Path::new(if cfg!(windows) { "nvcuda.dll" } else { "libcuda.so.1" }));
        let failed = |error: libloading::Error| Error::Cuda {
            what: format!("the CUDA driver could not be loaded from {}: {error}", path.display()),
            code: 0,
            advice: "install the NVIDIA driver (the CUDA toolkit does not bring it), or start the container with --gpus",
        };
        // SAFETY: the library is the driver (this function's contract), whose initialisers may run here.
        let (library, functions) = unsafe {
            let library = Library::new(path).map_err(failed)?;
            let functions = Functions::of(&library).map_err(|name| Error::Cuda {
                what: format!("the CUDA driver in {} has no function {name}", path.display()),
                code: NOT_FOUND,
                advice: "it is no NVIDIA driver, or older than CUDA 7: install a newer one",
            })?;
            (library, functions)
        };
        std::mem::forget(library); // never unloaded: its functions stay callable
        let (mut version, mut devices) = (0, 0);
        // SAFETY: the driver's own functions. Both numbers are ours to write to.
        unsafe {
            checked("cuInit", (functions.init)(0))?;
            checked("cuDriverGetVersion", (functions.version)(&raw mut version))?;
            checked("cuDeviceGetCount", (functions.device_count)(&raw mut devices))?;
        }
        if devices < 1 {
            checked("cuDeviceGetCount", 100)?;
        }
        // A flag instead of comparing `getpid`, which is a system call, before each call.
        if !os::at_fork(None, None, Some(forked)) {
            return Err(Error::Cuda {
                what: "no memory to learn of forks, in which CUDA must not be called".into(),
                code: 0,
                advice: "free something",
            });
        }
        // Runs before the driver's own exit functions, which were registered when it was loaded. Racing threads may
        // each register it; a second run does nothing.
        // SAFETY: `end` takes nothing, and this code is never unloaded.
        let _ = unsafe { libc::atexit(end) };
        Ok(LOADED.get_or_make(|| Self {
            functions,
            path: path.into(),
            version,
            devices: usize::try_from(devices).unwrap_or(0).min(MAX_DEVICES),
            process: std::process::id(),
            contexts: [const { AtomicPtr::new(null_mut()) }; MAX_DEVICES],
            spare_events: Mutex::new(Vec::new()),
            last_failure: Mutex::new(None),
            lost: Mutex::new(None),
        }))
    }

    /// The driver, if it was loaded.
    #[must_use]
    pub fn loaded() -> Option<&'static Self> {
        LOADED.get()
    }

    /// The library as it was named to the system.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The newest CUDA version that it serves, such as `(12, 5)`.
    #[must_use]
    pub fn version(&self) -> (u32, u32) {
        let version = u32::try_from(self.version).unwrap_or(0);
        (version / 1000, version % 1000 / 10)
    }

    /// How many devices there are.
    #[must_use]
    pub fn devices(&self) -> usize {
        self.devices
    }

    /// Whether an event can be recorded for all streams of a context (CUDA 12.5), which reuse of freed blocks needs.
    #[must_use]
    pub fn records_contexts(&self) -> bool {
        self.functions.record_context.is_some()
    }

    /// Whether it may be called: not in a child of `fork`, and not while the process ends.
    #[must_use]
    #[expect(clippy::unused_self, reason = "there is a driver that was loaded")]
    pub(crate) fn is_usable(&self) -> bool {
        !ENDED.load(Ordering::SeqCst) && !is_forked()
    }

    /// Whether this is a child of the process that loaded it.
    #[expect(clippy::unused_self, reason = "there is a driver that was loaded")]
    pub(crate) fn is_forked_from(&self) -> bool {
        is_forked()
    }

    /// Why it must not be called.
    pub(super) fn unusable(&self) -> Error {
        Error::Cuda {
            what: format!(
                "CUDA cannot be used in process {}, a fork of {} or at its end",
                std::process::id(),
                self.process
            ),
            code: 3,
            advice: "start workers with multiprocessing's 'spawn' or 'forkserver'",
        }
    }

    /// The last call that failed, in words; `None` if none did.
    #[must_use]
    pub fn last_failure(&self) -> Option<String> {
        let last = *self.last_failure.try_lock().ok()?;
        last.map(|failure| failure.while_doing("the last call that failed").to_string())
    }

    /// The call that found a device's context lost, after which the process can only begin anew.
    #[cfg_attr(not(feature = "python"), allow(dead_code, reason = "Python's `info` asks"))]
    pub(crate) fn lost(&self) -> Option<Error> {
        let lost = *self.lost.try_lock().ok()?;
        lost.map(|failure| failure.while_doing("a CUDA context is lost"))
    }

    /// Makes the exit of the process wait for a call, until the value is dropped. `None` if no call may begin any more.
    pub(super) fn begin_call(&self) -> Option<Call> {
        CALLS.fetch_add(1, Ordering::SeqCst);
        let call = Call(());
        self.is_usable().then_some(call)
    }

    /// What a call returned; a failure is remembered.
    pub(super) fn check(&self, call: &'static str, code: c_int) -> Result<(), Failure> {
        if code == 0 {
            return Ok(());
        }
        let failure = Failure { call, code };
        *self.last_failure.lock().unwrap_or_else(PoisonError::into_inner) = Some(failure);
        if failure.loses_context() {
            self.lost.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(failure);
        }
        Err(failure)
    }
}

/// Whether this is a child of the process that loaded the driver.
pub(super) fn is_forked() -> bool {
    FORKED.load(Ordering::Relaxed)
}

fn checked(call: &'static str, code: c_int) -> Result<(), Error> {
    if code == 0 { Ok(()) } else { Err(Failure { call, code }.while_doing("CUDA cannot be used")) }
}

extern "C" fn forked() {
    FORKED.store(true, Ordering::Relaxed);
    super::inherited::take();
}

/// Ends all use of the driver, which shuts down after this.
extern "C" fn end() {
    // A caller increments CALLS and then reads ENDED (`begin_call`). Here ENDED is stored, and then CALLS is read. All
    // four are SeqCst, so at least one of the two sees the other.
    ENDED.store(true, Ordering::SeqCst);
    let begun = Instant::now();
    while !is_forked() && CALLS.load(Ordering::SeqCst) > 0 && begun.elapsed() < PATIENCE {
        sleep(Duration::from_millis(1));
    }
}
