//! `ctxalloc_new`, `_new_zeroed`, `_renew` and `_free`: blocks that C owns by their address alone, like those of
//! `PyDataMem_NEW`.
//!
//! Whoever frees one names neither handler nor size, so both are recorded here. An address that is not on record is
//! refused, and not followed.

use super::Selection;
use super::error::{Refusal, answer};
use crate::error::Error;
use crate::handler::Handler;
use crate::handler::abi::PyDataMem_Handler;
use crate::handler::trace;
use crate::layout::array;
use crate::strategy::ledger::ProcessLedger;
use std::ffi::{c_int, c_void};
use std::ptr::{NonNull, null, null_mut};

#[derive(Debug, Clone, Copy)]
struct Record {
    handler: Handler,
    size_bytes: usize,
}

static BLOCKS: ProcessLedger<Record> = ProcessLedger::new();

/// Records a block, and gives C its address.
fn handed_out(block: NonNull<u8>, record: Record) -> *mut c_void {
    trace(block.as_ptr(), record.size_bytes.max(1));
    BLOCKS.get().insert(block, record);
    block.as_ptr().cast()
}

/// Takes a block off the record, before anything happens to it: once it is freed, its address may be another's.
fn taken_back(block: *mut c_void) -> Result<(NonNull<u8>, Record), Error> {
    let unknown = Error::NotABlock { address: block.addr(), size_bytes: 0 };
    let Some(start) = NonNull::new(block.cast::<u8>()) else { return Err(unknown) };
    let record = BLOCKS.get().remove(start).ok_or(unknown)?;
    trace(start.as_ptr(), 0);
    Ok((start, record))
}

/// `ctxalloc_new`.
pub(super) extern "C" fn new<S: Selection>(size_bytes: usize) -> *mut c_void {
    answer(null_mut(), || {
        let handler = S::current()?;
        Ok(handed_out(handler.allocate(size_bytes)?, Record { handler, size_bytes }))
    })
}

/// `ctxalloc_new_zeroed`.
pub(super) extern "C" fn new_zeroed<S: Selection>(nelem: usize, elsize: usize) -> *mut c_void {
    answer(null_mut(), || {
        let handler = S::current()?;
        // A product that overflows is more than any handler has.
        let size_bytes = array(nelem, elsize).unwrap_or(usize::MAX);
        Ok(handed_out(handler.allocate_zeroed(size_bytes)?, Record { handler, size_bytes }))
    })
}

/// `ctxalloc_renew`.
pub(super) extern "C" fn renew<S: Selection>(block: *mut c_void, size_bytes: usize) -> *mut c_void {
    if block.is_null() {
        return new::<S>(size_bytes);
    }
    answer(null_mut(), || {
        let (start, record) = taken_back(block)?;
        // SAFETY: a live block of this handler. It is on no record, so nobody else frees or resizes it meanwhile; where
        // this succeeds it is not used again.
        match unsafe { record.handler.resize(start, size_bytes) } {
            Ok(moved) => Ok(handed_out(moved, Record { size_bytes, ..record })),
            Err(error) => {
                handed_out(start, record);
                Err(error.into())
            }
        }
    })
}

/// `ctxalloc_free`.
pub(super) extern "C" fn free(block: *mut c_void) -> c_int {
    if block.is_null() {
        return answer(-1, || Ok(0));
    }
    answer(-1, || {
        let (start, Record { handler, size_bytes }) = taken_back(block)?;
        // SAFETY: a live block of this handler with this size. It is on no record any more, so nobody else frees it.
        unsafe { handler.release(start, size_bytes) };
        Ok(0)
    })
}

/// The handler of the block that starts here.
pub(super) fn handler_of(block: *mut c_void) -> Result<Handler, Refusal> {
    let unknown = Error::NotABlock { address: block.addr(), size_bytes: 0 };
    let Some(start) = NonNull::new(block.cast::<u8>()) else { return Err(unknown.into()) };
    let record = BLOCKS.get().with(start, |record| record.copied());
    Ok(record.ok_or(unknown)?.handler)
}

