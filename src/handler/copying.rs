//! How bytes get into a handler's blocks and out of them: by the copy functions it may have (the second draft of
//! NEP 49), by `memcpy` where it has none.

use super::abi::CopyFunction;
use super::word::Handler;
use crate::error::Error;
use std::ptr::NonNull;

impl Handler {
    /// Copies `size_bytes` bytes of the host into a block, by the handler's own function where it has one
    /// ([`Copies`](super::abi::Copies), the second draft of NEP 49), by `memcpy` where not.
    ///
    /// # Errors
    /// [`Error::CopyFailed`]; the block may have some of the bytes.
    ///
    /// # Safety
    /// - `to` points into a live block of this handler, with room for that many bytes; `from` to as many on the host.
    ///   They do not overlap.
    pub unsafe fn copy_in(self, to: NonNull<u8>, from: *const u8, size_bytes: usize) -> Result<(), Error> {
        // SAFETY: the caller promises what the function and `memcpy` want: a block of this handler, room, no overlap.
        unsafe { self.copy("host2obj", self.copies().host2obj, to.as_ptr(), from, size_bytes) }
    }

    /// Copies `size_bytes` bytes of a block to the host; as [`copy_in`](Self::copy_in).
    ///
    /// # Errors
    /// [`Error::CopyFailed`]; `to` may have some of the bytes.
    ///
    /// # Safety
    /// - `from` points into a live block of this handler that has that many bytes from there on, `to` to room for as
    ///   many on the host. They do not overlap.
    pub unsafe fn copy_out(self, to: *mut u8, from: NonNull<u8>, size_bytes: usize) -> Result<(), Error> {
        // SAFETY: the caller promises what the function and `memcpy` want: a block of this handler, room, no overlap.
        unsafe { self.copy("obj2host", self.copies().obj2host, to, from.as_ptr(), size_bytes) }
    }

    /// Copies `size_bytes` bytes from one block of this handler to another; as [`copy_in`](Self::copy_in).
    ///
    /// # Errors
    /// [`Error::CopyFailed`]; `to` may have some of the bytes.
    ///
    /// # Safety
    /// - `from` and `to` point into live blocks of this handler that have that many bytes from there on. They do not
    ///   overlap.
    pub unsafe fn copy_across(self, to: NonNull<u8>, from: NonNull<u8>, size_bytes: usize) -> Result<(), Error> {
        // SAFETY: the caller promises what the function and `memcpy` want: blocks of this handler, room, no overlap.
        unsafe { self.copy("obj2obj", self.copies().obj2obj, to.as_ptr(), from.as_ptr(), size_bytes) }
    }

    /// # Safety
    /// - the pointers are as `function` wants them; they do not overlap.
    unsafe fn copy(
        self,
        name: &'static str,
        function: Option<CopyFunction>,
        to: *mut u8,
        from: *const u8,
        size_bytes: usize,
    ) -> Result<(), Error> {
        let Some(function) = function else {
            // SAFETY: the caller's pointers are valid for that many bytes and do not overlap.
            unsafe { std::ptr::copy_nonoverlapping(from, to, size_bytes) };
            return Ok(());
        };
        // SAFETY: the context is the one that belongs to the function, and the caller's pointers are as it wants them.
        let answer = unsafe { function(self.copies().ctx, to.cast(), from.cast(), size_bytes) };
        if answer.is_null() {
            return Err(Error::CopyFailed { handler: self.name(), function: name, size_bytes });
        }
        Ok(())
    }
}
