//! Placed blocks: each has a record before it, which says who pays and how much, or has it apart ([`apart`]).
//!
//! ```text
//!   pool's block                          the caller's block
//!   |<--- for the alignment --->|<- Record ->|<---- size_bytes ---->|
//! ```
//! Before the record of a sample that has a twin lies that, and the block is no pool's ([`samples`](super::samples)).

use super::apart::{self, Apart, Table};
use super::range::{self, Range};
use super::samples::Samples;
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
    /// Where the pool's block begins, in units of 16 bytes before this one; and, in the lowest bit, whether it is for a
    /// Python object.
    place: u32,
}

/// Before the record of a sample that has one.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct Twin {
    /// 0: it was given up.
    address: usize,
    /// How much room the sample has.
    room_bytes: usize,
}

const _: () = assert!(size_of::<Twin>() == UNIT);
const BEFORE_SAMPLE: usize = size_of::<Twin>() + RECORD;
/// In the place of an offset: it has a twin.
const HAS_TWIN: u32 = u32::MAX - 1;

const _: () = assert!(size_of::<Record>() == 32);
const RECORD: usize = size_of::<Record>();
/// Offsets are multiples of it.
const UNIT: usize = 16;
/// What the pool aligns blocks to, and a resize keeps.
pub(super) const ALIGN: usize = 64;
/// The pool has four classes to each doubling, and its largest blocks are multiples of 64 KiB.
const MAX_QUARTER: u32 = 16;
/// From so many bytes on a block that grows gets room for so many times as much: each place that it leaves is memory
/// that the processor's caches have for nothing.
const ROOM_FROM: usize = 8 << 10;
const ROOM: usize = 4;
/// And from so many on it lies as the pool's large ones do, which grow in place.
const LARGE_FROM: usize = ROOM_FROM * ROOM;
/// From so many bytes on a block lies by preference where another one lay shortly before, of whatever size: that memory
/// is in the processor's caches. With places of their own for each size, a request's blocks took these from the rest of
/// the program.
const LATEST_FROM: usize = 48 << 10;
/// The largest alignment.
const MAX_ALIGN: usize = 64 << 20;

impl Record {
    pub(super) fn new(payer: Payer, size_bytes: usize, weight: Weight, drawn_bytes: u32) -> Self {
        Self {
            payer: payer.address(),
            size_bytes,
            weight_bytes: weight.bytes,
            drawn_bytes,
            place: weight.is_object.into(),
        }
    }

    pub(super) fn weight(&self) -> Weight {
        Weight { bytes: self.weight_bytes, is_object: self.is_object(), is_sample: self.drawn_bytes > 0 }
    }

    /// Who pays; `None` if the block was freed.
    pub(super) fn payer(&self) -> Option<Payer> {
        // SAFETY: `new` had the address from a payer whose charge for this block is not over: `release` writes 0.
        unsafe { Payer::from_address(self.payer) }
    }

    /// That of a block whose record lies apart: no sample, which is charged what it was asked for.
    fn of_apart(apart: Apart) -> Self {
        let Apart { payer, size_bytes, is_object } = apart;
        Self { payer, size_bytes, weight_bytes: size_bytes, drawn_bytes: 0, place: is_object.into() }
    }

    fn apart(&self) -> Apart {
        Apart { payer: self.payer, size_bytes: self.size_bytes, is_object: self.is_object() }
    }

    /// Whether it is to lie apart: where it would not fit into the class that its block fits into, and where the block
    /// is aligned as the pool's are, so that a record would take as much as the alignment.
    #[inline]
    fn lies_apart(&self, align: usize) -> bool {
        if self.size_bytes < apart::FROM || self.drawn_bytes > 0 || align > apart::ALIGN {
            return false;
        }
        let quarter = 1_usize << (((self.size_bytes - 1) | 1).ilog2().min(MAX_QUARTER + 2) - 2);
        let rest = self.size_bytes.wrapping_neg() & (quarter - 1); // up to the class's size
        rest < RECORD || align == apart::ALIGN
    }

    /// Whether it does: others are some bytes behind the beginning of the pool's block.
    fn is_apart(&self) -> bool {
        self.offset() == 0
    }

    fn is_object(&self) -> bool {
        self.place & 1 > 0
    }

    fn offset(&self) -> usize {
        (self.place >> 1) as usize * UNIT
    }

    pub(super) fn has_twin(&self) -> bool {
        self.place & !1 == HAS_TWIN
    }

    /// The same with the pool's block so many bytes before it.
    fn behind(self, offset: usize) -> Self {
        Self { place: ((offset / UNIT) as u32 * 2) | (self.place & 1), ..self }
    }
}

