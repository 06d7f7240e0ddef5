//! `Blocks`: what an allocator for containers does. allocator-api2 0.4 and 0.2 each have a trait `Allocator`, and to
//! the compiler these are two traits; `implement_allocator!` implements both from this one.

use std::alloc::Layout;
use std::ptr::NonNull;

/// Blocks for containers. Nothing is `None` but a refusal, which changes nothing.
///
/// # Safety
/// - A block has the size and the alignment of its layout, and stays valid until it is given back or resized, for as
///   long as this value or a clone of it lives. Clones have the same blocks.
#[cfg_attr(
    not(any(feature = "allocator-api2-02", feature = "allocator-api2")),
    allow(dead_code, reason = "without a line of allocator-api2 there is nobody to call it")
)]
pub(super) unsafe trait Blocks {
    /// An uninitialised block.
    fn new_block(&self, layout: Layout) -> Option<NonNull<u8>>;

    /// A block of zeros.
    fn new_zeroed_block(&self, layout: Layout) -> Option<NonNull<u8>> {
        let block = self.new_block(layout)?;
        // SAFETY: a new block with as many bytes as its layout.
        unsafe { block.write_bytes(0, layout.size()) };
        Some(block)
    }

    /// Takes a block back.
    ///
    /// # Safety
    /// - `block` is a live block of this allocator with layout `layout`; nobody uses it from now on.
    unsafe fn give_back(&self, block: NonNull<u8>, layout: Layout);

    /// The block with its bytes kept and room for more.
    ///
    /// # Safety
    /// - `block` is a live block of this allocator with layout `old`; if this succeeds, nobody uses it from now on.
    /// - `new` has at least as many bytes.
    unsafe fn grow_block(&self, block: NonNull<u8>, old: Layout, new: Layout) -> Option<NonNull<u8>>;

    /// The block with its first bytes kept and the others given back.
    ///
    /// # Safety
    /// - `block` is a live block of this allocator with layout `old`; if this succeeds, nobody uses it from now on.
    /// - `new` has at most as many bytes.
    unsafe fn shrink_block(&self, block: NonNull<u8>, old: Layout, new: Layout) -> Option<NonNull<u8>>;
}

/// The `Allocator` of one line of allocator-api2 for a type that has [`Blocks`]. `Layout` and `NonNull` are in scope
/// there.
#[cfg(any(feature = "allocator-api2-02", feature = "allocator-api2"))]
macro_rules! implement_allocator {
    ($line:ident, $type:ty) => {
        // SAFETY: what the trait asks for is what `Blocks` promises.
        unsafe impl $line::alloc::Allocator for $type {
            #[inline]
            fn allocate(&self, layout: Layout) -> Result<NonNull<[u8]>, $line::alloc::AllocError> {
                let block = self.new_block(layout).ok_or($line::alloc::AllocError)?;
                Ok(NonNull::slice_from_raw_parts(block, layout.size()))
            }

            fn allocate_zeroed(&self, layout: Layout) -> Result<NonNull<[u8]>, $line::alloc::AllocError> {
                let block = self.new_zeroed_block(layout).ok_or($line::alloc::AllocError)?;
                Ok(NonNull::slice_from_raw_parts(block, layout.size()))
            }

            #[inline]
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
                // SAFETY: the trait asks its caller for a live block with layout `old`, and for no smaller a new one.
                let grown = unsafe { self.grow_block(block, old, new) }.ok_or($line::alloc::AllocError)?;
                Ok(NonNull::slice_from_raw_parts(grown, new.size()))
            }

            unsafe fn grow_zeroed(
                &self,
                block: NonNull<u8>,
                old: Layout,
                new: Layout,
            ) -> Result<NonNull<[u8]>, $line::alloc::AllocError> {
                // SAFETY: the callers' duties are the same. The bytes past `old.size()` are new and lie in the block.
                unsafe {
                    let grown = self.grow(block, old, new)?;
                    grown.cast::<u8>().add(old.size()).write_bytes(0, new.size() - old.size());
                    Ok(grown)
                }
            }

            unsafe fn shrink(
                &self,
                block: NonNull<u8>,
                old: Layout,
                new: Layout,
            ) -> Result<NonNull<[u8]>, $line::alloc::AllocError> {
                debug_assert!(new.size() <= old.size());
                // SAFETY: the trait asks its caller for a live block with layout `old`, and for no larger a new one.
                let shrunk = unsafe { self.shrink_block(block, old, new) }.ok_or($line::alloc::AllocError)?;
                Ok(NonNull::slice_from_raw_parts(shrunk, new.size()))
            }
        }
    };
}

#[cfg(any(feature = "allocator-api2-02", feature = "allocator-api2"))]
pub(super) use implement_allocator;
