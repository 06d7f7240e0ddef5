//! The four C functions behind a handler that stands for a [`Strategy`]: one set for each strategy type.
//!
//! They bring C's habits to what strategies are promised: zero becomes one, absurd sizes and overflowing
//! products fail, `realloc(NULL)` allocates, `free(NULL)` does nothing, and the size given to `free` is dropped.
//! They take no lock, know no Python, and let no panic out. Where there is an event hook, it is told: of the end of a block
//! before it ends, of all else when it is done.

use super::abi::Functions;
use super::events::{resizing, tell};
use crate::layout;
use crate::strategy::{LiveBlock, Strategy};
use crate::trace;
use std::any::Any;
use std::ffi::c_void;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::{NonNull, null_mut};

/// [`Strategy::trim`] behind a handler: how many bytes went.
pub(super) type Trim = unsafe extern "C" fn(ctx: *mut c_void) -> usize;

/// [`Strategy::live_blocks`] behind a handler. Only for the copy of this crate that made the handler: it is Rust's, not C's.
pub(super) type LiveBlocks = unsafe fn(ctx: *mut c_void) -> Option<Vec<LiveBlock>>;

/// The functions of an immortal strategy.
pub(super) fn functions<S: Strategy>(strategy: &'static S) -> Functions {
    // SAFETY: it is there, and immortal.
    unsafe { functions_at::<S>(strategy) }
}

/// The functions of an immortal strategy that is not made yet.
///
/// # Safety
/// - none of them is called before the strategy is there.
pub(super) unsafe fn functions_at<S: Strategy>(strategy: *const S) -> Functions {
    Functions {
        ctx: strategy.cast_mut().cast(),
        malloc: malloc::<S>,
        calloc: calloc::<S>,
        realloc: realloc::<S>,
        free: free::<S>,
    }
}

/// The functions that stand in a struct for NumPy where it could not write to the blocks: it is told that there is no
/// memory.
pub(super) fn refusing() -> Functions {
    unsafe extern "C" fn malloc(_ctx: *mut c_void, _size: usize) -> *mut c_void {
        null_mut()
    }
    unsafe extern "C" fn calloc(_ctx: *mut c_void, _nelem: usize, _elsize: usize) -> *mut c_void {
        null_mut()
    }
    unsafe extern "C" fn realloc(_ctx: *mut c_void, _ptr: *mut c_void, _new_size: usize) -> *mut c_void {
        null_mut()
    }
    unsafe extern "C" fn free(_ctx: *mut c_void, _ptr: *mut c_void, _size: usize) {}
    Functions { ctx: null_mut(), malloc, calloc, realloc, free }
}

/// Runs `operation`; a panic is reported and becomes nothing.
#[inline]
fn shielded<R>(name: &'static str, operation: impl FnOnce() -> Option<R>) -> Option<R> {
    catch_unwind(AssertUnwindSafe(operation)).unwrap_or_else(|payload| panicked(name, payload))
}

#[cold]
pub(super) fn panicked<R>(name: &'static str, payload: Box<dyn Any + Send>) -> Option<R> {
    // A payload that panics while it is dropped has another one, which is leaked: this has to end somewhere.
    if let Err(another) = catch_unwind(AssertUnwindSafe(|| drop(payload))) {
        std::mem::forget(another);
    }
    trace::strategy_panicked(name);
    None
}

fn to_c(block: Option<NonNull<u8>>) -> *mut c_void {
    block.map_or(null_mut(), |block| block.as_ptr().cast())
}

/// # Safety
/// - `ctx` is the strategy that [`functions`] was given.
pub(super) unsafe fn strategy<'a, S: Strategy>(ctx: *mut c_void) -> &'a S {
    debug_assert!(!ctx.is_null());
    // SAFETY: `functions` put an immortal `&'static S` here.
    unsafe { &*ctx.cast::<S>() }
}

/// # Safety
/// - `ctx` is the strategy that [`functions`] was given.
unsafe extern "C" fn malloc<S: Strategy>(ctx: *mut c_void, size: usize) -> *mut c_void {
    // SAFETY: passed on from the caller.
    let strategy = unsafe { strategy::<S>(ctx) };
    let block = to_c(shielded("malloc", || strategy.allocate(layout::request(size)?)));
    tell(null_mut(), block, size);
    block
}

/// # Safety
/// - `ctx` is the strategy that [`functions`] was given.
unsafe extern "C" fn calloc<S: Strategy>(ctx: *mut c_void, nelem: usize, elsize: usize) -> *mut c_void {
    // SAFETY: passed on from the caller.
    let strategy = unsafe { strategy::<S>(ctx) };
    let block = to_c(shielded("calloc", || strategy.allocate_zeroed(layout::request(layout::array(nelem, elsize)?)?)));
    tell(null_mut(), block, nelem.saturating_mul(elsize));
    block
}

/// # Safety
/// - `ctx` is the strategy that [`functions`] was given.
/// - `ptr` is NULL or a live block of it, given up unless NULL is returned.
unsafe extern "C" fn realloc<S: Strategy>(ctx: *mut c_void, ptr: *mut c_void, new_size: usize) -> *mut c_void {
    // SAFETY: passed on from the caller.
    let strategy = unsafe { strategy::<S>(ctx) };
    let resizing = resizing(ptr);
    let moved = to_c(shielded("realloc", || {
        let size_bytes = layout::request(new_size)?;
        match NonNull::new(ptr.cast::<u8>()) {
            None => strategy.allocate(size_bytes),
            // SAFETY: a live block, says the caller.
            Some(block) => unsafe { strategy.resize(block, size_bytes) },
        }
    }));
    resizing.done(moved, new_size);
    moved
}

/// # Safety
/// - `ctx` is the strategy that [`functions`] was given.
/// - `ptr` is NULL or a live block of it, given up.
unsafe extern "C" fn free<S: Strategy>(ctx: *mut c_void, ptr: *mut c_void, _size: usize) {
    let Some(block) = NonNull::new(ptr.cast::<u8>()) else { return };
    // SAFETY: passed on from the caller.
    let strategy = unsafe { strategy::<S>(ctx) };
    tell(ptr, null_mut(), 0); // first: once it is released its address may be another's
    shielded("free", || {
        // SAFETY: a live block, given up, says the caller.
        unsafe { strategy.release(block) };
        Some(())
    });
}

/// # Safety
/// - `ctx` is the strategy that [`functions`] was given.
pub(super) unsafe extern "C" fn trim<S: Strategy>(ctx: *mut c_void) -> usize {
    // SAFETY: passed on from the caller.
    let strategy = unsafe { strategy::<S>(ctx) };
    shielded("trim", || Some(strategy.trim())).unwrap_or(0)
}

/// # Safety
/// - `ctx` is the strategy that [`functions`] was given.
pub(super) unsafe fn live_blocks<S: Strategy>(ctx: *mut c_void) -> Option<Vec<LiveBlock>> {
    // SAFETY: passed on from the caller.
    let strategy = unsafe { strategy::<S>(ctx) };
    strategy.live_blocks()
}
