//! `ContextAlloc`: the current handler for `Vec`, `Box`, `HashMap` and other containers, by the trait of allocator-api2: of
//! its line 0.4 and of its line 0.2, which are two traits to the compiler.
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
use std::alloc::Layout;
use std::ptr::NonNull;

/// An allocator for containers that takes the handler current when it was made, and stays with it.
///
/// ```
/// # #[cfg(feature = "allocator-api2")] {
/// use allocator_api2::vec::Vec;
/// use ctxalloc::{ContextAlloc, handler, scope};
///
/// let aligned = handler("aligned64").expect("built in");
/// let mut squares = scope(aligned, || Vec::new_in(ContextAlloc::new()));
/// squares.extend((0..100_u64).map(|n| n * n)); // outside of the scope, still in `aligned64`
/// assert_eq!(squares.allocator().handler(), aligned);
/// assert_eq!(squares.as_ptr().addr() % 64, 0);
/// # }
/// ```
///
/// It is an `Allocator` of both lines of allocator-api2: of 0.4 (feature `allocator-api2`), whose `Vec` and `Box` are
/// above, and of 0.2 (feature `allocator-api2-02`), which hashbrown and bumpalo use:
///
/// ```
/// # #[cfg(feature = "allocator-api2-02")] {
/// use ctxalloc::{ContextAlloc, handler};
/// use hashbrown::{DefaultHashBuilder, HashMap};
///
/// let pool = ContextAlloc::with_handler(handler("pool").expect("built in"));
/// let mut words = HashMap::with_hasher_in(DefaultHashBuilder::default(), pool.clone());
/// words.insert("one", 1);
/// assert_eq!(words.allocator(), &pool);
/// # }
/// ```
///
/// Of a request it keeps the handler good: a container that is filled after the request's end is served as
/// [`AfterEnd`](crate::handler::requests::AfterEnd) says. Where a limit refuses, `Vec::push` and their like abort, as they
/// do when memory is out: use `try_reserve` before, which returns the refusal.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ContextAlloc {
    held: Held,
}

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
}

const WORD: usize = size_of::<usize>();

/// What the trait of each line is made of.
#[cfg_attr(
    not(any(feature = "allocator-api2-02", feature = "allocator-api2")),
    allow(dead_code, reason = "without a line of allocator-api2 there is nobody to call it")
)]
impl ContextAlloc {
    /// How many bytes to ask the handler for where it aligns less than the layout wants; `None` where it does not.
    fn wrapped_bytes(&self, layout: Layout) -> Option<usize> {
        // A Layout's size and alignment are at most isize::MAX each: no overflow.
        (layout.align() > self.handler().alignment()).then(|| layout.size() + layout.align().max(WORD) + WORD)
    }

    fn make(&self, layout: Layout, zeroed: bool) -> Option<NonNull<[u8]>> {
        let size = layout.size();
        if size == 0 {
            let nowhere = NonNull::without_provenance(layout.align().try_into().expect("an alignment is never zero"));
            return Some(NonNull::slice_from_raw_parts(nowhere, 0));
        }
        self.handler().require_host_accessible().ok()?;
        let wrapped = self.wrapped_bytes(layout);
        let raw_bytes = wrapped.unwrap_or(size);
        let raw = if zeroed { self.handler().allocate_zeroed(raw_bytes) } else { self.handler().allocate(raw_bytes) };
        let raw = raw.ok()?;
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
        Some(NonNull::slice_from_raw_parts(block, size))
    }

