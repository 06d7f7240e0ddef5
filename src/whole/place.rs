//! Placed blocks: each has a record before it, which says who pays and how much.
//!
//! ```text
//!   pool's block                          the caller's block
//!   |<--- for the alignment --->|<- Record ->|<---- size_bytes ---->|
//! ```

use super::range::{self, Range};
use super::shared::Kind;
use crate::handler::requests::Payer;
use crate::strategy::account::Weight;
use crate::strategy::{Pool, PoolOptions, Strategy, room_bytes};
use std::ptr::NonNull;

/// What is known of a placed block.
#[repr(C, align(16))]
#[derive(Debug, Clone, Copy)]
pub(super) struct Record {
    /// The address of who pays ([`Payer::address`]). 0: the block was freed.
    payer: usize,
    pub(super) size_bytes: usize,
    weight_bytes: usize,
    /// For a sample: how many bytes it was drawn by. 0: it is no sample.
    pub(super) drawn_bytes: u32,
    /// Whether it is for a Python object; and where the pool's block begins, in units of 16 bytes before this one.
    is_object: bool,
    offset: [u8; 3],
}

const _: () = assert!(size_of::<Record>() == 32);
const RECORD: usize = size_of::<Record>();
/// What the pool aligns blocks to, and a resize keeps.
pub(super) const ALIGN: usize = 64;
/// From so many bytes on a block that grows gets half as much again.
const ROOM_FROM: usize = 8 << 10;
/// The largest alignment: its offset has 24 bits.
const MAX_ALIGN: usize = 64 << 20;

impl Record {
    pub(super) fn new(payer: Payer, size_bytes: usize, weight: Weight, drawn_bytes: u32) -> Self {
        Self {
            payer: payer.address(),
            size_bytes,
            weight_bytes: weight.bytes,
            drawn_bytes,
            is_object: weight.is_object,
            offset: [0; 3],
        }
    }

    pub(super) fn weight(&self) -> Weight {
        Weight { bytes: self.weight_bytes, is_object: self.is_object, is_sample: self.drawn_bytes > 0 }
    }

    /// Who pays; `None` if the block was freed.
    pub(super) fn payer(&self) -> Option<Payer> {
        // SAFETY: `new` had the address from a payer whose charge for this block is not over: `release` writes 0.
        unsafe { Payer::from_address(self.payer) }
    }

    fn offset(&self) -> usize {
        let [low, middle, high] = self.offset.map(usize::from);
        (low | middle << 8 | high << 16) * 16
    }
}

pub(super) struct Places {
    /// Where the ranges begin.
    bases: [usize; 3],
    pools: [Pool<Range>; 3],
}

impl Places {
    pub(super) fn over(ranges: [Range; 3]) -> Self {
        let bases = ranges.each_ref().map(Range::base);
        Self { bases, pools: ranges.map(|range| Pool::over(range, PoolOptions::default())) }
    }

    /// Whether a block is a placed one of this kind.
    pub(super) fn contains(&self, kind: Kind, block: *const u8) -> bool {
        block.addr().wrapping_sub(self.bases[kind as usize]) < range::BYTES
    }

    fn pool(&self, kind: Kind) -> &Pool<Range> {
        &self.pools[kind as usize]
    }

    /// A block with this record.
    pub(super) fn allocate(&self, kind: Kind, align: usize, zeroed: bool, record: Record) -> Option<NonNull<u8>> {
        let spare = if align > RECORD { align } else { RECORD };
        let whole = record.size_bytes.checked_add(RECORD + spare).filter(|_| align <= MAX_ALIGN)?;
        let whole = if align <= RECORD { whole - RECORD } else { whole };
        let pool = self.pool(kind);
        let start = if zeroed { pool.allocate_zeroed(whole) } else { pool.allocate(whole) }?;
        debug_assert!(start.addr().get() % ALIGN == 0);
        let offset = (start.addr().get() + RECORD).next_multiple_of(align) - start.addr().get();
        let [low, middle, high, ..] = (offset / 16).to_le_bytes();
        // SAFETY: the block has room for the record, what the alignment skips, and `size_bytes`; nobody else has it.
        // The record's place is a multiple of 16, since `start` and `offset` are.
        unsafe {
            let block = start.add(offset);
            block.sub(RECORD).cast::<Record>().write(Record { offset: [low, middle, high], ..record });
            Some(block)
        }
    }

