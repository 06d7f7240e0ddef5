//! Handlers over USM: a pool on a queue, with copy functions that go through that queue.
//!
//! One of the kind `device` has two faces: its functions serve Rust and C, the struct that NumPy sees refuses.

use super::abi::Copies;
use super::entry::{Draft, Handler};
use super::name::Name;
use super::{enter, table};
use crate::error::Error;
use crate::source::{Queue, UsmKind, UsmPages};
use crate::strategy::{Pool, PoolOptions};
use std::ffi::c_void;
use std::ptr::null_mut;

/// Registers a pool over USM of a queue's device under a name, for ever. The queue lives as long.
///
/// Bytes get in and out by copies on the queue ([`Handler::copy_in`] and its kin), after all that was submitted to it.
/// Blocks of the kind `device` cannot be read by the host: [`Buffer`](crate::Buffer) and
/// [`ContextAlloc`](crate::ContextAlloc) refuse such a handler, NumPy gets no memory from it, and
/// [`DeviceBuffer`](crate::memory::DeviceBuffer) owns its blocks.
///
/// # Errors
/// Those of [`register`](super::register); [`Error::Sycl`] where the device has no such memory.
pub fn register_usm(name: &str, queue: &Queue, kind: UsmKind) -> Result<Handler, Error> {
    let name = Name::new(name)?;
    let table = table::table();
    if table.named(name.as_str()).is_some() {
        return Err(Error::NameTaken { name: name.as_str().into() });
    }
    let pool = Pool::over(UsmPages::of_any_kind(queue, kind)?, PoolOptions::default());
    let queue: &'static Queue = Box::leak(Box::new(queue.clone()));
    let copies = Copies {
        ctx: std::ptr::from_ref(queue).cast_mut().cast(),
        host2obj: Some(copy),
        obj2host: Some(copy),
        obj2obj: Some(copy),
    };
    enter(table, Draft::of_strategy(name, pool).with_copies(copies, kind.is_host_accessible()))
}

/// # Safety
/// - `ctx` is the queue that `register_usm` put there; the rest is the contract of NEP 49's second draft.
unsafe extern "C" fn copy(ctx: *mut c_void, dst: *mut c_void, src: *const c_void, size: usize) -> *mut c_void {
    // SAFETY: an immortal queue, says the caller.
    let queue: &Queue = unsafe { &*ctx.cast() };
    // SAFETY: passed on from the caller.
    match unsafe { queue.copy(dst.cast(), src.cast(), size) } {
        Ok(()) => dst,
        Err(_) => null_mut(),
    }
}
