//! `Arena`: the memory of one piece of work, given back as a whole when the work is done.
//!
//! Freed blocks are reused inside, since NumPy's temporaries would grow a bump arena without bound. Spans come from the
//! pages of a pool, large blocks from the pool. Each span counts its live blocks. A span without any is kept for the
//! next class that needs one, or goes back to the pool at once. So the end of the work costs nothing for blocks freed
//! before, and a block that escapes pins only its own span. Spans are taken from the pool and given back outside the
//! lock.

use super::decay::{self, Keeper, Noted, Registration};
use super::geometry::PAGE;
use super::large::Taking;
use super::region::{self, Region};
use super::span::{Span, Spans};
use super::turn::in_turn;
use super::{Pool, classes};
use crate::source::{Pages, PrivatePages, pages};
use crate::strategy::Strategy;
use crate::sync::{ForkLock, HeldAcrossFork, HeldUntilDropped, Owned};
use std::fmt;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

/// An arena keeps at most this many pages of 64 KiB for its next use.
const KEPT_PAGES: usize = 16;

/// Memory for one piece of work, over the pages of a [`Pool`]. Blocks are aligned to 64 bytes.
///
/// Any thread may use it, one at a time (it has a lock). Clones are the same arena, and cloning is cheap.
///
/// ```
/// use ctxalloc::strategy::{Arena, Pool, Strategy};
///
/// let arena = Arena::over(&Pool::new());
/// let block = arena.allocate(1000).expect("memory");
/// assert!(!arena.reset(), "something is alive");
/// // SAFETY: the block is live and from this arena.
/// unsafe { arena.release(block) };
/// assert!(arena.reset());
/// ```
pub struct Arena<P: Pages = PrivatePages> {
    inner: Arc<Inner<P>>,
}

struct Inner<P: Pages> {
    pool: Pool<P>,
    state: Owned<State>,
    /// The turn of the thread that gives dead spans to the pool. Taken before the state's lock.
    giving: ForkLock,
    /// Counts uses, roughly: the decay thread leaves an arena alone that was used since it last looked.
    uses: AtomicU32,
    uses_seen: AtomicU32,
    /// Whether there may be memory to give back.
    noted: Noted,
    _held: HeldUntilDropped,
    _registration: Registration,
}

struct State {
    /// The span that the next block of each class comes from. It may be full, and is in no list.
    current: [Option<&'static Span>; classes::COUNT],
    /// Other spans with a free block and a live one. Full spans are in no list.
    with_room: [Spans; classes::COUNT],
    /// Spans of one page without a live block, for any class.
    spare: Spans,
    spare_pages: usize,
    /// The pages of all spans that this arena has.
    pages: usize,
    live_blocks: usize,
}

impl<P: Pages> Arena<P> {
    /// An arena over a pool's pages and large blocks.
    #[must_use]
    pub fn over(pool: &Pool<P>) -> Self {
        let state = State {
            current: [None; classes::COUNT],
            with_room: [const { Spans::new() }; classes::COUNT],
            spare: Spans::new(),
            spare_pages: 0,
            pages: 0,
            live_blocks: 0,
        };
        let inner = Arc::new_cyclic(|inner: &Weak<Inner<P>>| Inner {
            pool: pool.clone(),
            state: Owned::new(state),
            giving: ForkLock::new(),
            uses: AtomicU32::new(0),
            uses_seen: AtomicU32::new(0),
            noted: Noted::default(),
            // In this order: see `decay`.
            _held: crate::sync::hold_across_fork_until(inner.clone()),
            _registration: decay::register(inner.clone()),
        });
        Self { inner }
    }

    /// The number of live blocks.
    #[must_use]
    pub fn live_blocks(&self) -> usize {
        self.inner.state.with(|state| state.live_blocks)
    }

    /// Gives the arena's memory back to the pool, if no block is alive; returns whether it did. At most 1 MiB stays for
    /// the next use, until the arena was unused for a while ([`PoolOptions::decay`](super::PoolOptions::decay)).
    #[must_use = "a live block keeps the memory, and nothing is given back"]
    pub fn reset(&self) -> bool {
        self.inner.note_use();
        let kept = self.inner.state.with(|state| {
            if state.live_blocks > 0 {
                return None;
            }
            Some((if state.pages > KEPT_PAGES { state.take_surplus() } else { Spans::new() }, state.pages))
        });
        let Some((surplus, kept_pages)) = kept else { return false };
        self.give(surplus);
        if kept_pages > 0 {
            self.inner.noted.note();
        }
        true
    }

