//! `Scratch`: short-lived values side by side in large blocks of a handler or an arena, freed all at once.
//!
//! One thread uses it at a time, so an allocation is a subtraction and a comparison: no lock, no record per value.
//! Chunks are filled from their end downwards, because rounding down to an alignment is a mask:
//!
//! ```text
//!   chunk          floor                 next
//!   | Chunk header | free ............... | newest value | ... | oldest value |
//! ```

use super::allocator::Blocks;
use crate::error::Error;
use crate::handler::{Handler, Held, requests};
use crate::scope::current;
use crate::strategy::{Arena, Strategy};
use std::alloc::Layout;
use std::cell::Cell;
use std::fmt;
use std::ptr::{NonNull, null_mut};

/// Memory for the values of one stretch of work, which all go together: at [`reset`](Self::reset) or when it is
/// dropped.
///
/// Values lie side by side in chunks of the handler that was selected when the `Scratch` was made, so a request's
/// limit, budgets and numbers count the chunks: 4 KiB first, each new one twice as large up to 256 KiB, or as large as
/// one value needs. [`in_arena`](Self::in_arena) takes them from an [`Arena`] instead. Values are not dropped (as with
/// `bumpalo`): what owns something else, a `String` for instance, leaks that.
///
/// Containers of `allocator-api2` take `&Scratch` as their allocator; of theirs, the newest block grows in place and is
/// taken back.
///
/// ```
/// # #[cfg(feature = "allocator-api2")] {
/// use allocator_api2::vec::Vec;
/// use ctxalloc::{Scratch, request};
///
/// let request = request().limit_bytes(1 << 20).begin()?;
/// request.run(|| {
///     let mut scratch = Scratch::new();
///     for line in ["one two", "three"] {
///         let mut words = Vec::new_in(&scratch);
///         words.extend(line.split(' '));
///         let copy = scratch.copy_from_slice(line.as_bytes())?;
///         copy.make_ascii_uppercase();
///         assert!(words.len() <= 2);
///     }
///     scratch.reset(); // the next stretch of work uses the same chunk
///     assert!(scratch.copy_from_slice(&[0; 2 << 20]).is_err(), "the request's limit holds");
///     Ok::<(), ctxalloc::Error>(())
/// })?;
/// assert_eq!(request.stats().live_bytes, 0);
/// # }
/// # Ok::<(), ctxalloc::Error>(())
/// ```
pub struct Scratch {
    /// Where the newest value starts: free bytes lie between `floor` and here. Both are 0 while there is no chunk.
    next: Cell<usize>,
    floor: Cell<usize>,
    /// The newest chunk; NULL while there is none.
    chunk: Cell<*mut Chunk>,
    upstream: Upstream,
}

/// Where the chunks come from.
enum Upstream {
    Handler(Held),
    Arena(Arena),
}

impl Upstream {
    fn allocate(&self, bytes: usize) -> Result<NonNull<u8>, Error> {
        match self {
            Self::Handler(held) => {
                held.handler().require_host_accessible()?;
                held.handler().allocate(bytes)
            }
            Self::Arena(arena) => arena
                .allocate(bytes)
                .ok_or_else(|| Error::OutOfMemory { handler: "arena".into(), requested_bytes: bytes }),
        }
    }

    /// Whether no limit of a request is known to refuse so many bytes.
    fn may_have_room(&self, bytes: usize) -> bool {
        match self {
            Self::Handler(held) => requests::may_have_room(held.handler(), bytes),
            Self::Arena(_) => true,
        }
    }

    /// # Safety
    /// - `block` is live, from here, of this size.
    unsafe fn release(&self, block: NonNull<u8>, bytes: usize) {
        match self {
            // SAFETY: a live block of this handler, of this size, given up (this function's contract).
            Self::Handler(held) => unsafe { held.handler().release(block, bytes) },
            // SAFETY: a live block of this arena, given up (this function's contract).
            Self::Arena(arena) => unsafe { arena.release(block) },
        }
    }
}

/// What a chunk begins with. Read and written as if unaligned: a handler may align to less.
#[derive(Clone, Copy)]
struct Chunk {
    /// The chunk before; NULL for the first.
    previous: *mut Chunk,
    /// With this header.
    bytes: usize,
}

const FIRST_BYTES: usize = 4 << 10;
const MAX_BYTES: usize = 256 << 10;

// SAFETY: a Scratch owns its chunks alone, and handlers may be called from any thread (`Entry`). It is not Sync: values
// are borrowed from it, so it cannot move while one is in use.
unsafe impl Send for Scratch {}

impl Scratch {
    /// One over the current handler. Takes no memory before the first value.
    #[must_use]
    pub fn new() -> Self {
        Self::with_handler(current())
    }

    /// One over `handler`.
    #[must_use]
    pub fn with_handler(handler: Handler) -> Self {
        Self::over(Upstream::Handler(Held::on(handler)))
    }

