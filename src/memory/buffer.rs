//! `Buffer`: owned bytes with a memory of their handler.

use crate::error::Error;
use crate::handler::trace;
use crate::handler::{Handler, Held};
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
/// assert_eq!((buffer[0], buffer[99_999], &*buffer.handler().name()), (7, 0, "aligned64"));
/// # Ok::<(), ctxalloc::Error>(())
/// ```
pub struct Buffer {
    /// Dangling while `length` is zero; else a block of `handler` with `length` initialised bytes.
    block: NonNull<u8>,
    length: usize,
    handler: Handler,
    /// While there is no block: what keeps a request's handler good. A block does so by itself.
    _held: Option<Held>,
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
    /// [`Error::OutOfMemory`]; [`Error::NotHostAccessible`] for memory that Rust cannot read
    /// ([`DeviceBuffer`](super::DeviceBuffer) can have it).
    pub fn zeroed_in(handler: Handler, length: usize) -> Result<Self, Error> {
        handler.require_host_accessible()?;
        if length == 0 {
            let held = Held::on(handler);
            return Ok(Self { block: NonNull::dangling(), length, handler: held.handler(), _held: Some(held) });
        }
        let block = handler.allocate_zeroed(length)?;
        trace(block.as_ptr(), length);
        Ok(Self { block, length, handler, _held: None })
    }

    /// A copy of `bytes` in the current handler.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`]; [`Error::CopyFailed`] where the handler has a copy function and it failed.
    pub fn copy_from_slice(bytes: &[u8]) -> Result<Self, Error> {
        Self::copy_from_slice_in(current(), bytes)
    }

    /// A copy of `bytes` in `handler`.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`]; [`Error::CopyFailed`] where the handler has a copy function and it failed.
    pub fn copy_from_slice_in(handler: Handler, bytes: &[u8]) -> Result<Self, Error> {
        if bytes.is_empty() {
            return Self::zeroed_in(handler, 0);
        }
        let copy = Self::uninitialised(handler, bytes.len())?;
        // SAFETY: the new block has `bytes.len()` bytes and nobody else knows it. Where the copy fails, it is freed unread.
        unsafe { handler.copy_in(copy.block, bytes.as_ptr(), bytes.len()) }?;
        Ok(copy)
    }

    /// A copy of it, in the same handler.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`]; [`Error::CopyFailed`] where the handler has a copy function and it failed.
    pub fn try_clone(&self) -> Result<Self, Error> {
        if self.length == 0 {
            return Self::zeroed_in(self.handler, 0);
        }
        let copy = Self::uninitialised(self.handler, self.length)?;
        // SAFETY: two live blocks of this handler with that many bytes. Where the copy fails, it is freed unread.
        unsafe { self.handler.copy_across(copy.block, self.block, self.length) }?;
        Ok(copy)
    }

    /// Copies all of it to `bytes`, which has as many.
    ///
    /// # Errors
    /// [`Error::CopyFailed`] where the handler has a copy function and it failed; `bytes` may have changed.
    ///
    /// # Panics
    /// Where `bytes` has another length, as [`slice::copy_from_slice`].
    pub fn copy_to_slice(&self, bytes: &mut [u8]) -> Result<(), Error> {
        assert_eq!(bytes.len(), self.length, "the slice is as long as the buffer");
        if self.length == 0 {
            return Ok(());
        }
        // SAFETY: a live block of this handler with that many bytes, and as many to write to.
        unsafe { self.handler.copy_out(bytes.as_mut_ptr(), self.block, self.length) }
    }

    /// A block that the caller fills before anybody reads it.
    fn uninitialised(handler: Handler, length: usize) -> Result<Self, Error> {
        handler.require_host_accessible()?;
        let block = handler.allocate(length)?;
        trace(block.as_ptr(), length);
        Ok(Self { block, length, handler, _held: None })
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
        trace(self.block.as_ptr(), 0); // before: by the time it has moved, its place may be another's
        // SAFETY: a live block of this handler (length > 0); the old pointer is overwritten on success.
        let moved = unsafe { self.handler.resize(self.block, length) };
        match moved {
            Ok(moved) => self.block = moved,
            Err(error) => {
                trace(self.block.as_ptr(), self.length);
                return Err(error);
            }
        }
        trace(self.block.as_ptr(), length);
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
            trace(self.block.as_ptr(), 0);
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
