//! The library that stands before malloc (`src/whole/preload.c`), where this process has it preloaded; and NumPy's
//! ContextVar set by functions that tell it of a new selection.
#![allow(unsafe_code, reason = "dlsym, and CPython's C functions")]

use super::symbol::symbol;
use super::uncollected::{VarReset, VarSet};
use crate::sync::Made;
use crate::unattributed::unattributed;
use crate::whole::{Attach, AttachArrow, AttachMappings, GetThread, Hook, Library, MakeTwin, Shrinks, Thread, Twins};
use pyo3::ffi::PyObject;
use std::ffi::{CStr, c_int, c_void};
use std::mem::transmute;

/// The version of `preload.c` that this module agrees with.
const VERSION: u32 = 11;

/// Where the library is.
pub(super) struct Preloaded {
    pub(super) library: Library,
    /// Whether calls of malloc reach it.
    pub(super) is_first: bool,
}

/// What this process has preloaded.
pub(super) enum Found {
    Here(Preloaded),
    OfAnotherVersion,
    Nothing,
}

impl Found {
    /// The library, if it can be used.
    pub(super) fn library(&self) -> Option<&Preloaded> {
        if let Self::Here(preloaded) = self { Some(preloaded) } else { None }
    }
}

/// The preloaded library.
pub(super) fn preloaded() -> &'static Found {
    static FOUND: Made<Found> = Made::new();
    FOUND.get_or_make(|| {
        let Some(version) = symbol(c"ctxalloc_whole_version") else { return Found::Nothing };
        // SAFETY: `uint32_t ctxalloc_whole_version(void)` of `preload.c`, in every version.
        let version = unsafe { transmute::<*mut c_void, extern "C" fn() -> u32>(version) };
        if version() != VERSION {
            return Found::OfAnotherVersion;
        }
        find().map_or(Found::OfAnotherVersion, Found::Here)
    })
}

/// Its functions, in the version that this module agrees with.
fn find() -> Option<Preloaded> {
    let find = |name: &CStr| symbol(name);
    // SAFETY: the functions of `preload.c` in the version that this module agrees with; their types are those of
    // `Library`.
    unsafe {
        let is_first = transmute::<*mut c_void, extern "C" fn() -> bool>(find(c"ctxalloc_whole_is_first")?);
        Some(Preloaded {
            library: Library {
                attach: transmute::<*mut c_void, Attach>(find(c"ctxalloc_whole_attach")?),
                attach_arrow: transmute::<*mut c_void, AttachArrow>(find(c"ctxalloc_whole_attach_arrow")?),
                hook: transmute::<*mut c_void, Hook>(find(c"ctxalloc_whole_hook")?),
                thread: transmute::<*mut c_void, GetThread>(find(c"ctxalloc_whole_thread")?),
                attach_mappings: transmute::<*mut c_void, AttachMappings>(find(c"ctxalloc_whole_attach_mappings")?),
                next: transmute::<*mut c_void, unsafe extern "C" fn() -> *const c_void>(find(c"ctxalloc_whole_next")?),
                twins: Twins {
                    make: transmute::<*mut c_void, MakeTwin>(find(c"ctxalloc_whole_twin")?),
                    shrinks: transmute::<*mut c_void, Shrinks>(find(c"ctxalloc_whole_shrinks")?),
                },
            },
            is_first: is_first(),
        })
    }
}

type Look = fn(&mut Thread);
static REAL: Made<(VarSet, VarReset)> = Made::new();
static LOOK: Made<Look> = Made::new();

/// From now on `look` is called on each thread that selects something.
pub(super) fn look_at_selections(look: Look) {
    LOOK.get_or_make(|| look);
}

/// This thread's struct in the library.
fn own() -> Option<*mut Thread> {
    // SAFETY: the library's function, which only returns an address.
    preloaded().library().map(|preloaded| unsafe { (preloaded.library.thread)() })
}

fn look() {
    if let (Some(look), Some(own)) = (LOOK.get(), own()) {
        // SAFETY: this thread's own struct, which lives as long as the thread; nobody else has a reference to it here.
        look(unsafe { &mut *own });
    }
}

/// `PyContextVar_Set` and `PyContextVar_Reset` that look at the selection afterwards; the given ones themselves where
/// nothing is preloaded.
pub(super) fn watched(set: VarSet, reset: VarReset) -> (VarSet, VarReset) {
    if preloaded().library().is_none() {
        return (set, reset);
    }
    REAL.get_or_make(|| (set, reset));
    (watched_set, watched_reset)
}

/// Makes a change of a ContextVar, and tells whoever asks meanwhile who is selected on this thread.
fn changing<R>(change: impl FnOnce() -> R) -> R {
    let Some(own) = own() else { return change() };
    // SAFETY: this thread's own struct, which lives as long as the thread. Nobody has a reference to it here, and none
    // is kept: `change` may allocate.
    unsafe { (*own).changes += 1 }; // the value that goes may run code that changes one too
    let answer = change();
    // SAFETY: as before the change: this thread's own struct, to which nobody has a reference here.
    unsafe { (*own).changes -= 1 };
    answer
}

unsafe extern "C" fn watched_set(var: *mut PyObject, value: *mut PyObject) -> *mut PyObject {
    let Some((set, _)) = REAL.get() else { return std::ptr::null_mut() };
    // SAFETY: the caller keeps the contract of `PyContextVar_Set`.
    let token = changing(|| unsafe { set(var, value) });
    look();
    token
}

unsafe extern "C" fn watched_reset(var: *mut PyObject, token: *mut PyObject) -> c_int {
    let Some((_, reset)) = REAL.get() else { return -1 };
    let answer = changing(|| {
        let _unattributed = unattributed(); // what leaves a block is not refused what that takes
        // SAFETY: the caller keeps the contract of `PyContextVar_Reset`.
        unsafe { reset(var, token) }
    });
    look();
    answer
}
