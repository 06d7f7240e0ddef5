//! Where threads get small blocks of one class from, and give what they have too many of: by the batch.

use super::classes;
use super::heap::PageHeap;
use super::region::{self, PAGE, Region};
use crate::source::Pages;
use crate::sync::{ForkLock, Locked};
use std::collections::HashMap;
use std::ptr::NonNull;

/// One class of small blocks.
#[derive(Debug)]
pub(super) struct Central {
    shelf: Locked<Shelf>,
    class: usize,
}

#[derive(Debug, Default)]
struct Shelf {
    /// Blocks that came back.
    returned: Vec<NonNull<u8>>,
    /// What is left of the newest span: never handed out so far.
    fresh: Option<NonNull<u8>>,
    fresh_left: usize,
}

// SAFETY: blocks here belong to nobody; they are plain memory of any thread.
unsafe impl Send for Shelf {}

impl Central {
    pub(super) fn new(class: usize) -> Self {
        Self { shelf: Locked::new(Shelf::default()), class }
    }

    /// Fills `places` from the front with blocks; says how many there were. None: out of memory.
    pub(super) fn take<P: Pages>(&self, heap: &PageHeap<P>, places: &mut [NonNull<u8>]) -> usize {
        let bytes = classes::bytes(self.class);
        self.shelf.with(|shelf| {
            let mut filled = 0;
            for place in places.iter_mut() {
                let block = shelf.returned.pop().or_else(|| shelf.cut(bytes));
                let block = match block {
                    Some(block) => block,
                    // The rest of the batch can wait: a new span is only for who has nothing.
                    None if filled > 0 => break,
                    None => {
                        let pages = classes::span_pages(self.class);
                        let Some(span) = heap.take(pages, self.class) else { break };
                        shelf.fresh = Some(span);
                        shelf.fresh_left = pages * PAGE / bytes;
                        let Some(block) = shelf.cut(bytes) else { break };
                        block
                    }
                };
                *place = block;
                filled += 1;
            }
            filled
        })
    }

    /// Takes blocks back.
    pub(super) fn give(&self, blocks: &[NonNull<u8>]) {
        self.shelf.with(|shelf| shelf.returned.extend_from_slice(blocks));
    }

    /// Gives spans of which every block has come back to the heap.
    pub(super) fn trim<P: Pages>(&self, heap: &PageHeap<P>) {
        let pages = classes::span_pages(self.class);
        let whole = pages * PAGE / classes::bytes(self.class);
        let emptied: Vec<(&'static Region, usize)> = self.shelf.with(|shelf| {
            // A span that is still being cut counts its rest as returned.
            while let Some(block) = shelf.cut(classes::bytes(self.class)) {
                shelf.returned.push(block);
            }
            let mut counts: HashMap<(usize, usize), usize> = HashMap::new();
            let span_of = |block: &NonNull<u8>| {
                let address = block.addr().get();
                // SAFETY: a block of this pool, in a region that is not given back while we have it.
                let region = unsafe { region::find(address) };
                (region, region.span_at(address))
            };
            for block in &shelf.returned {
                let (region, first) = span_of(block);
                *counts.entry((std::ptr::from_ref(region).addr(), first)).or_default() += 1;
            }
            let mut emptied = Vec::new();
            shelf.returned.retain(|block| {
                let (region, first) = span_of(block);
                let count = counts.get_mut(&(std::ptr::from_ref(region).addr(), first));
                match count {
                    Some(count) if *count == whole => {
                        emptied.push((region, first));
                        *count = usize::MAX; // noted once
                        false
                    }
                    Some(count) => *count != usize::MAX,
                    None => true,
                }
            });
            emptied
        });
        for (region, first) in emptied {
            heap.give(region, first, pages);
        }
    }

    pub(super) fn lock(&self) -> &ForkLock {
        self.shelf.lock()
    }
}

impl Shelf {
    /// The next block of the newest span.
    fn cut(&mut self, bytes: usize) -> Option<NonNull<u8>> {
        let block = self.fresh?;
        self.fresh_left -= 1;
        // The end of the span is no block; the pointer to it is never used.
        self.fresh = if self.fresh_left == 0 { None } else { NonNull::new(block.as_ptr().wrapping_add(bytes)) };
        Some(block)
    }
}
