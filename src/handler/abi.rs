//! NEP 49's structs, final form, byte for byte as NumPy's `ndarraytypes.h` declares them.
//!
//! The offsets are asserted below for 64-bit targets; fields may only ever be appended (NEP 49).
#![allow(non_camel_case_types, reason = "PyDataMem_Handler is NumPy's own spelling, which users search for")]

use std::ffi::{c_char, c_void};
use std::mem::offset_of;
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

/// `copy(ctx, dst, src, size)`: `dst`, or NULL where the copy failed. As the second draft of NEP 49 had it, with a context.
pub type Copy =
    unsafe extern "C" fn(ctx: *mut c_void, dst: *mut c_void, src: *const c_void, size: usize) -> *mut c_void;

/// NEP 49's `PyDataMemAllocator`: four functions and what they are called with. In a struct from C each
/// function may be missing (NULL), which NEP 49 forbids and [`register`](crate::register) never makes.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
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
    /// - `face` points to an immortal struct.
    pub(super) unsafe fn functions(face: *const Self) -> Result<Functions, &'static str> {
        let face = face.cast_mut();
        let word = |offset: usize| {
            // SAFETY: the offset of a field, one word wide and aligned.
            let field = unsafe { face.byte_add(offset) }.cast::<*mut c_void>();
            // SAFETY: as above; immortal, says the caller; who writes meanwhile writes by atomics too.
            unsafe { AtomicPtr::from_ptr(field) }.load(Ordering::Acquire)
        };
        const AT: usize = offset_of!(PyDataMem_Handler, allocator);
        Functions::of(&PyDataMemAllocator {
            ctx: word(AT + offset_of!(PyDataMemAllocator, ctx)),
            // SAFETY: such a function or NULL; an `Option` of a function has a place for NULL. So the three below.
            malloc: unsafe {
                std::mem::transmute::<*mut c_void, Option<Malloc>>(word(AT + offset_of!(PyDataMemAllocator, malloc)))
            },
            // SAFETY: as above.
            calloc: unsafe {
                std::mem::transmute::<*mut c_void, Option<Calloc>>(word(AT + offset_of!(PyDataMemAllocator, calloc)))
            },
            // SAFETY: as above.
            realloc: unsafe {
                std::mem::transmute::<*mut c_void, Option<Realloc>>(word(AT + offset_of!(PyDataMemAllocator, realloc)))
            },
            // SAFETY: as above.
            free: unsafe {
                std::mem::transmute::<*mut c_void, Option<Free>>(word(AT + offset_of!(PyDataMemAllocator, free)))
            },
        })
    }

    /// Puts functions into a struct, word by word, and leaves its context alone.
    ///
    /// # Safety
    /// - `face` points to an immortal struct that can be written to; only one thread at a time.
    /// - the functions do for its blocks what those before them did, with the same context.
    pub(super) unsafe fn set_functions(face: *mut Self, functions: &Functions) {
        let put = |offset: usize, function: *mut c_void| {
            // SAFETY: the offset of a field, one word wide and aligned.
            let field = unsafe { face.byte_add(offset_of!(PyDataMem_Handler, allocator) + offset) };
            // SAFETY: as above; immortal and writable, says the caller.
            unsafe { AtomicPtr::from_ptr(field.cast::<*mut c_void>()) }.store(function, Ordering::Release);
        };
        put(offset_of!(PyDataMemAllocator, malloc), functions.malloc as *mut c_void);
        put(offset_of!(PyDataMemAllocator, calloc), functions.calloc as *mut c_void);
        put(offset_of!(PyDataMemAllocator, realloc), functions.realloc as *mut c_void);
        put(offset_of!(PyDataMemAllocator, free), functions.free as *mut c_void);
    }
}

/// How bytes get into the blocks of a handler, out of them, and from one to another: the second draft of NEP 49's three
/// functions. Where one is missing, bytes are copied by `memcpy`. NumPy knows nothing of them; [`Buffer`](crate::Buffer)
/// and the C face use them.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct Copies {
    /// Passed as the first argument to each function.
    pub ctx: *mut c_void,
    /// Copies from the host into a block.
    pub host2obj: Option<self::Copy>,
    /// Copies from a block to the host.
    pub obj2host: Option<self::Copy>,
    /// Copies from one block into another; of the same handler both.
    pub obj2obj: Option<self::Copy>,
}

impl Copies {
    /// `memcpy` for all.
    pub const NONE: Self = Self { ctx: null_mut(), host2obj: None, obj2host: None, obj2obj: None };

    pub(super) fn are_none(&self) -> bool {
        self.host2obj.is_none() && self.obj2host.is_none() && self.obj2obj.is_none()
    }
}

/// The four functions, none missing, with their context: what Rust calls.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
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

    /// The struct that NumPy reads.
    pub(super) fn face(&self, name: &super::Name) -> PyDataMem_Handler {
        self.face_named(name.field())
    }

    /// The same, with the name as it stands there.
    pub(super) fn face_named(&self, name: [c_char; NAME_BYTES]) -> PyDataMem_Handler {
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
