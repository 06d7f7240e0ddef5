//! `Inner`: what the clones of a pool share. Small blocks are in its central free lists and pages, large ones in the
//! extents; it gives back what is old, when it is used or when the decay thread asks.

use super::cache::{Home, Number};
use super::central::Central;
use super::decay::{self, Keeper, Noted, PoolBytes, Registration};
use super::geometry::PAGE;
use super::heap::PageHeap;
use super::large::{Large, Taking};
use super::options::{PoolOptions, Retention};
use super::region::{self, Region};
use super::span::Span;
use super::{classes, clock, idle, local};
use crate::source::{Pages, pages};
use crate::sync::{ForkLock, HeldAcrossFork, HeldUntilDropped, hold_across_fork_until};
use std::ptr::NonNull;
use std::sync::{Arc, Weak};
use std::time::Duration;

/// The memory of a pool.
pub(super) struct Inner<P: Pages> {
    /// Identifies this pool's cache among those of a thread.
    pub(super) number: Number,
    large: Large,
    /// If the source has other pages for blocks of 2 MiB and more.
    huge: Option<Huge>,
    pub(super) central: Central,
    pub(super) heap: PageHeap<P>,
    pub(super) retention: Retention,
    /// Whether there may be memory to return to the system.
    noted: Noted,
    _held: HeldUntilDropped,
    _registration: Registration,
}

struct Huge {
    blocks: Large,
    source: Arc<dyn Pages>,
}

/// Threads empty their caches at most this often, however short the decay is.
const MIN_SWEEP_INTERVAL: Duration = Duration::from_millis(100);

/// Pages of 64 KiB in a huge page. Blocks on huge pages are multiples of it.
const HUGE_PAGES: usize = pages::HUGE_PAGE / PAGE;

impl<P: Pages> Inner<P> {
    pub(super) fn new(source: P, options: PoolOptions) -> Arc<Self> {
        let retention = Retention::new(options);
        idle::prepare();
        Arc::new_cyclic(|inner: &Weak<Self>| Self {
            number: Number::new(),
            large: Large::new(1, retention),
            huge: source.huge().map(|source| Huge { blocks: Large::new(HUGE_PAGES, retention), source }),
            central: Central::new(),
            heap: PageHeap::new(source, retention),
            retention,
            noted: Noted::default(),
            // In this order: see `decay`.
            _held: hold_across_fork_until(inner.clone()),
            _registration: decay::register(inner.clone()),
        })
    }

    pub(super) fn allocate_large(&self, size_bytes: usize, taking: Taking) -> Option<NonNull<u8>> {
        match &self.huge {
            Some(huge) if size_bytes.div_ceil(PAGE) >= HUGE_PAGES => {
                huge.blocks.allocate(&*huge.source, size_bytes, taking)
            }
            _ => self.large.allocate(&self.heap.source, size_bytes, taking),
        }
    }

    /// A small block of a [joined](classes::is_joined) class.
    pub(super) fn allocate_joined(&self, class: usize) -> Option<NonNull<u8>> {
        self.large.allocate_of(&self.heap.source, class)
    }

    /// Takes blocks of `class` back that a thread released and does not keep. As [`give`](Home::give), but that memory
    /// may go to the system.
    pub(super) fn take_back(&self, class: usize, blocks: &mut [NonNull<u8>]) {
        if classes::is_joined(class) {
            self.large.release_given(&self.heap.source, blocks);
            self.noted.note();
        } else {
            self.give(class, blocks);
        }
    }

    /// Resizes a live large block in place; false where it has to move.
    pub(super) fn resize_large(&self, region: &Region, block: NonNull<u8>, size_bytes: usize) -> bool {
        let was_huge = region.large_pages_at(block.addr().get()) >= HUGE_PAGES;
        let is_huge = size_bytes.div_ceil(PAGE) >= HUGE_PAGES;
        let resized = match &self.huge {
            Some(_) if was_huge != is_huge => false,
            Some(huge) if is_huge => huge.blocks.resize(&*huge.source, region, block, size_bytes),
            _ => self.large.resize(&self.heap.source, region, block, size_bytes),
        };
        self.noted.note(); // what it shrank by may go back to the system
        resized
    }

    /// A large block was moved to one that is larger, and is to be released: what it was goes to the system.
    ///
    /// # Safety
    /// - `block` is a live large one, cut from this pool's memory; nobody needs its contents.
    pub(super) unsafe fn leave(&self, block: NonNull<u8>) {
        // SAFETY: the block is live (this function's contract), so its region is in the map.
        let region = unsafe { region::find(block.addr().get()) };
        match &self.huge {
            Some(huge) if region.large_pages_at(block.addr().get()) >= HUGE_PAGES => {
                huge.blocks.leave(&*huge.source, region, block);
            }
            _ => self.large.leave(&self.heap.source, region, block),
        }
    }

