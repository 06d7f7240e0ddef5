//! Regions, and the map that finds a block's region by its address.
//!
//! A region is 4 MiB of address space at a multiple of 4 MiB, cut into 64 pages of 64 KiB: for spans of small blocks, or
//! for large blocks, which may go on in the regions behind it. What is known of a block stands in its region's record,
//! outside of the memory that users write to: nothing they overrun can lead `free` astray, and memory that the host
//! cannot read can be pooled.

use super::classes;
use super::span::Span;
use crate::source::pages;
use std::ptr::{NonNull, null_mut};
use std::sync::atomic::{AtomicPtr, AtomicU16, AtomicU32, AtomicU64, Ordering};

/// The address space of a region, in bytes.
pub(super) const REGION: usize = 4 << 20;
/// A page of a region, in bytes: not the system's.
pub(super) const PAGE: usize = 64 << 10;
/// Pages in a region.
pub(super) const PAGES: usize = REGION / PAGE;

/// The record of one region. Records are reused, never freed: a reader may always look. All zero until its first use.
#[derive(Debug)]
pub(super) struct Region {
    pub(super) start: AtomicPtr<u8>,
    /// The size class of the blocks in each page, and one; [`LARGE`] where no span is. In the upper half, which page is the
    /// first of its span. Written before the first block of a span is handed out; a reader holds a block of it, so it sees
    /// the value (whoever handed the block over made sure of that). Hence Relaxed.
    classes: [AtomicU16; PAGES],
    /// How many pages the large block has that starts in each page. Written before it is handed out.
    large: [AtomicU32; PAGES],
    /// How many bytes were asked for, for each small block ([`note_asked`](Self::note_asked)); NULL until one is noted.
    asked: AtomicPtr<Asked>,
    /// The same for the large block that starts in each page.
    asked_large: [AtomicU64; PAGES],
    /// The record of the span that starts in each page.
    spans: [Span; PAGES],
    /// The next record that no region has.
    next_spare: AtomicPtr<Region>,
}

/// A size for each place where a small block may start. Outside of the region, and mapped when it is first needed.
type Asked = [AtomicU32; REGION / classes::ALIGN];

/// In place of a size class: the page is a large block's.
const LARGE: u16 = 0;

impl Region {
    /// Makes it the record of a region at `start`, without spans: all of it is for large blocks until `assign`.
    pub(super) fn reset(&self, start: NonNull<u8>) {
        self.start.store(start.as_ptr(), Ordering::Relaxed);
        self.classes.iter().for_each(|class| class.store(LARGE, Ordering::Relaxed));
    }

    /// Notes how many bytes were asked for when a live block that starts at this address was handed out, until the next
    /// note for it. False where there is no memory for the note.
    ///
    /// Relaxed: whoever reads the note has the block from who noted it, and sees it for the reason given at `classes`.
    #[inline]
    pub(super) fn note_asked(&self, address: usize, size_bytes: usize) -> bool {
        if self.class_at(address).is_none() {
            self.asked_large[page_of(address)].store(size_bytes as u64, Ordering::Relaxed);
            return true;
        }
        self.note_small(address, size_bytes)
    }

    /// The same for a block that is small.
    #[inline]
    pub(super) fn note_small(&self, address: usize, size_bytes: usize) -> bool {
        // Acquire pairs with the Release in `map_asked`.
        let table = NonNull::new(self.asked.load(Ordering::Acquire)).or_else(|| self.map_asked());
        let Some(table) = table else { return false };
        // SAFETY: mapped until the region is unmapped, in which a live block lies.
        let table = unsafe { table.as_ref() };
        table[address % REGION / classes::ALIGN].store(size_bytes as u32, Ordering::Relaxed);
        true
    }

    /// What was noted last for the live block that starts at this address; zero where nothing was.
    #[inline]
    pub(super) fn asked_at(&self, address: usize) -> usize {
        if self.class_at(address).is_none() {
            return self.asked_large[page_of(address)].load(Ordering::Relaxed) as usize;
        }
        self.asked_small(address)
    }

