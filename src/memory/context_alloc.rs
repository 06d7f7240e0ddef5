//! `ContextAlloc`: the current handler for `Vec`, `Box`, `HashMap` and other containers, by the trait of allocator-api2: of
//! its line 0.4 and of its line 0.2, which are two traits to the compiler.
//!
//! Containers may request any alignment, and each handler promises one. If a layout needs more, the block lies inside a larger
//! one, and the word before it is the address of that one:
//!
//! ```text
//!   raw                      block (layout.align()-aligned)
//!   |<--- pad --->| raw: usize |<---- layout.size() ---->|<- rest ->|
//! ```
//! Whether it does depends only on the layout and the handler, so `deallocate` comes to the same answer as `allocate`.
//!
//! Here and in many strategies a block's record lies outside the bytes that the user requested. A container may return a
//! pointer whose provenance covers only those bytes (a `Box` goes through `&mut T`). So a block's provenance is exposed when
//! it is made, and of a returned pointer only the address is used.

use crate::handler::{Handler, Held};
use crate::layout::padding;
use crate::scope::current;
use std::alloc::Layout;
use std::ptr::NonNull;

/// An allocator for containers. It uses the handler that was current when it was made.
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
/// It keeps a request's handler valid: a container that grows after the request's end is treated as
/// [`AfterEnd`](crate::handler::requests::AfterEnd) says. If a limit refuses, `Vec::push` and the like abort, as they do when
/// there is no memory. Call `try_reserve` first, which returns the refusal.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ContextAlloc {
    held: Held,
}

impl ContextAlloc {
    /// An allocator that uses the current handler.
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
        // This does not overflow: a layout's size and alignment are at most isize::MAX each.
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
                // SAFETY: WORD <= offset < WORD + align, and `wrapped_bytes` made room for that besides `size`: word and block
                // lie in the raw block. The word is aligned, since `block` is a multiple of at least WORD.
                unsafe {
                    let block = raw.add(offset);
                    block.sub(WORD).cast::<NonNull<u8>>().write(raw);
                    block
                }
            }
        };
        Some(NonNull::slice_from_raw_parts(block, size))
    }

    /// Resizes a block: by the handler if that keeps the alignment, else by allocating and copying.
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
            // SAFETY: live and not used again (this function's contract); not wrapped, so it is the handler's own.
            None => unsafe { self.handler().release(whole(block), layout.size()) },
            Some(raw_bytes) => {
                // SAFETY: live and not used again (this function's contract). It is wrapped, so `make` wrote the address of the
                // raw block, which has `raw_bytes`, directly before it.
                unsafe {
                    let raw = whole(block).sub(WORD).cast::<NonNull<u8>>().read();
                    self.handler().release(raw, raw_bytes);
                }
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
