//! `DeviceBuffer`: owned bytes of any handler, including one whose blocks the host cannot read. Only copies access
//! them.

use super::block::Block;
use crate::error::Error;
use crate::handler::Handler;
use std::fmt;

/// Owned bytes that only copies access. For memory of the host there is [`Buffer`](super::Buffer).
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
    block: Block,
}

impl DeviceBuffer {
    /// `length` zero bytes in `handler`.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`], or another refusal of the handler's.
    pub fn zeroed_in(handler: Handler, length: usize) -> Result<Self, Error> {
        Ok(Self { block: Block::zeroed(handler, length)? })
    }

    /// A copy of `bytes` in `handler`.
    ///
    /// # Errors
    /// As [`zeroed_in`](Self::zeroed_in); [`Error::CopyFailed`].
    pub fn copy_from_slice_in(handler: Handler, bytes: &[u8]) -> Result<Self, Error> {
        let mut made = Self::uninitialised(handler, bytes.len())?;
        made.copy_from_slice(bytes)?;
        Ok(made)
    }

    /// A copy of it in the same handler.
    ///
    /// # Errors
    /// As [`zeroed_in`](Self::zeroed_in); [`Error::CopyFailed`].
    pub fn try_clone(&self) -> Result<Self, Error> {
        let mut made = Self::uninitialised(self.handler(), self.len())?;
        made.block.copy_from(&self.block)?;
        Ok(made)
    }

    /// Copies `bytes` into it.
    ///
    /// # Errors
    /// [`Error::CopyFailed`]; some bytes may have been copied.
    ///
    /// # Panics
    /// If `bytes` has another length.
    pub fn copy_from_slice(&mut self, bytes: &[u8]) -> Result<(), Error> {
        self.block.copy_from_slice(bytes)
    }

    /// Copies all of it to `bytes`.
    ///
    /// # Errors
    /// [`Error::CopyFailed`]; `bytes` may have changed.
    ///
    /// # Panics
    /// If `bytes` has another length.
    pub fn copy_to_slice(&self, bytes: &mut [u8]) -> Result<(), Error> {
        self.block.copy_to_slice(bytes)
    }

    /// Its length in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.block.length()
    }

    /// Whether it has no bytes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The address of its bytes, which perhaps only a device can read.
    #[must_use]
    pub fn as_ptr(&self) -> *const u8 {
        self.block.start().as_ptr()
    }

    /// The handler that made it and will release it.
    #[must_use]
    pub fn handler(&self) -> Handler {
        self.block.handler()
    }

    /// Bytes that are written before they are copied from.
    pub(crate) fn uninitialised(handler: Handler, length: usize) -> Result<Self, Error> {
        Ok(Self { block: Block::uninitialised(handler, length)? })
    }
}

impl fmt::Debug for DeviceBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.block.debug("DeviceBuffer", f)
    }
}