    /// # Safety
    /// - `block` is a live one of [`allocate`](Self::allocate).
    pub(super) unsafe fn record(block: NonNull<u8>) -> Record {
        // SAFETY: `allocate` wrote it there.
        unsafe { block.sub(RECORD).cast::<Record>().read() }
    }

    /// Takes a block back, whose charge is over.
    ///
    /// # Safety
    /// - `block` is a live one of [`allocate`](Self::allocate) of this kind, and not used again.
    pub(super) unsafe fn release(&self, kind: Kind, block: NonNull<u8>) {
        // SAFETY: the block is live, so its record is there, and the pool's block begins where it says.
        unsafe {
            let place = block.sub(RECORD).cast::<Record>();
            let offset = place.as_ref().offset();
            (*place.as_ptr()).payer = 0;
            self.pool(kind).release(block.sub(offset));
        }
    }

    /// Resizes a block that is not aligned beyond the usual: what the pool's own resize keeps. A block that grew will
    /// most likely grow again, as lists and buffers do: if it is of several pages it gets room for that, which takes
    /// addresses, and no memory until it is written to.
    ///
    /// # Safety
    /// - `block` is a live one of [`allocate`](Self::allocate) of this kind; after `Some` it is not used again.
    pub(super) unsafe fn resize(&self, kind: Kind, block: NonNull<u8>, record: Record) -> Option<NonNull<u8>> {
        // SAFETY: the block is live. Its record comes along with it, and is then written anew.
        unsafe {
            let old = Self::record(block);
            let offset = old.offset();
            let (start, whole) = (block.sub(offset), record.size_bytes.checked_add(offset)?);
            let (pool, room) = (self.pool(kind), room_bytes(start));
            let moved = if record.size_bytes < old.size_bytes || whole < ROOM_FROM {
                pool.resize(start, whole)?.add(offset)
            } else if whole <= room {
                block
            } else {
                pool.resize(start, whole.saturating_add(whole / 2)).or_else(|| pool.resize(start, whole))?.add(offset)
            };
            moved.sub(RECORD).cast::<Record>().write(Record { offset: old.offset, ..record });
            Some(moved)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Kind, Places, Range, Record, room_bytes};

    fn record(size_bytes: usize) -> Record {
        Record { payer: 0, size_bytes, weight_bytes: 0, drawn_bytes: 0, is_object: false, offset: [0; 3] }
    }

    #[test]
    fn a_block_that_grows_moves_seldom_and_shrunk_gives_room_back() {
        const KIB: usize = 1 << 10;
        let places = Places::over(Range::reserve().expect("addresses"));
        let mut block = places.allocate(Kind::Native, 16, false, record(8 * KIB)).expect("memory");
        let (mut moves, mut end) = (0, 0);
        for kib in 9..=1024 {
            // SAFETY: a live block of these places, whose last bytes are written before they are read.
            unsafe {
                block.add(end).write(kib as u8);
                let grown = places.resize(Kind::Native, block, record(kib * KIB)).expect("memory");
                moves += usize::from(grown != block);
                block = grown;
                assert_eq!((block.add(end).read(), Places::record(block).size_bytes), (kib as u8, kib * KIB));
            }
            end = kib * KIB - 1;
        }
        assert!((2..20).contains(&moves), "{moves} moves of 1016 steps");
        // SAFETY: as above; a block without alignment begins 32 bytes after the pool's.
        unsafe {
            let shrunk = places.resize(Kind::Native, block, record(9 * KIB)).expect("memory");
            assert!(room_bytes(shrunk.sub(32)) < 12 * KIB);
            places.release(Kind::Native, shrunk);
        }
    }
}
