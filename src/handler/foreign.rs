//! Foreign handlers: structs that somebody else made, and how Rust reaches the functions in them.
//!
//! A struct is read at each call and never copied: while there is an event hook, other functions take the place of its own
//! ([`events`](super::events)), and the hook hears of what Rust does too.

use super::abi::{Copies, CopyFunction, Functions, PyDataMem_Handler};
use super::entry::Draft;
use super::name::Name;
use super::table::attached;
use super::word::Handler;
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
    /// Not at all: Rust allocates from this handler instead (NumPy's default keeps a cache that only the GIL protects, so
    /// Rust uses the C heap). A block goes back the way it came, so the two never mix.
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

/// A handler that somebody else made.
pub(super) fn draft(name: Name<'_>, c_struct: NonNull<PyDataMem_Handler>, reach: Reach, extras: Extras) -> Draft<'_> {
    Draft {
        alignment: extras.alignment,
        copies: copies(extras.copies, reach),
        foreign: Some(c_struct),
        ..Draft::new(name, format!("foreign handler at {c_struct:p}"), move || functions(c_struct, reach))
    }
}

/// The functions by which Rust reaches those of a foreign struct. Their context is the struct.
fn functions(c_struct: NonNull<PyDataMem_Handler>, reach: Reach) -> Functions {
    let ctx = c_struct.as_ptr().cast();
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

/// The copy functions by which Rust reaches those of a foreign handler.
fn copies(copies: Copies, reach: Reach) -> Copies {
    if !matches!(reach, Reach::WithGil) || copies.are_none() {
        return copies;
    }
    let original: &'static Copies = Box::leak(Box::new(copies));
    Copies {
        ctx: std::ptr::from_ref(original).cast_mut().cast(),
        host2obj: copies.host2obj.map(|_| host2obj as CopyFunction),
        obj2host: copies.obj2host.map(|_| obj2host as CopyFunction),
        obj2obj: copies.obj2obj.map(|_| obj2obj as CopyFunction),
    }
}

/// Runs `call` on the functions of a struct as they are now, attached to Python where `GIL` says so. `None`: it was not
/// called, because a function is missing or Python is shutting down.
///
/// # Safety
/// - `ctx` is a struct that [`functions`] was given: immortal, and changed by event hooks only.
#[inline]
unsafe fn reach<const GIL: bool, R>(ctx: *mut c_void, call: impl FnOnce(Functions) -> R) -> Option<R> {
    // SAFETY: an immortal struct that only event hooks change.
    let own = unsafe { PyDataMem_Handler::functions(ctx.cast()) }.ok()?;
    if GIL { attached(|| call(own)) } else { Some(call(own)) }
}

/// # Safety
/// - `ctx` as for [`reach`]. So the three below.
unsafe extern "C" fn malloc<const GIL: bool>(ctx: *mut c_void, size: usize) -> *mut c_void {
    // SAFETY: the caller passes the context that belongs to this function; the struct's own function gets its own.
    unsafe { reach::<GIL, _>(ctx, |own| (own.malloc)(own.ctx, size)) }.unwrap_or(null_mut())
}

unsafe extern "C" fn calloc<const GIL: bool>(ctx: *mut c_void, nelem: usize, elsize: usize) -> *mut c_void {
    // SAFETY: the caller passes the context that belongs to this function; the struct's own function gets its own.
    unsafe { reach::<GIL, _>(ctx, |own| (own.calloc)(own.ctx, nelem, elsize)) }.unwrap_or(null_mut())
}

/// # Safety
/// - `ctx` as for [`reach`].
/// - `ptr` is NULL or a live block of the handler, given up unless NULL is returned.
unsafe extern "C" fn realloc<const GIL: bool>(ctx: *mut c_void, ptr: *mut c_void, new_size: usize) -> *mut c_void {
    // SAFETY: the caller passes the context that belongs to this function, and a block of the struct's handler.
    unsafe { reach::<GIL, _>(ctx, |own| (own.realloc)(own.ctx, ptr, new_size)) }.unwrap_or(null_mut())
}

/// # Safety
/// - `ctx` as for [`reach`].
/// - `ptr` is NULL or a live block of the handler, given up.
unsafe extern "C" fn free<const GIL: bool>(ctx: *mut c_void, ptr: *mut c_void, size: usize) {
    // Where Python is shutting down the block stays: a foreign free may need Python, and the process is ending.
    // SAFETY: the caller passes the context that belongs to this function, and a block of the struct's handler.
    let _ = unsafe { reach::<GIL, _>(ctx, |own| (own.free)(own.ctx, ptr, size)) };
}

/// # Safety
/// - `ctx` is the original that [`copies`] leaked. The rest is the contract of the function that `which` takes.
unsafe fn copy(
    ctx: *mut c_void,
    which: impl FnOnce(&Copies) -> Option<CopyFunction>,
    (dst, src, size): (*mut c_void, *const c_void, usize),
) -> *mut c_void {
    // SAFETY: `copies` leaked it, so it is valid for ever.
    let original: &Copies = unsafe { &*ctx.cast() };
    let Some(function) = which(original) else { return null_mut() };
    // SAFETY: the caller keeps the function's contract; the context is the one that belongs to it.
    attached(|| unsafe { function(original.ctx, dst, src, size) }).unwrap_or(null_mut())
}

/// # Safety
/// - as for [`copy`]. So the two below.
unsafe extern "C" fn host2obj(ctx: *mut c_void, dst: *mut c_void, src: *const c_void, size: usize) -> *mut c_void {
    // SAFETY: the caller passes the context that belongs to this function, and keeps the original's contract.
    unsafe { copy(ctx, |copies| copies.host2obj, (dst, src, size)) }
}

unsafe extern "C" fn obj2host(ctx: *mut c_void, dst: *mut c_void, src: *const c_void, size: usize) -> *mut c_void {
    // SAFETY: the caller passes the context that belongs to this function, and keeps the original's contract.
    unsafe { copy(ctx, |copies| copies.obj2host, (dst, src, size)) }
}

unsafe extern "C" fn obj2obj(ctx: *mut c_void, dst: *mut c_void, src: *const c_void, size: usize) -> *mut c_void {
    // SAFETY: the caller passes the context that belongs to this function, and keeps the original's contract.
    unsafe { copy(ctx, |copies| copies.obj2obj, (dst, src, size)) }
}
