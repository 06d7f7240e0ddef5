//! `System`: the C heap as it is, which every other strategy is measured against.

use super::Strategy;
use crate::source::heap;
use std::ptr::NonNull;

/// The C heap, passed through: `malloc`, `calloc`, `realloc`, `free` of the process.
///
/// Blocks are aligned to 16 bytes, less than the 64 of the other strategies, because the C heap promises no more and
/// this strategy adds nothing to it.
#[derive(Debug, Clone, Copy, Default)]
#[allow(clippy::exhaustive_structs, reason = "its name is its value")]
pub struct System;

// SAFETY: the C heap keeps these promises (C17 7.22.3): blocks are disjoint, live until freed on any
// thread, fit for max_align_t; calloc zeroes; a failed realloc leaves the block alone.
unsafe impl Strategy for System {
    fn alignment(&self) -> usize {
        heap::ALIGNMENT
    }

    #[inline]
    fn allocate(&self, size_bytes: usize) -> Option<NonNull<u8>> {
        heap::allocate(size_bytes)
    }

    fn allocate_zeroed(&self, size_bytes: usize) -> Option<NonNull<u8>> {
        heap::allocate_zeroed(size_bytes)
    }

    unsafe fn resize(&self, block: NonNull<u8>, new_size_bytes: usize) -> Option<NonNull<u8>> {
        // SAFETY: the block is live and came from `heap::allocate*` (the trait's contract).
        unsafe { heap::resize(block, new_size_bytes) }
    }

    #[inline]
    unsafe fn release(&self, block: NonNull<u8>) {
        // SAFETY: the block is live, came from `heap::allocate*`, and is not used again (the trait's contract).
        unsafe { heap::release(block) }
    }

    /// Returns 0: the C library does not say how many bytes it returned.
    fn trim(&self) -> usize {
        heap::trim();
        0
    }
}

#[cfg(test)]
mod tests {
    use super::System;
    use crate::strategy::conformance;

    #[test]
    fn system_keeps_the_strategy_contract() {
        conformance::check(System);
    }
}
