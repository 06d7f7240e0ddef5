//! `Arena`: memory of one stretch of work, which goes all at once when that is over.
//!
//! Inside, blocks that come back are used again (NumPy's temporaries would grow a bump arena without bound); each class
//! has a stack of them, beside and not inside the blocks: memory that nobody uses is not touched. Pages come from a pool's regions, large blocks from its
//! warm ones. When nothing is alive, [`Arena::reset`] forgets lists and cuts at once and keeps a few pages for next time;
//! while something is, [`Arena::release_dead_pages`] gives back what lies around it.

use super::Pool;
use super::classes;
use super::region::{self, PAGE, Region};
use crate::source::{Pages, PrivatePages, pages};
use crate::strategy::Strategy;
use crate::sync::{ForkLock, HeldAcrossFork, Locked};
use std::fmt;
use std::ptr::NonNull;
use std::sync::{Arc, Weak};

/// How many pages of 64 KiB an arena keeps for its next use.
const KEPT_PAGES: usize = 16;

/// Memory for one stretch of work, over the pages of a [`Pool`]. Blocks are aligned to 64 bytes.
///
/// Cheap to clone: clones are the same arena. Any thread may use it; they take turns.
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
    state: Locked<State>,
}

struct State {
    /// The free blocks of each class, with room for all of its spans': a release never allocates.
    free: [Vec<NonNull<u8>>; classes::COUNT],
    /// What is left of each class's newest span.
    fresh: [Fresh; classes::COUNT],
    spans: Vec<Span>,
    /// Single pages for the next use.
    spare: Vec<Span>,
    live_blocks: usize,
}

#[derive(Clone, Copy)]
struct Fresh {
    next: Option<NonNull<u8>>,
    left: usize,
}

#[derive(Clone, Copy)]
struct Span {
    start: NonNull<u8>,
    region: &'static Region,
    first: usize,
    pages: usize,
    class: usize,
}

// SAFETY: pointers to memory that this arena owns alone, reached under its lock.
unsafe impl Send for State {}

impl<P: Pages> Arena<P> {
    /// An arena over a pool's pages and large blocks.
    #[must_use]
    pub fn over(pool: &Pool<P>) -> Self {
        let state = State {
            free: [const { Vec::new() }; classes::COUNT],
            fresh: [Fresh { next: None, left: 0 }; classes::COUNT],
            spans: Vec::new(),
            spare: Vec::new(),
            live_blocks: 0,
        };
        let inner = Arc::new(Inner { pool: pool.clone(), state: Locked::new(state) });
        crate::sync::hold_across_fork(Arc::downgrade(&inner) as Weak<dyn HeldAcrossFork>);
        Self { inner }
    }

    /// How many blocks are alive.
    pub fn live_blocks(&self) -> usize {
        self.inner.state.with(|state| state.live_blocks)
    }

    /// Takes everything back at once, if nothing is alive; says whether it did. A few pages stay for the next use, with
    /// their memory.
    pub fn reset(&self) -> bool {
        let surplus = self.inner.state.with(|state| {
            if state.live_blocks > 0 {
                return None;
            }
            let mut surplus = Vec::new();
            for span in state.spans.drain(..) {
                state.free[span.class].clear();
                state.fresh[span.class] = Fresh { next: None, left: 0 };
                if span.pages == 1 && state.spare.len() < KEPT_PAGES {
                    state.spare.push(span);
                } else {
                    surplus.push(span);
                }
            }
            Some(surplus)
        });
        surplus.is_some_and(|surplus| {
            self.give(&surplus);
            true
        })
    }

    /// Gives memory around the blocks that are alive back to the system; returns how many bytes went.
    ///
    /// Free blocks are not used again before the next [`reset`](Self::reset), except those that come back after this.
    pub fn release_dead_pages(&self) -> usize {
        let heap = &self.inner.pool.inner.heap;
        let (released, emptied) = self.inner.state.with(|state| {
            let mut released = 0;
            let mut emptied = Vec::new();
            let dead = state.take_dead();
            state.spans.retain(|span| {
                let blocks = span.pages * PAGE / classes::bytes(span.class);
                let dead_here = &dead[dead.partition_point(|&at| at < span.start)..];
                let dead_here = &dead_here[..dead_here.partition_point(|&at| at < span.end())];
                if dead_here.len() == blocks {
                    emptied.push(*span);
                    return false;
                }
                for (from, to) in whole_pages(dead_here, classes::bytes(span.class)) {
                    // SAFETY: these pages lie in blocks of this arena that nobody has, and no list leads there any more.
                    if unsafe { heap.source.empty(from, to.addr().get() - from.addr().get()) } {
                        released += to.addr().get() - from.addr().get();
                    }
                }
                true
            });
            emptied.append(&mut state.spare);
            (released, emptied)
        });
        self.give(&emptied);
        released + emptied.iter().map(|span| span.pages * PAGE).sum::<usize>()
    }

