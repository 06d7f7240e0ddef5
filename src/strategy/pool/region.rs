//! Regions, and the map that finds a block's region by its address.
//!
//! A region is 4 MiB of address space at a multiple of 4 MiB, cut into 64 pages of 64 KiB, for spans of small blocks or
//! for large blocks, which may continue in the regions behind. What the pool knows of a block is in its region's
//! record, outside the memory that users write to. So an overrun block cannot mislead `free`, and memory that the host
//! cannot read can be pooled.

use super::classes;
use super::geometry::{PAGE, PAGES, REGION};
use super::span::Span;
use crate::source::pages;
use std::ptr::{NonNull, null_mut};
use std::sync::atomic::{AtomicPtr, AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

/// The record of a region. Records are reused but never freed, so a reader may always access one. All zero before the
/// first use.
#[derive(Debug)]
pub(super) struct Region {
    pub(super) start: AtomicPtr<u8>,
    /// For each page: in the lower byte the size class of its blocks plus one, or [`LARGE`] if it is in no span; in the
    /// upper byte the first page of its span. A large block that is one of a small class has that in its first page,
    /// and 0 in the upper byte. Written before the first block of a span is handed out. A reader has a block of the
    /// span, and whatever passed the block to the reader's thread made this value visible too. Hence Relaxed.
    classes: [AtomicU16; PAGES],
    /// For each page, the number of pages of the large block that starts there. Written before that is handed out.
    large: [AtomicU32; PAGES],
    /// The requested size of each small block ([`note_requested`](Self::note_requested)); NULL until one is noted.
    requested: AtomicPtr<Requested>,
    /// For each page, the requested size of the large block that starts there.
    requested_large: [AtomicU64; PAGES],
    /// For each page, the record of the span that starts there.
    spans: [Span; PAGES],
    /// What the free pages of large blocks have behind them.
    pub(super) dirt: Dirt,
    /// The next record in the list of spare ones.
    next_spare: AtomicPtr<Region>,
}

/// Reached under the lock of the large blocks alone, so Relaxed throughout. It stands here since a list of it would be
/// allocated under that lock: the pool may be the global allocator.
#[derive(Debug)]
pub(super) struct Dirt {
    /// A bit for each free page that may have memory behind it. Set when the page comes back; cleared when it is taken
    /// or emptied. Cannot be set while the page is in use.
    bits: AtomicU64,
    /// The last time that one of its pages came back, in nanoseconds.
    since: AtomicU64,
}

impl Dirt {
    pub(super) fn bits(&self) -> u64 {
        self.bits.load(Ordering::Relaxed)
    }

    pub(super) fn set_bits(&self, bits: u64) {
        self.bits.store(bits, Ordering::Relaxed);
    }

    pub(super) fn pages(&self) -> usize {
        self.bits().count_ones() as usize
    }

    pub(super) fn since(&self) -> Duration {
        Duration::from_nanos(self.since.load(Ordering::Relaxed))
    }

    pub(super) fn set_since(&self, since: Duration) {
        self.since.store(since.as_nanos() as u64, Ordering::Relaxed);
    }
}

/// The requested sizes of small blocks, by where they may start. Outside the region, and mapped when it is first
/// needed. A page has blocks of one class at a time, and of what is noted for others there nobody has the block.
#[repr(C)]
struct Requested {
    others: [AtomicU32; REGION / classes::ALIGN],
    /// A tiny block's size fits into a byte.
    tiny: [AtomicU8; REGION / classes::TINY_ALIGN],
}

/// The size of each part.
const PART: usize = REGION / classes::TINY_ALIGN;
const _: () = assert!(size_of::<Requested>() == 2 * PART && classes::TINY_MAX <= u8::MAX as usize);

impl Requested {
    /// Relaxed, as in `get`, for the reason given at `Region::classes`: whoever reads the note has the block.
    #[inline(always)]
    fn set(&self, address: usize, class: usize, size_bytes: usize) {
        if classes::is_tiny(class) {
            self.tiny[address % REGION / classes::TINY_ALIGN].store(size_bytes as u8, Ordering::Relaxed);
        } else {
            self.others[address % REGION / classes::ALIGN].store(size_bytes as u32, Ordering::Relaxed);
        }
    }

    #[inline(always)]
    fn get(&self, address: usize, class: usize) -> usize {
        if classes::is_tiny(class) {
            self.tiny[address % REGION / classes::TINY_ALIGN].load(Ordering::Relaxed).into()
        } else {
            self.others[address % REGION / classes::ALIGN].load(Ordering::Relaxed) as usize
        }
    }
}

/// Instead of a size class: the page is free or a large block's.
const LARGE: u16 = 0;

impl Region {
    /// Makes it the record of a region at `start` without spans.
    pub(super) fn reset(&self, start: NonNull<u8>) {
        self.start.store(start.as_ptr(), Ordering::Relaxed);
        self.classes.iter().for_each(|class| class.store(LARGE, Ordering::Relaxed));
        self.dirt.set_bits(0);
        self.dirt.set_since(Duration::ZERO);
    }

    /// Notes the requested size of the live block that starts at this address, until the next note for it. False if
    /// there is no memory for the note.
    #[inline]
    pub(super) fn note_requested(&self, address: usize, size_bytes: usize) -> bool {
        let Some(class) = self.class_at(address) else {
            // Relaxed, for the reason given at `classes`: whoever reads the note has the block.
            self.requested_large[page_of(address)].store(size_bytes as u64, Ordering::Relaxed);
            return true;
        };
        self.note_small(address, class, size_bytes)
    }

    /// [`note_requested`](Self::note_requested) for a small block of `class`.
    #[inline]
    pub(super) fn note_small(&self, address: usize, class: usize, size_bytes: usize) -> bool {
        self.note_again(address, class, size_bytes)
            || (self.map_requested().is_some() && self.note_again(address, class, size_bytes))
    }

    /// [`note_small`](Self::note_small) where the table is mapped; else false.
    #[inline(always)]
    pub(super) fn note_again(&self, address: usize, class: usize, size_bytes: usize) -> bool {
        // Acquire pairs with the Release in `map_requested`.
        let Some(table) = NonNull::new(self.requested.load(Ordering::Acquire)) else { return false };
        // SAFETY: the table is mapped as long as the region, in which a live block of this class lies.
        unsafe { table.as_ref() }.set(address, class, size_bytes);
        true
    }

    /// The last note for the live block that starts at this address; zero if there is none.
    #[inline]
    pub(super) fn requested_at(&self, address: usize) -> usize {
        match self.class_at(address) {
            None => self.requested_large[page_of(address)].load(Ordering::Relaxed) as usize,
            Some(class) => self.requested_small(address, class),
        }
    }

    /// [`requested_at`](Self::requested_at) for a small block of `class`.
    #[inline(always)]
    pub(super) fn requested_small(&self, address: usize, class: usize) -> usize {
        // Acquire pairs with the Release in `map_requested`.
        let Some(table) = NonNull::new(self.requested.load(Ordering::Acquire)) else { return 0 };
        // SAFETY: the table is mapped as long as the region, in which a live block of this class lies.
        unsafe { table.as_ref() }.get(address, class)
    }

    #[cold]
    #[inline(never)]
    fn map_requested(&self) -> Option<NonNull<Requested>> {
        // New pages are zero, which is a valid `Requested`.
        let start = pages::map(size_of::<Requested>(), pages::page_bytes()).ok()?;
        let fresh = start.cast::<Requested>();
        // Release pairs with the Acquire loads of the table's address.
        match self.requested.compare_exchange(null_mut(), fresh.as_ptr(), Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => Some(fresh),
            Err(present) => {
                // SAFETY: mapped above, and nobody else has it, since the exchange failed.
                unsafe { pages::unmap(start, size_of::<Requested>()) };
                NonNull::new(present)
            }
        }
    }

    /// Returns the memory of the notes for these pages, in which no block lies, to the system.
    pub(super) fn forget_requested(&self, first: usize, count: usize) {
        const NOTES: usize = PART / PAGES; // in bytes, for one page, in each part
        let Some(table) = NonNull::new(self.requested.load(Ordering::Acquire)) else { return };
        let from = (first * NOTES).next_multiple_of(pages::page_bytes());
        let to = (first + count) * NOTES / pages::page_bytes() * pages::page_bytes();
        if from < to {
            for part in [0, PART] {
                // SAFETY: each part has `NOTES` bytes for each page, so these are whole system pages of the mapping. No
                // block lies in the region's pages, so nobody needs the notes. A failure costs memory only.
                let _ = unsafe { pages::discard(table.cast::<u8>().add(part + from), to - from) };
            }
        }
    }

    /// Unmaps the table of notes. No block lies in the region.
    pub(super) fn close(&self) {
        // Acquire pairs with the Release in `map_requested`.
        if let Some(table) = NonNull::new(self.requested.swap(null_mut(), Ordering::Acquire)) {
            // SAFETY: `map_requested` mapped it with this size. Only owners of blocks in the region access it, and
            // there are none.
            unsafe { pages::unmap(table.cast(), size_of::<Requested>()) };
        }
    }

    /// The number of pages of the large block that starts at this address.
    pub(super) fn large_pages_at(&self, address: usize) -> usize {
        self.large[page_of(address)].load(Ordering::Relaxed) as usize
    }

    /// Notes that a large block of `pages` starts at this address.
    pub(super) fn assign_large(&self, address: usize, pages: usize) {
        self.large[page_of(address)].store(pages as u32, Ordering::Relaxed);
    }

    /// Notes that the large block at this address is one of `class` from now on, or is large again.
    pub(super) fn set_class(&self, address: usize, class: Option<usize>) {
        let word = class.map_or(LARGE, |class| class as u16 + 1);
        self.classes[page_of(address)].store(word, Ordering::Relaxed);
    }

    /// The block at this address of this region.
    pub(super) fn block_at(&self, address: usize) -> Option<NonNull<u8>> {
        NonNull::new(self.start.load(Ordering::Relaxed).with_addr(address))
    }

    /// A word for the large block that starts at this address, while nobody has it.
    pub(super) fn link_at(&self, address: usize) -> &AtomicU64 {
        &self.requested_large[page_of(address)]
    }

    /// The class of the small block at this address; `None` if the block is large.
    #[inline(always)]
    pub(super) fn class_at(&self, address: usize) -> Option<usize> {
        // The lower byte of `LARGE` is 0, and no class's is.
        usize::from(self.classes[page_of(address)].load(Ordering::Relaxed) as u8).checked_sub(1)
    }

    /// Whether the block at this address is a small one of this class.
    #[inline(always)]
    pub(super) fn has_class_at(&self, address: usize, class: usize) -> bool {
        self.classes[page_of(address)].load(Ordering::Relaxed) as u8 == class as u8 + 1
    }

    /// The first page of the span of the small block at this address.
    #[inline]
    pub(super) fn span_at(&self, address: usize) -> usize {
        usize::from(self.classes[page_of(address)].load(Ordering::Relaxed) >> 8)
    }

    /// The record of the span that starts in this page.
    #[inline]
    pub(super) fn span(&self, first: usize) -> &Span {
        &self.spans[first % PAGES]
    }

    /// Makes these pages, which nobody else has, a span of free blocks of `class`.
    pub(super) fn assign(&'static self, first: usize, class: usize) -> Option<&'static Span> {
        let start = NonNull::new(self.start.load(Ordering::Relaxed).wrapping_add(first * PAGE))?;
        for page in first..first + classes::span_pages(class) {
            self.classes[page].store((first as u16) << 8 | (class as u16 + 1), Ordering::Relaxed);
        }
        let span = &self.spans[first];
        span.reset(start, class);
        Some(span)
    }
}

const fn page_of(address: usize) -> usize {
    (address % REGION) / PAGE
}

/// A program's addresses have 47 bits on x86-64, and 48 on aarch64, where Linux maps the highest first. (With larger
/// page tables more, but Linux uses those only on request.)
const ROOT: usize = 1 << 13;
const LEAF: usize = 1 << 13;
const _: () = assert!(ROOT * LEAF * REGION == 1 << 48);

type Leaf = [AtomicPtr<Region>; LEAF];
static MAP: [AtomicPtr<Leaf>; ROOT] = [const { AtomicPtr::new(null_mut()) }; ROOT];

/// The record of the region that a live block starts in. Two loads, no lock.
///
/// # Safety
/// - `address` is that of a live block of some pool, or lies in a region that was inserted and is still mapped.
#[inline(always)]
pub(super) unsafe fn find(address: usize) -> &'static Region {
    let index = address / REGION;
    // Acquire pairs with the Release stores in `insert`.
    // SAFETY: the region was inserted (this function's contract; a block's is, before the block is handed out). So the
    // map has a place for it, and neither pointer is NULL; leaves and records are never freed.
    unsafe {
        let leaf = MAP.get_unchecked(index / LEAF).load(Ordering::Acquire);
        debug_assert!(!leaf.is_null());
        let region = (&(*leaf))[index % LEAF].load(Ordering::Acquire);
        std::hint::assert_unchecked(!region.is_null()); // or each caller would look once more
        &*region
    }
}

/// The span of a small block, found by the block's address.
///
/// # Safety
/// - `block` is a live small block, and not of a class that is [joined](classes::is_joined).
#[inline]
pub(super) unsafe fn span_of(block: NonNull<u8>) -> &'static Span {
    let address = block.addr().get();
    // SAFETY: the block is live (this function's contract), so its region is in the map.
    let region = unsafe { find(address) };
    region.span(region.span_at(address))
}

