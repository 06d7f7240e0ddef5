//! `Live`: a block of a strategy as a value, for the tests of this folder.

use super::Strategy;
use super::conformance::Filled;
use std::ptr::NonNull;

/// A live block, all of whose bytes are written. It is released once: by `release`, or when it is dropped.
pub(super) struct Live<'a, S: Strategy> {
    strategy: &'a S,
    filled: Filled,
}

impl<'a, S: Strategy> Live<'a, S> {
    /// A block of a strategy that has so many bytes, with the pattern of the conformance suite in it.
    #[track_caller]
    pub(super) fn of(strategy: &'a S, size_bytes: usize) -> Self {
        Self { strategy, filled: Filled::new(strategy, size_bytes, 7) }
    }

    pub(super) fn start(&self) -> NonNull<u8> {
        self.filled.block
    }

    pub(super) fn address(&self) -> usize {
        self.start().addr().get()
    }

    pub(super) fn bytes(&self) -> &[u8] {
        // SAFETY: the block is live while `self` is, and `of`, `resize` and `fill` wrote all of its bytes.
        unsafe { std::slice::from_raw_parts(self.start().as_ptr(), self.filled.size_bytes) }
    }

    /// Asserts that the first `length` bytes are as `of` wrote them.
    #[track_caller]
    pub(super) fn assert_kept(&self, length: usize) {
        self.filled.assert_kept(self.strategy, length);
    }

    pub(super) fn fill(&mut self, byte: u8) {
        // SAFETY: the block is live while `self` is, and has so many bytes, which this value alone reaches.
        unsafe { self.start().write_bytes(byte, self.filled.size_bytes) };
    }

    /// Whether the strategy had so many bytes. If not, the block stays as it is. New bytes are zeros.
    pub(super) fn resize(&mut self, size_bytes: usize) -> bool {
        let kept = self.filled.size_bytes.min(size_bytes);
        let is_resized = self.filled.resize(self.strategy, size_bytes);
        if is_resized {
            // SAFETY: the strategy gave `size_bytes` writable bytes, of which the first `kept` are the old ones.
            unsafe { self.start().add(kept).write_bytes(0, size_bytes - kept) };
        }
        is_resized
    }

    pub(super) fn release(self) {
        drop(self);
    }
}

impl<S: Strategy> Drop for Live<'_, S> {
    fn drop(&mut self) {
        // SAFETY: the block is this strategy's and live, and nobody has it after its owner.
        unsafe { self.strategy.release(self.filled.block) }
    }
}