    /// Gives all spans without a live block back to the pool, without system calls. Returns how many bytes. A live
    /// block keeps its span: 64 KiB for blocks of up to 16 KiB, else four to five times the block's size.
    pub fn release_dead_pages(&self) -> usize {
        self.inner.release_dead_pages()
    }

    /// Gives spans back to the pool.
    fn give(&self, spans: Spans) -> usize {
        self.inner.give(spans)
    }

    #[inline]
    fn allocate_small(&self, size_bytes: usize) -> Option<NonNull<u8>> {
        let class = classes::ALIGNED.of(size_bytes);
        self.inner.state.with(|state| state.take(class)).or_else(|| self.take_from_new_span(class))
    }

    /// Takes one more span from the pool, and a block from it.
    #[cold]
    #[inline(never)]
    fn take_from_new_span(&self, class: usize) -> Option<NonNull<u8>> {
        self.inner.note_use();
        let span = self.inner.pool.inner.take_span(class)?;
        self.inner.state.with(|state| {
            state.add_span(span);
            state.take(class)
        })
    }

    fn allocate_large(&self, size_bytes: usize, taking: Taking) -> Option<NonNull<u8>> {
        let pool = &*self.inner.pool.inner;
        let block = pool.allocate_large(size_bytes, taking)?;
        self.inner.state.with(|state| state.live_blocks += 1);
        Some(block)
    }

    /// Takes a small block back, and gives its span back to the pool if it is not needed.
    #[inline]
    fn release_small(&self, region: &'static Region, block: NonNull<u8>) {
        let span = region.span(region.span_at(block.addr().get()));
        if let Some(surplus) = self.inner.state.with(|state| state.give(span, block)) {
            self.inner.pool.inner.give_span(surplus);
        }
    }
}

impl State {
    #[inline]
    fn take(&mut self, class: usize) -> Option<NonNull<u8>> {
        let block = match self.current[class].and_then(Span::take) {
            Some(block) => block,
            None => self.take_from_another(class)?,
        };
        self.live_blocks += 1;
        Some(block)
    }

    /// Makes another span of this arena the current one and takes a block from it. `None` if the pool must be asked.
    #[cold]
    #[inline(never)]
    fn take_from_another(&mut self, class: usize) -> Option<NonNull<u8>> {
        let span = match self.with_room[class].pop() {
            Some(span) => span,
            None if classes::span_pages(class) == 1 => {
                let page = self.take_spare().or_else(|| self.take_idle())?;
                // A span that was of this class before need not be set up again.
                if page.class() != class {
                    let (region, first) = region::place_of(page);
                    region.assign(first, class)?;
                }
                page
            }
            None => return None,
        };
        // The previous one is full.
        self.current[class] = Some(span);
        span.take()
    }

    fn take_spare(&mut self) -> Option<&'static Span> {
        let span = self.spare.pop()?;
        self.spare_pages -= 1;
        Some(span)
    }

