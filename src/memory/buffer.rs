//! `Buffer`: owned bytes that remember their handler.

use super::block::Block;
use crate::error::Error;
use crate::handler::trace as report_block;
use crate::handler::{Handler, requests};
use crate::scope::current;
use std::fmt;
use std::io;
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
///
/// It grows like a `Vec<u8>`, but says so where it cannot: [`extend_from_slice`](Self::extend_from_slice) returns an
/// error, and what is written to it by [`io::Write`] one of the kind `OutOfMemory`.
///
/// ```
/// use ctxalloc::Buffer;
/// use std::io::Write;
///
/// let mut report = Buffer::with_capacity(100)?;
/// report.extend_from_slice(b"pixels: ")?;
/// write!(report, "{}", 1000).expect("there is memory");
/// assert_eq!(&*report, b"pixels: 1000");
/// # Ok::<(), ctxalloc::Error>(())
/// ```
pub struct Buffer {
    /// As many bytes as its capacity.
    block: Block,
    /// So many of them are initialised.
    length: usize,
}

/// What growing step by step begins with, in bytes.
const MIN_CAPACITY: usize = 64;

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
    /// [`Error::OutOfMemory`], or another refusal of the handler's; [`Error::NotHostAccessible`] for memory that Rust
    /// cannot read ([`DeviceBuffer`](super::DeviceBuffer) takes it).
    pub fn zeroed_in(handler: Handler, length: usize) -> Result<Self, Error> {
        handler.require_host_accessible()?;
        Ok(Self::reported(Block::zeroed(handler, length)?))
    }

    /// No bytes, with room for `capacity` in the current handler.
    ///
    /// # Errors
    /// As [`zeroed`](Self::zeroed).
    pub fn with_capacity(capacity: usize) -> Result<Self, Error> {
        Self::with_capacity_in(current(), capacity)
    }

    /// No bytes, with room for `capacity` in `handler`.
    ///
    /// # Errors
    /// As [`zeroed_in`](Self::zeroed_in).
    pub fn with_capacity_in(handler: Handler, capacity: usize) -> Result<Self, Error> {
        let mut buffer = Self::uninitialised(handler, capacity)?;
        buffer.length = 0;
        Ok(buffer)
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
        if self.length < self.block.length() {
            return Self::copy_from_slice_in(self.handler(), self);
        }
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
        if self.length < self.block.length() {
            bytes.copy_from_slice(self);
            return Ok(());
        }
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
        Self { length: block.length(), block }
    }

    /// Resizes it to `length` bytes by the handler that made it. The first bytes are kept, new ones are zero.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`], or another refusal of the handler's; the buffer is unchanged then.
    pub fn resize(&mut self, length: usize) -> Result<(), Error> {
        if self.block.length() == 0 || length == 0 {
            *self = Self::zeroed_in(self.handler(), length)?;
            return Ok(());
        }
        let before = self.length;
        self.set_capacity(length)?;
        self.length = length;
        if before < length {
            // SAFETY: inside of the block, which has `length` bytes, and exclusively borrowed.
            unsafe { self.block.start().add(before).write_bytes(0, length - before) };
        }
        Ok(())
    }

    /// Changes the size of the block, neither size being zero. Bytes beyond `length` are not initialised then.
    fn set_capacity(&mut self, capacity: usize) -> Result<(), Error> {
        // Before the resize: once the block has moved, its address may be that of another block.
        report_block(self.block.start().as_ptr(), 0);
        let outcome = self.block.resize_uninitialised(capacity);
        report_block(self.block.start().as_ptr(), self.block.length());
        outcome
    }

    /// How many bytes it has room for.
    #[must_use]
    pub fn capacity(&self) -> usize {
        self.block.length()
    }

    /// Makes room for `additional` bytes more, or for twice as many as it has room for, so that growing step by step
    /// copies each byte a few times at most.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`], or another refusal of the handler's; the buffer is unchanged then.
    pub fn reserve(&mut self, additional: usize) -> Result<(), Error> {
        if additional <= self.capacity() - self.length {
            return Ok(());
        }
        let handler = self.handler();
        let needed = self.length.checked_add(additional);
        let needed =
            needed.ok_or_else(|| Error::OutOfMemory { handler: handler.name(), requested_bytes: usize::MAX })?;
        let roomy = needed.max(self.capacity().saturating_mul(2)).max(MIN_CAPACITY);
        if self.capacity() == 0 {
            *self = Self::with_capacity_in(handler, needed)?;
            return Ok(());
        }
        // What no limit leaves room for is not asked for: it would count as a refusal where nothing is refused.
        if roomy > needed
            && requests::may_have_room(handler, roomy - self.capacity())
            && self.set_capacity(roomy).is_ok()
        {
            return Ok(());
        }
        // Near a limit, what is needed may still fit.
        self.set_capacity(needed)
    }

    /// Adds a copy of `bytes` at its end.
    ///
    /// # Errors
    /// As [`reserve`](Self::reserve).
    pub fn extend_from_slice(&mut self, bytes: &[u8]) -> Result<(), Error> {
        self.reserve(bytes.len())?;
        // SAFETY: the block has room for them after its `length` bytes, and `bytes` is borrowed from elsewhere.
        unsafe {
            let end = self.block.start().add(self.length);
            end.copy_from_nonoverlapping(std::ptr::NonNull::from(bytes).cast(), bytes.len());
        }
        self.length += bytes.len();
        Ok(())
    }

    /// Adds one byte at its end.
    ///
    /// # Errors
    /// As [`reserve`](Self::reserve).
    pub fn push(&mut self, byte: u8) -> Result<(), Error> {
        self.extend_from_slice(&[byte])
    }

    /// Keeps the first `length` bytes, and the room for the others. Nothing happens if it has fewer.
    pub fn truncate(&mut self, length: usize) {
        self.length = self.length.min(length);
    }

    /// Removes all bytes, and keeps the room for them.
    ///
    /// ```
    /// let mut line = ctxalloc::Buffer::copy_from_slice(b"one")?;
    /// line.clear();
    /// assert_eq!((line.len(), line.capacity()), (0, 3));
    /// # Ok::<(), ctxalloc::Error>(())
    /// ```
    pub fn clear(&mut self) {
        self.truncate(0);
    }

    /// Gives the room beyond its length back to its handler, so that its capacity is its length. An empty one has no
    /// block then.
    ///
    /// ```
    /// let mut line = ctxalloc::Buffer::with_capacity(100)?;
    /// line.extend_from_slice(b"one")?;
    /// line.shrink_to_fit()?;
    /// assert_eq!((&*line, line.capacity()), (&b"one"[..], 3));
    /// # Ok::<(), ctxalloc::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::OutOfMemory`], or another refusal of the handler's, which may need a new block for it; the buffer is
    /// unchanged then.
    pub fn shrink_to_fit(&mut self) -> Result<(), Error> {
        match self.length {
            length if length == self.capacity() => Ok(()),
            0 => self.resize(0),
            length => self.set_capacity(length),
        }
    }

    /// The handler that made it and will release it.
    #[must_use]
    pub fn handler(&self) -> Handler {
        self.block.handler()
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        if self.block.length() > 0 {
            report_block(self.block.start().as_ptr(), 0);
        }
    }
}

