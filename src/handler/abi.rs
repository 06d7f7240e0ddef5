//! NEP 49's structs, final form, byte for byte as NumPy's `ndarraytypes.h` declares them.
//!
//! The offsets are asserted below for 64-bit targets; fields may only ever be appended (NEP 49).
#![allow(non_camel_case_types, reason = "PyDataMem_Handler is NumPy's own spelling, which users search for")]

use std::ffi::{c_char, c_void};
use std::mem::{offset_of, transmute};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicPtr, Ordering};

/// `malloc(ctx, size)`: a block or NULL.
pub type Malloc = unsafe extern "C" fn(ctx: *mut c_void, size: usize) -> *mut c_void;
/// `calloc(ctx, nelem, elsize)`: a block of zeros or NULL.
pub type Calloc = unsafe extern "C" fn(ctx: *mut c_void, nelem: usize, elsize: usize) -> *mut c_void;
/// `realloc(ctx, ptr, new_size)`: the moved block, or NULL and the old one intact.
pub type Realloc = unsafe extern "C" fn(ctx: *mut c_void, ptr: *mut c_void, new_size: usize) -> *mut c_void;
/// `free(ctx, ptr, size)`: the size is a best guess (NEP 49), the pointer may be NULL.
pub type Free = unsafe extern "C" fn(ctx: *mut c_void, ptr: *mut c_void, size: usize);

/// `copy(ctx, dst, src, size)`: `dst`, or NULL where the copy failed. As the second draft of NEP 49 had it, with a
/// context.
pub type CopyFunction =
    unsafe extern "C" fn(ctx: *mut c_void, dst: *mut c_void, src: *const c_void, size: usize) -> *mut c_void;

/// NEP 49's `PyDataMemAllocator`: four functions and what they are called with. In a struct from C each
/// function may be missing (NULL), which NEP 49 forbids and [`register`](crate::register) never makes.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
#[allow(clippy::exhaustive_structs, reason = "NEP 49 lays it out")]
pub struct PyDataMemAllocator {
    /// Passed as the first argument to each function.
    pub ctx: *mut c_void,
    /// Makes a block.
    pub malloc: Option<Malloc>,
    /// Makes a block of zeros.
    pub calloc: Option<Calloc>,
    /// Resizes a block.
    pub realloc: Option<Realloc>,
    /// Takes a block back.
    pub free: Option<Free>,
}

/// NEP 49's `PyDataMem_Handler`: a name, a version (1), and the functions.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
#[allow(clippy::exhaustive_structs, reason = "NEP 49 lays it out")]
pub struct PyDataMem_Handler {
    /// NUL-terminated UTF-8.
    pub name: [c_char; NAME_BYTES],
    /// 1; NumPy never checks it.
    pub version: u8,
    /// The functions.
    pub allocator: PyDataMemAllocator,
}

/// The size of the name field, its NUL included.
pub const NAME_BYTES: usize = 127;
/// The version that NumPy 1.22 to 2.x knows.
pub const VERSION: u8 = 1;
/// The name that a capsule around a `PyDataMem_Handler` must carry.
pub const CAPSULE_NAME: &std::ffi::CStr = c"mem_handler";

#[cfg(target_pointer_width = "64")]
const _: () = {
    assert!(offset_of!(PyDataMem_Handler, name) == 0);
    assert!(offset_of!(PyDataMem_Handler, version) == 127);
    assert!(offset_of!(PyDataMem_Handler, allocator) == 128);
    assert!(offset_of!(PyDataMemAllocator, ctx) == 0);
    assert!(offset_of!(PyDataMemAllocator, malloc) == 8);
    assert!(offset_of!(PyDataMemAllocator, calloc) == 16);
    assert!(offset_of!(PyDataMemAllocator, realloc) == 24);
    assert!(offset_of!(PyDataMemAllocator, free) == 32);
    assert!(size_of::<PyDataMemAllocator>() == 40);
    assert!(size_of::<PyDataMem_Handler>() == 168);
};

