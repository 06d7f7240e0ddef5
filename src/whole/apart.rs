//! Records that lie apart from their blocks: of those that would need the pool's next size class with a record before
//! them, as all of 2^n bytes would.
//!
//! ```text
//!   the ranges   |   1 KiB   |   1 KiB   |   1 KiB   | ...      a block of this kind begins in it, or none does
//!   the table    |entry|entry|entry| ...                        16 bytes for each
//! ```
//! Such a block has a class of 1 KiB at least, so no two of them begin in the same KiB. The table is reserved with the
//! ranges, and has memory where they have some.

use std::sync::atomic::{AtomicUsize, Ordering};

/// From so many bytes on a block may have its record apart: the part of a range that has one entry.
pub(super) const FROM: usize = 1 << 10;
/// Of the table: so many bytes for each part.
pub(super) const ENTRY_BYTES: usize = 16;
/// What its address is a multiple of. A block with a record before it, and no such alignment, is none of one.
pub(super) const ALIGN: usize = 64;

/// What is known of a block. Whoever has the block writes it, and nobody else reads more than `block` of it.
struct Entry {
    /// The address of who pays, which is even, and whether it is a Python object. 0: the block was freed.
    payer: AtomicUsize,
    /// Its size, and where in its KiB it begins; 0: none begins there.
    block: AtomicUsize,
}

const _: () = assert!(size_of::<Entry>() == ENTRY_BYTES);

/// What an entry says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Apart {
    pub(super) payer: usize,
    pub(super) size_bytes: usize,
    pub(super) is_object: bool,
}

/// The entries of all ranges.
pub(super) struct Table {
    /// Where the first range begins, and where the entry of its first KiB is.
    base: usize,
    entries: usize,
}

const PLACE_BITS: u32 = 5;
const PLACE: usize = (1 << PLACE_BITS) - 1;

/// Where in its KiB a block begins, not 0.
fn place_in(block: usize) -> usize {
    block / ALIGN % (FROM / ALIGN) + 1
}

impl Table {
    pub(super) fn of(base: usize, entries: usize) -> Self {
        Self { base, entries }
    }

    /// The entry for a block at this address, which is in a range that has memory there.
    fn at(&self, block: usize) -> &Entry {
        let address = self.entries + (block - self.base) / FROM * ENTRY_BYTES;
        // SAFETY: the table has memory where the range has (`Range::map`), and zeros are an entry. It stays mapped
        // while there is a block.
        unsafe { &*std::ptr::with_exposed_provenance(address) }
    }

    /// Whether this block, which is live or was freed, has its record here.
    #[inline]
    pub(super) fn has(&self, block: usize) -> bool {
        block.is_multiple_of(ALIGN) && {
            let there = self.at(block).block.load(Ordering::Relaxed);
            there & PLACE == place_in(block)
        }
    }

    pub(super) fn read(&self, block: usize) -> Apart {
        let entry = self.at(block);
        let payer = entry.payer.load(Ordering::Relaxed);
        let size_bytes = entry.block.load(Ordering::Relaxed) >> PLACE_BITS;
        Apart { payer: payer & !1, size_bytes, is_object: payer & 1 > 0 }
    }

    /// For who has made the block.
    pub(super) fn write(&self, block: usize, apart: Apart) {
        debug_assert!(block.is_multiple_of(ALIGN) && apart.payer.is_multiple_of(2));
        let entry = self.at(block);
        entry.payer.store(apart.payer | usize::from(apart.is_object), Ordering::Relaxed);
        entry.block.store(apart.size_bytes << PLACE_BITS | place_in(block), Ordering::Relaxed);
    }

    /// The block is freed, or moves. Before it goes back to the pool.
    pub(super) fn free(&self, block: usize) {
        self.at(block).payer.store(0, Ordering::Relaxed);
    }

    /// A block that was made here has its record before it: what another one left is removed. By comparing: the entry
    /// may be written meanwhile for a third one, which begins elsewhere in the same KiB.
    pub(super) fn forget(&self, block: usize) {
        if !block.is_multiple_of(ALIGN) {
            return;
        }
        let entry = self.at(block);
        let left = entry.block.load(Ordering::Relaxed);
        if left & PLACE == place_in(block) {
            let _ = entry.block.compare_exchange(left, 0, Ordering::Relaxed, Ordering::Relaxed);
        }
    }
}
