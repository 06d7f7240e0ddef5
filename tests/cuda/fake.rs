//! The tests' driver, built from `driver.c` by the system's C compiler.

use ctxalloc::source::{CudaDevice, CudaDriver};
use libloading::Library;
use std::ffi::{CStr, c_char, c_void};
use std::path::PathBuf;
use std::process::Command;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

/// One test at a time: the driver's numbers are the process's.
pub(crate) fn alone() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    for (name, value) in [(c"refuse_register", 0), (c"refuse_alloc", 0), (c"dead", 0), (c"capturing", 0)] {
        set(name, value);
    }
    for (name, value) in [(c"query_fails", 0), (c"progress", 1_000_000)] {
        set(name, value);
    }
    turn
}

fn path() -> PathBuf {
    let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("fake-cuda-{}.so", std::process::id()));
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/cuda/driver.c");
    let compiler = std::env::var("CC").unwrap_or_else(|_| "cc".into());
    let status = Command::new(compiler)
        .args([
            "-std=c99",
            "-Wall",
            "-Wextra",
            "-pedantic",
            "-Werror",
            "-O1",
            "-g",
            "-shared",
            "-fPIC",
            "-pthread",
            "-o",
        ])
        .arg(&path)
        .arg(source)
        .status()
        .expect("a C compiler: cc, or $CC");
    assert!(status.success());
    path
}

struct Fake {
    driver: &'static CudaDriver,
    set: unsafe extern "C" fn(*const c_char, i64),
    get: unsafe extern "C" fn(*const c_char) -> i64,
    copy: unsafe extern "C" fn(*const c_void, usize),
    run: unsafe extern "C" fn(i64),
}

#[allow(unsafe_code, reason = "the tests' own library")]
fn fake() -> &'static Fake {
    static FAKE: OnceLock<Fake> = OnceLock::new();
    FAKE.get_or_init(|| {
        let path = path();
        // SAFETY: driver.c, which declares these types.
        let made = unsafe {
            let library = Library::new(&path).expect("it was just built");
            let made = Fake {
                driver: CudaDriver::load(Some(&path)).expect("a driver with a device"),
                set: *library.get(b"fake_set\0").expect("there"),
                get: *library.get(b"fake_get\0").expect("there"),
                copy: *library.get(b"fake_copy\0").expect("there"),
                run: *library.get(b"fake_run\0").expect("there"),
            };
            std::mem::forget(library);
            made
        };
        std::fs::remove_file(path).expect("it is loaded");
        made
    })
}

pub(crate) fn driver() -> &'static CudaDriver {
    fake().driver
}

pub(crate) fn device() -> CudaDevice {
    CudaDevice::open(driver(), 0).expect("there is one")
}

#[allow(unsafe_code, reason = "the tests' own library")]
pub(crate) fn set(name: &CStr, value: i64) {
    // SAFETY: a name of driver.c.
    unsafe { (fake().set)(name.as_ptr(), value) }
}

#[allow(unsafe_code, reason = "the tests' own library")]
pub(crate) fn get(name: &CStr) -> i64 {
    // SAFETY: a name of driver.c.
    unsafe { (fake().get)(name.as_ptr()) }
}

/// Queues a copy of these bytes to the device, which reads them until it is completed.
#[allow(unsafe_code, reason = "the tests' own library")]
pub(crate) fn copy(start: std::ptr::NonNull<u8>, size_bytes: usize) {
    // SAFETY: callers pass live memory, which stays mapped until the copy is completed: that is what is tested.
    unsafe { (fake().copy)(start.as_ptr().cast(), size_bytes) }
}

/// Completes so many copies.
#[allow(unsafe_code, reason = "the tests' own library")]
pub(crate) fn run(count: i64) {
    // SAFETY: driver.c's own function.
    unsafe { (fake().run)(count) }
}
