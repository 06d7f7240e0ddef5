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
use std::thread;

/// Attributes every block of Rust's heap to the [request](crate::request()) that was current when it was made, and its
/// free to the same one, wherever and whenever that is. `upstream` is any global allocator.
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
/// Numbers: [`HeapStats`](crate::request::HeapStats). They are a request's own, without those of requests inside of it,
/// and apart from those of its [`Buffer`](crate::Buffer)s and containers, which its limit and budgets count. Limits:
/// [`heap_limit_bytes`](crate::request::Builder::heap_limit_bytes).
///
/// Each block of a request has 8 bytes more, and each that is aligned to 16 and more has as many as it is aligned to.
/// A block stays whose it is when it is resized. These are nobody's:
///
/// - blocks that begin with at most 128 bytes while a panic unwinds;
/// - what the panic hook allocates, such as std's cache of symbols for backtraces, some 25 MB: the first request puts a
///   hook around the one that is there. One that the program sets later should call what `take_hook` returned;
/// - what ctxalloc makes for itself: the records of requests, the entries of handlers, a thread's cache;
/// - what a handler's strategy, also one of the program's own, allocates while it serves a call or is dropped with the
///   last block of its request, and all that it calls meanwhile: an event hook, a subscriber of `tracing`, the closure
///   of [`Tracked`](crate::strategy::Tracked).
///
/// A [`Budget`](crate::strategy::Budget) or a strategy that the program makes belongs to the request in which it is
/// made, and that cache of symbols to the request in which a [`Backtrace`](std::backtrace::Backtrace) is first shown
/// outside of a panic (an `anyhow::Error` by `{:?}`). `Context::new().run(|| ..)` makes what it encloses nobody's.
///
/// `upstream` may call back: what it allocates itself while it is at work comes from [`System`], and what it frees then
/// is freed afterwards. So one that forwards to ctxalloc's own strategies never finds itself in the middle of its own
/// work.
///
/// The program may `fork` while other threads allocate: the locks of ctxalloc are held across it. Those of Rust's
/// standard library are not (`std::thread::spawn` and `std::process::exit` may hang in the child), and a handler that
/// was given to `pthread_atfork` before the program's first allocation must not allocate if `upstream` is one of our
/// strategies.
#[derive(Debug, Clone, Copy, Default)]
pub struct GlobalScoped<A = System> {
    upstream: A,
    /// Whether the program says that `upstream` never calls back.
    is_leaf: bool,
}

impl<A> GlobalScoped<A> {
    /// One that allocates by `upstream`, which may itself allocate by the program's global allocator.
    pub const fn new(upstream: A) -> Self {
        Self { upstream, is_leaf: false }
    }

    /// One that allocates by `upstream`, which never uses the program's global allocator itself, such as mimalloc and
    /// jemalloc, which are written in C. So nothing has to be noted around its work, some 3 ns for a block and its end.
    /// (That
    /// [`System`] is such a one is known without this.)
    ///
    /// An `upstream` that calls back all the same is called again while it is at work, as any global allocator would be
    /// that allocates by itself.
    pub const fn over_leaf(upstream: A) -> Self {
        Self { upstream, is_leaf: true }
    }
}

/// In place of a record: `upstream` asked for the block itself, and `System` has it.
const REENTRANT: *const Record = ptr::without_provenance(1);

const WORD: usize = size_of::<*const Record>();

/// Blocks of nobody that are aligned to a word, which are most where nothing is selected, are just `upstream`'s: no
/// word is before them. They are distinguished from the others by their address: it is a multiple of so much, since
/// that is asked for, and that of the others is a word more.
const PLAIN_ALIGN: usize = 2 * WORD;