    /// Takes the current span of a class that has no live block, if it is a single page.
    fn take_idle(&mut self) -> Option<&'static Span> {
        let is_idle = |span: &Option<&'static Span>| span.is_some_and(|span| span.live() == 0 && span.pages() == 1);
        self.current.iter_mut().find(|span| is_idle(span))?.take()
    }

    /// Adds a span from the pool.
    fn add_span(&mut self, span: &'static Span) {
        self.pages += span.pages();
        match &mut self.current[span.class()] {
            // Another thread has added a span in the meantime.
            Some(current) if !current.is_full() => self.with_room[span.class()].push(span),
            current => *current = Some(span),
        }
    }

    /// Takes a block back. Returns its span if that is to go back to the pool.
    #[inline]
    fn give(&mut self, span: &'static Span, block: NonNull<u8>) -> Option<&'static Span> {
        let was_full = span.is_full();
        span.give(block);
        self.live_blocks -= 1;
        if was_full || span.live() == 0 { self.file(span, was_full) } else { None }
    }

    /// Moves a span to the right list after it stopped being full or lost its last live block. Returns it if it is to
    /// go back to the pool.
    fn file(&mut self, span: &'static Span, was_full: bool) -> Option<&'static Span> {
        let class = span.class();
        if self.current[class].is_some_and(|current| std::ptr::eq(current, span)) {
            return None; // it stays current, so that a single temporary moves no span between lists
        }
        if was_full {
            self.with_room[class].push(span);
        }
        if span.live() > 0 {
            return None;
        }
        self.with_room[class].remove(span);
        if span.pages() == 1 && self.spare_pages < KEPT_PAGES {
            self.spare.push(span);
            self.spare_pages += 1;
            return None;
        }
        self.pages -= span.pages();
        Some(span)
    }

    /// Takes out the spans beyond what the arena keeps. No block is alive.
    fn take_surplus(&mut self) -> Spans {
        let mut surplus = Spans::new();
        for current in &mut self.current {
            if self.pages > KEPT_PAGES
                && let Some(span) = current.take()
            {
                self.pages -= span.pages();
                surplus.push(span);
            }
        }
        surplus
    }

    /// All spans without a live block.
    fn take_dead(&mut self) -> Spans {
        let mut dead = Spans::new();
        while let Some(span) = self.take_spare() {
            self.pages -= 1;
            dead.push(span);
        }
        for current in &mut self.current {
            if let Some(span) = current.take_if(|span| span.live() == 0) {
                self.pages -= span.pages();
                dead.push(span);
            }
        }
        dead
    }

    /// All spans that have a free block.
    fn all_with_room(&self) -> impl Iterator<Item = &'static Span> {
        let current = self.current.iter().flatten().copied().filter(|span| !span.is_full());
        self.with_room.iter().flat_map(Spans::iter).chain(current)
    }
}

impl<P: Pages> Inner<P> {
    /// A load and a store instead of `fetch_add`: lost counts do not matter, as long as the number changes.
    #[inline]
    fn note_use(&self) {
        self.uses.store(self.uses.load(Ordering::Relaxed).wrapping_add(1), Ordering::Relaxed);
    }

    fn give(&self, mut spans: Spans) -> usize {
        let mut bytes = 0;
        while let Some(span) = spans.pop() {
            bytes += span.pages() * PAGE;
            self.pool.inner.give_span(span);
        }
        bytes
    }

    fn release_dead_pages(&self) -> usize {
        in_turn(&self.giving, || self.give(self.state.with(State::take_dead)))
    }

    /// Returns the memory of system pages that lie in free blocks to the system; the spans stay. Returns how many
    /// bytes.
    fn empty_around_live(&self) -> usize {
        let source = &self.pool.inner.heap.source;
        // SAFETY: the bytes lie in free blocks of this arena, and nobody takes one of them while the lock is held.
        let empty = |start: NonNull<u8>, bytes: usize| unsafe { source.empty(start, bytes) };
        let page_bytes = pages::page_bytes();
        self.state.with(|state| state.all_with_room().map(|span| span.empty_free(page_bytes, empty)).sum())
    }
}

impl<P: Pages> Keeper for Inner<P> {
    fn decay(&self, now: Duration) -> Option<Duration> {
        let uses = self.uses.load(Ordering::Relaxed);
        if self.uses_seen.swap(uses, Ordering::Relaxed) != uses {
            return Some(now + self.pool.inner.retention.decay() / 2);
        }
        if self.noted.clear() {
            self.release_dead_pages();
        }
        None
    }

    /// Only counts the pages around live blocks: dead spans go to the pool, which returns and counts them itself.
    fn give_back(&self) -> usize {
        self.release_dead_pages();
        self.empty_around_live()
    }
}

impl<P: Pages> HeldAcrossFork for Inner<P> {
    fn for_each_lock(&self, visit: &mut dyn FnMut(&ForkLock)) {
        visit(&self.giving);
    }

    fn before_fork(&self) -> bool {
        if !self.acquire_each() {
            return false;
        }
        let is_taken = self.state.lock().acquire_before_fork();
        if !is_taken {
            self.release_each();
        }
        is_taken
    }

    fn after_fork(&self) {
        self.state.lock().release_after_fork();
        self.release_each();
    }
}

impl<P: Pages> Drop for Inner<P> {
    fn drop(&mut self) {
        self.release_dead_pages();
    }
}

// SAFETY: small blocks are cut from spans that belong to this arena alone until they go back to the pool, without a
// live block. Large blocks are the pool's. All are aligned as the pool's are.
unsafe impl<P: Pages> Strategy for Arena<P> {
    fn alignment(&self) -> usize {
        classes::ALIGN
    }

