//! `Pending`: bytes that are reserved while a block is being made.

use super::Chain;
use std::mem::ManuallyDrop;

/// Bytes that [`Chain::reserve`] took. Dropping it gives them back: where there is no block, or a strategy panics.
pub(crate) struct Pending<'a> {
    chain: &'a Chain,
    bytes: usize,
}

impl<'a> Pending<'a> {
    /// The chain has just reserved so many bytes.
    pub(crate) fn new(chain: &'a Chain, bytes: usize) -> Self {
        Self { chain, bytes }
    }

    /// The block is there: the bytes are in use, in so many blocks more.
    pub(crate) fn commit(self, blocks: usize) {
        let this = ManuallyDrop::new(self);
        this.chain.commit(this.bytes, blocks);
    }

    /// The same, for the block of a request: see [`Chain::commit_block`].
    pub(crate) fn commit_block(self, hold: impl FnOnce()) {
        let this = ManuallyDrop::new(self);
        this.chain.commit_block(this.bytes, hold);
    }
}

impl Drop for Pending<'_> {
    fn drop(&mut self) {
        self.chain.cancel(self.bytes);
    }
}
