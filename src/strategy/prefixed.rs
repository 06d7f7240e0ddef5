//! A prefix in front of each block, for strategies that wrap another one and keep a record of their own per block.
//!
//! ```text
//!   upstream's block           the user's block, equally aligned
//!   |<--- pad --->|<- record ->|<------- size_bytes ------->|
//!   |<------ prefix_bytes ---->|
//! ```

use super::{LiveBlock, Strategy};
use std::marker::PhantomData;
use std::ptr::NonNull;

/// Blocks of `upstream`, each with an `R` in front.
#[derive(Debug)]
pub(crate) struct Prefixed<S, R> {
    pub(crate) upstream: S,
    /// A multiple of the upstream's alignment.
    prefix_bytes: usize,
    record: PhantomData<fn() -> R>,
}

/// How many bytes a prefix with a record takes over an upstream of this alignment.
pub(crate) const fn prefix_bytes<R>(alignment: usize) -> usize {
    let align = if alignment > align_of::<R>() { alignment } else { align_of::<R>() };
    size_of::<R>().next_multiple_of(align)
}

impl<S: Strategy, R: Copy> Prefixed<S, R> {
    pub(crate) fn new(upstream: S) -> Self {
        Self { prefix_bytes: prefix_bytes::<R>(upstream.alignment()), upstream, record: PhantomData }
    }

    /// The alignment of the user's blocks, in bytes.
    pub(crate) fn alignment(&self) -> usize {
        self.upstream.alignment()
    }

    /// A block of `size_bytes`, zeroed on request, with `record` in front.
    pub(crate) fn allocate(&self, size_bytes: usize, zeroed: bool, record: R) -> Option<NonNull<u8>> {
        let whole = size_bytes.checked_add(self.prefix_bytes)?;
        let raw = if zeroed { self.upstream.allocate_zeroed(whole) } else { self.upstream.allocate(whole) }?;
        // SAFETY: the upstream's block has `prefix_bytes + size_bytes` bytes and nobody else has it, so the user's
        // block lies inside and has room for a record in front.
        unsafe {
            let block = raw.add(self.prefix_bytes);
            Self::write(block, record);
            Some(block)
        }
    }

    /// Resizes the block by the upstream. Its record comes along.
    ///
    /// # Safety
    /// - `block` came from here and was not released; after `Some` the old pointer is not used again.
    pub(crate) unsafe fn resize(&self, block: NonNull<u8>, new_size_bytes: usize) -> Option<NonNull<u8>> {
        let whole = new_size_bytes.checked_add(self.prefix_bytes)?;
        // SAFETY: the block is live and from `allocate` or here (this function's contract), so the upstream's block
        // starts `prefix_bytes` before it and is live. The resized one has `prefix_bytes + new_size_bytes` bytes.
        unsafe { Some(self.upstream.resize(block.sub(self.prefix_bytes), whole)?.add(self.prefix_bytes)) }
    }

    /// Gives the block back to the upstream.
    ///
    /// # Safety
    /// - `block` came from here, was not released, and is not used again.
    pub(crate) unsafe fn release(&self, block: NonNull<u8>) {
        // SAFETY: the block is live and not used again (this function's contract). The upstream's block, which starts
        // `prefix_bytes` before it, is released once, with it.
        unsafe { self.upstream.release(block.sub(self.prefix_bytes)) }
    }

    /// The upstream's live blocks as the user sees them: without the prefix.
    pub(crate) fn live_blocks(&self) -> Option<Vec<LiveBlock>> {
        let mut blocks = self.upstream.live_blocks()?;
        for block in &mut blocks {
            if block.address != 0 {
                block.address += self.prefix_bytes;
            }
            block.size_bytes = block.size_bytes.saturating_sub(self.prefix_bytes);
        }
        Some(blocks)
    }

    /// The record in front of the block.
    ///
    /// # Safety
    /// - `block` came from here and was not released.
    pub(crate) unsafe fn read(block: NonNull<u8>) -> R {
        // SAFETY: the block is live, so `allocate` or `write` has written a record in front of it. Unaligned, for the
        // upstream may align less than the record's type.
        unsafe { Self::place(block).read_unaligned() }
    }

    /// Replaces the record in front of the block.
    ///
    /// # Safety
    /// - `block` came from here and was not released.
    pub(crate) unsafe fn write(block: NonNull<u8>, record: R) {
        // SAFETY: there is room for a record in front of each block. Unaligned, for the upstream may align less than
        // the record's type.
        unsafe { Self::place(block).write_unaligned(record) }
    }

    /// Whether every record is aligned as its type requires: necessary if records are used in place.
    pub(crate) fn aligns_records(&self) -> bool {
        self.upstream.alignment() >= align_of::<R>()
    }

    /// The address of the block's record; aligned if [`aligns_records`](Self::aligns_records).
    ///
    /// # Safety
    /// - `block` has a record in front of it.
    pub(crate) unsafe fn place(block: NonNull<u8>) -> NonNull<R> {
        // SAFETY: the record ends where the block starts, in the same allocation of the upstream's.
        unsafe { block.cast::<R>().sub(1) }
    }
}
