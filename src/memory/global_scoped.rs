//! `GlobalScoped`: a global allocator that knows whose each block of Rust's heap is.
//!
//! ```text
//!   upstream's block:  [ .. padding .. | word ][ the caller's bytes ]
//!                                        └ the record of the request that made it, NULL, or REENTRANT
//! ```

use crate::handler::heap::{self, Record, Refused};
use std::alloc::{GlobalAlloc, Layout, System};
use std::any::TypeId;
use std::cell::Cell;
use std::ptr::{self, null_mut};

/// Attributes every block of Rust's heap to the [request](crate::request()) that was current when it was made, and its free to the
/// same one, wherever and whenever that is. `upstream` is any global allocator.
///
/// ```
/// use ctxalloc::{GlobalScoped, request};
/// use std::alloc::System;
///
/// #[global_allocator]
/// static GLOBAL: GlobalScoped<System> = GlobalScoped::new(System);
///
/// let request = request().name("words").begin()?;
/// let kept = request.run(|| {
///     let _scratch = vec![0_u8; 10_000];
///     String::from("kept")
/// });
/// let heap = request.heap().expect("the program's allocator counts");
/// assert_eq!((heap.peak_bytes, heap.live_bytes, heap.total_blocks), (10_004, 4, 2));
/// drop(kept); // outside of the request: credited to it nevertheless
/// assert_eq!(request.heap().map(|heap| heap.live_bytes), Some(0));
/// # Ok::<(), ctxalloc::Error>(())
/// ```
///
/// Numbers: [`HeapStats`](crate::request::HeapStats). They are a request's own, without those of requests inside of it, and apart
/// from those of its [`Buffer`](crate::Buffer)s and containers, which its limit and budgets count. Limits:
/// [`heap_limit_bytes`](crate::request::Builder::heap_limit_bytes).
///
/// Each block has 8 bytes more, or as many as it is aligned to. `upstream` may call back: what it allocates itself while it is
/// at work comes from [`System`], and what it frees then is freed afterwards. So one that forwards to ctxalloc's own strategies
/// never finds itself in the middle of its own work.
#[derive(Debug, Clone, Copy, Default)]
pub struct GlobalScoped<A = System> {
    upstream: A,
}

impl<A> GlobalScoped<A> {
    /// One that allocates by `upstream`.
    pub const fn new(upstream: A) -> Self {
        Self { upstream }
    }
}

/// In place of a record: `upstream` asked for the block itself, and `System` has it.
const REENTRANT: *const Record = ptr::without_provenance(1);

/// A block with less room could not be put into the list of those to be freed later. The C heap has none that is smaller.
const MIN_BYTES: usize = size_of::<Layout>();

thread_local! {
    /// Where this thread is.
    static PLACE: Cell<Place> = const { Cell::new(Place::Outside) };
    /// Blocks that an `upstream` freed while it was at work: each begins with its `Layout`, after the word with the next one.
    static LATER: Cell<*mut u8> = const { Cell::new(null_mut()) };
}

/// Whether a thread is inside of an `upstream` that may call back.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Place {
    Outside,
    Inside,
    /// And it freed something, which is in [`LATER`].
    InsideWithLater,
}

/// How far into its block of `upstream`'s a block with this layout begins.
#[inline]
fn offset(layout: Layout) -> usize {
    layout.align().max(align_of::<*const Record>())
}

/// A block `around` another one.
#[inline]
fn raw(by: &impl GlobalAlloc, around: Layout, zeroed: bool) -> *mut u8 {
    // SAFETY: a layout of `around`, which has a size above zero.
    unsafe { if zeroed { by.alloc_zeroed(around) } else { by.alloc(around) } }
}

/// The word before a block.
///
/// # Safety
/// - `block` was made by a `GlobalScoped`.
#[inline]
unsafe fn word(block: *mut u8) -> *mut *const Record {
    // SAFETY: `around` has room for a word before each block. It is aligned, as blocks are to at least as much.
    unsafe { block.sub(size_of::<*const Record>()).cast() }
}

