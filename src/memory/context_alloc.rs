//! `ContextAlloc`: the current handler for `Vec`, `Box` and other containers, by the `allocator-api2` trait.
//!
//! Containers may ask for any alignment, handlers promise one each. Where a layout wants more, the block sits
//! inside a larger one, and the word before it says where that begins:
//!
//! ```text
//!   raw                      block (layout.align()-aligned)
//!   |<--- pad --->| raw: usize |<---- layout.size() ---->|<- rest ->|
//! ```
//! Whether it does follows from the layout and the handler alone, so freeing decides as allocating did.
//!
//! Here and in many strategies a block's record stands outside of the bytes that the user asked for. Containers may
//! come back with a pointer that is good for those bytes alone (a `Box` goes through `&mut T`): blocks are exposed when
//! they are made, and what comes back is only taken for its address.

use crate::handler::{Handler, Held};
use crate::layout::padding;
use crate::scope::current;
use allocator_api2::alloc::{AllocError, Allocator, Layout};
use std::ptr::NonNull;

/// An allocator for containers that takes the handler current when it was made, and stays with it.
///
/// ```
/// use allocator_api2::vec::Vec;
/// use ctxalloc::{ContextAlloc, handler, scope};
///
/// let aligned = handler("aligned64").expect("built in");
/// let mut squares = scope(aligned, || Vec::new_in(ContextAlloc::new()));
/// squares.extend((0..100_u64).map(|n| n * n)); // outside of the scope, still in `aligned64`
/// assert_eq!(squares.allocator().handler(), aligned);
/// assert_eq!(squares.as_ptr().addr() % 64, 0);
/// ```
///
/// Of a request it keeps the handler good: a container that is filled after the request's end is served as
/// [`AfterEnd`](crate::handler::requests::AfterEnd) says. Where a limit refuses, `Vec::push` and their like abort, as they
/// do when memory is out: use `try_reserve` before, which returns the refusal.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ContextAlloc {
    held: Held,
}

const WORD: usize = size_of::<usize>();

impl ContextAlloc {
    /// An allocator that uses the handler current now.
    #[must_use]
    pub fn new() -> Self {
        Self::with_handler(current())
    }

    /// An allocator that uses `handler`.
    #[must_use]
    pub fn with_handler(handler: Handler) -> Self {
        Self { held: Held::on(handler) }
    }

    /// The handler it uses.
    #[must_use]
    pub fn handler(&self) -> Handler {
        self.held.handler()
    }

    /// How many bytes to ask the handler for where it aligns less than the layout wants; `None` where it does not.
    fn wrapped_bytes(&self, layout: Layout) -> Option<usize> {
        // A Layout's size and alignment are at most isize::MAX each: no overflow.
        (layout.align() > self.handler().alignment()).then(|| layout.size() + layout.align().max(WORD) + WORD)
    }

    fn make(&self, layout: Layout, zeroed: bool) -> Result<NonNull<[u8]>, AllocError> {
        let size = layout.size();
        if size == 0 {
            let nowhere = NonNull::without_provenance(layout.align().try_into().expect("an alignment is never zero"));
            return Ok(NonNull::slice_from_raw_parts(nowhere, 0));
        }
        self.handler().require_host_accessible().map_err(|_| AllocError)?;
        let wrapped = self.wrapped_bytes(layout);
        let raw_bytes = wrapped.unwrap_or(size);
        let raw = if zeroed { self.handler().allocate_zeroed(raw_bytes) } else { self.handler().allocate(raw_bytes) };
        let raw = raw.map_err(|_| AllocError)?;
        raw.expose_provenance(); // for `whole`
        let block = match wrapped {
            None => raw,
            Some(_) => {
                let align = layout.align().max(WORD);
                let offset = WORD + padding(raw.addr().get() + WORD, align);
                // SAFETY: offset <= WORD + align - 1, for which `wrapped_bytes` made room besides `size`.
                let block = unsafe { raw.add(offset) };
                // SAFETY: offset >= WORD, so the word lies in the raw block.
                let word = unsafe { block.sub(WORD) }.cast::<NonNull<u8>>();
                // SAFETY: as above; aligned, since block is a multiple of at least WORD.
                unsafe { word.write(raw) };
                block
            }
        };
        Ok(NonNull::slice_from_raw_parts(block, size))
    }

