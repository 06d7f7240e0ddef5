//! A record in front of each block, for strategies that wrap another and must remember something of their own.
//!
//! ```text
//!   upstream's block (aligned)   the user's block (as aligned)
//!   |<--- pad --->|<- record ->|<------- size_bytes ------->|
//!   |<-------- front --------->|
//! ```

use super::{LiveBlock, Strategy};
use std::marker::PhantomData;
use std::ptr::NonNull;

/// Blocks of `upstream` with an `R` in front of each.
#[derive(Debug)]
pub(crate) struct Prefixed<S, R> {
    pub(crate) upstream: S,
    /// How many bytes stand before the user's block: a multiple of the upstream's alignment.
    front: usize,
    record: PhantomData<fn() -> R>,
}

impl<S: Strategy, R: Copy> Prefixed<S, R> {
    pub(crate) fn new(upstream: S) -> Self {
        let align = upstream.alignment().max(align_of::<R>());
        Self { front: size_of::<R>().next_multiple_of(align), upstream, record: PhantomData }
    }

    /// What the user's blocks are aligned to.
    pub(crate) fn alignment(&self) -> usize {
        self.upstream.alignment()
    }

    /// A block of `size_bytes`, zeroed if asked, with `record` in front.
    pub(crate) fn allocate(&self, size_bytes: usize, zeroed: bool, record: R) -> Option<NonNull<u8>> {
        let whole = size_bytes.checked_add(self.front)?;
        let raw = if zeroed { self.upstream.allocate_zeroed(whole) } else { self.upstream.allocate(whole) }?;
        // SAFETY: the raw block has `front + size_bytes` bytes.
        let block = unsafe { raw.add(self.front) };
        // SAFETY: made with this layout, nobody else has it.
        unsafe { Self::write(block, record) };
        Some(block)
    }

    /// The block resized by the upstream, its record taken along.
    ///
    /// # Safety
    /// - `block` came from here and was not released; after `Some` the old pointer is not used again.
    pub(crate) unsafe fn resize(&self, block: NonNull<u8>, new_size_bytes: usize) -> Option<NonNull<u8>> {
        let whole = new_size_bytes.checked_add(self.front)?;
        // SAFETY: every block has `front` bytes before it.
        let raw = unsafe { block.sub(self.front) };
        // SAFETY: the upstream's own block, live, says the caller.
        let moved = unsafe { self.upstream.resize(raw, whole) }?;
        // SAFETY: the moved block has `front + new_size_bytes` bytes.
        Some(unsafe { moved.add(self.front) })
    }

    /// Gives the block back to the upstream.
    ///
    /// # Safety
    /// - `block` came from here, was not released, and is not used again.
    pub(crate) unsafe fn release(&self, block: NonNull<u8>) {
        // SAFETY: every block has `front` bytes before it.
        let raw = unsafe { block.sub(self.front) };
        // SAFETY: the upstream's own block, given up, says the caller.
        unsafe { self.upstream.release(raw) }
    }

    /// The upstream's live blocks as the user sees them: without what stands in front.
    pub(crate) fn live_blocks(&self) -> Option<Vec<LiveBlock>> {
        let mut blocks = self.upstream.live_blocks()?;
        for block in &mut blocks {
            if block.address != 0 {
                block.address += self.front;
            }
            block.size_bytes = block.size_bytes.saturating_sub(self.front);
        }
        Some(blocks)
    }

    /// What stands in front of the block.
    ///
    /// # Safety
    /// - `block` came from here and was not released.
    pub(crate) unsafe fn read(block: NonNull<u8>) -> R {
        // SAFETY: the record ends where the block starts.
        let place = unsafe { Self::place(block) };
        // SAFETY: written by `allocate`; an upstream may align to less than the record would like.
        unsafe { place.read_unaligned() }
    }

    /// Puts another record in front of the block.
    ///
    /// # Safety
    /// - `block` came from here and was not released.
    pub(crate) unsafe fn write(block: NonNull<u8>, record: R) {
        // SAFETY: the record ends where the block starts.
        let place = unsafe { Self::place(block) };
        // SAFETY: as in `read`.
        unsafe { place.write_unaligned(record) }
    }

    /// Whether every record is as aligned as its type is: those that are used in place must be.
    pub(crate) fn aligns_records(&self) -> bool {
        self.upstream.alignment() >= align_of::<R>()
    }

    /// Where the block's record stands; aligned where [`aligns_records`](Self::aligns_records) says so.
    ///
    /// # Safety
    /// - `block` has a record before it.
    pub(crate) unsafe fn place(block: NonNull<u8>) -> NonNull<R> {
        // SAFETY: it stands right before the block.
        unsafe { block.cast::<R>().sub(1) }
    }
}