    #[inline]
    fn allocate(&self, size_bytes: usize) -> Option<NonNull<u8>> {
        if size_bytes <= classes::MAX {
            self.allocate_small(size_bytes)
        } else {
            self.allocate_large(size_bytes, Taking::AsItIs)
        }
    }

    fn allocate_zeroed(&self, size_bytes: usize) -> Option<NonNull<u8>> {
        if size_bytes > classes::MAX {
            return self.allocate_large(size_bytes, Taking::Zeroed);
        }
        let block = self.allocate_small(size_bytes)?;
        // SAFETY: the block was just made with at least `size_bytes` bytes of the heap's source, and nobody else has
        // it.
        unsafe { super::resize::cleared(self, &self.inner.pool.inner.heap.source, block, size_bytes) }
    }

    unsafe fn resize(&self, block: NonNull<u8>, new_size_bytes: usize) -> Option<NonNull<u8>> {
        // SAFETY: the block is live and from this arena, whose memory is the source's (this function's contract).
        unsafe {
            let pool = &*self.inner.pool.inner;
            super::resize::resize_by(self, pool, block, new_size_bytes, classes::MAX + 1, |_, grows| {
                if grows { self.allocate_large(new_size_bytes, Taking::ToGrow) } else { self.allocate(new_size_bytes) }
            })
        }
    }

    #[inline]
    unsafe fn release(&self, block: NonNull<u8>) {
        // SAFETY: the block is live (this function's contract), so its region is in the map.
        let region = unsafe { region::find(block.addr().get()) };
        if region.class_at(block.addr().get()).is_some() {
            return self.release_small(region, block);
        }
        // First, since the source may panic below, and the block is gone nevertheless.
        self.inner.state.with(|state| state.live_blocks -= 1);
        self.inner.pool.inner.release_large(region, block);
    }

    /// Returns the pages kept for the next use, those between live blocks, and all unused memory of the pool to the
    /// system.
    fn trim(&self) -> usize {
        self.inner.give_back() + self.inner.pool.inner.give_back()
    }
}

impl<P: Pages> Clone for Arena<P> {
    fn clone(&self) -> Self {
        Self { inner: Arc::clone(&self.inner) }
    }
}

impl<P: Pages> fmt::Debug for Arena<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Arena").field("pool", &self.inner.pool).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::{Arena, Pool, Strategy};
    use crate::strategy::conformance;
    use crate::strategy::live::Live;

    #[test]
    fn arena_keeps_the_strategy_contract_and_resets_after_it() {
        let pool = Pool::new();
        let arena = Arena::over(&pool);
        conformance::check(arena.clone());
        assert_eq!(arena.live_blocks(), 0);
        assert!(arena.reset());
    }

    #[test]
    fn a_temporary_that_comes_back_is_used_again_inside() {
        let arena = Arena::over(&Pool::new());
        let first = Live::of(&arena, 5000);
        let start = first.start();
        first.release();
        assert_eq!(Live::of(&arena, 5000).start(), start);
    }

    #[test]
    fn after_a_reset_the_same_pages_serve_other_sizes() {
        let arena = Arena::over(&Pool::new());
        let first = Live::of(&arena, 100);
        let start = first.start();
        assert!(!arena.reset(), "a block is alive");
        first.release();
        assert!(arena.reset());
        assert_eq!(Live::of(&arena, 700).start(), start, "the page that was kept");
    }

    #[test]
    fn dead_pages_around_an_escape_go_back_and_the_escape_stays() {
        let pool = Pool::new();
        let arena = Arena::over(&pool);
        let mut blocks: Vec<_> = (0..1000).map(|_| Live::of(&arena, 4096)).collect();
        blocks.iter_mut().for_each(|block| block.fill(7));
        let escape = blocks.swap_remove(500);
        drop(blocks);
        arena.release_dead_pages();
        assert!(pool.trim() > 990 * 4096, "only the span of the escape stays");
        assert_eq!(arena.trim(), 15 * 4096, "what lies around the escape in its span");
        assert_eq!(arena.trim(), 0, "once");
        assert!(escape.bytes().iter().all(|&byte| byte == 7));
        let next = Live::of(&arena, 4096);
        assert_ne!(next.start(), escape.start());
        drop((escape, next));
        assert!(arena.reset());
        drop(arena);
        assert_eq!(pool.regions_after_trim(), 0, "no page was lost");
    }
}
