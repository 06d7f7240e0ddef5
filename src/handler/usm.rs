//! Handlers over USM: a pool on a queue, with copy functions that go through that queue.
//!
//! A handler of the kind `device` serves Rust and C through its functions; the struct that NumPy sees refuses
//! everything. `pool` has the pools, of which there is one for each context, device and kind; `block` what Python's
//! arrays own.

#[cfg(feature = "python")]
mod block;
mod pool;

#[cfg(feature = "python")]
pub(crate) use block::UsmBlock;
pub(crate) use pool::UsmPool;

use super::abi::Copies;
use super::entry::Draft;
use super::name::Name;
use super::process;
use super::trampoline;
use super::word::Handler;
use crate::error::Error;
use crate::source::{Queue, UsmKind};
use crate::unattributed::unattributed;
use std::ffi::c_void;
use std::ptr::null_mut;

/// Registers a pool over USM of a queue's device under a name, for ever. The queue lives as long. All handlers whose
/// queues have the same context and device share one pool of each kind.
///
/// Bytes get in and out by copies on the queue ([`Handler::copy_in`], `copy_out`, `copy_across`), after all that was
/// submitted to it.
/// Blocks of the kind `device` cannot be read by the host: [`Buffer`](crate::Buffer) and
/// [`ContextAlloc`](crate::ContextAlloc) refuse such a handler, NumPy gets no memory from it, and
/// [`DeviceBuffer`](crate::memory::DeviceBuffer) owns its blocks.
///
/// # Errors
/// Those of [`register`](super::register); [`Error::Sycl`] where the device has no such memory.
pub fn register_usm(name: &str, queue: &Queue, kind: UsmKind) -> Result<Handler, Error> {
    let name = Name::new(name)?;
    process::check_free(name)?; // before anything is made immortal
    let pool = UsmPool::of(queue, kind)?.for_handler();
    let _immortal = unattributed();
    let queue: &'static Queue = Box::leak(Box::new(queue.clone()));
    let copies = Copies {
        ctx: std::ptr::from_ref(queue).cast_mut().cast(),
        host2obj: Some(copy),
        obj2host: Some(copy),
        obj2obj: Some(copy),
    };
    let host_accessible = kind.is_host_accessible();
    // NumPy would write to the blocks.
    let shown = (!host_accessible).then(trampoline::refusing);
    process::register(Draft { copies, host_accessible, shown, ..trampoline::draft(name, pool) })
}

/// # Safety
/// - `ctx` is the queue that `register_usm` put there. The rest is the contract of NEP 49's second draft: both sides
///   have `size` bytes and do not overlap; one is a block of this handler, the other that or the host's.
unsafe extern "C" fn copy(ctx: *mut c_void, dst: *mut c_void, src: *const c_void, size: usize) -> *mut c_void {
    // SAFETY: `register_usm` leaked the queue that `ctx` points to.
    let queue: &Queue = unsafe { &*ctx.cast() };
    // SAFETY: blocks of this handler are USM of the queue's context, and the caller keeps the rest of the contract.
    match unsafe { queue.copy(dst.cast(), src.cast(), size) } {
        Ok(()) => dst,
        Err(_) => null_mut(),
    }
}
