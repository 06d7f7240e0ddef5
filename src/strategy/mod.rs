//! Layer 2: how bytes are handed out. One file a strategy, one conformance suite for all of them.
//!
//! To add one: copy `aligned.rs`, add a `mod` and a `pub use` line below, and let its tests call
//! `conformance::check`. To give it a name at start-up, add a line to `handler/builtin.rs`; to
//! offer it to Python, an arm to `python/strategies.rs` and a class to `python/ctxalloc/strategies.py`.
#![allow(unsafe_code, reason = "strategies deal in raw blocks")]

pub(crate) mod account;
mod aligned;
mod budget;
mod callbacks;
mod fallback;
mod faulty;
mod guard;
pub(crate) mod ledger;
mod pool;
mod prefixed;
mod shared_memory;
mod system;
mod tracked;
mod zeroing;

pub mod conformance;

pub use aligned::Aligned;
pub use budget::{Budget, Budgeted, Charge};
pub use callbacks::{CallbackFunctions, Callbacks};
pub use fallback::Fallback;
pub use faulty::Faulty;
pub use guard::{Guard, GuardOptions};
#[cfg(feature = "python")]
pub(crate) use pool::restart_decay;
pub(crate) use pool::trim_pools;
pub use pool::{Arena, Pool, PoolOptions};
pub(crate) use prefixed::Prefixed;
pub use shared_memory::{SharedBlock, SharedMemory};
pub use system::System;
pub use tracked::{Frame, Group, LiveBlock, Origin, Place, Report, Thread, Told, Totals, Tracked};
pub use zeroing::Zeroing;

use std::fmt::Debug;
use std::ptr::NonNull;
use std::sync::Arc;

/// How blocks are handed out: what stands behind a [`Handler`](crate::Handler).
///
/// A strategy keeps its own record of each block; it is never told a size again after it allocated
/// (NumPy's `free` passes wrong ones, NEP 49 calls them a best guess). Sizes are in bytes and at least one:
/// the handler layer turns zero into one and refuses what exceeds `isize::MAX`.
///
/// The methods run without Python's GIL, on any thread, during interpreter exit and after `fork`; they must
/// not call Python. Its [`Debug`] text is what users see of it (`Aligned { align: 64 }`).
///
/// ```
/// use ctxalloc::strategy::{Strategy, System, conformance};
/// use std::ptr::NonNull;
///
/// /// Refuses single blocks above a size.
/// #[derive(Debug)]
/// struct AtMost<S> {
///     upstream: S,
///     max_bytes: usize,
/// }
///
/// // SAFETY: the blocks are the upstream's; a refusal changes nothing.
/// unsafe impl<S: Strategy> Strategy for AtMost<S> {
///     fn alignment(&self) -> usize {
///         self.upstream.alignment()
///     }
///     fn allocate(&self, size_bytes: usize) -> Option<NonNull<u8>> {
///         if size_bytes > self.max_bytes { None } else { self.upstream.allocate(size_bytes) }
///     }
///     unsafe fn resize(&self, block: NonNull<u8>, new_size_bytes: usize) -> Option<NonNull<u8>> {
///         // SAFETY: the caller's promises are the same.
///         if new_size_bytes > self.max_bytes { None } else { unsafe { self.upstream.resize(block, new_size_bytes) } }
///     }
///     unsafe fn release(&self, block: NonNull<u8>) {
///         // SAFETY: the caller's promises are the same.
///         unsafe { self.upstream.release(block) }
///     }
/// }
///
/// conformance::check(AtMost { upstream: System, max_bytes: 64 << 20 });
/// let careful = ctxalloc::register("careful", AtMost { upstream: System, max_bytes: 64 << 20 })?;
/// assert!(careful.allocate(65 << 20).is_err());
/// # Ok::<(), ctxalloc::Error>(())
/// ```
///
/// # Safety
/// An implementation promises that
/// - a block it returned has the size asked for, is aligned to [`alignment`](Strategy::alignment), and
///   stays valid and untouched until it is released or resized, on whatever thread that happens;
/// - a failure is `None`; after a failed [`resize`](Strategy::resize) the old block is as it was;
/// - [`allocate_zeroed`](Strategy::allocate_zeroed) returns zeros only;
/// - it does not unwind (a panic is caught at the handler and becomes a failure, but leaks the block).
pub unsafe trait Strategy: Debug + Send + Sync + 'static {
    /// The least alignment of every block, in bytes; a power of two. 64 or more, or the docs say why not.
    fn alignment(&self) -> usize;

    /// A block of `size_bytes` uninitialised bytes.
    fn allocate(&self, size_bytes: usize) -> Option<NonNull<u8>>;

    /// A block of `size_bytes` zeros. Override it where fresh memory is zero already.
    fn allocate_zeroed(&self, size_bytes: usize) -> Option<NonNull<u8>> {
        let block = self.allocate(size_bytes)?;
        // SAFETY: the block was just made with `size_bytes` bytes, and nobody else has it yet.
        unsafe { block.write_bytes(0, size_bytes) };
        Some(block)
    }

    /// The block with its first bytes kept (the lesser of old and new size) and `new_size_bytes` of room.
    ///
    /// # Safety
    /// - `block` came from this strategy and was not released;
    /// - after `Some`, the old pointer is not used again.
    unsafe fn resize(&self, block: NonNull<u8>, new_size_bytes: usize) -> Option<NonNull<u8>>;

    /// Takes the block back.
    ///
    /// # Safety
    /// - `block` came from this strategy, was not released, and is not used again.
    unsafe fn release(&self, block: NonNull<u8>);

    /// Gives memory that nobody uses back to the system. Returns how many bytes went, as far as is known.
    fn trim(&self) -> usize {
        0
    }

    /// Its live blocks, the oldest first, where it knows them: [`Tracked`] does. A strategy that wraps another passes the
    /// question on.
    fn live_blocks(&self) -> Option<Vec<LiveBlock>> {
        None
    }
}

// SAFETY: every call is passed on unchanged to a strategy, which keeps the promises.
unsafe impl<S: Strategy + ?Sized> Strategy for Arc<S> {
    fn alignment(&self) -> usize {
        (**self).alignment()
    }

    fn allocate(&self, size_bytes: usize) -> Option<NonNull<u8>> {
        (**self).allocate(size_bytes)
    }

    fn allocate_zeroed(&self, size_bytes: usize) -> Option<NonNull<u8>> {
        (**self).allocate_zeroed(size_bytes)
    }

    unsafe fn resize(&self, block: NonNull<u8>, new_size_bytes: usize) -> Option<NonNull<u8>> {
        // SAFETY: the caller's promises are the same.
        unsafe { (**self).resize(block, new_size_bytes) }
    }

    unsafe fn release(&self, block: NonNull<u8>) {
        // SAFETY: the caller's promises are the same.
        unsafe { (**self).release(block) }
    }

    fn trim(&self) -> usize {
        (**self).trim()
    }

    fn live_blocks(&self) -> Option<Vec<LiveBlock>> {
        (**self).live_blocks()
    }
}