/// The same block, by a pointer that may also reach what lies before it: a `Box` or a `Vec` comes back with one that is good for
/// its own bytes only.
fn whole(block: *mut u8) -> *mut u8 {
    ptr::with_exposed_provenance_mut(block.addr())
}

impl<A: GlobalAlloc + 'static> GlobalScoped<A> {
    /// The system's allocator is C's, which knows of no global allocator. Known when this is compiled.
    #[inline]
    fn may_call_back() -> bool {
        TypeId::of::<A>() != TypeId::of::<System>()
    }

    /// What `upstream` is asked for: none if that is more than a layout may have.
    #[inline]
    fn around(layout: Layout) -> Option<Layout> {
        let (size, offset) = (Self::size_around(layout), offset(layout));
        // Neither a layout's size nor its alignment is above `isize::MAX`, so the sum above has not wrapped.
        // SAFETY: `offset` is a power of two, as both of which it is the larger one are, and the size is looked at.
        (size <= isize::MAX.cast_unsigned() + 1 - offset)
            .then(|| unsafe { Layout::from_size_align_unchecked(size, offset) })
    }

    /// How many bytes of `upstream`'s are around a block.
    #[inline]
    fn size_around(layout: Layout) -> usize {
        let size = if Self::may_call_back() { layout.size().max(MIN_BYTES) } else { layout.size() };
        size + offset(layout)
    }

    /// What `upstream` was asked for.
    ///
    /// # Safety
    /// - a block with this layout was made here.
    #[inline]
    unsafe fn made_around(layout: Layout) -> Layout {
        debug_assert!(Self::around(layout).is_some());
        // SAFETY: `around` has found that this is a layout, when the block was made.
        unsafe { Layout::from_size_align_unchecked(Self::size_around(layout), offset(layout)) }
    }

    /// Whether `upstream` asked for a block itself, by its word.
    #[inline]
    fn is_reentrant(word: *const Record) -> bool {
        Self::may_call_back() && ptr::eq(word, REENTRANT)
    }

    /// Whether `upstream` is at work on this thread, and called back.
    #[inline]
    fn is_inside() -> bool {
        Self::may_call_back() && PLACE.get() != Place::Outside
    }

    /// Runs `work` of `upstream`, and then frees what it freed meanwhile.
    #[inline]
    fn inside<R>(&self, work: impl FnOnce(&A) -> R) -> R {
        if !Self::may_call_back() {
            return work(&self.upstream);
        }
        PLACE.set(Place::Inside);
        let answer = work(&self.upstream);
        if PLACE.replace(Place::Outside) == Place::InsideWithLater {
            self.free_later();
        }
        answer
    }

    #[cold]
    fn free_later(&self) {
        while let Some(block) = ptr::NonNull::new(LATER.get()) {
            let block = block.as_ptr();
            // SAFETY: `dealloc` put it there with the next one in its word and its layout after it, and nobody else has it. The
            // layout is not aligned for `Layout`. It is `upstream`'s, which is not at work on this thread.
            unsafe {
                LATER.set(word(block).cast::<*mut u8>().read());
                let layout = block.cast::<Layout>().read_unaligned();
                let around = Self::made_around(layout);
                self.inside(|upstream| upstream.dealloc(block.sub(offset(layout)), around));
            }
        }
    }

    #[inline]
    fn make(&self, layout: Layout, zeroed: bool) -> *mut u8 {
        let Some(around) = Self::around(layout) else { return null_mut() };
        let (owner, start) = if Self::is_inside() {
            (REENTRANT, raw(&System, around, zeroed))
        } else {
            let Ok(owner) = heap::made(layout.size()) else { return null_mut() };
            let start = self.inside(|upstream| raw(upstream, around, zeroed));
            if start.is_null() {
                heap::not_made(owner, layout.size());
            }
            (owner.map_or(ptr::null(), ptr::from_ref), start)
        };
        if start.is_null() {
            return start;
        }
        // SAFETY: `start` has that many bytes before those of the caller, at least a word.
        unsafe {
            let block = start.add(offset(layout));
            word(block).write(owner);
            start.expose_provenance(); // for `whole`
            block
        }
    }
}

