//! `Buffer`: owned bytes with a memory of their handler.

use crate::error::Error;
use crate::handler::Handler;
use crate::scope::current;
use std::fmt;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;

/// Owned, initialised bytes from a handler, resized and freed by that same handler.
///
/// A `Buffer` may be used, resized and dropped on any thread, inside and outside of scopes. An empty one has
/// no block at all.
///
/// ```
/// use ctxalloc::{Buffer, handler, scope};
///
/// let aligned = handler("aligned64").expect("built in");
/// let mut buffer = scope(aligned, || Buffer::zeroed(100))?;
/// buffer[0] = 7;
/// buffer.resize(100_000)?; // still by `aligned64`, though the scope is over
/// assert_eq!((buffer[0], buffer[99_999], buffer.handler().name()), (7, 0, "aligned64"));
/// # Ok::<(), ctxalloc::Error>(())
/// ```
pub struct Buffer {
    /// Dangling while `length` is zero; else a block of `handler` with `length` initialised bytes.
    block: NonNull<u8>,
    length: usize,
    handler: Handler,
}

// SAFETY: a Buffer owns its block alone, and handlers may be called from any thread (`Entry`).
unsafe impl Send for Buffer {}
// SAFETY: a shared Buffer only lends `&[u8]`.
unsafe impl Sync for Buffer {}

impl Buffer {
    /// `length` zero bytes in the current handler.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`].
    pub fn zeroed(length: usize) -> Result<Self, Error> {
        Self::zeroed_in(current(), length)
    }

    /// `length` zero bytes in `handler`.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`].
    pub fn zeroed_in(handler: Handler, length: usize) -> Result<Self, Error> {
        let block = match length {
            0 => NonNull::dangling(),
            _ => handler.allocate_zeroed(length)?,
        };
        Ok(Self { block, length, handler })
    }

    /// A copy of `bytes` in the current handler.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`].
    pub fn copy_from_slice(bytes: &[u8]) -> Result<Self, Error> {
        Self::copy_from_slice_in(current(), bytes)
    }

    /// A copy of `bytes` in `handler`.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`].
    pub fn copy_from_slice_in(handler: Handler, bytes: &[u8]) -> Result<Self, Error> {
        if bytes.is_empty() {
            return Self::zeroed_in(handler, 0);
        }
        let block = handler.allocate(bytes.len())?;
        // SAFETY: the new block has `bytes.len()` bytes and nobody else knows it.
        unsafe { block.copy_from_nonoverlapping(NonNull::from(bytes).cast(), bytes.len()) };
        Ok(Self { block, length: bytes.len(), handler })
    }

    /// A copy of it, in the same handler.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`].
    pub fn try_clone(&self) -> Result<Self, Error> {
        Self::copy_from_slice_in(self.handler, self)
    }

    /// Makes it `length` bytes long, by the handler that made it. The first bytes are kept, new ones are zero.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`]; the buffer is as it was.
    pub fn resize(&mut self, length: usize) -> Result<(), Error> {
        if self.length == 0 || length == 0 {
            *self = Self::zeroed_in(self.handler, length)?;
            return Ok(());
        }
        // SAFETY: a live block of this handler (length > 0); the old pointer is overwritten on success.
        self.block = unsafe { self.handler.resize(self.block, length) }?;
        if let Some(grown) = length.checked_sub(self.length) {
            // SAFETY: the block now has `length` bytes, of which the first `self.length` are kept.
            let tail = unsafe { self.block.add(self.length) };
            // SAFETY: `self.length + grown == length` bytes are ours.
            unsafe { tail.write_bytes(0, grown) };
        }
        self.length = length;
        Ok(())
    }

    /// The handler that made it and will free it.
    #[must_use]
    pub fn handler(&self) -> Handler {
        self.handler
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        if self.length > 0 {
            // SAFETY: a live block of this handler with `length` bytes, never used again.
            unsafe { self.handler.release(self.block, self.length) }
        }
    }
}

impl Deref for Buffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: `length` initialised bytes (none: dangling is fine), borrowed with `self`.
        unsafe { std::slice::from_raw_parts(self.block.as_ptr(), self.length) }
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.block.as_ptr(), self.length) }
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
    /// Equal bytes, whatever their handlers.
    fn eq(&self, other: &Self) -> bool {
        **self == **other
    }
}

impl Eq for Buffer {}

impl fmt::Debug for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Buffer").field("length", &self.length).field("handler", &self.handler.name()).finish()
    }
}