    /// The same for a block that is small.
    #[inline]
    pub(super) fn asked_small(&self, address: usize) -> usize {
        // Acquire pairs with the Release in `map_asked`.
        let Some(table) = NonNull::new(self.asked.load(Ordering::Acquire)) else { return 0 };
        // SAFETY: mapped until the region is unmapped, in which a live block lies.
        let table = unsafe { table.as_ref() };
        table[address % REGION / classes::ALIGN].load(Ordering::Relaxed) as usize
    }

    #[cold]
    #[inline(never)]
    fn map_asked(&self) -> Option<NonNull<Asked>> {
        // Zero when fresh, which is a valid `Asked`.
        let start = pages::map(size_of::<Asked>(), pages::page_bytes())?;
        let fresh = start.cast::<Asked>();
        // Release pairs with the Acquires of those who look for the table.
        match self.asked.compare_exchange(null_mut(), fresh.as_ptr(), Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => Some(fresh),
            Err(present) => {
                // SAFETY: mapped above, and nobody has seen it.
                unsafe { pages::unmap(start, size_of::<Asked>()) };
                NonNull::new(present)
            }
        }
    }

    /// Gives back the memory behind the notes for pages in which no block lies.
    pub(super) fn forget_asked(&self, first: usize, count: usize) {
        const NOTES: usize = size_of::<Asked>() / PAGES; // in bytes, for one page
        let Some(table) = NonNull::new(self.asked.load(Ordering::Acquire)) else { return };
        let from = (first * NOTES).next_multiple_of(pages::page_bytes());
        let to = (first + count) * NOTES / pages::page_bytes() * pages::page_bytes();
        if from < to {
            // SAFETY: inside of the table, which has `NOTES` bytes for each page.
            let place = unsafe { table.cast::<u8>().add(from) };
            // SAFETY: whole pages of the mapping; no block lies where these notes belong. A failure costs memory only.
            let _ = unsafe { pages::discard(place, to - from) };
        }
    }

    /// Gives the table of notes back: no block lies in the region any more.
    pub(super) fn close(&self) {
        // Acquire: the writes of whoever mapped it come before.
        if let Some(table) = NonNull::new(self.asked.swap(null_mut(), Ordering::Acquire)) {
            // SAFETY: mapped by `map_asked` with this size; without live blocks nobody looks into it.
            unsafe { pages::unmap(table.cast(), size_of::<Asked>()) };
        }
    }

    /// How many pages the large block has that starts at this address.
    pub(super) fn large_pages_at(&self, address: usize) -> usize {
        self.large[page_of(address)].load(Ordering::Relaxed) as usize
    }

    /// Declares that a large block starts at this address.
    pub(super) fn assign_large(&self, address: usize, pages: usize) {
        self.large[page_of(address)].store(pages as u32, Ordering::Relaxed);
    }

    /// The class of a small block in this region; nothing for a large one.
    #[inline]
    pub(super) fn class_at(&self, address: usize) -> Option<usize> {
        match self.classes[page_of(address)].load(Ordering::Relaxed) {
            LARGE => None,
            class => Some(usize::from(class & 0xFF) - 1),
        }
    }

    /// The first page of the span that the small block lies in.
    #[inline]
    pub(super) fn span_at(&self, address: usize) -> usize {
        usize::from(self.classes[page_of(address)].load(Ordering::Relaxed) >> 8)
    }

    /// The record of the span that starts in a page.
    #[inline]
    pub(super) fn span(&self, first: usize) -> &Span {
        &self.spans[first % PAGES]
    }

