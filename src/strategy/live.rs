//! `Live`: a block of a strategy as a value, for the tests of this folder.

use super::Strategy;
use std::ptr::NonNull;

/// A live block, all of whose bytes are written. It is released once: by `release`, or when it is dropped.
#[derive(Debug)]
pub(super) struct Live<'a, S: Strategy> {
    strategy: &'a S,
    start: NonNull<u8>,
    size_bytes: usize,
}

/// What a new byte is, until `fill` says otherwise.
const NEW: u8 = 0x5E;

impl<'a, S: Strategy> Live<'a, S> {
    /// A block of a strategy that has so many bytes.
    #[track_caller]
    pub(super) fn of(strategy: &'a S, size_bytes: usize) -> Self {
        let start = strategy.allocate(size_bytes).expect("memory");
        // SAFETY: the strategy has just made so many writable bytes, which nobody else has.
        unsafe { start.write_bytes(NEW, size_bytes) };
        Self { strategy, start, size_bytes }
    }

    pub(super) fn start(&self) -> NonNull<u8> {
        self.start
    }

    pub(super) fn address(&self) -> usize {
        self.start.addr().get()
    }

    pub(super) fn bytes(&self) -> &[u8] {
        // SAFETY: the block is live while `self` is, and `of`, `resize` and `fill` wrote all of its bytes.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.size_bytes) }
    }

    pub(super) fn fill(&mut self, byte: u8) {
        // SAFETY: the block is live while `self` is, and has so many bytes, which this value alone reaches.
        unsafe { self.start.write_bytes(byte, self.size_bytes) };
    }

    /// Whether the strategy had so many bytes. If not, the block stays as it is.
    pub(super) fn resize(&mut self, size_bytes: usize) -> bool {
        // SAFETY: the block is this strategy's and live; its old address is not used after a success.
        let Some(start) = (unsafe { self.strategy.resize(self.start, size_bytes) }) else { return false };
        let kept = self.size_bytes.min(size_bytes);
        // SAFETY: the strategy gave `size_bytes` writable bytes, of which the first `kept` are the old ones.
        unsafe { start.add(kept).write_bytes(NEW, size_bytes - kept) };
        (self.start, self.size_bytes) = (start, size_bytes);
        true
    }

    pub(super) fn release(self) {
        drop(self);
    }
}

impl<S: Strategy> Drop for Live<'_, S> {
    fn drop(&mut self) {
        // SAFETY: the block is this strategy's and live, and nobody has it after its owner.
        unsafe { self.strategy.release(self.start) }
    }
}
