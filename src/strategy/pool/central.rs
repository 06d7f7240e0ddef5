//! Where threads get small blocks of one class from, and give what they have too many of: by the batch.
//!
//! Each span knows which of its blocks are free. One whose last block came back goes to the page heap at once. Nothing here
//! allocates, and spans are made and given back outside of the lock.

use super::heap::PageHeap;
use super::span::{self, Spans};
use crate::source::Pages;
use crate::sync::{ForkLock, Locked};
use std::ptr::NonNull;

/// One class of small blocks.
#[derive(Debug)]
pub(super) struct Central {
    /// The spans of this class that have a free block and a live one.
    with_room: Locked<Spans>,
    class: usize,
}

impl Central {
    pub(super) fn new(class: usize) -> Self {
        Self { with_room: Locked::new(Spans::new()), class }
    }

    /// Fills `places` from the front with blocks; says how many there were. None: out of memory.
    pub(super) fn take<P: Pages>(&self, heap: &PageHeap<P>, places: &mut [NonNull<u8>]) -> usize {
        let filled = self.with_room.with(|spans| fill(spans, places));
        if filled > 0 || places.is_empty() {
            // The rest of the batch can wait: a new span is only for who has nothing.
            return filled;
        }
        let Some(span) = heap.take(self.class) else { return 0 };
        self.with_room.with(|spans| {
            spans.push(span);
            fill(spans, places)
        })
    }

    /// Takes blocks of this class back, which nobody else has. Whether the heap got something back by that.
    pub(super) fn give<P: Pages>(&self, heap: &PageHeap<P>, blocks: &[NonNull<u8>]) -> bool {
        let mut emptied = self.with_room.with(|spans| {
            let mut emptied = Spans::new();
            for &block in blocks {
                // SAFETY: it counts as live until the next line.
                let span = unsafe { span::of(block) };
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
