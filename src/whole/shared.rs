//! What `preload.c` and this layer share: its structs and functions.

use std::ffi::c_void;

/// Which of the three ranges a block is in, and who asked for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Native = 0,
    /// Python's domain MEM.
    Mem = 1,
    /// Python's domain OBJ.
    Obj = 2,
}

impl Kind {
    pub(super) fn of(number: u32) -> Self {
        [Self::Native, Self::Mem, Self::Obj].get(number as usize).copied().unwrap_or(Self::Native)
    }
}

/// `struct thread` of `preload.c`.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct Thread {
    pub(super) left: i64,
    pub(super) granted: i64,
    pub(super) sample_left: i64,
    pub(super) random: u64,
    /// Python's thread state when Python was last asked.
    pub(crate) state: *const c_void,
    /// The version of the running Context then.
    pub(crate) version: u64,
    /// The handler that was selected then, as a word; 0: no request's.
    pub(crate) account: u64,
    pub(super) busy: u32,
    pub(super) object: u32,
    pub(super) resize: u32,
    /// Whether an exception was set for this thread that it has not raised.
    pub(crate) raising: u32,
    /// The handler of the whole request that Python code runs in on this thread, which sees to it that no exception
    /// that is set for it comes after its end; 0: there is none.
    pub(crate) guard: u64,
}

/// `struct slow` of `preload.c`.
#[repr(C)]
pub(crate) struct Slow {
    pub(super) allocate: unsafe extern "C" fn(*mut Thread, u32, usize, usize, u32, *mut u32) -> *mut c_void,
    pub(super) resize: unsafe extern "C" fn(*mut Thread, u32, *mut c_void, usize, *mut u32) -> *mut c_void,
    pub(super) release: unsafe extern "C" fn(*mut Thread, u32, *mut c_void),
    pub(super) usable: unsafe extern "C" fn(*mut c_void) -> usize,
}

pub(super) const DONE: u32 = 0;
pub(super) const PASS: u32 = 1;
pub(super) const REFUSED: u32 = 2;

/// CPython's `PyMemAllocatorEx`, unchanged since 3.5. Passed on as it is.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct Allocator {
    pub(crate) words: [*mut c_void; 5],
}

/// The functions of the preloaded library.
pub(crate) struct Library {
    pub(crate) attach: Attach,
    pub(crate) hook: Hook,
    pub(crate) thread: GetThread,
}

pub(crate) type Attach = unsafe extern "C" fn(*const usize, *const usize, usize, *const Slow);
pub(crate) type Hook = unsafe extern "C" fn(u32, *const Allocator, *mut Allocator);
pub(crate) type GetThread = unsafe extern "C" fn() -> *mut Thread;
