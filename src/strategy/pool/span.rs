//! Spans: a few pages of a region, cut into blocks of one class.
//!
//! A span's record is part of its region's record, outside the memory that users write to: a bit for each free block,
//! and a count of the others. A span belongs to a central free list of its class or to one arena, and only the holder
//! of that list's or arena's lock reads or writes the record. The fields are atomic so that this needs no `unsafe`; the
//! lock orders them, hence Relaxed.

use super::classes;
use super::geometry::PAGE;
use std::ptr::{NonNull, null_mut};
use std::slice;
use std::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, Ordering::Relaxed};

/// The number of words with a bit for each block: the smallest ones are alone in their page.
const WORDS: usize = PAGE / classes::TINY_ALIGN / 64;
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
    /// Which of the central free lists of its class it belongs to. Changed only under the locks of both. May be read by
    /// whoever has a block of the span, as a guess; it is right under the lock of the list that it names.
    shard: AtomicU32,
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

    #[inline]
    pub(super) fn shard(&self) -> usize {
        self.shard.load(Relaxed) as usize
    }

    pub(super) fn set_shard(&self, shard: usize) {
        self.shard.store(shard as u32, Relaxed);
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

    /// [`take`](Self::take) for as many blocks as there are places; returns how many it took.
    pub(super) fn take_some(&self, places: &mut [NonNull<u8>]) -> usize {
        let (start, bytes) = (self.start.load(Relaxed), self.bytes.load(Relaxed) as usize);
        let words = (self.blocks.load(Relaxed) as usize).div_ceil(64);
        let mut number = self.first_word.load(Relaxed) as usize;
        let mut taken = 0;
        for free in self.free.get(number..words).unwrap_or_default() {
            let mut word = free.load(Relaxed);
            while word != 0
                && let Some(place) = places.get_mut(taken)
                && let Some(block) =
                    NonNull::new(start.wrapping_add((number * 64 + word.trailing_zeros() as usize) * bytes))
            {
                *place = block;
                taken += 1;
                word &= word - 1;
            }
            free.store(word, Relaxed);
            if word != 0 {
                break;
            }
            number += 1;
        }
        // Never past the last word: what is behind that is not reset.
        self.first_word.store(number.min(words - 1) as u32, Relaxed);
        self.live.store(self.live.load(Relaxed) + taken as u32, Relaxed);
        taken
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
        let given = self.give_run(slice::from_ref(&block));
        debug_assert_eq!(given, 1, "a block of another span");
    }

    /// Takes blocks of this span back, up to the first of another one; returns how many.
    #[inline]
    pub(super) fn give_run(&self, blocks: &[NonNull<u8>]) -> usize {
        let (start, divisor) = (self.start(), self.divisor.load(Relaxed));
        let bytes = self.blocks.load(Relaxed) as usize * self.bytes.load(Relaxed) as usize;
        let mut first_word = self.first_word.load(Relaxed) as usize;
        let mut given = 0;
        for block in blocks {
            let offset = block.addr().get().wrapping_sub(start);
            if offset >= bytes {
                break;
            }
            let index = classes::index_by(divisor, offset);
            let (number, bit) = (index / 64 % WORDS, 1 << (index % 64));
            let word = self.free[number].load(Relaxed);
            debug_assert_eq!(word & bit, 0, "released twice");
            self.free[number].store(word | bit, Relaxed);
            first_word = first_word.min(number);
            given += 1;
        }
        self.first_word.store(first_word as u32, Relaxed);
        self.live.store(self.live.load(Relaxed) - given as u32, Relaxed);
        self.is_touched.store(1, Relaxed);
        given
    }

    /// Calls `empty` on the system pages that lie in free blocks; returns how many bytes it emptied. Does nothing if no
    /// block came back since the last call.
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

#[cfg(test)]
mod tests {
    use super::super::{geometry::PAGE, region};
    use super::classes;
    use proptest::prelude::*;
    use std::collections::HashSet;
    use std::num::NonZero;
    use std::ptr::NonNull;

    proptest! {
        #![proptest_config(ProptestConfig {
            cases: if cfg!(miri) { 4 } else { 200 }, failure_persistence: None, ..ProptestConfig::default()
        })]

        /// As for a set of blocks, whatever the span was before.
        #[test]
        fn blocks_taken_and_given_back_in_any_order_are_those_of_a_set(
            steps in prop::collection::vec((0..3_u8, 0..65_usize, any::<usize>()), 1..60)
        ) {
            let record = region::take_record().expect("memory");
            let span = record.span(0);
            let start: NonNull<u8> = NonNull::without_provenance(NonZero::new(16 * PAGE).expect("not zero"));
            for class in [0, 1, 2, 7, 9, 20, classes::TINY - 1, classes::TINY, classes::COUNT - 1] {
                span.reset(start, class);
                let (bytes, count) = (classes::bytes(class), classes::span_blocks(class));
                let foreign = start.map_addr(|start| start.saturating_add(classes::span_pages(class) * PAGE));
                let mut live: Vec<NonNull<u8>> = Vec::new();
                for &(what, wanted, which) in &steps {
                    let before = live.len();
                    match what {
                        0 => live.extend(span.take()),
                        1 => {
                            let mut places = [start; 64];
                            let taken = span.take_some(&mut places[..wanted]);
                            assert_eq!(taken, wanted.min(count - before), "as many as there are");
                            live.extend(&places[..taken]);
                        }
                        _ => {
                            let wanted = wanted.min(before);
                            let mut blocks: Vec<_> =
                                (0..wanted).map(|number| live.swap_remove(which.wrapping_mul(number + 1) % live.len())).collect();
                            blocks.push(foreign);
                            assert_eq!(span.give_run(&blocks), wanted, "up to the first block of another span");
                        }
                    }
                    assert_eq!((span.live() as usize, span.is_full()), (live.len(), live.len() == count), "class {class}");
                    assert!(live.iter().all(|block| (block.addr().get() - start.addr().get()).is_multiple_of(bytes)));
                    assert!(live.iter().all(|block| block.addr() < foreign.addr()), "class {class}");
                    let distinct: HashSet<_> = live.iter().collect();
                    assert_eq!(distinct.len(), live.len(), "a block was handed out twice");
                }
            }
            region::give_records(record);
        }
    }
}