impl PyDataMem_Handler {
    /// The functions of a struct as they are now, or the name of the first one that is missing. Word by word: an event
    /// hook may be set meanwhile.
    ///
    /// # Errors
    /// `malloc`, `calloc`, `realloc` or `free`.
    ///
    /// # Safety
    /// - `c_struct` points to an immortal struct, whose functions nobody but [`set_functions`](Self::set_functions)
    ///   changes.
    pub(super) unsafe fn functions(c_struct: *const Self) -> Result<Functions, &'static str> {
        let word = |offset: usize| {
            // SAFETY: `offset` is that of a field of `allocator`, which is one aligned word of an immortal struct.
            // `set_functions` writes by atomics too.
            unsafe { AtomicPtr::from_ptr(c_struct.cast_mut().byte_add(ALLOCATOR + offset).cast()) }
                .load(Ordering::Acquire)
        };
        // SAFETY: each field holds NULL or a function of its type, and an `Option` of a function is NULL for `None`.
        Functions::of(&unsafe {
            PyDataMemAllocator {
                ctx: word(offset_of!(PyDataMemAllocator, ctx)),
                malloc: transmute::<*mut c_void, Option<Malloc>>(word(offset_of!(PyDataMemAllocator, malloc))),
                calloc: transmute::<*mut c_void, Option<Calloc>>(word(offset_of!(PyDataMemAllocator, calloc))),
                realloc: transmute::<*mut c_void, Option<Realloc>>(word(offset_of!(PyDataMemAllocator, realloc))),
                free: transmute::<*mut c_void, Option<Free>>(word(offset_of!(PyDataMemAllocator, free))),
            }
        })
    }

    /// Puts functions into a struct, word by word, and leaves its context alone.
    ///
    /// # Safety
    /// - `c_struct` points to an immortal struct that can be written to; only one thread at a time.
    /// - the functions do for its blocks what those before them did, with the same context.
    pub(super) unsafe fn set_functions(c_struct: *mut Self, functions: &Functions) {
        let put = |offset: usize, function: *mut c_void| {
            // SAFETY: `offset` is that of a field of `allocator`, which is one aligned word of an immortal, writable
            // struct. Other threads read it by atomics (`functions`) or, in NumPy, as one aligned word.
            unsafe { AtomicPtr::from_ptr(c_struct.byte_add(ALLOCATOR + offset).cast()) }
                .store(function, Ordering::Release);
        };
        put(offset_of!(PyDataMemAllocator, malloc), functions.malloc as *mut c_void);
        put(offset_of!(PyDataMemAllocator, calloc), functions.calloc as *mut c_void);
        put(offset_of!(PyDataMemAllocator, realloc), functions.realloc as *mut c_void);
        put(offset_of!(PyDataMemAllocator, free), functions.free as *mut c_void);
    }
}

/// Where the functions of a struct begin.
const ALLOCATOR: usize = offset_of!(PyDataMem_Handler, allocator);

/// How bytes get into the blocks of a handler, out of them, and from one to another: the second draft of NEP 49's three
/// functions. Where one is missing, bytes are copied by `memcpy`. NumPy knows nothing of them;
/// [`Buffer`](crate::Buffer) and the C interface use them.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct Copies {
    /// Passed as the first argument to each function.
    pub ctx: *mut c_void,
    /// Copies from the host into a block.
    pub host2obj: Option<CopyFunction>,
    /// Copies from a block to the host.
    pub obj2host: Option<CopyFunction>,
    /// Copies from one block into another; of the same handler both.
    pub obj2obj: Option<CopyFunction>,
}

impl Copies {
    /// `memcpy` for all.
    pub const NONE: Self = Self { ctx: null_mut(), host2obj: None, obj2host: None, obj2obj: None };

    /// This context, and no functions yet.
    #[must_use]
    pub const fn new(ctx: *mut c_void) -> Self {
        Self { ctx, ..Self::NONE }
    }

    /// What copies from the host into a block.
    #[must_use]
    pub const fn with_host2obj(mut self, host2obj: CopyFunction) -> Self {
        self.host2obj = Some(host2obj);
        self
    }

    /// What copies from a block to the host.
    #[must_use]
    pub const fn with_obj2host(mut self, obj2host: CopyFunction) -> Self {
        self.obj2host = Some(obj2host);
        self
    }

    /// What copies from one block into another.
    #[must_use]
    pub const fn with_obj2obj(mut self, obj2obj: CopyFunction) -> Self {
        self.obj2obj = Some(obj2obj);
        self
    }

    pub(super) fn are_none(&self) -> bool {
        self.host2obj.is_none() && self.obj2host.is_none() && self.obj2obj.is_none()
    }
}

/// The four functions, none missing, with their context: what Rust calls.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct Functions {
    /// Passed as the first argument to each function.
    pub ctx: *mut c_void,
    /// Makes a block.
    pub malloc: Malloc,
    /// Makes a block of zeros.
    pub calloc: Calloc,
    /// Resizes a block.
    pub realloc: Realloc,
    /// Takes a block back.
    pub free: Free,
}

impl Functions {
    /// The complete functions of a struct from C, or the name of the first one that is missing.
    ///
    /// # Errors
    /// `malloc`, `calloc`, `realloc` or `free`.
    pub fn of(allocator: &PyDataMemAllocator) -> Result<Self, &'static str> {
        Ok(Self {
            ctx: allocator.ctx,
            malloc: allocator.malloc.ok_or("malloc")?,
            calloc: allocator.calloc.ok_or("calloc")?,
            realloc: allocator.realloc.ok_or("realloc")?,
            free: allocator.free.ok_or("free")?,
        })
    }

    /// The struct that NumPy reads, with this name.
    pub(super) fn named(&self, name: [c_char; NAME_BYTES]) -> PyDataMem_Handler {
        PyDataMem_Handler {
            name,
            version: VERSION,
            allocator: PyDataMemAllocator {
                ctx: self.ctx,
                malloc: Some(self.malloc),
                calloc: Some(self.calloc),
                realloc: Some(self.realloc),
                free: Some(self.free),
            },
        }
    }
}
