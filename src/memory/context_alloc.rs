//! `ContextAlloc`: the current handler for `Vec`, `Box`, `HashMap` and other containers, by the trait of
//! allocator-api2, in its releases 0.4 and 0.2.
//!
//! Containers may request any alignment, and each handler promises one. If a layout needs more, the block lies inside a
//! larger one, and the word before it is the address of that one:
//!
//! ```text
//!   raw                      block (layout.align()-aligned)
//!   |<--- pad --->| raw: usize |<---- layout.size() ---->|<- rest ->|
//! ```
//! Whether a block lies inside a larger one depends only on the layout and the handler, so `deallocate` finds out the
//! same as `allocate`.
//!
//! Here and in many strategies a block's record lies outside the bytes that the user requested. A container may return
//! a pointer whose provenance covers only those bytes (a `Box` goes through `&mut T`). So a block's provenance is
//! exposed when it is made, and of a returned pointer only the address is used.

use super::allocator::Blocks;
use crate::handler::{Container, Handler, small};
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
/// A layout with a larger alignment than the handler's takes, and is charged, that many bytes and 8 more.
///
/// It keeps a request's handler valid: a container that grows after the request's end is treated as
/// [`AfterEnd`](crate::request::AfterEnd) says. If a limit refuses, `Vec::push` and the like abort, as they
/// do when there is no memory. Call `try_reserve` first, which returns the refusal.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ContextAlloc {
    container: Container,
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
        Self { container: Container::of(handler) }
    }

    /// The handler it uses.
    #[must_use]
    pub fn handler(&self) -> Handler {
        self.container.held().handler()
    }
}

const WORD: usize = size_of::<usize>();

/// How many bytes to ask this handler for where it aligns less than the layout wants; `None` where it does not.
fn wrapped_bytes(handler: Handler, layout: Layout) -> Option<usize> {
    // This does not overflow: a layout's size and alignment are at most isize::MAX each.
    (layout.align() > handler.alignment()).then(|| layout.size() + layout.align().max(WORD) + WORD)
}

/// [`give_back`](Blocks::give_back) of a request's plain block. A function of its own, as the next one, which calls
/// nothing where the short way is taken: so neither it nor a container's end saves many registers.
///
/// # Safety
/// - as for that one, of an allocator with this handler; the layout [is plain](is_plain).
#[inline(never)]
unsafe fn give_back_to_request(handler: Handler, block: NonNull<u8>, layout: Layout) {
    // SAFETY: live, not used again where this succeeds (this function's contract), and not wrapped.
    if !unsafe { small::release_of_latest(handler, whole(block)) } {
        // SAFETY: live and not used again (this function's contract): it was not given back above.
        unsafe { give_plain_back(handler, block, layout) }
    }
}

/// The same of a named handler's.
///
/// # Safety
/// - as for [`give_back_to_request`].
#[inline(never)]
unsafe fn give_back_to_named(handler: Handler, block: NonNull<u8>, layout: Layout) {
    // SAFETY: live, not used again where this succeeds (this function's contract), and not wrapped.
    if !unsafe { small::release_of_pool(handler, whole(block), layout.size()) } {
        // SAFETY: live and not used again (this function's contract): it was not given back above.
        unsafe { give_plain_back(handler, block, layout) }
    }
}

/// # Safety
/// - as for [`give_back_to_request`].
#[inline(never)]
unsafe fn give_plain_back(handler: Handler, block: NonNull<u8>, layout: Layout) {
    // SAFETY: live, not used again where this succeeds (this function's contract), and not wrapped.
    if !unsafe { small::release_tight(handler, whole(block), layout.size()) } {
        // SAFETY: live and not used again (this function's contract): it was not given back above.
        unsafe { give_any_back(handler, block, layout) }
    }
}

