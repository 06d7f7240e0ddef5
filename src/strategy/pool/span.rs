//! Spans: a few pages of a region, cut into blocks of one class.
//!
//! A span's record is part of its region's record, outside the memory that users write to: a bit for each free block, and a
//! count of the others. A span belongs to the central free list of its class or to one arena, and only the holder of that
//! one's lock reads or writes it. The fields are atomic so that this needs no `unsafe`; the lock orders them, hence Relaxed.

use super::classes;
use super::geometry::PAGE;
use std::ptr::{NonNull, null_mut};
use std::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, Ordering::Relaxed};

/// The number of words with a bit for each block.
const WORDS: usize = PAGE / classes::ALIGN / 64;
const _: () = assert!(classes::MAX_BLOCKS <= WORDS * 64);

/// The record of the span that starts in a certain page. All zero until one does.
#[derive(Debug)]
#[repr(align(64))]
pub(super) struct Span {
    start: AtomicPtr<u8>,
    /// Its neighbours in its list; NULL at the ends.
    next: AtomicPtr<Span>,
    previous: AtomicPtr<Span>,
    class: AtomicU32,
    /// The size of a block.
    bytes: AtomicU32,
    /// For [`classes::index_by`].
    divisor: AtomicU64,
    /// The number of blocks that are not free.
    live: AtomicU32,
    blocks: AtomicU32,
    /// The first word of `free` that may have a bit set.
    first_word: AtomicU32,
    /// Set when a block comes back: free blocks may have memory behind them. Cleared by `empty_free`.
    is_touched: AtomicU32,
    /// A bit for each block. Set while the block is free; cannot be set while somebody has the block.
    free: [AtomicU64; WORDS],
}

impl Span {
    /// Makes it the record of a span of free blocks of `class` at `start`, in no list.
    pub(super) fn reset(&self, start: NonNull<u8>, class: usize) {
        let blocks = classes::span_blocks(class);
        self.start.store(start.as_ptr(), Relaxed);
        self.next.store(null_mut(), Relaxed);
        self.previous.store(null_mut(), Relaxed);
        self.class.store(class as u32, Relaxed);
        self.bytes.store(classes::bytes(class) as u32, Relaxed);
        self.divisor.store(classes::divisor(class), Relaxed);
        self.live.store(0, Relaxed);
        self.blocks.store(blocks as u32, Relaxed);
        self.first_word.store(0, Relaxed);
        self.is_touched.store(1, Relaxed);
        for (number, word) in self.free.iter().enumerate().take(blocks.div_ceil(64)) {
            let left = blocks - number * 64;
            word.store(if left >= 64 { u64::MAX } else { (1 << left) - 1 }, Relaxed);
        }
    }

    #[inline]
    pub(super) fn class(&self) -> usize {
        self.class.load(Relaxed) as usize
    }

    pub(super) fn pages(&self) -> usize {
        classes::span_pages(self.class())
    }

    #[inline]
    pub(super) fn live(&self) -> u32 {
        self.live.load(Relaxed)
    }

    #[inline]
    pub(super) fn is_full(&self) -> bool {
        self.live.load(Relaxed) == self.blocks.load(Relaxed)
    }

    /// The address of its first byte.
    pub(super) fn start(&self) -> usize {
        self.start.load(Relaxed).addr()
    }

    /// Takes the lowest free block; `None` if it is full.
    #[inline]
    pub(super) fn take(&self) -> Option<NonNull<u8>> {
        let first = self.first_word.load(Relaxed) as usize;
        let (number, word) = match self.free.get(first)?.load(Relaxed) {
            0 => self.next_word(first)?,
            word => (first, word),
        };
        self.free[number].store(word & (word - 1), Relaxed);
        self.live.store(self.live.load(Relaxed) + 1, Relaxed);
        let index = number * 64 + word.trailing_zeros() as usize;
        NonNull::new(self.start.load(Relaxed).wrapping_add(index * self.bytes.load(Relaxed) as usize))
    }

