//! `Aligned`: every block starts at a multiple of `align`. The file to copy for a strategy of your own.
//!
//! Why not `posix_memalign`: it has no zeroing form (so `np.zeros` would touch every page) and no resizing
//! form (so growing would copy where `mremap` could move pages). Instead each block sits inside a larger
//! heap block, behind a record of where that one starts and how many bytes the user has.
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

/// Blocks aligned to a power of two of the user's choice, from 16 bytes to 2 MiB, on the C heap.
///
/// Each block costs up to `align + 16` bytes more than asked for; for large alignments most of that is
/// address space that is never touched. A resize moves pages instead of copying where the C heap does.
#[derive(Debug, Clone, Copy)]
pub struct Aligned {
    align: usize,
}

/// What stands right before each block.
#[repr(C)]
#[derive(Clone, Copy)]
struct Record {
    raw: NonNull<u8>,
    size_bytes: usize,
}

const RECORD_BYTES: usize = size_of::<Record>();
const _: () = assert!(RECORD_BYTES == 16 && align_of::<Record>() <= heap::ALIGNMENT);

impl Aligned {
    /// The smallest alignment, in bytes: what the C heap gives anyway.
    pub const MIN: usize = heap::ALIGNMENT;
    /// The largest alignment, in bytes: one huge page.
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

    /// Cache lines and AVX-512 vectors: 64 bytes. The handler `aligned64`.
    pub const CACHE_LINE: Self = Self { align: 64 };

    /// The alignment in bytes.
    pub const fn align(&self) -> usize {
        self.align
    }

    /// Room for the user's bytes, the record, and the worst padding; nothing on overflow.
    fn raw_bytes(&self, size_bytes: usize) -> Option<usize> {
        size_bytes.checked_add(self.align + RECORD_BYTES)
    }

    /// How far into a raw block the user's block starts.
    fn offset(&self, raw: NonNull<u8>) -> usize {
        RECORD_BYTES + padding(raw.addr().get() + RECORD_BYTES, self.align)
    }

    /// Writes the record of the block at `offset` into `raw`.
    ///
    /// # Safety
    /// - `raw` has `raw_bytes(size_bytes)` bytes, and `offset` is `self.offset(raw)`.
    unsafe fn seal(raw: NonNull<u8>, offset: usize, size_bytes: usize) -> NonNull<u8> {
        // SAFETY: offset <= align + RECORD_BYTES, which `raw_bytes` made room for.
        let block = unsafe { raw.add(offset) };
        // SAFETY: offset >= RECORD_BYTES, so the record lies inside of the raw block.
        let record = unsafe { block.sub(RECORD_BYTES) }.cast::<Record>();
        // SAFETY: inside of the raw block, and aligned: block and RECORD_BYTES are multiples of 16.
        unsafe { record.write(Record { raw, size_bytes }) };
        block
    }

    /// Reads the record of a live block.
    ///
    /// # Safety
    /// - `block` came from this strategy and was not released.
    unsafe fn record(block: NonNull<u8>) -> Record {
        // SAFETY: `seal` wrote one right before each block that this strategy hands out.
        let record = unsafe { block.sub(RECORD_BYTES) }.cast::<Record>();
        // SAFETY: as above; the user's bytes start behind it.
        unsafe { record.read() }
    }
}

// SAFETY: each block lies wholly in a heap block of its own (`raw_bytes`), aligned by `offset`; the heap
// keeps the rest of the promises. See `resize` for the one place where bytes move.
unsafe impl Strategy for Aligned {
    fn alignment(&self) -> usize {
        self.align
    }

    fn allocate(&self, size_bytes: usize) -> Option<NonNull<u8>> {
        let raw = heap::allocate(self.raw_bytes(size_bytes)?)?;
        // SAFETY: just made with `raw_bytes`.
        Some(unsafe { Self::seal(raw, self.offset(raw), size_bytes) })
    }

    fn allocate_zeroed(&self, size_bytes: usize) -> Option<NonNull<u8>> {
        let raw = heap::allocate_zeroed(self.raw_bytes(size_bytes)?)?;
        // SAFETY: just made with `raw_bytes`.
        Some(unsafe { Self::seal(raw, self.offset(raw), size_bytes) })
    }

    unsafe fn resize(&self, block: NonNull<u8>, new_size_bytes: usize) -> Option<NonNull<u8>> {
        // SAFETY: the caller vouches for the block.
        let old = unsafe { Self::record(block) };
        let old_offset = block.addr().get() - old.raw.addr().get();
        let raw_bytes = self.raw_bytes(new_size_bytes)?;
        // SAFETY: `old.raw` is the heap block behind the record; `raw_bytes` is above zero. This is the only
        // step that can fail, and on failure nothing has changed.
        let raw = unsafe { heap::resize(old.raw, raw_bytes) }?;
        let offset = self.offset(raw);
        if offset != old_offset {
            let kept = old.size_bytes.min(new_size_bytes);
            // SAFETY: both offsets are at most align + RECORD_BYTES, and the new raw block has room for
            // new_size_bytes >= kept behind either.
            let from = unsafe { raw.add(old_offset) };
            // SAFETY: as above.
            let to = unsafe { raw.add(offset) };
            // SAFETY: both ranges of `kept` bytes lie in the raw block; `copy_to` allows overlap.
            unsafe { from.copy_to(to, kept) };
        }
        // SAFETY: the raw block has `raw_bytes(new_size_bytes)` bytes, and `offset` is its offset.
        Some(unsafe { Self::seal(raw, offset, new_size_bytes) })
    }

    unsafe fn release(&self, block: NonNull<u8>) {
        // SAFETY: the caller vouches for the block.
        let record = unsafe { Self::record(block) };
        // SAFETY: the heap block behind the record, released once with its block.
        unsafe { heap::release(record.raw) }
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