/// [`give_back`](Blocks::give_back) of any block. No part of what each container is compiled with.
///
/// # Safety
/// - as for that one, of an allocator with this handler.
#[cold]
#[inline(never)]
unsafe fn give_any_back(handler: Handler, block: NonNull<u8>, layout: Layout) {
    if layout.size() == 0 {
        return;
    }
    match wrapped_bytes(handler, layout) {
        // SAFETY: live and not used again (this function's contract); not wrapped, so it is the handler's own.
        None => unsafe { handler.release(whole(block), layout.size()) },
        Some(raw_bytes) => {
            // SAFETY: live and not used again (this function's contract). It is wrapped, so `make` wrote the address of
            // the raw block, which has `raw_bytes`, directly before it.
            unsafe {
                let raw = whole(block).sub(WORD).cast::<NonNull<u8>>().read();
                handler.release(raw, raw_bytes);
            }
        }
    }
}

impl ContextAlloc {
    /// How many bytes to ask the handler for where it aligns less than the layout wants; `None` where it does not.
    fn wrapped_bytes(&self, layout: Layout) -> Option<usize> {
        wrapped_bytes(self.handler(), layout)
    }

    fn make(&self, layout: Layout, zeroed: bool) -> Option<NonNull<u8>> {
        let size = layout.size();
        if size == 0 {
            return Some(NonNull::without_provenance(layout.align().try_into().expect("an alignment is never zero")));
        }
        self.handler().require_host_accessible().ok()?;
        let wrapped = self.wrapped_bytes(layout);
        let raw_bytes = wrapped.unwrap_or(size);
        let held = self.container.held();
        let raw = if zeroed { held.allocate_zeroed(raw_bytes) } else { held.allocate(raw_bytes) };
        let raw = raw.ok()?;
        raw.expose_provenance(); // for `whole`
        Some(match wrapped {
            None => raw,
            Some(_) => {
                let align = layout.align().max(WORD);
                let offset = WORD + padding(raw.addr().get() + WORD, align);
                // SAFETY: WORD <= offset < WORD + align, and `wrapped_bytes` made room for that besides `size`: word
                // and block lie in the raw block. The word is aligned, since `block` is a multiple of at least WORD.
                unsafe {
                    let block = raw.add(offset);
                    block.sub(WORD).cast::<NonNull<u8>>().write(raw);
                    block
                }
            }
        })
    }

    /// Resizes a block: by the handler if that keeps the alignment, else by allocating and copying.
    ///
    /// # Safety
    /// - `block` is a live block of this allocator with layout `old`.
    unsafe fn change(&self, block: NonNull<u8>, old: Layout, new: Layout) -> Option<NonNull<u8>> {
        let direct = |layout| self.wrapped_bytes(layout).is_none() && layout.size() > 0;
        // A block of `pool` that `small` made is aligned to no more than that, and so may be what it is resized to.
        let is_aligned = new.align() <= old.align().max(small::ALIGN);
        if is_aligned && direct(old) && direct(new) {
            // SAFETY: the block is live (this function's contract), and not wrapped, so it is the handler's own.
            let moved = unsafe { self.handler().resize(whole(block), new.size()) }.ok()?;
            moved.expose_provenance(); // for `whole`
            return Some(moved);
        }
        let fresh = self.make(new, false)?;
        // SAFETY: both blocks are live, hence disjoint, and have at least the smaller of the two sizes. The old one is
        // given back once, with its layout; the caller uses the new one from here on.
        unsafe {
            fresh.copy_from_nonoverlapping(block, old.size().min(new.size()));
            self.give_back(block, old);
        }
        Some(fresh)
    }
}

/// Whether a block of this layout is never wrapped by those handlers whose blocks `small` makes. Known when the
/// container is compiled.
#[inline]
fn is_plain(layout: Layout) -> bool {
    layout.align() <= small::ALIGN && layout.size() > 0
}

/// The block with the provenance that its handler gave it, which `make` and `change` exposed.
#[inline]
fn whole(block: NonNull<u8>) -> NonNull<u8> {
    NonNull::with_exposed_provenance(block.addr())
}

impl Default for ContextAlloc {
    fn default() -> Self {
        Self::new()
    }
}