    /// Changes a block's size: by the handler where it can keep the alignment, else by hand.
    ///
    /// # Safety
    /// - `block` is a live block of this allocator with layout `old`.
    unsafe fn change(&self, block: NonNull<u8>, old: Layout, new: Layout) -> Result<NonNull<[u8]>, AllocError> {
        let direct = |layout| self.wrapped_bytes(layout).is_none() && layout.size() > 0;
        if direct(old) && direct(new) {
            // SAFETY: a live block, straight from the handler.
            let moved = unsafe { self.handler().resize(whole(block), new.size()) }.map_err(|_| AllocError)?;
            moved.expose_provenance(); // for `whole`
            return Ok(NonNull::slice_from_raw_parts(moved, new.size()));
        }
        let fresh = self.make(new, false)?;
        // SAFETY: both blocks are live, disjoint, and have at least the lesser of the two sizes.
        unsafe { fresh.cast().copy_from_nonoverlapping(block, old.size().min(new.size())) };
        // SAFETY: live, with layout `old`; the caller uses the new block from now on.
        unsafe { self.deallocate(block, old) };
        Ok(fresh)
    }
}

/// The block with the provenance that its handler gave it, whatever a container made of the pointer.
#[inline]
fn whole(block: NonNull<u8>) -> NonNull<u8> {
    NonNull::with_exposed_provenance(block.addr())
}

impl Default for ContextAlloc {
    fn default() -> Self {
        Self::new()
    }
}

// SAFETY: blocks come from an immortal handler and stay valid until deallocated, whatever becomes of this value;
// copies are equal and interchangeable (same handler).
unsafe impl Allocator for ContextAlloc {
    fn allocate(&self, layout: Layout) -> Result<NonNull<[u8]>, AllocError> {
        self.make(layout, false)
    }

    fn allocate_zeroed(&self, layout: Layout) -> Result<NonNull<[u8]>, AllocError> {
        self.make(layout, true)
    }

    unsafe fn deallocate(&self, block: NonNull<u8>, layout: Layout) {
        if layout.size() == 0 {
            return;
        }
        match self.wrapped_bytes(layout) {
            // SAFETY: straight from the handler, with this size.
            None => unsafe { self.handler().release(whole(block), layout.size()) },
            Some(raw_bytes) => {
                // SAFETY: `make` wrote the raw pointer right before the block.
                let word = unsafe { whole(block).sub(WORD) }.cast::<NonNull<u8>>();
                // SAFETY: as above.
                let raw = unsafe { word.read() };
                // SAFETY: the raw block has `raw_bytes` and goes with the block inside of it.
                unsafe { self.handler().release(raw, raw_bytes) }
            }
        }
    }

    unsafe fn grow(&self, block: NonNull<u8>, old: Layout, new: Layout) -> Result<NonNull<[u8]>, AllocError> {
        debug_assert!(new.size() >= old.size());
        // SAFETY: the caller's promises are the same.
        unsafe { self.change(block, old, new) }
    }

    unsafe fn grow_zeroed(&self, block: NonNull<u8>, old: Layout, new: Layout) -> Result<NonNull<[u8]>, AllocError> {
        debug_assert!(new.size() >= old.size());
        // SAFETY: the caller's promises are the same.
        let grown = unsafe { self.change(block, old, new) }?;
        // SAFETY: the block has `new.size()` bytes, of which the first `old.size()` are kept.
        let tail = unsafe { grown.cast::<u8>().add(old.size()) };
        // SAFETY: as above.
        unsafe { tail.write_bytes(0, new.size() - old.size()) };
        Ok(grown)
    }

    unsafe fn shrink(&self, block: NonNull<u8>, old: Layout, new: Layout) -> Result<NonNull<[u8]>, AllocError> {
        debug_assert!(new.size() <= old.size());
        // SAFETY: the caller's promises are the same.
        unsafe { self.change(block, old, new) }
    }
}