/// `ctxalloc_block_handler`.
pub(super) extern "C" fn block_handler(block: *mut c_void) -> *const PyDataMem_Handler {
    answer(null(), || Ok(handler_of(block)?.as_ptr()))
}

/// The handler of the block in which all these bytes lie.
fn around(address: *const c_void, size_bytes: usize) -> Result<Handler, Error> {
    let wanted = address.addr();
    let found = BLOCKS.get().near(wanted, |start, record| {
        let offset = wanted.checked_sub(start)?;
        (offset <= record.size_bytes && size_bytes <= record.size_bytes - offset).then_some(record.handler)
    });
    found.ok_or(Error::NotABlock { address: wanted, size_bytes })
}

fn start(address: *const c_void, argument: &'static str) -> Result<NonNull<u8>, Error> {
    NonNull::new(address.cast_mut().cast()).ok_or(Error::NullArgument { argument })
}

/// `ctxalloc_copy_in`.
///
/// # Safety
/// - `src` has that many bytes on the host, and the block stays alive meanwhile.
pub(super) unsafe extern "C" fn copy_in(dst: *mut c_void, src: *const c_void, size_bytes: usize) -> c_int {
    answer(-1, || {
        let handler = around(dst, size_bytes)?;
        let (dst, src) = (start(dst, "dst")?, start(src, "src")?);
        // SAFETY: `around` found all of `dst` in a block of this handler. The caller keeps that alive, and `src`
        // readable.
        unsafe { handler.copy_in(dst, src.as_ptr(), size_bytes) }?;
        Ok(0)
    })
}

/// `ctxalloc_copy_out`.
///
/// # Safety
/// - `dst` has room for that many bytes on the host, and the block stays alive meanwhile.
pub(super) unsafe extern "C" fn copy_out(dst: *mut c_void, src: *const c_void, size_bytes: usize) -> c_int {
    answer(-1, || {
        let handler = around(src, size_bytes)?;
        let (dst, src) = (start(dst, "dst")?, start(src, "src")?);
        // SAFETY: `around` found all of `src` in a block of this handler. The caller keeps that alive, and `dst`
        // writable.
        unsafe { handler.copy_out(dst.as_ptr(), src, size_bytes) }?;
        Ok(0)
    })
}

/// `ctxalloc_copy`.
///
/// # Safety
/// - both blocks stay alive meanwhile.
pub(super) unsafe extern "C" fn copy(dst: *mut c_void, src: *const c_void, size_bytes: usize) -> c_int {
    answer(-1, || {
        let (to, from) = (around(dst, size_bytes)?, around(src, size_bytes)?);
        if dst.addr().abs_diff(src.addr()) < size_bytes {
            let (dst, src) = (dst.addr(), src.addr());
            return Err(Error::Overlap { dst, src, size_bytes }.into());
        }
        let (dst, src) = (start(dst, "dst")?, start(src, "src")?);
        if to == from {
            // SAFETY: `around` found both in blocks of this handler, which the caller keeps alive; they do not overlap.
            unsafe { to.copy_across(dst, src, size_bytes) }?;
            return Ok(0);
        }
        // By way of the host: neither handler knows what the other's memory is.
        let mut between = [0_u8; 16 * 1024];
        for offset in (0..size_bytes).step_by(between.len()) {
            let some = between.len().min(size_bytes - offset);
            // SAFETY: `around` found `size_bytes` from `src` and from `dst` on in blocks of these two handlers, which
            // the caller keeps alive; `offset + some` is within that, and `between` has room for `some`.
            unsafe {
                from.copy_out(between.as_mut_ptr(), src.add(offset), some)?;
                to.copy_in(dst.add(offset), between.as_ptr(), some)?;
            }
        }
        Ok(0)
    })
}
