//! `Aligned`: every block starts at a multiple of `align`. Copy this file to begin a strategy of your own.
//!
//! It does not use `posix_memalign`, which has no zeroing form (`np.zeros` would touch every page) and no resizing form
//! (growing would copy where `mremap` can move pages). Instead each block lies inside a larger heap block, behind a
//! record of the heap block's start and the block's size.
//!
//! ```text
//!   raw (16-aligned)            block (align-aligned)
//!   |<------ pad ------>|Record |<---- size_bytes ---->|<- rest ->|
//!                        16 B
//! ```

use super::Strategy;
use crate::error::Error;
use crate::layout::padding;
use crate::source::heap;
use std::ptr::NonNull;

/// Blocks on the C heap, aligned to a power of two from 16 bytes to 2 MiB.
///
/// Each block costs up to `align + 16` more bytes than requested. With large alignments most of these are addresses
/// that are never touched. A resize moves pages instead of copying, if the C heap does so.
#[derive(Debug, Clone, Copy)]
pub struct Aligned {
    align: usize,
}

/// Directly before each block.
#[repr(C)]
#[derive(Clone, Copy)]
struct Record {
    raw: NonNull<u8>,
    size_bytes: usize,
}

const RECORD_BYTES: usize = size_of::<Record>();
const _: () = assert!(RECORD_BYTES == 16 && align_of::<Record>() <= heap::ALIGNMENT);

impl Aligned {
    /// The smallest alignment in bytes: that of the C heap.
    pub const MIN: usize = heap::ALIGNMENT;
    /// The largest alignment in bytes: that of a huge page.
    pub const MAX: usize = 2 << 20;

    /// Blocks aligned to `align` bytes.
    ///
    /// # Errors
    /// [`Error::BadAlignment`] unless `align` is a power of two from 16 to 2 MiB.
    pub const fn new(align: usize) -> Result<Self, Error> {
        if align.is_power_of_two() && align >= Self::MIN && align <= Self::MAX {
            Ok(Self { align })
        } else {
            Err(Error::BadAlignment { align, min: Self::MIN, max: Self::MAX })
        }
    }

    /// 64 bytes, the size of a cache line and of an AVX-512 vector. The handler `aligned64`.
    pub const CACHE_LINE: Self = Self { align: 64 };

    /// The alignment in bytes.
    #[must_use]
    pub const fn align(&self) -> usize {
        self.align
    }

    /// The user's bytes, the record and the largest padding; `None` on overflow.
    fn raw_bytes(&self, size_bytes: usize) -> Option<usize> {
        size_bytes.checked_add(self.align + RECORD_BYTES)
    }

    /// How many bytes into a raw block the user's block starts.
    fn offset(&self, raw: NonNull<u8>) -> usize {
        RECORD_BYTES + padding(raw.addr().get() + RECORD_BYTES, self.align)
    }

    /// Writes the record of the block at `offset` into `raw`.
    ///
    /// # Safety
    /// - `raw` has `raw_bytes(size_bytes)` bytes, and `offset` is `self.offset(raw)`.
    unsafe fn seal(raw: NonNull<u8>, offset: usize, size_bytes: usize) -> NonNull<u8> {
        // SAFETY: RECORD_BYTES <= offset <= align + RECORD_BYTES, and `raw_bytes` made room for the latter: block and
        // record lie inside the raw block. The record is aligned, since the block and RECORD_BYTES are multiples of 16.
        unsafe {
            let block = raw.add(offset);
            block.sub(RECORD_BYTES).cast::<Record>().write(Record { raw, size_bytes });
            block
        }
    }

    /// Reads the record of a live block.
    ///
    /// # Safety
    /// - `block` came from this strategy and was not released.
    unsafe fn record(block: NonNull<u8>) -> Record {
        // SAFETY: `seal` wrote a record directly before each block of this strategy. The user's bytes start behind it.
        unsafe { block.sub(RECORD_BYTES).cast::<Record>().read() }
    }
}

// SAFETY: each block lies inside a heap block of its own (`raw_bytes`), aligned by `offset`. The C heap keeps the other
// promises. Bytes move only in `resize`.
unsafe impl Strategy for Aligned {
    fn alignment(&self) -> usize {
        self.align
    }

    fn allocate(&self, size_bytes: usize) -> Option<NonNull<u8>> {
        let raw = heap::allocate(self.raw_bytes(size_bytes)?)?;
        // SAFETY: `raw` was just allocated with `raw_bytes(size_bytes)`.
        Some(unsafe { Self::seal(raw, self.offset(raw), size_bytes) })
    }

    fn allocate_zeroed(&self, size_bytes: usize) -> Option<NonNull<u8>> {
        let raw = heap::allocate_zeroed(self.raw_bytes(size_bytes)?)?;
        // SAFETY: `raw` was just allocated with `raw_bytes(size_bytes)`.
        Some(unsafe { Self::seal(raw, self.offset(raw), size_bytes) })
    }

    unsafe fn resize(&self, block: NonNull<u8>, new_size_bytes: usize) -> Option<NonNull<u8>> {
        // SAFETY: the block is live (this function's contract).
        let old = unsafe { Self::record(block) };
        let old_offset = block.addr().get() - old.raw.addr().get();
        let raw_bytes = self.raw_bytes(new_size_bytes)?;
        // SAFETY: `old.raw` is the heap block around the live block, and `raw_bytes` is above zero. Only this step can
        // fail, and a failure changes nothing.
        let raw = unsafe { heap::resize(old.raw, raw_bytes) }?;
        let offset = self.offset(raw);
        if offset != old_offset {
            let kept = old.size_bytes.min(new_size_bytes);
            // SAFETY: both offsets are at most align + RECORD_BYTES, and the new raw block has room for
            // `new_size_bytes`, at least `kept`, behind that. `copy_to` allows the ranges to overlap.
            unsafe { raw.add(old_offset).copy_to(raw.add(offset), kept) };
        }
        // SAFETY: the raw block has `raw_bytes(new_size_bytes)` bytes, and `offset` is its offset.
        Some(unsafe { Self::seal(raw, offset, new_size_bytes) })
    }

    unsafe fn release(&self, block: NonNull<u8>) {
        // SAFETY: the block is live and not used again (this function's contract), and the heap block around it is
        // released once, with it.
        unsafe { heap::release(Self::record(block).raw) }
    }
}

#[cfg(test)]
mod tests {
    use super::{Aligned, Error};
    use crate::strategy::conformance;

    #[test]
    fn aligned_keeps_the_strategy_contract() {
        let alignments: &[usize] = if cfg!(miri) { &[16, 64, 4096] } else { &[16, 32, 64, 4096, 2 << 20] };
        for &align in alignments {
            conformance::check(Aligned::new(align).expect("a power of two in range"));
        }
    }

    #[test]
    fn an_alignment_out_of_range_is_refused_with_the_range() {
        for align in [0, 1, 8, 24, 63, 65, 4 << 20, usize::MAX] {
            let expected = Error::BadAlignment { align, min: 16, max: 2 << 20 };
            assert_eq!(Aligned::new(align).expect_err("out of range"), expected);
        }
    }
}