    /// One over `arena`: what one thread allocates there without taking the arena's lock for each value. The chunks
    /// count as live blocks of the arena until this `Scratch` is dropped.
    ///
    /// ```
    /// use ctxalloc::Scratch;
    /// use ctxalloc::strategy::{Arena, Pool};
    ///
    /// let arena = Arena::over(&Pool::new());
    /// let scratch = Scratch::in_arena(&arena);
    /// let squares = scratch.copy_from_slice(&[1, 4, 9])?;
    /// assert_eq!(squares, &[1, 4, 9]);
    /// drop(scratch);
    /// assert!(arena.reset());
    /// # Ok::<(), ctxalloc::Error>(())
    /// ```
    #[must_use]
    pub fn in_arena(arena: &Arena) -> Self {
        Self::over(Upstream::Arena(arena.clone()))
    }

    fn over(upstream: Upstream) -> Self {
        Self { next: Cell::new(0), floor: Cell::new(0), chunk: Cell::new(null_mut()), upstream }
    }

    /// The handler that its chunks come from; none where they come from an arena.
    #[must_use]
    pub fn handler(&self) -> Option<Handler> {
        match &self.upstream {
            Upstream::Handler(held) => Some(held.handler()),
            Upstream::Arena(_) => None,
        }
    }

    /// Uninitialised memory of this layout.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] or [`Error::BudgetExceeded`] where no further
    /// chunk is to be had; [`Error::NotHostAccessible`] for memory that Rust cannot write.
    #[inline]
    pub fn allocate_layout(&self, layout: Layout) -> Result<NonNull<u8>, Error> {
        match self.bump(layout) {
            Some(block) => Ok(block),
            None => self.allocate_in_new_chunk(layout),
        }
    }

    /// `value`, moved here. Its destructor never runs.
    ///
    /// # Errors
    /// As [`allocate_layout`](Self::allocate_layout).
    #[inline]
    #[allow(clippy::mut_from_ref, reason = "each value has memory of its own")]
    pub fn put<T>(&self, value: T) -> Result<&mut T, Error> {
        let place = self.allocate_layout(Layout::new::<T>())?.cast::<T>();
        // SAFETY: new memory of T's layout that nobody else has, written before it is lent, and ours while we are
        // borrowed.
        unsafe {
            place.write(value);
            Ok(&mut *place.as_ptr())
        }
    }

    /// A copy of `values`.
    ///
    /// # Errors
    /// As [`allocate_layout`](Self::allocate_layout).
    #[inline]
    #[allow(clippy::mut_from_ref, reason = "each slice has memory of its own")]
    pub fn copy_from_slice<T: Copy>(&self, values: &[T]) -> Result<&mut [T], Error> {
        let place = self.allocate_layout(Layout::for_value(values))?.cast::<T>();
        // SAFETY: new memory for as many values that nobody else has, written before it is lent.
        unsafe {
            place.copy_from_nonoverlapping(NonNull::from(values).cast(), values.len());
            Ok(std::slice::from_raw_parts_mut(place.as_ptr(), values.len()))
        }
    }

    /// How many bytes it has from its handler now.
    #[must_use]
    pub fn held_bytes(&self) -> usize {
        let mut bytes = 0;
        let mut chunk = self.chunk.get();
        while let Some(header) = self.header(chunk) {
            bytes += header.bytes;
            chunk = header.previous;
        }
        bytes
    }

    /// Forgets all values. The newest chunk stays for the next ones, the others go back to the handler.
    pub fn reset(&mut self) {
        let newest = self.chunk.get();
        let Some(Chunk { previous, bytes }) = self.header(newest) else { return };
        // SAFETY: a chunk of ours starts with room for its header.
        unsafe { newest.write_unaligned(Chunk { previous: null_mut(), bytes }) };
        self.next.set(newest.addr() + bytes);
        self.free_chunks(previous);
    }

    /// Memory from the newest chunk, if there is enough.
    #[inline]
    fn bump(&self, layout: Layout) -> Option<NonNull<u8>> {
        let start = self.next.get().checked_sub(layout.size())? & !(layout.align() - 1);
        if start < self.floor.get() || start == 0 {
            return None;
        }
        self.next.set(start);
        NonNull::new(self.chunk.get().cast::<u8>().with_addr(start))
    }

