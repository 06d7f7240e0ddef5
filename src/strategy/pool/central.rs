//! The central free list of a size class. Threads take small blocks from it and return surplus ones to it, in batches.
//!
//! Each span knows which of its blocks are free. A span whose last live block came back goes to the page heap at once.
//! Nothing here allocates; spans are taken from the page heap and given back outside the lock.

use super::heap::PageHeap;
use super::region;
use super::span::Spans;
use crate::source::Pages;
use crate::sync::{ForkLock, Locked};
use std::ptr::NonNull;

/// The central free list of one class.
#[derive(Debug)]
pub(super) struct Central {
    /// The spans of this class with a free block and a live one.
    with_room: Locked<Spans>,
    class: usize,
}

impl Central {
    pub(super) fn new(class: usize) -> Self {
        Self { with_room: Locked::new(Spans::new()), class }
    }

    /// Fills `places` from the front with blocks; returns how many. 0 means that there is no memory.
    pub(super) fn take<P: Pages>(&self, heap: &PageHeap<P>, places: &mut [NonNull<u8>]) -> usize {
        let filled = self.with_room.with(|spans| fill(spans, places));
        if filled > 0 || places.is_empty() {
            // A part of a batch will do; a new span is taken only if there is no block at all.
            return filled;
        }
        let Some(span) = heap.take(self.class) else { return 0 };
        self.with_room.with(|spans| {
            spans.push(span);
            fill(spans, places)
        })
    }

    /// Takes blocks of this class back, which nobody else has. Returns whether a span went back to the heap.
    pub(super) fn give<P: Pages>(&self, heap: &PageHeap<P>, blocks: &[NonNull<u8>]) -> bool {
        let mut emptied = self.with_room.with(|spans| {
            let mut emptied = Spans::new();
            for &block in blocks {
                // SAFETY: nobody else has the block, and its span counts it as live until `give` below.
                let span = unsafe { region::span_of(block) };
                if span.is_full() {
                    spans.push(span);
                }
                span.give(block);
                if span.live() == 0 {
                    spans.remove(span);
                    emptied.push(span);
                }
            }
            emptied
        });
        let mut is_emptied = false;
        while let Some(span) = emptied.pop() {
            heap.give(span);
            is_emptied = true;
        }
        is_emptied
    }

    pub(super) fn lock(&self) -> &ForkLock {
        self.with_room.lock()
    }
}

fn fill(spans: &mut Spans, places: &mut [NonNull<u8>]) -> usize {
    let mut filled = 0;
    while let (Some(place), Some(span)) = (places.get_mut(filled), spans.first()) {
        if let Some(block) = span.take() {
            *place = block;
            filled += 1;
        }
        if span.is_full() {
            spans.remove(span);
        }
    }
    filled
}
