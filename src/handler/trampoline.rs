//! The four C functions behind a handler that stands for a [`Strategy`]: one set for each strategy type.
//!
//! They bring C's habits to what strategies are promised: zero becomes one, absurd sizes and overflowing
//! products fail, `realloc(NULL)` allocates, `free(NULL)` does nothing, and the size given to `free` is dropped.
//! They take no lock, know no Python, and let no panic out. Where there is an event hook, it is told: of the end of a block
//! before it ends, of all else when it is done.

use super::abi::Functions;
use super::entry::Draft;
use super::events::tell::{resizing, tell};
use super::name::Name;
use crate::layout;
use crate::strategy::{LiveBlock, Strategy};
use crate::trace;
use std::any::Any;
use std::ffi::c_void;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::{NonNull, null_mut};

/// A handler of our own, which makes its strategy immortal when it is registered.
pub(super) fn draft<S: Strategy>(name: Name<'_>, strategy: S) -> Draft<'_> {
    Draft {
        alignment: strategy.alignment(),
        trim: Some(trim::<S>),
        live_blocks: Some(live_blocks::<S>),
        ..Draft::new(name, format!("{strategy:?}"), move || {
            let strategy: &'static S = Box::leak(Box::new(strategy));
            // SAFETY: the strategy is there, and immortal.
            unsafe { functions_at::<S>(strategy) }
        })
    }
}

/// The functions of an immortal strategy, which may not be made yet.
///
/// # Safety
/// - `strategy` stays valid for ever from the first call of any of them on.
pub(super) unsafe fn functions_at<S: Strategy>(strategy: *const S) -> Functions {
    Functions {
        ctx: strategy.cast_mut().cast(),
        malloc: malloc::<S>,
        calloc: calloc::<S>,
        realloc: realloc::<S>,
        free: free::<S>,
    }
}

/// What NumPy is shown where it could not write to the blocks: functions that give it no memory.
#[cfg(feature = "usm")]
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
/// - `ctx` is that of [`functions_at::<S>`](functions_at). So for all functions below, which are called with it.
unsafe fn strategy<'a, S: Strategy>(ctx: *mut c_void) -> &'a S {
    debug_assert!(!ctx.is_null());
    // SAFETY: `functions_at` was promised an `S` that is valid for ever.
    unsafe { &*ctx.cast::<S>() }
}

/// # Safety
/// - `ctx` as for [`strategy`].
unsafe extern "C" fn malloc<S: Strategy>(ctx: *mut c_void, size: usize) -> *mut c_void {
    // SAFETY: the caller passes the context that belongs to this function.
    let strategy = unsafe { strategy::<S>(ctx) };
    let block = to_c(shielded("malloc", || strategy.allocate(layout::request(size)?)));
    tell(null_mut(), block, size);
    block
}

/// # Safety
/// - `ctx` as for [`strategy`].
unsafe extern "C" fn calloc<S: Strategy>(ctx: *mut c_void, nelem: usize, elsize: usize) -> *mut c_void {
    // SAFETY: the caller passes the context that belongs to this function.
    let strategy = unsafe { strategy::<S>(ctx) };
    let block = to_c(shielded("calloc", || strategy.allocate_zeroed(layout::request(layout::array(nelem, elsize)?)?)));
    tell(null_mut(), block, nelem.saturating_mul(elsize));
    block
}

/// # Safety
/// - `ctx` as for [`strategy`].
/// - `ptr` is NULL or a live block of that strategy, given up unless NULL is returned.
unsafe extern "C" fn realloc<S: Strategy>(ctx: *mut c_void, ptr: *mut c_void, new_size: usize) -> *mut c_void {
    // SAFETY: the caller passes the context that belongs to this function.
    let strategy = unsafe { strategy::<S>(ctx) };
    let resizing = resizing(ptr);
    let moved = to_c(shielded("realloc", || {
        let size_bytes = layout::request(new_size)?;
        match NonNull::new(ptr.cast::<u8>()) {
            None => strategy.allocate(size_bytes),
            // SAFETY: the caller passes a live block of this strategy, and gives it up where this succeeds.
            Some(block) => unsafe { strategy.resize(block, size_bytes) },
        }
    }));
    resizing.done(moved, new_size);
    moved
}

/// # Safety
/// - `ctx` as for [`strategy`].
/// - `ptr` is NULL or a live block of that strategy, given up.
unsafe extern "C" fn free<S: Strategy>(ctx: *mut c_void, ptr: *mut c_void, _size: usize) {
    let Some(block) = NonNull::new(ptr.cast::<u8>()) else { return };
    // SAFETY: the caller passes the context that belongs to this function.
    let strategy = unsafe { strategy::<S>(ctx) };
    tell(ptr, null_mut(), 0); // first: once it is released, its address may be another's
    shielded("free", || {
        // SAFETY: the caller passes a live block of this strategy, and gives it up.
        unsafe { strategy.release(block) };
        Some(())
    });
}

/// # Safety
/// - `ctx` as for [`strategy`].
pub(super) unsafe extern "C" fn trim<S: Strategy>(ctx: *mut c_void) -> usize {
    // SAFETY: the caller passes the context that belongs to this function.
    let strategy = unsafe { strategy::<S>(ctx) };
    shielded("trim", || Some(strategy.trim())).unwrap_or(0)
}

/// # Safety
/// - `ctx` as for [`strategy`].
pub(super) unsafe fn live_blocks<S: Strategy>(ctx: *mut c_void) -> Option<Vec<LiveBlock>> {
    // SAFETY: the caller passes the context that belongs to this function.
    let strategy = unsafe { strategy::<S>(ctx) };
    strategy.live_blocks()
}