/// The region of a span, and the number of the span's first page there.
pub(super) fn place_of(span: &Span) -> (&'static Region, usize) {
    let start = span.start();
    // SAFETY: the span's region is in the map, since a region is unmapped only when it has no span.
    let region = unsafe { find(start) };
    (region, start % REGION / PAGE)
}

/// Inserts a region into the map. False if its address is beyond what the map covers, or if there is no memory for a
/// leaf.
pub(super) fn insert(region: &'static Region) -> bool {
    let index = region.start.load(Ordering::Relaxed).addr() / REGION;
    let Some(place) = MAP.get(index / LEAF) else { return false };
    let mut leaf = place.load(Ordering::Acquire);
    if leaf.is_null() {
        // New pages are zero: NULL in each place.
        let Ok(mapped) = pages::map(size_of::<Leaf>(), pages::page_bytes()) else { return false };
        let fresh = mapped.as_ptr().cast::<Leaf>();
        match place.compare_exchange(null_mut(), fresh, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => leaf = fresh,
            Err(present) => {
                // SAFETY: mapped above, and nobody else has it, since the exchange failed.
                unsafe { pages::unmap(mapped, size_of::<Leaf>()) };
                leaf = present;
            }
        }
    }
    // SAFETY: not NULL by now, and leaves are never freed.
    unsafe { &(*leaf)[index % LEAF] }.store(std::ptr::from_ref(region).cast_mut(), Ordering::Release);
    true
}