    /// Changes a block's size: by the handler where it can keep the alignment, else by hand.
    ///
    /// # Safety
    /// - `block` is a live block of this allocator with layout `old`.
    unsafe fn change(&self, block: NonNull<u8>, old: Layout, new: Layout) -> Option<NonNull<[u8]>> {
        let direct = |layout| self.wrapped_bytes(layout).is_none() && layout.size() > 0;
        if direct(old) && direct(new) {
            // SAFETY: a live block, straight from the handler.
            let moved = unsafe { self.handler().resize(whole(block), new.size()) }.ok()?;
            moved.expose_provenance(); // for `whole`
            return Some(NonNull::slice_from_raw_parts(moved, new.size()));
        }
        let fresh = self.make(new, false)?;
        // SAFETY: both blocks are live, disjoint, and have at least the lesser of the two sizes.
        unsafe { fresh.cast().copy_from_nonoverlapping(block, old.size().min(new.size())) };
        // SAFETY: live, with layout `old`; the caller uses the new block from now on.
        unsafe { self.give_back(block, old) };
        Some(fresh)
    }

    /// Gives a block back to the handler.
    ///
    /// # Safety
    /// - `block` is a live block of this allocator with layout `layout`; nobody uses it from now on.
    unsafe fn give_back(&self, block: NonNull<u8>, layout: Layout) {
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

/// The trait of one line of allocator-api2. The lines differ in name only; all steps are above.
#[cfg(any(feature = "allocator-api2-02", feature = "allocator-api2"))]
macro_rules! implement_allocator {
    ($line:ident) => {
        // SAFETY: blocks come from an immortal handler and stay valid until deallocated, whatever becomes of this
        // value; copies are equal and interchangeable (same handler).
        unsafe impl $line::alloc::Allocator for ContextAlloc {
            fn allocate(&self, layout: Layout) -> Result<NonNull<[u8]>, $line::alloc::AllocError> {
                self.make(layout, false).ok_or($line::alloc::AllocError)
            }

            fn allocate_zeroed(&self, layout: Layout) -> Result<NonNull<[u8]>, $line::alloc::AllocError> {
                self.make(layout, true).ok_or($line::alloc::AllocError)
            }

            unsafe fn deallocate(&self, block: NonNull<u8>, layout: Layout) {
                // SAFETY: the trait asks its caller for a live block of this allocator with this layout.
                unsafe { self.give_back(block, layout) }
            }

            unsafe fn grow(
                &self,
                block: NonNull<u8>,
                old: Layout,
                new: Layout,
            ) -> Result<NonNull<[u8]>, $line::alloc::AllocError> {
                debug_assert!(new.size() >= old.size());
                // SAFETY: the trait asks its caller for a live block of this allocator with layout `old`.
                unsafe { self.change(block, old, new) }.ok_or($line::alloc::AllocError)
            }

            unsafe fn grow_zeroed(
                &self,
                block: NonNull<u8>,
                old: Layout,
                new: Layout,
            ) -> Result<NonNull<[u8]>, $line::alloc::AllocError> {
                debug_assert!(new.size() >= old.size());
                // SAFETY: the trait asks its caller for a live block of this allocator with layout `old`.
                let grown = unsafe { self.change(block, old, new) }.ok_or($line::alloc::AllocError)?;
                // SAFETY: the block has `new.size()` bytes, of which the first `old.size()` are kept.
                let tail = unsafe { grown.cast::<u8>().add(old.size()) };
                // SAFETY: from `tail` on there are the `new.size() - old.size()` bytes that are left.
                unsafe { tail.write_bytes(0, new.size() - old.size()) };
                Ok(grown)
            }

            unsafe fn shrink(
                &self,
                block: NonNull<u8>,
                old: Layout,
                new: Layout,
            ) -> Result<NonNull<[u8]>, $line::alloc::AllocError> {
                debug_assert!(new.size() <= old.size());
                // SAFETY: the trait asks its caller for a live block of this allocator with layout `old`.
                unsafe { self.change(block, old, new) }.ok_or($line::alloc::AllocError)
            }
        }
    };
}

#[cfg(feature = "allocator-api2-02")]
implement_allocator!(allocator_api2_02);
#[cfg(feature = "allocator-api2")]
implement_allocator!(allocator_api2);