thread_local! {
    /// Where this thread is.
    static PLACE: Cell<Place> = const { Cell::new(Place::Outside) };
    /// Blocks that an `upstream` freed while it was at work. In each: the next one, and its `Layout` ([`Noted`]). The
    /// lowest bit of the address tells that it is a plain one.
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

/// Small blocks made while a panic unwinds are nobody's, and so aligned to two words, since one of them is the
/// exception of that panic: Rust's standard library asks for it to be aligned to one word, and LLVM's unwinder, which
/// static musl programs have, writes two at once (until rust-lang/rust#161368).
const MAX_EXCEPTION: usize = 128;

/// What stands in a block that is to be freed later: from the word before it on, or in a plain one from its start on.
#[repr(C)]
struct Noted {
    next: *mut u8,
    layout: Layout,
}

/// How far into its block of `upstream`'s a block with this layout begins, if it is not a plain one.
#[inline]
fn offset(layout: Layout) -> usize {
    layout.align().max(WORD)
}

/// Whether a block with this layout, made here, is a plain one.
#[inline]
fn is_plain(block: *mut u8, layout: Layout) -> bool {
    layout.align() <= WORD && block.addr() & WORD == 0
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
/// - `block` was made by a `GlobalScoped`, and is not a plain one.
#[inline]
unsafe fn word(block: *mut u8) -> *mut *const Record {
    // SAFETY: `around` has room for a word before each block. It is aligned, as blocks are to at least as much.
    unsafe { block.sub(WORD).cast() }
}

/// The same block, by a pointer that may also reach what lies before it: a `Box` or a `Vec` comes back with one that is
/// good for its own bytes only.
///
/// Where this is inlined beside the call that made the block, the optimizer knows that the block was made there and how
/// long it is. It looks through the address too, and takes a read of the word before the block for something that
/// cannot happen. So the address comes out of an instruction that it cannot look into (of none: the text is empty).
#[inline]
fn whole(block: *mut u8) -> *mut u8 {
    ptr::with_exposed_provenance_mut(hidden(block.expose_provenance()))
}

#[inline]
#[cfg(all(any(target_arch = "x86_64", target_arch = "aarch64"), not(miri)))]
fn hidden(address: usize) -> usize {
    let same;
    // SAFETY: no instruction at all; what goes in comes out of the same register.
    unsafe {
        std::arch::asm!("/* {} */", inlateout(reg) address => same, options(pure, nomem, nostack, preserves_flags))
    };
    same
}

#[inline]
#[cfg(not(all(any(target_arch = "x86_64", target_arch = "aarch64"), not(miri))))]
fn hidden(address: usize) -> usize {
    std::hint::black_box(address)
}

impl<A: GlobalAlloc + 'static> GlobalScoped<A> {
    /// The system's allocator is C's, which knows of no global allocator. Known when this is compiled, where the
    /// allocator is a static.
    #[inline]
    fn may_call_back(&self) -> bool {
        !self.is_leaf && TypeId::of::<A>() != TypeId::of::<System>()
    }

    /// What `upstream` is asked for: none if that is more than a layout may have.
    #[inline]
    fn around(&self, layout: Layout) -> Option<Layout> {
        // Neither a layout's size nor its alignment is above `isize::MAX`, so the sum has not wrapped.
        Layout::from_size_align(self.size_around(layout), Self::align_around(layout)).ok()
    }

    /// How many bytes of `upstream`'s are around a block: room for [`Noted`] too, where that may be needed, and not
    /// less than the alignment: the C heap would take another way for that.
    #[inline]
    fn size_around(&self, layout: Layout) -> usize {
        let min_size = if self.may_call_back() { offset(layout) - WORD + size_of::<Noted>() } else { PLAIN_ALIGN };
        (layout.size() + offset(layout)).max(min_size)
    }

    #[inline]
    fn align_around(layout: Layout) -> usize {
        layout.align().max(PLAIN_ALIGN)
    }

    /// What `upstream` is asked for where a plain block of so many bytes is wanted: none if that is more than a layout
    /// may have.
    #[inline]
    fn plain(&self, size_bytes: usize) -> Option<Layout> {
        Layout::from_size_align(self.plain_size(size_bytes), PLAIN_ALIGN).ok()
    }

    #[inline]
    fn plain_size(&self, size_bytes: usize) -> usize {
        size_bytes.max(if self.may_call_back() { size_of::<Noted>() } else { PLAIN_ALIGN })
    }

    /// The start of what `upstream` has made for a block, and what it was asked for.
    ///
    /// # Safety
    /// - `block` was made here with this layout.
    #[inline]
    unsafe fn upstreams(&self, block: *mut u8, layout: Layout) -> (*mut u8, Layout) {
        // SAFETY: `plain` or `around` has found that this is a layout, when the block was made. One that is not plain
        // begins so far into its start.
        unsafe {
            if is_plain(block, layout) {
                return (block, Layout::from_size_align_unchecked(self.plain_size(layout.size()), PLAIN_ALIGN));
            }
            let around = Layout::from_size_align_unchecked(self.size_around(layout), Self::align_around(layout));
            (block.sub(offset(layout)), around)
        }
    }

    /// The owner's word of a block; NULL for a plain one.
    ///
    /// # Safety
    /// - as for [`upstreams`](Self::upstreams).
    #[inline]
    unsafe fn owner(block: *mut u8, layout: Layout) -> *const Record {
        // SAFETY: a block that is not plain has a word, which was written when it was made here.
        if is_plain(block, layout) { ptr::null() } else { unsafe { word(block).read() } }
    }

    /// Whether `upstream` asked for a block itself, by its word.
    #[inline]
    fn is_reentrant(&self, word: *const Record) -> bool {
        self.may_call_back() && ptr::eq(word, REENTRANT)
    }

    /// Whether `upstream` is at work on this thread, and called back.
    #[inline]
    fn is_inside(&self) -> bool {
        self.may_call_back() && PLACE.get() != Place::Outside
    }

    /// Runs `work` of `upstream`, and then frees what it freed meanwhile.
    #[inline]
    fn inside<R>(&self, work: impl FnOnce(&A) -> R) -> R {
        if !self.may_call_back() {
            return work(&self.upstream);
        }
        PLACE.set(Place::Inside);
        let _leaving = Leaving(self);
        work(&self.upstream)
    }

    #[cold]
    fn free_later(&self) {
        while let Some(first) = ptr::NonNull::new(LATER.get()) {
            let (is_plain, block) = (first.addr().get() & 1 != 0, first.as_ptr().map_addr(|address| address & !1));
            // SAFETY: `free_when_outside` put it there with this note in it, and nobody else has it. It is
            // `upstream`'s, which is not at work on this thread.
            unsafe {
                let noted = if is_plain { block.cast() } else { word(block).cast::<Noted>() }.read();
                LATER.set(noted.next);
                let (start, around) = self.upstreams(block, noted.layout);
                self.inside(|upstream| upstream.dealloc(start, around));
            }
        }
    }

    /// Frees a block when `upstream`, which is at work on this thread, is not any more.
    ///
    /// # Safety
    /// - the block was made here by `upstream` with this layout, and the caller gives it up.
    #[cold]
    unsafe fn free_when_outside(block: *mut u8, layout: Layout) {
        let is_plain = is_plain(block, layout);
        let noted = Noted { next: LATER.get(), layout };
        // SAFETY: given up by the caller, with room for it, and aligned to a word.
        unsafe { if is_plain { block.cast() } else { word(block).cast::<Noted>() }.write(noted) };
        LATER.set(block.map_addr(|address| address | usize::from(is_plain)));
        PLACE.set(Place::InsideWithLater);
    }

    #[inline]
    fn make(&self, layout: Layout, zeroed: bool) -> *mut u8 {
        if self.is_inside() {
            return self.make_for_upstream(layout, zeroed);
        }
        let may_be_exception = || layout.align() <= WORD && layout.size() <= MAX_EXCEPTION && thread::panicking();
        let Ok(owner) = heap::made(layout.size(), may_be_exception) else { return null_mut() };
        if owner.is_none() && layout.align() <= WORD {
            let Some(plain) = self.plain(layout.size()) else { return null_mut() };
            let block = self.inside(|upstream| raw(upstream, plain, zeroed));
            block.expose_provenance(); // for `whole`
            return block;
        }
        let start =
            self.around(layout).map_or(null_mut(), |around| self.inside(|upstream| raw(upstream, around, zeroed)));
        if start.is_null() {
            heap::not_made(owner, layout.size());
            return start;
        }
        // SAFETY: the new block has the size of `around(layout)`, so room for the word beside the layout.
        unsafe { Self::with_word(start, layout, owner.map_or(ptr::null(), ptr::from_ref)) }
    }

    /// A block for `upstream` itself, which is at work.
    #[cold]
    fn make_for_upstream(&self, layout: Layout, zeroed: bool) -> *mut u8 {
        let Some(around) = self.around(layout) else { return null_mut() };
        let start = raw(&System, around, zeroed);
        // SAFETY: the new block has the size of `around(layout)`, so room for the word beside the layout.
        if start.is_null() { start } else { unsafe { Self::with_word(start, layout, REENTRANT) } }
    }

    /// The block with this layout that begins behind the word.
    ///
    /// # Safety
    /// - `start` is a new block, made for what is `around` this layout.
    #[inline]
    unsafe fn with_word(start: *mut u8, layout: Layout, owner: *const Record) -> *mut u8 {
        start.expose_provenance(); // for `whole`
        // SAFETY: `start` has that many bytes before those of the caller, at least a word.
        unsafe {
            let block = start.add(offset(layout));
            word(block).write(owner);
            block
        }
    }
}

/// Ends what [`GlobalScoped::inside`] began, also where `upstream` panics (which a global allocator must not).
struct Leaving<'a, A: GlobalAlloc + 'static>(&'a GlobalScoped<A>);

impl<A: GlobalAlloc + 'static> Drop for Leaving<'_, A> {
    #[inline]
    fn drop(&mut self) {
        if PLACE.replace(Place::Outside) == Place::InsideWithLater {
            self.0.free_later();
        }
    }
}

// SAFETY: blocks are `upstream`'s or System's, which keep these promises, with an offset that keeps the alignment and
// room for it. The word before a block that is not plain says whose it is. Nothing here unwinds or allocates by itself.
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
        // SAFETY: the caller gives up a block that was made here with this layout.
        let (owner, (start, around)) = unsafe { (Self::owner(block, layout), self.upstreams(block, layout)) };
        if self.is_reentrant(owner) {
            // SAFETY: System made it with this layout.
            return unsafe { System.dealloc(start, around) };
        }
        // SAFETY: NULL, or a record, and those live for ever.
        if let Some(owner) = unsafe { owner.as_ref() } {
            heap::freed(owner, layout.size());
        }
        if self.is_inside() {
            // SAFETY: given up by the caller, and not System's.
            return unsafe { Self::free_when_outside(block, layout) };
        }
        // SAFETY: `upstream` made it with this layout.
        self.inside(|upstream| unsafe { upstream.dealloc(start, around) });
    }

    #[inline]
    unsafe fn realloc(&self, block: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        let block = whole(block);
        let is_plain = is_plain(block, layout);
        let new = Layout::from_size_align(new_size, layout.align()).ok();
        let new = new.and_then(|new| if is_plain { self.plain(new_size) } else { self.around(new) });
        let Some(new_around) = new else { return null_mut() };
        // SAFETY: the caller passes a block that was made here with this layout.
        let (owner, (start, around)) = unsafe { (Self::owner(block, layout), self.upstreams(block, layout)) };
        if self.is_reentrant(owner) || self.is_inside() {
            // SAFETY: the caller passes a live block with this layout. It is System's from now on if `upstream` is at
            // work.
            return unsafe { self.moved(block, layout, new_size) };
        }
        // SAFETY: NULL, or a record, and those live for ever.
        let owner = unsafe { owner.as_ref() };
        if let Some(owner) = owner
            && let Err(Refused) = heap::resized(owner, layout.size(), new_size)
        {
            return null_mut();
        }
        // SAFETY: `upstream` made it with this layout. The word, if there is one, is among the bytes that are kept.
        let moved = self.inside(|upstream| unsafe { upstream.realloc(start, around, new_around.size()) });
        if moved.is_null() {
            if let Some(owner) = owner {
                heap::not_resized(owner, layout.size(), new_size);
            }
            return moved;
        }
        if let Some(owner) = owner {
            heap::has_resized(owner);
        }
        moved.expose_provenance();
        // SAFETY: the moved block has `offset(layout)` bytes for the word, as it had before.
        if is_plain { moved } else { unsafe { moved.add(offset(layout)) } }
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