    /// The next word after `first` with a bit set.
    #[cold]
    fn next_word(&self, first: usize) -> Option<(usize, u64)> {
        if self.is_full() {
            return None;
        }
        let words = (self.blocks.load(Relaxed) as usize).div_ceil(64);
        let found =
            (first + 1..words).map(|number| (number, self.free[number].load(Relaxed))).find(|&(_, word)| word != 0);
        let (number, _) = found?;
        self.first_word.store(number as u32, Relaxed);
        found
    }

    /// Takes a block of this span back.
    #[inline]
    pub(super) fn give(&self, block: NonNull<u8>) {
        let offset = block.addr().get() - self.start.load(Relaxed).addr();
        let index = classes::index_by(self.divisor.load(Relaxed), offset);
        let (number, bit) = (index / 64 % WORDS, 1 << (index % 64));
        let word = self.free[number].load(Relaxed);
        debug_assert_eq!(word & bit, 0, "released twice");
        self.free[number].store(word | bit, Relaxed);
        if (number as u32) < self.first_word.load(Relaxed) {
            self.first_word.store(number as u32, Relaxed);
        }
        self.live.store(self.live.load(Relaxed) - 1, Relaxed);
        self.is_touched.store(1, Relaxed);
    }

    /// Calls `empty` on the system pages that lie in free blocks; returns how many bytes it emptied. Does nothing if no block
    /// came back since the last call.
    pub(super) fn empty_free(&self, page_bytes: usize, mut empty: impl FnMut(NonNull<u8>, usize) -> bool) -> usize {
        if self.is_touched.swap(0, Relaxed) == 0 {
            return 0;
        }
        let (bytes, blocks) = (classes::bytes(self.class()), self.blocks.load(Relaxed) as usize);
        let is_free = |index: usize| self.free[index / 64].load(Relaxed) & 1 << (index % 64) != 0;
        let (mut emptied, mut index) = (0, 0);
        while index < blocks {
            let run = (index..blocks).take_while(|&index| is_free(index)).count();
            let from = (index * bytes).next_multiple_of(page_bytes);
            let to = (index + run) * bytes / page_bytes * page_bytes;
            let place = NonNull::new(self.start.load(Relaxed).wrapping_add(from));
            if let Some(place) = place.filter(|_| from < to)
                && empty(place, to - from)
            {
                emptied += to - from;
            }
            index += run + 1;
        }
        emptied
    }
}

/// A list of spans of one owner, the latest first. Accessed under the owner's lock.
#[derive(Debug, Default)]
pub(super) struct Spans {
    head: Option<&'static Span>,
}

impl Spans {
    pub(super) const fn new() -> Self {
        Self { head: None }
    }

    #[inline]
    pub(super) fn first(&self) -> Option<&'static Span> {
        self.head
    }

    /// Adds a span that is in no list.
    pub(super) fn push(&mut self, span: &'static Span) {
        let next = self.head.map_or(null_mut(), |head| std::ptr::from_ref(head).cast_mut());
        if let Some(head) = self.head {
            head.previous.store(std::ptr::from_ref(span).cast_mut(), Relaxed);
        }
        span.next.store(next, Relaxed);
        span.previous.store(null_mut(), Relaxed);
        self.head = Some(span);
    }

    pub(super) fn pop(&mut self) -> Option<&'static Span> {
        let span = self.head?;
        self.remove(span);
        Some(span)
    }

    /// Takes out a span of this list.
    pub(super) fn remove(&mut self, span: &'static Span) {
        let (next, previous) = (span.next.load(Relaxed), span.previous.load(Relaxed));
        if let Some(next) = record(next) {
            next.previous.store(previous, Relaxed);
        }
        match record(previous) {
            Some(previous) => previous.next.store(next, Relaxed),
            None => self.head = record(next),
        }
        span.next.store(null_mut(), Relaxed);
        span.previous.store(null_mut(), Relaxed);
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &'static Span> {
        std::iter::successors(self.head, |span| record(span.next.load(Relaxed)))
    }
}

fn record(pointer: *mut Span) -> Option<&'static Span> {
    // SAFETY: NULL, or a span's record, which is part of a region's record and never freed.
    unsafe { pointer.as_ref() }
}