// SAFETY: blocks are `upstream`'s or System's, which keep these promises, with an offset that keeps the alignment and room for it.
// The word before a block says whose it is. Nothing here unwinds or allocates by itself.
unsafe impl<A: GlobalAlloc + 'static> GlobalAlloc for GlobalScoped<A> {
    #[inline]
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        self.make(layout, false)
    }

    #[inline]
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        self.make(layout, true)
    }

    #[inline]
    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        let block = whole(block);
        // SAFETY: the caller gives up a block that was made here with this layout: so far into its start.
        let (around, owner, start) =
            unsafe { (Self::made_around(layout), word(block).read(), block.sub(offset(layout))) };
        if Self::is_reentrant(owner) {
            // SAFETY: System made it with this layout.
            return unsafe { System.dealloc(start, around) };
        }
        // SAFETY: NULL, or a record, and those live for ever.
        if let Some(owner) = unsafe { owner.as_ref() } {
            heap::freed(owner, layout.size());
        }
        if Self::is_inside() {
            // SAFETY: given up by the caller, with at least `MIN_BYTES` after its word.
            unsafe {
                block.cast::<Layout>().write_unaligned(layout);
                word(block).cast::<*mut u8>().write(LATER.replace(block));
            }
            PLACE.set(Place::InsideWithLater);
            return;
        }
        // SAFETY: `upstream` made it with this layout.
        self.inside(|upstream| unsafe { upstream.dealloc(start, around) });
    }

    #[inline]
    unsafe fn realloc(&self, block: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        let new = Layout::from_size_align(new_size, layout.align()).ok().and_then(Self::around);
        let Some(new_around) = new else { return null_mut() };
        let block = whole(block);
        // SAFETY: the caller passes a block that was made here with this layout: so far into its start.
        let (around, owner, start) =
            unsafe { (Self::made_around(layout), word(block).read(), block.sub(offset(layout))) };
        if Self::is_reentrant(owner) || Self::is_inside() {
            // SAFETY: the caller passes a live block with this layout. It is System's from now on if `upstream` is at work.
            return unsafe { self.moved(block, layout, new_size) };
        }
        // SAFETY: NULL, or a record, and those live for ever.
        let owner = unsafe { owner.as_ref() };
        if let Some(owner) = owner
            && let Err(Refused) = heap::resized(owner, layout.size(), new_size)
        {
            return null_mut();
        }
        // SAFETY: `upstream` made it with this layout. The word is among the bytes that are kept.
        let moved = self.inside(|upstream| unsafe { upstream.realloc(start, around, new_around.size()) });
        if moved.is_null() {
            if let Some(owner) = owner {
                heap::not_resized(owner, layout.size(), new_size);
            }
            return moved;
        }
        moved.expose_provenance();
        // SAFETY: as far into the moved block.
        unsafe { moved.add(offset(layout)) }
    }
}

impl<A: GlobalAlloc + 'static> GlobalScoped<A> {
    /// `realloc` by a new block and a copy: what `GlobalAlloc` does by default.
    ///
    /// # Safety
    /// - those of [`GlobalAlloc::realloc`].
    #[cold]
    unsafe fn moved(&self, block: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        // SAFETY: the caller vouches for the new size and the block; the two are disjoint, since both are live.
        unsafe {
            let moved = self.alloc(Layout::from_size_align_unchecked(new_size, layout.align()));
            if !moved.is_null() {
                ptr::copy_nonoverlapping(block, moved, layout.size().min(new_size));
                self.dealloc(block, layout);
            }
            moved
        }
    }
}