// SAFETY: blocks come from a handler that `container` keeps valid, and a block keeps its handler's state itself: it
// stays valid until it is given back. Clones use the same handler.
unsafe impl Blocks for ContextAlloc {
    #[inline]
    fn new_block(&self, layout: Layout) -> Option<NonNull<u8>> {
        if is_plain(layout)
            && let Some(block) = small::allocate_tight(self.handler(), layout.size())
        {
            block.expose_provenance(); // for `whole`
            return Some(block);
        }
        self.make(layout, false)
    }

    fn new_zeroed_block(&self, layout: Layout) -> Option<NonNull<u8>> {
        self.make(layout, true)
    }

    #[inline]
    unsafe fn give_back(&self, block: NonNull<u8>, layout: Layout) {
        // SAFETY: live and not used again (this function's contract); where it is plain, not wrapped.
        unsafe {
            match self.handler() {
                handler if !is_plain(layout) => give_any_back(handler, block, layout),
                handler if handler.is_request() => give_back_to_request(handler, block, layout),
                handler => give_back_to_named(handler, block, layout),
            }
        }
    }

    #[inline]
    unsafe fn grow_block(&self, block: NonNull<u8>, old: Layout, new: Layout) -> Option<NonNull<u8>> {
        if is_plain(old)
            && is_plain(new)
            // SAFETY: a live block with layout `old`, which is not used again after this, and not wrapped.
            && let Some(grown) = unsafe { small::grow_tight(self.handler(), whole(block), old.size(), new.size()) }
        {
            grown.expose_provenance(); // for `whole`
            return Some(grown);
        }
        // SAFETY: a live block with layout `old` (this function's contract).
        unsafe { self.change(block, old, new) }
    }

    unsafe fn shrink_block(&self, block: NonNull<u8>, old: Layout, new: Layout) -> Option<NonNull<u8>> {
        // SAFETY: a live block with layout `old` (this function's contract).
        unsafe { self.change(block, old, new) }
    }
}

#[cfg(feature = "allocator-api2-02")]
super::allocator::implement_allocator!(allocator_api2_02, ContextAlloc);
#[cfg(feature = "allocator-api2")]
super::allocator::implement_allocator!(allocator_api2, ContextAlloc);

#[cfg(all(test, not(ctxalloc_loom)))]
mod tests {
    use super::{Blocks as _, ContextAlloc, Layout};
    use crate::handler::handler;

    #[test]
    fn a_block_moves_to_an_alignment_that_its_layout_did_not_want() {
        let layout = |size, align| Layout::from_size_align(size, align).expect("valid");
        for name in ["pool", "system", "aligned64"] {
            let allocator = ContextAlloc::with_handler(handler(name).expect("built in"));
            let mut blocks = Vec::new();
            for (number, (old, new)) in [
                (layout(16, 8), layout(40, 64)),
                (layout(40, 64), layout(48, 1)),
                (layout(10, 1), layout(48, 32)),
                (layout(33, 16), layout(47, 16)),
            ]
            .repeat(if cfg!(miri) { 1 } else { 16 })
            .into_iter()
            .enumerate()
            {
                let block = allocator.new_block(old).expect("memory");
                // SAFETY: a live block of this allocator with layout `old`; its old pointer is not used again.
                let grown = unsafe {
                    block.write_bytes(number as u8, old.size());
                    allocator.grow_block(block, old, new)
                };
                let grown = grown.expect("memory");
                assert!(grown.addr().get().is_multiple_of(new.align()), "{name}: {old:?} to {new:?}");
                // SAFETY: as many bytes were written before it grew.
                assert!((0..old.size()).all(|at| unsafe { grown.add(at).read() } == number as u8));
                blocks.push((grown, new));
            }
            // SAFETY: live blocks of this allocator with these layouts, each given up here.
            blocks.into_iter().for_each(|(block, layout)| unsafe { allocator.give_back(block, layout) });
        }
    }
}