    #[cold]
    #[inline(never)]
    fn allocate_in_new_chunk(&self, layout: Layout) -> Result<NonNull<u8>, Error> {
        if layout.size() == 0 {
            // SAFETY: an alignment is never zero.
            return Ok(NonNull::without_provenance(unsafe { layout.align().try_into().unwrap_unchecked() }));
        }
        // A Layout's size and alignment are at most isize::MAX each: no overflow.
        let needed_bytes = size_of::<Chunk>().saturating_add(layout.size() + (layout.align() - 1));
        let last_bytes = self.header(self.chunk.get()).map_or(0, |chunk| chunk.bytes);
        let usual_bytes = last_bytes.saturating_mul(2).clamp(FIRST_BYTES, MAX_BYTES);
        // A chunk that no limit leaves room for is not asked for: it would count as a refusal where nothing is refused.
        if usual_bytes > needed_bytes && self.upstream.may_have_room(usual_bytes) && self.add_chunk(usual_bytes).is_ok()
        {
            return Ok(self.bump(layout).expect("the chunk has room for it"));
        }
        // Near a limit, what is needed may still fit.
        self.add_chunk(needed_bytes)?;
        Ok(self.bump(layout).expect("the chunk was made for it"))
    }

    fn add_chunk(&self, bytes: usize) -> Result<(), Error> {
        let block = self.upstream.allocate(bytes)?;
        let chunk = block.as_ptr().cast::<Chunk>();
        // SAFETY: a new block with room for the header.
        unsafe { chunk.write_unaligned(Chunk { previous: self.chunk.get(), bytes }) };
        self.chunk.set(chunk);
        self.floor.set(chunk.addr() + size_of::<Chunk>());
        self.next.set(chunk.addr() + bytes);
        Ok(())
    }

    /// The header of a chunk of this `Scratch`; none for NULL.
    #[allow(clippy::unused_self, reason = "whose chunk it is")]
    fn header(&self, chunk: *mut Chunk) -> Option<Chunk> {
        // SAFETY: `add_chunk` wrote a header at the start of each chunk that `self.chunk` leads to.
        (!chunk.is_null()).then(|| unsafe { chunk.read_unaligned() })
    }

    /// Frees this chunk and those before it. Nothing in them may be used again.
    fn free_chunks(&self, mut chunk: *mut Chunk) {
        while let Some(Chunk { previous, bytes }) = self.header(chunk) {
            // SAFETY: a live block from upstream with `bytes` bytes, and nobody has a value in it any more.
            unsafe { self.upstream.release(NonNull::new_unchecked(chunk.cast()), bytes) };
            chunk = previous;
        }
    }

    /// Whether this block is the newest.
    fn is_newest(&self, block: NonNull<u8>) -> bool {
        block.addr().get() == self.next.get()
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        self.free_chunks(self.chunk.get());
    }
}

impl Default for Scratch {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Debug for Scratch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Scratch")
            .field("upstream", &self.handler().map_or("an arena".into(), |handler| handler.name()))
            .field("held_bytes", &self.held_bytes())
            .finish_non_exhaustive()
    }
}

// SAFETY: memory stays valid while the `Scratch` is borrowed: chunks go only by `&mut self` and when it is dropped, and
// their blocks do not move with it. Copies of `&Scratch` are the same allocator.
unsafe impl Blocks for &Scratch {
    #[inline]
    fn new_block(&self, layout: Layout) -> Option<NonNull<u8>> {
        self.allocate_layout(layout).ok()
    }

    #[inline]
    unsafe fn give_back(&self, block: NonNull<u8>, layout: Layout) {
        if self.is_newest(block) {
            self.next.set(self.next.get() + layout.size());
        }
    }

    unsafe fn grow_block(&self, block: NonNull<u8>, old: Layout, new: Layout) -> Option<NonNull<u8>> {
        let is_newest = self.is_newest(block) && old.size() > 0;
        if is_newest {
            self.next.set(self.next.get() + old.size()); // its own bytes are free for the larger one
        }
        let Some(grown) = self.bump(new) else {
            if is_newest {
                self.next.set(block.addr().get());
            }
            let grown = self.allocate_in_new_chunk(new).ok()?;
            // SAFETY: two live blocks in different chunks, both with `old.size()` bytes.
            unsafe { grown.copy_from_nonoverlapping(block, old.size()) };
            return Some(grown);
        };
        // SAFETY: both lie in our chunks and have `old.size()` bytes; they may overlap.
        unsafe { grown.copy_from(block, old.size()) };
        Some(grown)
    }

    unsafe fn shrink_block(&self, block: NonNull<u8>, _old: Layout, new: Layout) -> Option<NonNull<u8>> {
        if block.addr().get().is_multiple_of(new.align()) {
            return Some(block);
        }
        let shrunk = self.allocate_layout(new).ok()?;
        // SAFETY: two live blocks, disjoint, both with `new.size()` bytes.
        unsafe { shrunk.copy_from_nonoverlapping(block, new.size()) };
        Some(shrunk)
    }
}

#[cfg(feature = "allocator-api2-02")]
super::allocator::implement_allocator!(allocator_api2_02, &Scratch);
#[cfg(feature = "allocator-api2")]
super::allocator::implement_allocator!(allocator_api2, &Scratch);