    /// Gives spans back to the pool's pages.
    fn give(&self, spans: &[Span]) {
        for span in spans {
            self.inner.pool.inner.heap.give(span.region, span.first, span.pages);
        }
    }

    #[inline]
    fn allocate_small(&self, size_bytes: usize) -> Option<NonNull<u8>> {
        let class = classes::of(size_bytes);
        self.inner.state.with(|state| {
            let block = match state.pop(class).or_else(|| state.cut(class)) {
                Some(block) => block,
                None => self.cut_new_span(state, class)?,
            };
            state.live_blocks += 1;
            Some(block)
        })
    }

    /// The first block of one more span.
    #[cold]
    #[inline(never)]
    fn cut_new_span(&self, state: &mut State, class: usize) -> Option<NonNull<u8>> {
        let pages = classes::span_pages(class);
        let blocks = pages * PAGE / classes::bytes(class);
        state.make_room(class, blocks)?;
        let span = match state.spare.pop_if(|_| pages == 1) {
            Some(span) => {
                span.region.assign(span.first, 1, class);
                Span { class, ..span }
            }
            None => {
                let start = self.inner.pool.inner.heap.take(pages, class)?;
                // SAFETY: just taken; its first block is as good as live.
                let region = unsafe { region::find(start.addr().get()) };
                Span { start, region, first: region.span_at(start.addr().get()), pages, class }
            }
        };
        state.spans.push(span);
        state.fresh[class] = Fresh { next: Some(span.start), left: blocks };
        state.cut(class)
    }

    fn allocate_large(&self, size_bytes: usize, zeroed: bool) -> Option<NonNull<u8>> {
        let pool = &*self.inner.pool.inner;
        let block = pool.allocate_large(size_bytes, zeroed)?;
        self.inner.state.with(|state| state.live_blocks += 1);
        Some(block)
    }
}

impl State {
    /// Makes room for the free blocks of one more span; nothing where there is no memory for that.
    fn make_room(&mut self, class: usize, blocks: usize) -> Option<()> {
        let spans = self.spans.iter().filter(|span| span.class == class);
        let all = spans.map(|span| span.pages * PAGE / classes::bytes(class)).sum::<usize>() + blocks;
        let free = &mut self.free[class];
        free.try_reserve(all.saturating_sub(free.len())).ok()
    }

    #[inline]
    fn pop(&mut self, class: usize) -> Option<NonNull<u8>> {
        self.free[class].pop()
    }

    #[inline]
    fn push(&mut self, class: usize, block: NonNull<u8>) {
        self.free[class].push(block);
    }

    /// The next block of the class's newest span.
    #[inline]
    fn cut(&mut self, class: usize) -> Option<NonNull<u8>> {
        let Fresh { next, left } = self.fresh[class];
        let block = next?;
        // The end of the span is no block; the pointer to it is never used.
        let next = NonNull::new(block.as_ptr().wrapping_add(classes::bytes(class))).filter(|_| left > 1);
        self.fresh[class] = Fresh { next, left: left - 1 };
        Some(block)
    }

    /// All blocks that nobody has, sorted; from now on no list knows them.
    fn take_dead(&mut self) -> Vec<NonNull<u8>> {
        let mut dead = Vec::new();
        for class in 0..classes::COUNT {
            while let Some(block) = self.pop(class).or_else(|| self.cut(class)) {
                dead.push(block);
            }
        }
        dead.sort_unstable();
        dead
    }
}

impl Span {
    /// The first address behind it.
    fn end(&self) -> NonNull<u8> {
        // SAFETY: one past the pages of the span.
        unsafe { self.start.add(self.pages * PAGE) }
    }
}

/// The whole pages of the system that lie in runs of dead blocks, which are sorted and `bytes` long.
fn whole_pages(dead: &[NonNull<u8>], bytes: usize) -> Vec<(NonNull<u8>, NonNull<u8>)> {
    let page = pages::page_bytes();
    dead.chunk_by(|one, next| next.addr().get() - one.addr().get() == bytes)
        .filter_map(|run| {
            let (first, last) = (run.first()?, run.last()?);
            let before = crate::layout::padding(first.addr().get(), page);
            let length = last.addr().get() + bytes - first.addr().get();
            let whole = length.checked_sub(before)? / page * page;
            // SAFETY: `before + whole` bytes lie in the run.
            let from = unsafe { first.add(before) };
            // SAFETY: as above.
            (whole > 0).then(|| (from, unsafe { from.add(whole) }))
        })
        .collect()
}