    /// A part of what came back latest: see `large`.
    #[cfg(ctxalloc_whole)]
    pub(super) fn allocate_latest(&self, size_bytes: usize, zeroed: bool) -> Option<NonNull<u8>> {
        self.large.allocate_latest(&self.heap.source, size_bytes, zeroed)
    }

    /// A large block that came back lately, as it is, if one fits. The source is not called.
    pub(super) fn take_recent(&self, size_bytes: usize) -> Option<NonNull<u8>> {
        self.large_of(size_bytes).take_recent(size_bytes)
    }

    /// That which came back last, if it fits and is there without a lock.
    #[inline]
    pub(super) fn take_parked(&self, size_bytes: usize) -> Option<NonNull<u8>> {
        self.large_of(size_bytes).take_parked(size_bytes)
    }

    /// Where blocks of so many bytes are.
    #[inline]
    fn large_of(&self, size_bytes: usize) -> &Large {
        match &self.huge {
            Some(huge) if size_bytes.div_ceil(PAGE) >= HUGE_PAGES => &huge.blocks,
            _ => &self.large,
        }
    }

    /// Takes a span of `class` for an arena.
    pub(super) fn take_span(&self, class: usize) -> Option<&'static Span> {
        self.look();
        // If the source refuses, the pool's unused memory can go to make room.
        self.heap.take(class).or_else(|| if self.give_back() == 0 { None } else { self.heap.take(class) })
    }

    /// Takes back a span without a live block from an arena.
    pub(super) fn give_span(&self, span: &Span) {
        self.heap.give(span);
        self.noted.note();
    }

    /// Returns old memory to the system, if it is time to. A pool in use does this itself, without the decay thread.
    pub(super) fn look(&self) {
        let now = clock::now();
        if self.heap.is_due(now) {
            self.heap.tick(now);
        }
        local::sweep(now, (self.retention.decay() / 2).max(MIN_SWEEP_INTERVAL));
    }

    /// Takes a live large block back. Not inline: what it needs, each small block's release would save and restore.
    #[inline(never)]
    pub(super) fn release_large(&self, region: &Region, block: NonNull<u8>) {
        match &self.huge {
            // `allocate_large` decides by the same size: blocks are rounded up to whole huge pages only on huge pages.
            Some(huge) if region.large_pages_at(block.addr().get()) >= HUGE_PAGES => {
                huge.blocks.release(&*huge.source, block);
            }
            _ => self.large.release(&self.heap.source, block),
        }
        self.noted.note();
    }

    /// Returns memory that is in no thread's cache to the system. Returns how many bytes.
    pub(super) fn give_back(&self) -> usize {
        let huge = self.huge.as_ref().map_or(0, |huge| huge.blocks.trim(&*huge.source));
        huge + self.large.trim(&self.heap.source) + self.heap.trim()
    }
}

impl<P: Pages> Home for Inner<P> {
    fn give(&self, class: usize, blocks: &mut [NonNull<u8>]) {
        let is_emptied = if classes::is_joined(class) {
            self.large.give(blocks);
            true
        } else {
            self.central.give(&self.heap, class, blocks)
        };
        if is_emptied {
            self.noted.note();
        }
    }
}

impl<P: Pages> Drop for Inner<P> {
    fn drop(&mut self) {
        self.large.close(&self.heap.source);
        if let Some(huge) = &self.huge {
            huge.blocks.close(&*huge.source);
        }
    }
}

impl<P: Pages> HeldAcrossFork for Inner<P> {
    fn for_each_lock(&self, visit: &mut dyn FnMut(&ForkLock)) {
        // Lists grow under the locks of large blocks: by small blocks of this pool, where it is the global allocator.
        if let Some(huge) = &self.huge {
            visit(huge.blocks.lock());
        }
        visit(self.large.lock());
        self.central.for_each_lock(visit);
        self.heap.for_each_lock(visit);
    }
}

impl<P: Pages> Keeper for Inner<P> {
    fn decay(&self, now: Duration) -> Option<Duration> {
        if !self.heap.source.decays_by_itself() {
            return None;
        }
        self.noted.clear();
        let huge = self.huge.as_ref().and_then(|huge| huge.blocks.decay(&*huge.source, now));
        let next = [huge, self.large.decay(&self.heap.source, now), self.heap.tick(now)].into_iter().flatten().min();
        if next.is_some() {
            self.noted.keep();
        }
        next
    }

    fn give_back(&self) -> usize {
        Self::give_back(self)
    }

    fn kept(&self) -> PoolBytes {
        let huge = self.huge.as_ref().map(|huge| huge.blocks.kept()).unwrap_or_default();
        self.large.kept().plus(self.heap.kept()).plus(huge)
    }

    fn for_each_mapping(&self, visit: &mut dyn FnMut(usize, usize)) {
        self.large.for_each_mapping(visit);
        self.heap.for_each_mapping(visit);
        if let Some(huge) = &self.huge {
            huge.blocks.for_each_mapping(visit);
        }
    }
}
