//! `System`: the C heap as NumPy's default handler uses it, which every other strategy is measured against.

use super::Strategy;
use crate::source::{heap, pages};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, Ordering};

/// New blocks from this size on get NumPy's hint: huge pages behind them, please. In bytes.
const HUGE_FROM: usize = 4 << 20;

/// Whether they do. Relaxed: it goes with no other data.
static HINTS: AtomicBool = AtomicBool::new(true);

/// The C heap, passed through: `malloc`, `calloc`, `realloc`, `free` of the process.
///
/// Blocks are aligned to 16 bytes, less than the 64 of the other strategies, because the C heap promises no more and
/// this strategy adds nothing to it. On Linux the system is asked for huge pages behind new blocks from 4 MiB on, as
/// NumPy's default handler asks (`numpy/_core/src/multiarray/alloc.c`): not behind those that grow.
#[derive(Debug, Clone, Copy, Default)]
#[allow(clippy::exhaustive_structs, reason = "its name is its value")]
pub struct System;

impl System {
    /// Whether large blocks get the hint from now on: NumPy's own setting. Without NumPy they do.
    #[cfg_attr(not(feature = "python"), allow(dead_code, reason = "only NumPy has a setting"))]
    pub(crate) fn prefer_huge_pages(are_preferred: bool) {
        HINTS.store(are_preferred, Ordering::Relaxed);
    }
}

/// Asks for huge pages behind a new block: its whole pages, and what is left of its last one.
#[cold]
fn hint(block: NonNull<u8>, size_bytes: usize) {
    let before = block.align_offset(pages::page_bytes());
    if HINTS.load(Ordering::Relaxed) && before < size_bytes {
        // SAFETY: the C heap mapped all pages of the block; this begins with one of them, within the block, and ends
        // with the block.
        unsafe { pages::prefer_huge(block.add(before), size_bytes - before) };
    }
}

#[inline]
fn hinted(block: Option<NonNull<u8>>, size_bytes: usize) -> Option<NonNull<u8>> {
    if size_bytes >= HUGE_FROM { block.inspect(|&block| hint(block, size_bytes)) } else { block }
}

// SAFETY: the C heap keeps these promises (C17 7.22.3): blocks are disjoint, live until freed on any
// thread, fit for max_align_t; calloc zeroes; a failed realloc leaves the block alone.
unsafe impl Strategy for System {
    fn alignment(&self) -> usize {
        heap::ALIGNMENT
    }

    #[inline]
    fn allocate(&self, size_bytes: usize) -> Option<NonNull<u8>> {
        hinted(heap::allocate(size_bytes), size_bytes)
    }

    fn allocate_zeroed(&self, size_bytes: usize) -> Option<NonNull<u8>> {
        hinted(heap::allocate_zeroed(size_bytes), size_bytes)
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