impl io::Write for Buffer {
    /// # Errors
    /// Of the kind `OutOfMemory`, with our [`Error`] in it.
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.extend_from_slice(bytes).map_err(|error| io::Error::new(io::ErrorKind::OutOfMemory, error))?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(feature = "bytes")]
impl From<Buffer> for bytes::Bytes {
    /// Without a copy. The block goes back to its handler when the last clone or slice of it is dropped; to a request
    /// it is an escape until then.
    fn from(buffer: Buffer) -> Self {
        Self::from_owner(buffer)
    }
}

/// Into the room that it has, which never grows by this: [`reserve`](Buffer::reserve) makes room, and says where there is
/// none. Past it, writing panics, as it does past the end of a slice.
///
/// ```
/// use bytes::BufMut;
///
/// let mut message = ctxalloc::Buffer::with_capacity(8)?;
/// message.put_u32(7);
/// assert_eq!((&*message, message.remaining_mut()), (&[0, 0, 0, 7][..], 4));
/// message.reserve(100)?;
/// message.put_bytes(1, 100);
/// # Ok::<(), ctxalloc::Error>(())
/// ```
// SAFETY: `chunk_mut` is the room behind the first `length` bytes, exclusively borrowed, and so long that
// `remaining_mut` does not grow by itself. `advance_mut` stays inside of it.
#[cfg(feature = "bytes")]
unsafe impl bytes::BufMut for Buffer {
    fn remaining_mut(&self) -> usize {
        self.capacity() - self.length
    }

    unsafe fn advance_mut(&mut self, count: usize) {
        let room = bytes::BufMut::remaining_mut(self);
        assert!(count <= room, "{count} bytes were written where there was room for {room}: reserve more before");
        self.length += count; // the caller has initialised them
    }

    fn chunk_mut(&mut self) -> &mut bytes::buf::UninitSlice {
        let room = bytes::BufMut::remaining_mut(self);
        // SAFETY: inside of the block, or dangling and without bytes. They are borrowed with `self`, exclusively, and
        // need not be initialised.
        unsafe { bytes::buf::UninitSlice::from_raw_parts_mut(self.block.start().as_ptr().add(self.length), room) }
    }
}

impl Deref for Buffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: all `length` bytes are initialised, since whatever makes it longer writes them before it returns, and
        // they are borrowed with `self`. Without bytes the pointer is dangling, which an empty slice allows.
        unsafe { std::slice::from_raw_parts(self.block.start().as_ptr(), self.length) }
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: all `length` bytes are initialised, since whatever makes it longer writes them before it returns.
        // They are borrowed with `self`, exclusively, and it alone owns the block. Without bytes the pointer is
        // dangling, which an empty slice allows.
        unsafe { std::slice::from_raw_parts_mut(self.block.start().as_ptr(), self.length) }
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
        f.debug_struct("Buffer").field("length", &self.length).field("handler", &self.handler().name()).finish()
    }
}