impl<P: Pages> HeldAcrossFork for Inner<P> {
    fn for_each_lock(&self, visit: &mut dyn FnMut(&ForkLock)) {
        visit(self.state.lock());
    }
}

impl<P: Pages> Drop for Inner<P> {
    fn drop(&mut self) {
        let heap = &self.pool.inner.heap;
        self.state.with(|state| {
            if state.live_blocks == 0 {
                for span in state.spans.drain(..).chain(state.spare.drain(..)) {
                    heap.give(span.region, span.first, span.pages);
                }
            }
        });
    }
}

// SAFETY: small blocks are cut from spans that are this arena's alone until they are given back, which happens only
// when none of their blocks is live; large ones are the pool's. Alignment as in the pool.
unsafe impl<P: Pages> Strategy for Arena<P> {
    fn alignment(&self) -> usize {
        classes::ALIGN
    }

    fn allocate(&self, size_bytes: usize) -> Option<NonNull<u8>> {
        if size_bytes <= classes::MOST {
            self.allocate_small(size_bytes)
        } else {
            self.allocate_large(size_bytes, false)
        }
    }

    fn allocate_zeroed(&self, size_bytes: usize) -> Option<NonNull<u8>> {
        if size_bytes > classes::MOST {
            return self.allocate_large(size_bytes, true);
        }
        let block = self.allocate_small(size_bytes)?;
        // SAFETY: the block has that many bytes, and nobody else has it yet.
        unsafe { super::cleared(self, &self.inner.pool.inner.heap.source, block, size_bytes) }
    }

    unsafe fn resize(&self, block: NonNull<u8>, new_size_bytes: usize) -> Option<NonNull<u8>> {
        // SAFETY: a live block of this arena, and so of its pool's regions, says the caller.
        unsafe { super::resize_by(self, &self.inner.pool.inner.heap.source, block, new_size_bytes) }
    }

    unsafe fn release(&self, block: NonNull<u8>) {
        // SAFETY: a live block, says the caller.
        let region = unsafe { region::find(block.addr().get()) };
        let class = region.class_at(block.addr().get());
        if class.is_none() {
            let pool = &*self.inner.pool.inner;
            pool.release_large(region, block);
        }
        self.inner.state.with(|state| {
            if let Some(class) = class {
                state.push(class, block);
            }
            state.live_blocks -= 1;
        });
    }

    /// Pages kept for the next use, and what lies between live blocks.
    fn trim(&self) -> usize {
        self.release_dead_pages()
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
        let first = arena.allocate(5000).expect("memory");
        // SAFETY: live, from this arena.
        unsafe { arena.release(first) };
        assert_eq!(arena.allocate(5000), Some(first));
    }

    #[test]
    fn after_a_reset_the_same_pages_serve_other_sizes() {
        let arena = Arena::over(&Pool::new());
        let first = arena.allocate(100).expect("memory");
        assert!(!arena.reset(), "a block is alive");
        // SAFETY: live, from this arena.
        unsafe { arena.release(first) };
        assert!(arena.reset());
        assert_eq!(arena.allocate(700), Some(first), "the page that was kept");
    }

    #[test]
    fn dead_pages_around_an_escape_go_back_and_the_escape_stays() {
        let pool = Pool::new();
        let arena = Arena::over(&pool);
        let blocks: Vec<_> = (0..1000).map(|_| arena.allocate(4096).expect("memory")).collect();
        let escape = blocks[500];
        for &block in &blocks {
            // SAFETY: live, 4096 bytes.
            unsafe { block.write_bytes(7, 4096) };
        }
        for &block in blocks.iter().filter(|&&block| block != escape) {
            // SAFETY: live, from this arena, once.
            unsafe { arena.release(block) };
        }
        assert!(arena.release_dead_pages() > 990 * 4096);
        // SAFETY: live, 4096 bytes, initialised.
        let kept = unsafe { std::slice::from_raw_parts(escape.as_ptr(), 4096) };
        assert!(kept.iter().all(|&byte| byte == 7));
        let next = arena.allocate(4096).expect("it goes on");
        assert_ne!(next, escape);
        for block in [escape, next] {
            // SAFETY: live, from this arena, once.
            unsafe { arena.release(block) };
        }
        assert!(arena.reset());
        drop(arena);
        pool.trim();
        assert_eq!(pool.inner.heap.regions(), 0, "no page was lost");
    }
}