pub(super) struct Places {
    /// Where the ranges begin.
    bases: [usize; 3],
    pools: [Pool<Range>; 3],
    /// Those that have a twin.
    samples: [Samples; 3],
    table: Table,
}

impl Places {
    pub(super) fn over(ranges: [Range; 3]) -> Self {
        let bases = ranges.each_ref().map(Range::base);
        let table = Table::of(bases[0], ranges[0].entries());
        let samples = ranges.clone().map(Samples::over);
        Self { bases, table, samples, pools: ranges.map(|range| Pool::over(range, PoolOptions::default())) }
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
        let is_apart = record.lies_apart(align);
        let before = match align {
            _ if is_apart => 0,
            _ if align <= RECORD => RECORD,
            _ => RECORD + align,
        };
        let whole = record.size_bytes.checked_add(before).filter(|_| align <= MAX_ALIGN)?;
        let pool = self.pool(kind);
        let latest = if whole >= LATEST_FROM { pool.allocate_latest(whole, zeroed) } else { None };
        let start = match latest {
            Some(start) => start,
            None if zeroed => pool.allocate_zeroed(whole)?,
            None => pool.allocate(whole)?,
        };
        if is_apart {
            self.table.write(start.addr().get(), record.apart());
            return Some(start);
        }
        debug_assert!(start.addr().get() % ALIGN == 0);
        let offset = (start.addr().get() + RECORD).next_multiple_of(align) - start.addr().get();
        // SAFETY: the block has room for the record, what the alignment skips, and `size_bytes`; nobody else has it.
        // The record's place is a multiple of 16, since `start` and `offset` are.
        unsafe {
            let block = start.add(offset);
            self.table.forget(block.addr().get());
            block.sub(RECORD).cast::<Record>().write(record.behind(offset));
            Some(block)
        }
    }

    /// A sample with this record and this twin, which has as much room as the record has bytes. It is aligned as the
    /// twin is, from 16 bytes up to [`WINDOW`](super::samples::WINDOW).
    pub(super) fn allocate_sample(
        &self,
        kind: Kind,
        twin: NonNull<u8>,
        zeroed: bool,
        record: Record,
    ) -> Option<NonNull<u8>> {
        let room_bytes = record.size_bytes.max(1).next_multiple_of(UNIT);
        let block = self.samples[kind as usize].allocate(twin.addr().get(), BEFORE_SAMPLE, room_bytes)?;
        let place = HAS_TWIN | record.place & 1;
        // SAFETY: the block has room for both and for `room_bytes`, and nobody else has it. Its place is a multiple of
        // 16.
        unsafe {
            self.table.forget(block.addr().get());
            block.sub(RECORD).cast::<Record>().write(Record { place, ..record });
            block
                .sub(BEFORE_SAMPLE)
                .cast::<Twin>()
                .write(Twin { address: twin.as_ptr().expose_provenance(), room_bytes });
            if zeroed {
                block.write_bytes(0, room_bytes);
            }
        }
        Some(block)
    }

    /// The twin of a block, if it has one.
    ///
    /// # Safety
    /// - `block` is a live one of these places, with this record.
    pub(super) unsafe fn twin(block: NonNull<u8>, record: &Record) -> *mut u8 {
        if !record.has_twin() {
            return std::ptr::null_mut();
        }
        // SAFETY: the block is live (this function's contract), and `allocate_sample` wrote its twin there.
        let twin = unsafe { block.sub(BEFORE_SAMPLE).cast::<Twin>().read() };
        std::ptr::with_exposed_provenance_mut(twin.address)
    }

    /// Notes that the twin of a sample is this one from now on; null: it is given up.
    ///
    /// # Safety
    /// - `block` is a live one of [`allocate_sample`](Self::allocate_sample).
    pub(super) unsafe fn set_twin(&self, block: NonNull<u8>, twin: *mut u8) {
        // SAFETY: `allocate_sample` wrote it there (this function's contract).
        unsafe { (*block.sub(BEFORE_SAMPLE).cast::<Twin>().as_ptr()).address = twin.expose_provenance() }
    }

    /// The same record for a sample whose twin has so much room now.
    ///
    /// # Safety
    /// - `block` is a live one of [`allocate_sample`](Self::allocate_sample), whose record is `old`.
    pub(super) unsafe fn note_room(&self, block: NonNull<u8>, old: &Record, room_bytes: usize, weight: Weight) {
        // SAFETY: `allocate_sample` wrote both there (this function's contract).
        unsafe {
            let most = block.sub(BEFORE_SAMPLE).cast::<Twin>().read().room_bytes;
            let record = Record { size_bytes: room_bytes.min(most), weight_bytes: weight.bytes, ..*old };
            block.sub(RECORD).cast::<Record>().write(record);
        }
    }

