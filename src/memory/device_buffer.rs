//! `DeviceBuffer`: owned bytes of any handler, also of one whose blocks the host cannot read. Only copies touch them.

use crate::error::Error;
use crate::handler::Handler;
use std::fmt;
use std::ptr::NonNull;

/// Owned bytes that are reached by copies alone: what [`Buffer`](super::Buffer) is for memory of the host.
///
/// ```
/// use ctxalloc::{handler, memory::DeviceBuffer};
///
/// let handler = handler("pool").expect("built in"); // or one of `handler::register_usm`
/// let buffer = DeviceBuffer::copy_from_slice_in(handler, b"some bytes")?;
/// let mut back = [0; 10];
/// buffer.copy_to_slice(&mut back)?;
/// assert_eq!(&back, b"some bytes");
/// # Ok::<(), ctxalloc::Error>(())
/// ```
pub struct DeviceBuffer {
    /// Dangling while `length` is zero; else a block of `handler` with `length` initialised bytes.
    block: NonNull<u8>,
    length: usize,
    handler: Handler,
}

// SAFETY: it owns its block alone, and handlers may be called from any thread.
unsafe impl Send for DeviceBuffer {}
// SAFETY: shared, it is only copied from.
unsafe impl Sync for DeviceBuffer {}

impl DeviceBuffer {
    /// `length` zero bytes in `handler`.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`].
    pub fn zeroed_in(handler: Handler, length: usize) -> Result<Self, Error> {
        let block = if length == 0 { NonNull::dangling() } else { handler.allocate_zeroed(length)? };
        Ok(Self { block, length, handler })
    }

    /// A copy of `bytes` in `handler`.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`], [`Error::CopyFailed`].
    pub fn copy_from_slice_in(handler: Handler, bytes: &[u8]) -> Result<Self, Error> {
        let mut made = Self::uninitialised(handler, bytes.len())?;
        made.copy_from_slice(bytes)?;
        Ok(made)
    }

    /// A copy of it, in the same handler.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`], [`Error::CopyFailed`].
    pub fn try_clone(&self) -> Result<Self, Error> {
        let made = Self::uninitialised(self.handler, self.length)?;
        if self.length > 0 {
            // SAFETY: two live blocks of this handler with that many bytes. Where the copy fails, it is freed unread.
            unsafe { self.handler.copy_across(made.block, self.block, self.length) }?;
        }
        Ok(made)
    }

    /// Copies `bytes` into it, which are as many.
    ///
    /// # Errors
    /// [`Error::CopyFailed`]; it may have some of them.
    ///
    /// # Panics
    /// Where `bytes` has another length.
    pub fn copy_from_slice(&mut self, bytes: &[u8]) -> Result<(), Error> {
        assert_eq!(bytes.len(), self.length, "the slice is as long as the buffer");
        if self.length == 0 {
            return Ok(());
        }
        // SAFETY: a live block of this handler with that many bytes, ours alone.
        unsafe { self.handler.copy_in(self.block, bytes.as_ptr(), self.length) }
    }

    /// Copies all of it to `bytes`, which has as many.
    ///
    /// # Errors
    /// [`Error::CopyFailed`]; `bytes` may have changed.
    ///
    /// # Panics
    /// Where `bytes` has another length.
    pub fn copy_to_slice(&self, bytes: &mut [u8]) -> Result<(), Error> {
        assert_eq!(bytes.len(), self.length, "the slice is as long as the buffer");
        if self.length == 0 {
            return Ok(());
        }
        // SAFETY: a live block of this handler with that many bytes, and as many to write to.
        unsafe { self.handler.copy_out(bytes.as_mut_ptr(), self.block, self.length) }
    }

    /// How many bytes it has.
    #[must_use]
    pub fn len(&self) -> usize {
        self.length
    }

    /// Whether it has none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// Where its bytes are; perhaps an address that only a device can read.
    #[must_use]
    pub fn as_ptr(&self) -> *const u8 {
        self.block.as_ptr()
    }

    /// The handler that made it and will free it.
    #[must_use]
    pub fn handler(&self) -> Handler {
        self.handler
    }

    /// A block that is written to before it is copied from.
    pub(crate) fn uninitialised(handler: Handler, length: usize) -> Result<Self, Error> {
        let block = if length == 0 { NonNull::dangling() } else { handler.allocate(length)? };
        Ok(Self { block, length, handler })
    }
}

impl Drop for DeviceBuffer {
    fn drop(&mut self) {
        if self.length > 0 {
            // SAFETY: a live block of this handler with `length` bytes, never used again.
            unsafe { self.handler.release(self.block, self.length) }
        }
    }
}

impl fmt::Debug for DeviceBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceBuffer").field("length", &self.length).field("handler", &self.handler.name()).finish()
    }
}