    /// Declares pages, which nobody else has, to be one span of free blocks of `class`.
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

/// User space has 47 bits of addresses (without five-level paging, which Linux gives only to those who ask).
const ROOT: usize = 1 << 12;
const LEAF: usize = 1 << 13;
const _: () = assert!(ROOT * LEAF * REGION == 1 << 47);

type Leaf = [AtomicPtr<Region>; LEAF];
static MAP: [AtomicPtr<Leaf>; ROOT] = [const { AtomicPtr::new(null_mut()) }; ROOT];

/// The record of the region in which a live block starts. Two loads, no lock.
///
/// # Safety
/// - `address` is that of a live block of some pool.
#[inline]
pub(super) unsafe fn find(address: usize) -> &'static Region {
    let index = address / REGION;
    // Acquire pairs with the Releases in `insert`.
    let leaf = MAP[index / LEAF].load(Ordering::Acquire);
    debug_assert!(!leaf.is_null());
    // SAFETY: the block's region was entered before the block was handed out; leaves live for ever.
    let region = unsafe { &(*leaf)[index % LEAF] }.load(Ordering::Acquire);
    debug_assert!(!region.is_null());
    // SAFETY: as above; records live for ever.
    unsafe { &*region }
}

/// Enters a region. False where its address lies beyond what the map covers, or there is no memory for that.
pub(super) fn insert(region: &'static Region) -> bool {
    let index = region.start.load(Ordering::Relaxed).addr() / REGION;
    let Some(place) = MAP.get(index / LEAF) else { return false };
    let mut leaf = place.load(Ordering::Acquire);
    if leaf.is_null() {
        // Zero when fresh: NULL in each place.
        let Some(mapped) = pages::map(size_of::<Leaf>(), pages::page_bytes()) else { return false };
        let fresh = mapped.as_ptr().cast::<Leaf>();
        match place.compare_exchange(null_mut(), fresh, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => leaf = fresh,
            Err(present) => {
                // SAFETY: mapped above, and nobody has seen it.
                unsafe { pages::unmap(mapped, size_of::<Leaf>()) };
                leaf = present;
            }
        }
    }
    // SAFETY: leaves live for ever.
    unsafe { &(*leaf)[index % LEAF] }.store(std::ptr::from_ref(region).cast_mut(), Ordering::Release);
    true
}

/// Records that no region has, each with the next one. Without a lock, so that it works in every child of `fork`.
static SPARE: AtomicPtr<Region> = AtomicPtr::new(null_mut());

/// So many records are mapped at a time.
const RECORDS: usize = if cfg!(miri) { 2 } else { 16 };

/// A record that no region has; nothing where there is no memory for one.
pub(super) fn take_record() -> Option<&'static Region> {
    // All are taken and the others put back: to take the first alone, its successor would have to be known for sure.
    // Acquire pairs with the Release in `give_records`.
    let first = SPARE.swap(null_mut(), Ordering::Acquire);
    // SAFETY: NULL or a record, which live for ever.
    if let Some(record) = unsafe { first.as_ref() } {
        let rest = record.next_spare.swap(null_mut(), Ordering::Relaxed);
        if SPARE.compare_exchange(null_mut(), rest, Ordering::Release, Ordering::Relaxed).is_err()
            // SAFETY: NULL or a record, as above.
            && let Some(rest) = unsafe { rest.as_ref() }
        {
            give_records(rest);
        }
        return Some(record);
    }
    // Not from the heap: that may be us. Zero when fresh, which is a valid record; touched as far as it is used.
    let bytes = (size_of::<Region>() * RECORDS).next_multiple_of(pages::page_bytes());
    let start = pages::map(bytes, pages::page_bytes())?.cast::<Region>();
    for number in 1..RECORDS {
        // SAFETY: inside of the mapping.
        let record = unsafe { start.add(number) };
        // SAFETY: never unmapped; aligned, for the mapping starts at a page; zero is a valid record.
        give_records(unsafe { record.as_ref() });
    }
    // SAFETY: as above.
    Some(unsafe { start.as_ref() })
}

/// Takes back a record, and all that hang on it.
pub(super) fn give_records(first: &'static Region) {
    let mut last = first;
    // SAFETY: NULL or a record, which live for ever.
    while let Some(next) = unsafe { last.next_spare.load(Ordering::Relaxed).as_ref() } {
        last = next;
    }
    let mut head = SPARE.load(Ordering::Relaxed);
    loop {
        last.next_spare.store(head, Ordering::Relaxed);
        // Release: whoever takes them sees what was written to them.
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