    /// # Safety
    /// - `block` is a live one of [`allocate`](Self::allocate) or [`allocate_sample`](Self::allocate_sample).
    pub(super) unsafe fn record(&self, block: NonNull<u8>) -> Record {
        if self.table.has(block.addr().get()) {
            return Record::of_apart(self.table.read(block.addr().get()));
        }
        // SAFETY: `allocate` wrote it there.
        unsafe { block.sub(RECORD).cast::<Record>().read() }
    }

    /// Writes another record of a block that stays as it is.
    ///
    /// # Safety
    /// - `block` is a live one of [`allocate`](Self::allocate), whose record is `old`; the new one has its sizes.
    pub(super) unsafe fn note(&self, block: NonNull<u8>, old: &Record, record: Record) {
        if old.is_apart() {
            self.table.write(block.addr().get(), record.apart());
        } else {
            // SAFETY: the old record lies there (this function's contract).
            unsafe { block.sub(RECORD).cast::<Record>().write(record.behind(old.offset())) };
        }
    }

    /// Takes a block back, whose charge is over. Its twin, if it has one, is the caller's.
    ///
    /// # Safety
    /// - `block` is a live one of these places and this kind with this record, and not used again.
    pub(super) unsafe fn release(&self, kind: Kind, block: NonNull<u8>, record: &Record) {
        // SAFETY: the block is live, so its record is there, and the pool's block begins where it says.
        unsafe {
            if record.has_twin() {
                (*block.sub(RECORD).cast::<Record>().as_ptr()).payer = 0;
                let room_bytes = block.sub(BEFORE_SAMPLE).cast::<Twin>().read().room_bytes;
                self.samples[kind as usize].release(block, BEFORE_SAMPLE, room_bytes);
                return;
            }
            if record.is_apart() {
                self.table.free(block.addr().get());
            } else {
                (*block.sub(RECORD).cast::<Record>().as_ptr()).payer = 0;
            }
            self.pool(kind).release(block.sub(record.offset()));
        }
    }