/// The list of spare records. Atomic instead of locked, so that it works in every child of `fork`.
static SPARE: AtomicPtr<Region> = AtomicPtr::new(null_mut());

/// How many records are mapped at a time.
const RECORDS: usize = if cfg!(miri) { 2 } else { 16 };

/// Takes a spare record; `None` if there is no memory for one.
pub(super) fn take_record() -> Option<&'static Region> {
    // Takes the whole list and puts the rest back. Taking only the first with a compare-and-swap would be wrong if the
    // list changed in between and had the same first record again (ABA). Acquire pairs with the Release in
    // `give_records`.
    let first = SPARE.swap(null_mut(), Ordering::Acquire);
    // SAFETY: NULL or a record, and records are never freed.
    if let Some(record) = unsafe { first.as_ref() } {
        let rest = record.next_spare.swap(null_mut(), Ordering::Relaxed);
        if SPARE.compare_exchange(null_mut(), rest, Ordering::Release, Ordering::Relaxed).is_err()
            // SAFETY: NULL or a record, and records are never freed.
            && let Some(rest) = unsafe { rest.as_ref() }
        {
            give_records(rest);
        }
        return Some(record);
    }
    // Mapped, not allocated: this pool may be the global allocator. New pages are zero, which is a valid record, and
    // take memory only when they are touched.
    let bytes = (size_of::<Region>() * RECORDS).next_multiple_of(pages::page_bytes());
    let start = pages::map(bytes, pages::page_bytes()).ok()?.cast::<Region>();
    for number in 1..RECORDS {
        // SAFETY: the mapping has RECORDS of them, is aligned to a page, and is never unmapped. Zero is a valid record.
        give_records(unsafe { start.add(number).as_ref() });
    }
    // SAFETY: the first record of the same mapping.
    Some(unsafe { start.as_ref() })
}

/// Puts a record, and all that it links to, into the list of spare ones.
pub(super) fn give_records(first: &'static Region) {
    let mut last = first;
    // SAFETY: NULL or a record, and records are never freed.
    while let Some(next) = unsafe { last.next_spare.load(Ordering::Relaxed).as_ref() } {
        last = next;
    }
    let mut head = SPARE.load(Ordering::Relaxed);
    loop {
        last.next_spare.store(head, Ordering::Relaxed);
        // Release pairs with the Acquire in `take_record`.
        match SPARE.compare_exchange_weak(
            head,
            std::ptr::from_ref(first).cast_mut(),
            Ordering::Release,
            Ordering::Relaxed,
        ) {
            Ok(_) => return,
            Err(now) => head = now,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_map_has_room_for_the_highest_address_of_a_program() {
        let record = take_record().expect("there is memory");
        let highest = (1 << 48) - REGION; // of aarch64, where Linux maps there first
        record.reset(NonNull::without_provenance(highest.try_into().expect("not zero")));
        assert!(insert(record));
        // SAFETY: the map has it; no block is looked at.
        assert!(std::ptr::eq(unsafe { find(highest) }, record));
    }
}
