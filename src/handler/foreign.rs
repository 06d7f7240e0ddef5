//! Foreign handlers: structs that somebody else made, and how Rust reaches the functions in them.
//!
//! A struct is read at each call and never copied: an event hook may stand in its functions for a while
//! (see [`events`](super::events)), and then hears of what Rust does too.

use super::abi::{Copies, Functions, PyDataMem_Handler};
use super::{Handler, interpreter};
use std::ffi::c_void;
use std::ptr::{NonNull, null_mut};

/// How Rust may reach the functions of a foreign struct.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub enum Reach {
    /// On any thread, several at once, without Python's GIL, also while the process exits.
    AnyThread,
    /// Attached to Python, as NumPy calls them; directly in a process without Python. Once Python is gone the functions
    /// are not called any more: NULL is the answer, and what is freed then stays.
    WithGil,
    /// Not at all: this handler stands for it where Rust allocates (NumPy's default keeps a cache that only the GIL
    /// protects; the C heap stands for it). A block goes back the way it came, so the two never mix.
    By(Handler),
}

/// What NEP 49's struct has no place for, and a handler may have all the same.
#[derive(Debug, Clone, Copy)]
pub struct Extras {
    /// What its blocks are known to be aligned to, in bytes: a power of two up to 1 GiB; 1 where nothing is known.
    pub alignment: usize,
    /// How bytes get into its blocks and out of them; `memcpy` where there is nothing.
    pub copies: Copies,
}

impl Default for Extras {
    fn default() -> Self {
        Self { alignment: 1, copies: Copies::NONE }
    }
}

/// The functions that stand in the table for a foreign struct.
pub(super) fn functions(face: NonNull<PyDataMem_Handler>, reach: Reach) -> Functions {
    let ctx = face.as_ptr().cast();
    match reach {
        Reach::AnyThread => Functions {
            ctx,
            malloc: malloc::<false>,
            calloc: calloc::<false>,
            realloc: realloc::<false>,
            free: free::<false>,
        },
        Reach::WithGil => Functions {
            ctx,
            malloc: malloc::<true>,
            calloc: calloc::<true>,
            realloc: realloc::<true>,
            free: free::<true>,
        },
        Reach::By(handler) => handler.functions(),
    }
}

/// The copy functions that stand in the table for those of a foreign handler.
pub(super) fn copies(copies: Copies, reach: Reach) -> Copies {
    if !matches!(reach, Reach::WithGil) || copies.are_none() {
        return copies;
    }
    let original: &'static Copies = Box::leak(Box::new(copies));
    Copies {
        ctx: std::ptr::from_ref(original).cast_mut().cast(),
        host2obj: copies.host2obj.map(|_| host2obj as super::abi::Copy),
        obj2host: copies.obj2host.map(|_| obj2host as super::abi::Copy),
        obj2obj: copies.obj2obj.map(|_| obj2obj as super::abi::Copy),
    }
}

/// The functions of a struct as they are now.
///
/// # Safety
/// - `ctx` is the struct that [`functions`] put there: immortal and complete.
#[inline]
unsafe fn own(ctx: *mut c_void) -> Option<Functions> {
    // SAFETY: immortal, says the caller.
    unsafe { PyDataMem_Handler::functions(ctx.cast()) }.ok()
}

/// Runs `call`, attached to Python where `GIL` says so.
#[inline]
fn reach<const GIL: bool, R>(call: impl FnOnce() -> R) -> Option<R> {
    if GIL { interpreter::attached(call) } else { Some(call()) }
}

/// # Safety
/// - as [`own`].
unsafe extern "C" fn malloc<const GIL: bool>(ctx: *mut c_void, size: usize) -> *mut c_void {
    // SAFETY: says the caller.
    let Some(own) = (unsafe { own(ctx) }) else { return null_mut() };
    // SAFETY: with their own context; the rest is passed on from the caller. So below.
    reach::<GIL, _>(|| unsafe { (own.malloc)(own.ctx, size) }).unwrap_or(null_mut())
}

/// # Safety
/// - as [`own`].
unsafe extern "C" fn calloc<const GIL: bool>(ctx: *mut c_void, nelem: usize, elsize: usize) -> *mut c_void {
    // SAFETY: says the caller.
    let Some(own) = (unsafe { own(ctx) }) else { return null_mut() };
    // SAFETY: as in `malloc`.
    reach::<GIL, _>(|| unsafe { (own.calloc)(own.ctx, nelem, elsize) }).unwrap_or(null_mut())
}

/// # Safety
/// - as [`own`].
/// - `ptr` is NULL or a live block of the handler, given up unless NULL is returned.
unsafe extern "C" fn realloc<const GIL: bool>(ctx: *mut c_void, ptr: *mut c_void, new_size: usize) -> *mut c_void {
    // SAFETY: says the caller.
    let Some(own) = (unsafe { own(ctx) }) else { return null_mut() };
    // SAFETY: as in `malloc`.
    reach::<GIL, _>(|| unsafe { (own.realloc)(own.ctx, ptr, new_size) }).unwrap_or(null_mut())
}

/// # Safety
/// - as [`own`].
/// - `ptr` is NULL or a live block of the handler, given up.
unsafe extern "C" fn free<const GIL: bool>(ctx: *mut c_void, ptr: *mut c_void, size: usize) {
    // SAFETY: says the caller.
    let Some(own) = (unsafe { own(ctx) }) else { return };
    // Without an interpreter the block stays: a foreign free may need Python, and the process is ending.
    // SAFETY: as in `malloc`.
    let _ = reach::<GIL, _>(|| unsafe { (own.free)(own.ctx, ptr, size) });
}

/// # Safety
/// - `ctx` is the original that [`copies`] put there; the rest is the contract of the function that `which` takes.
unsafe fn copy(
    ctx: *mut c_void,
    which: impl FnOnce(&Copies) -> Option<super::abi::Copy>,
    (dst, src, size): (*mut c_void, *const c_void, usize),
) -> *mut c_void {
    // SAFETY: immortal, says the caller.
    let original: &Copies = unsafe { &*ctx.cast() };
    let Some(function) = which(original) else { return null_mut() };
    // SAFETY: passed on from the caller, with the context that belongs to the function.
    interpreter::attached(|| unsafe { function(original.ctx, dst, src, size) }).unwrap_or(null_mut())
}

/// # Safety
/// - as [`copy`].
unsafe extern "C" fn host2obj(ctx: *mut c_void, dst: *mut c_void, src: *const c_void, size: usize) -> *mut c_void {
    // SAFETY: passed on from the caller.
    unsafe { copy(ctx, |copies| copies.host2obj, (dst, src, size)) }
}

/// # Safety
/// - as [`copy`].
unsafe extern "C" fn obj2host(ctx: *mut c_void, dst: *mut c_void, src: *const c_void, size: usize) -> *mut c_void {
    // SAFETY: passed on from the caller.
    unsafe { copy(ctx, |copies| copies.obj2host, (dst, src, size)) }
}

/// # Safety
/// - as [`copy`].
unsafe extern "C" fn obj2obj(ctx: *mut c_void, dst: *mut c_void, src: *const c_void, size: usize) -> *mut c_void {
    // SAFETY: passed on from the caller.
    unsafe { copy(ctx, |copies| copies.obj2obj, (dst, src, size)) }
}