    /// Resizes a block that is not aligned beyond the usual: what the pool's own resize keeps. A block that grew will
    /// most likely grow again, as lists and buffers do: if it is of several pages it gets room for that, which takes
    /// addresses, and no memory until it is written to. The pool places its large ones so that they grow in place.
    ///
    /// # Safety
    /// - `block` is a live one of [`allocate`](Self::allocate) of this kind; after `Some` it is not used again.
    pub(super) unsafe fn resize(&self, kind: Kind, block: NonNull<u8>, record: Record) -> Option<NonNull<u8>> {
        // SAFETY: the block is live. Its record comes along with it, and is then written anew.
        unsafe {
            let old = self.record(block);
            let is_apart = old.is_apart();
            if is_apart && record.size_bytes < apart::FROM {
                let moved = self.allocate(kind, ALIGN, false, record)?; // what it was aligned to is kept
                moved.copy_from_nonoverlapping(block, record.size_bytes);
                self.release(kind, block, &old);
                return Some(moved);
            }
            let offset = old.offset();
            let (start, whole) = (block.sub(offset), record.size_bytes.checked_add(offset)?);
            let (pool, room) = (self.pool(kind), room_bytes(start));
            if is_apart {
                self.table.free(block.addr().get()); // whoever gets its place may write there at once
            }
            let moved = if record.size_bytes < old.size_bytes || whole < ROOM_FROM {
                pool.resize(start, whole)
            } else if whole <= room {
                Some(start)
            } else if whole < LARGE_FROM {
                pool.resize(start, whole * ROOM).or_else(|| pool.resize(start, whole))
            } else {
                pool.resize_to_grow_from(LARGE_FROM, start, whole)
            };
            let moved = moved.map(|start| start.add(offset));
            match moved {
                None if is_apart => self.table.write(block.addr().get(), old.apart()),
                None => {}
                Some(moved) if is_apart => self.table.write(moved.addr().get(), record.apart()),
                Some(moved) => {
                    // One that was aligned to more has an address again that may have had a record apart.
                    self.table.forget(moved.addr().get());
                    moved.sub(RECORD).cast::<Record>().write(record.behind(offset));
                }
            }
            moved
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{ALIGN, Kind, Places, Range, Record, room_bytes};
    use crate::random::Random;

    fn record(size_bytes: usize) -> Record {
        Record { payer: 0, size_bytes, weight_bytes: 0, drawn_bytes: 0, place: 0 }
    }

    #[test]
    fn a_block_that_grows_moves_seldom_and_shrunk_gives_room_back() {
        const KIB: usize = 1 << 10;
        let places = Places::over(Range::reserve().expect("addresses"));
        let mut block = places.allocate(Kind::Native, 16, false, record(8 * KIB)).expect("memory");
        let (mut moves, mut end) = (0, 0);
        for kib in 9..=32768 {
            // SAFETY: a live block of these places, whose last bytes are written before they are read.
            unsafe {
                block.add(end).write((kib - 1) as u8);
                let grown = places.resize(Kind::Native, block, record(kib * KIB)).expect("memory");
                moves += usize::from(grown != block);
                block = grown;
                assert_eq!((block.add(end).read(), places.record(block).size_bytes), ((kib - 1) as u8, kib * KIB));
            }
            end = kib * KIB - 1;
        }
        assert!((2..=5).contains(&moves), "{moves} moves of 32760 steps");
        for kib in 9..32768 {
            // SAFETY: a live block of 32 MiB, this byte of which was written.
            assert_eq!(unsafe { block.add(kib * KIB - 1).read() }, kib as u8, "what was moved by parts");
        }
        // SAFETY: as above; the block began as one of 8 KiB, whose record lies apart.
        unsafe {
            let shrunk = places.resize(Kind::Native, block, record(9 * KIB)).expect("memory");
            assert!(room_bytes(shrunk) < 12 * KIB);
            places.release(Kind::Native, shrunk, &places.record(shrunk));
        }
    }

    #[test]
    fn a_block_of_a_power_of_two_takes_no_more_than_it_asks_for() {
        let places = Places::over(Range::reserve().expect("addresses"));
        for bits in 10..=20 {
            let size = 1 << bits;
            for align in [16, 32, 64] {
                let block = places.allocate(Kind::Native, align, false, record(size)).expect("memory");
                // SAFETY: a live block, which is the pool's if its record lies apart.
                unsafe {
                    assert_eq!(room_bytes(block), size, "aligned to {align}");
                    places.release(Kind::Native, block, &places.record(block));
                }
            }
        }
    }

    /// Blocks of all sizes and alignments side by side, made, resized and freed at random: each keeps what is in it and
    /// in its record, wherever that lies.
    #[test]
    fn records_before_blocks_and_apart_are_each_their_own() {
        const STEPS: usize = if cfg!(miri) { 300 } else { 60_000 };
        let places = Places::over(Range::reserve().expect("addresses"));
        let mut random = Random::new(1);
        let mut live: Vec<(std::ptr::NonNull<u8>, usize, usize, usize)> = Vec::new();
        for number in 1..=STEPS {
            let size = match random.below(3) {
                0 => 1 + random.below(1500),
                1 => 1 << (4 + random.below(13)),
                _ => 1024 + random.below(40_000),
            };
            // Twice as much as the number: a payer's address is even.
            let made = Record { payer: 2 * number, weight_bytes: size, ..record(size) };
            let (what, align) = (random.below(10), 1 << (4 + random.below(9)));
            // SAFETY: live blocks of these places, which are not used after they are freed or moved; their first and
            // last bytes were written.
            unsafe {
                let (block, align) = if what < 4 || live.is_empty() {
                    let block = places.allocate(Kind::Native, align, false, made).expect("memory");
                    assert_eq!(block.addr().get() % align, 0);
                    (block, align.min(ALIGN))
                } else {
                    let (block, old_size, owner, align) = live.swap_remove(random.below(live.len()));
                    let found = places.record(block);
                    assert_eq!((found.payer, found.size_bytes, found.weight_bytes), (2 * owner, old_size, old_size));
                    assert_eq!((block.read(), block.add(old_size - 1).read()), (owner as u8, owner as u8));
                    if what >= 7 {
                        places.release(Kind::Native, block, &found);
                        continue;
                    }
                    let moved = places.resize(Kind::Native, block, made).expect("memory");
                    assert_eq!((moved.read(), moved.addr().get() % align), (owner as u8, 0));
                    (moved, align)
                };
                block.write(number as u8);
                block.add(size - 1).write(number as u8);
                live.push((block, size, number, align));
            }
        }
        for (block, ..) in live {
            // SAFETY: each was placed above as native memory, and is released once: here.
            unsafe { places.release(Kind::Native, block, &places.record(block)) };
        }
    }
}
