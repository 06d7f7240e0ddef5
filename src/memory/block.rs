//! `Block`: owned bytes of a handler. [`Buffer`](super::Buffer) and [`DeviceBuffer`](super::DeviceBuffer) are
//! one each; they differ in who may read the bytes.

use crate::error::Error;
use crate::handler::{Handler, Held};
use crate::os;
use std::fmt;
use std::ptr::NonNull;

/// Bytes of a handler, released to it on drop. With a length of zero there is no block.
pub(crate) struct Block {
    /// Dangling while `length` is zero; otherwise a live block of `handler` with `length` bytes.
    start: NonNull<u8>,
    length: usize,
    handler: Handler,
    /// Keeps a request's handler valid while there is no block. A block does so itself.
    _held: Option<Held>,
}

// SAFETY: it alone owns its block, and handlers may be called on any thread (`Entry`).
unsafe impl Send for Block {}
// SAFETY: a shared Block only gives its address and copies of its bytes.
unsafe impl Sync for Block {}

impl Block {
    /// No bytes, of `handler`.
    pub(super) fn empty(handler: Handler) -> Self {
        let held = Held::on(handler);
        Self { start: NonNull::dangling(), length: 0, handler: held.handler(), _held: Some(held) }
    }

    /// `length` zero bytes.
    ///
    /// # Errors
    /// Those of [`Handler::allocate_zeroed`].
    pub(crate) fn zeroed(handler: Handler, length: usize) -> Result<Self, Error> {
        if length == 0 {
            return Ok(Self::empty(handler));
        }
        Ok(Self { start: handler.allocate_zeroed(length)?, length, handler, _held: None })
    }

    /// `length` bytes that the caller writes before anybody reads them.
    ///
    /// # Errors
    /// Those of [`Handler::allocate`].
    pub(crate) fn uninitialised(handler: Handler, length: usize) -> Result<Self, Error> {
        if length == 0 {
            return Ok(Self::empty(handler));
        }
        Ok(Self { start: handler.allocate(length)?, length, handler, _held: None })
    }

    /// Resizes it to `length` bytes, neither length being zero. The first bytes are kept; the caller writes the new
    /// ones before anybody reads them.
    ///
    /// # Errors
    /// Those of [`Handler::resize`]; it is unchanged then.
    pub(crate) fn resize_uninitialised(&mut self, length: usize) -> Result<(), Error> {
        debug_assert!(self.length > 0 && length > 0);
        // SAFETY: a live block of this handler, since the length is not zero. The old pointer is overwritten on
        // success.
        self.start = unsafe { self.handler.resize(self.start, length) }?;
        self.length = length;
        Ok(())
    }

    /// Writes one byte in each page from byte `from` on, as a program that fills them would: then they are in memory.
    pub(crate) fn touch(&mut self, from: usize) {
        let page = os::page_bytes();
        // The first byte of the range, and of each page that begins in it.
        let start = self.start.addr().get();
        let mut at = from;
        while at < self.length {
            // SAFETY: inside of a live block, which is exclusively borrowed; `at` is less than its length. Volatile: it
            // is done for the page, and nobody reads the byte.
            unsafe { self.start.add(at).write_volatile(1) };
            at = ((start + at) / page + 1) * page - start;
        }
    }

    /// Copies `bytes` into it.
    ///
    /// # Errors
    /// [`Error::CopyFailed`] if the handler has a copy function and it failed; some bytes may have been copied.
    ///
    /// # Panics
    /// If `bytes` has another length.
    pub(super) fn copy_from_slice(&mut self, bytes: &[u8]) -> Result<(), Error> {
        assert_eq!(bytes.len(), self.length, "the slice is as long as the buffer");
        if self.length == 0 {
            return Ok(());
        }
        // SAFETY: a live block of this handler with `length` bytes, exclusively borrowed.
        unsafe { self.handler.copy_in(self.start, bytes.as_ptr(), self.length) }
    }

    /// Copies all of it to `bytes`.
    ///
    /// # Errors
    /// [`Error::CopyFailed`] if the handler has a copy function and it failed; `bytes` may have changed.
    ///
    /// # Panics
    /// If `bytes` has another length.
    pub(super) fn copy_to_slice(&self, bytes: &mut [u8]) -> Result<(), Error> {
        assert_eq!(bytes.len(), self.length, "the slice is as long as the buffer");
        if self.length == 0 {
            return Ok(());
        }
        // SAFETY: a live block of this handler with `length` bytes, and a slice with as many to write to.
        unsafe { self.handler.copy_out(bytes.as_mut_ptr(), self.start, self.length) }
    }

    /// Copies all of another block of the same handler and length into it.
    ///
    /// # Errors
    /// [`Error::CopyFailed`] if the handler has a copy function and it failed; some bytes may have been copied.
    pub(super) fn copy_from(&mut self, other: &Self) -> Result<(), Error> {
        debug_assert!(self.handler == other.handler && self.length == other.length);
        if self.length == 0 {
            return Ok(());
        }
        // SAFETY: two live blocks of this handler, hence disjoint, with `length` bytes each.
        unsafe { self.handler.copy_across(self.start, other.start, self.length) }
    }

    /// Where it starts; dangling if it has no bytes.
    pub(super) fn start(&self) -> NonNull<u8> {
        self.start
    }

    /// Its length in bytes.
    pub(super) fn length(&self) -> usize {
        self.length
    }

    /// The handler that made it and will release it.
    pub(super) fn handler(&self) -> Handler {
        self.handler
    }

    /// What an owner called `name` shows of it.
    pub(super) fn debug(&self, name: &str, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct(name).field("length", &self.length).field("handler", &self.handler.name()).finish()
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        if self.length > 0 {
            // SAFETY: a live block of this handler with `length` bytes, which is not used again.
            unsafe { self.handler.release(self.start, self.length) }
        }
    }
}
