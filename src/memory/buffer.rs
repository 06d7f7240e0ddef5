//! `Buffer`: owned bytes that remember their handler.

use super::block::Block;
use crate::error::Error;
use crate::handler::Handler;
use crate::handler::trace as report_block;
use crate::scope::current;
use std::fmt;
use std::ops::{Deref, DerefMut};

/// Owned, initialised bytes of a handler, resized and released by that same handler.
///
/// A `Buffer` may be used, resized and dropped on any thread, inside and outside of scopes. An empty one has no block.
///
/// ```
/// use ctxalloc::{Buffer, handler, scope};
///
/// let aligned = handler("aligned64").expect("built in");
/// let mut buffer = scope(aligned, || Buffer::zeroed(100))?;
/// buffer[0] = 7;
/// buffer.resize(100_000)?; // still by `aligned64`, though the scope is over
/// assert_eq!((buffer[0], buffer[99_999], &*buffer.handler().name()), (7, 0, "aligned64"));
/// # Ok::<(), ctxalloc::Error>(())
/// ```
pub struct Buffer {
    block: Block,
}

impl Buffer {
    /// `length` zero bytes in the current handler.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`], or another refusal of the handler's.
    pub fn zeroed(length: usize) -> Result<Self, Error> {
        Self::zeroed_in(current(), length)
    }

    /// `length` zero bytes in `handler`.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`], or another refusal of the handler's; [`Error::NotHostAccessible`] for memory that Rust cannot
    /// read ([`DeviceBuffer`](super::DeviceBuffer) takes it).
    pub fn zeroed_in(handler: Handler, length: usize) -> Result<Self, Error> {
        handler.require_host_accessible()?;
        Ok(Self::reported(Block::zeroed(handler, length)?))
    }

    /// A copy of `bytes` in the current handler.
    ///
    /// # Errors
    /// As [`zeroed`](Self::zeroed); [`Error::CopyFailed`] if the handler has a copy function and it failed.
    pub fn copy_from_slice(bytes: &[u8]) -> Result<Self, Error> {
        Self::copy_from_slice_in(current(), bytes)
    }

    /// A copy of `bytes` in `handler`.
    ///
    /// # Errors
    /// As [`zeroed_in`](Self::zeroed_in); [`Error::CopyFailed`] if the handler has a copy function and it failed.
    pub fn copy_from_slice_in(handler: Handler, bytes: &[u8]) -> Result<Self, Error> {
        let mut copy = Self::uninitialised(handler, bytes.len())?;
        copy.block.copy_from_slice(bytes)?;
        Ok(copy)
    }

    /// A copy of it in the same handler.
    ///
    /// # Errors
    /// As [`zeroed_in`](Self::zeroed_in); [`Error::CopyFailed`] if the handler has a copy function and it failed.
    pub fn try_clone(&self) -> Result<Self, Error> {
        let mut copy = Self::uninitialised(self.handler(), self.len())?;
        copy.block.copy_from(&self.block)?;
        Ok(copy)
    }

    /// Copies all of it to `bytes`.
    ///
    /// # Errors
    /// [`Error::CopyFailed`] if the handler has a copy function and it failed; `bytes` may have changed.
    ///
    /// # Panics
    /// If `bytes` has another length, as [`slice::copy_from_slice`] does.
    pub fn copy_to_slice(&self, bytes: &mut [u8]) -> Result<(), Error> {
        self.block.copy_to_slice(bytes)
    }

    /// Bytes that the caller writes before anybody reads them.
    fn uninitialised(handler: Handler, length: usize) -> Result<Self, Error> {
        handler.require_host_accessible()?;
        Ok(Self::reported(Block::uninitialised(handler, length)?))
    }

    fn reported(block: Block) -> Self {
        if block.length() > 0 {
            report_block(block.start().as_ptr(), block.length());
        }
        Self { block }
    }

    /// Resizes it to `length` bytes by the handler that made it. The first bytes are kept, new ones are zero.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`], or another refusal of the handler's; the buffer is unchanged then.
    pub fn resize(&mut self, length: usize) -> Result<(), Error> {
        if self.is_empty() || length == 0 {
            *self = Self::zeroed_in(self.handler(), length)?;
            return Ok(());
        }
        // Before the resize: once the block has moved, its address may be that of another block.
        report_block(self.as_ptr().cast_mut(), 0);
        let outcome = self.block.resize(length);
        report_block(self.as_ptr().cast_mut(), self.len());
        outcome
    }

    /// The handler that made it and will release it.
    #[must_use]
    pub fn handler(&self) -> Handler {
        self.block.handler()
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        if !self.is_empty() {
            report_block(self.as_ptr().cast_mut(), 0);
        }
    }
}

impl Deref for Buffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: all `length` bytes are initialised, since every constructor writes them before it returns, and they are
        // borrowed with `self`. Without bytes the pointer is dangling, which an empty slice allows.
        unsafe { std::slice::from_raw_parts(self.block.start().as_ptr(), self.block.length()) }
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `deref`; `self` is borrowed exclusively, and it alone owns the block.
        unsafe { std::slice::from_raw_parts_mut(self.block.start().as_ptr(), self.block.length()) }
    }
}

impl AsRef<[u8]> for Buffer {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

impl AsMut<[u8]> for Buffer {
    fn as_mut(&mut self) -> &mut [u8] {
        self
    }
}

impl PartialEq for Buffer {
    /// Whether the bytes are equal, whatever the handlers.
    fn eq(&self, other: &Self) -> bool {
        **self == **other
    }
}

impl Eq for Buffer {}

impl fmt::Debug for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.block.debug("Buffer", f)
    }
}
