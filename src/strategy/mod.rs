//! Layer 2: how bytes are handed out. One file (or folder) per strategy, and one conformance suite for all of them.
//!
//! To add one: copy `aligned.rs`, add a `mod` and a `pub use` line below, and let its tests call `conformance::check`.
//! ARCHITECTURE.md, "Add a strategy", says what else it takes: a line in `tests/rust/strategies.rs`, and for Python an
//! arm and a class.
#![allow(unsafe_code, reason = "strategies deal in raw blocks")]

pub(crate) mod account;
mod aligned;
mod budget;
mod budgeted;
mod callbacks;
mod fallback;
mod faulty;
mod guard;
pub(crate) mod ledger;
#[cfg(test)]
mod live;
mod pool;
mod prefixed;
mod process;
#[cfg(feature = "cuda")]
mod quarantine;
mod shared_memory;
mod system;
#[cfg(feature = "tracing")]
mod traced;
mod tracked;
mod zeroing;

pub mod conformance;

pub use aligned::Aligned;
pub use budget::{Budget, Charge, Reclaimer};
pub use budgeted::Budgeted;
pub use callbacks::{CallbackFunctions, Callbacks};
pub use fallback::Fallback;
pub use faulty::Faulty;
pub use guard::{Guard, GuardOptions};
#[cfg(feature = "python")]
pub(crate) use pool::restart_decay;
#[cfg(ctxalloc_whole)]
pub(crate) use pool::room_bytes;
pub use pool::{Arena, Pool, PoolBytes, PoolOptions};
pub(crate) use pool::{Kept, Over, Small};
pub(crate) use pool::{flush_recordings, pool_bytes, pool_resident_bytes, trim_pools};
pub(crate) use prefixed::Prefixed;
#[cfg(feature = "python")]
pub(crate) use prefixed::prefix_bytes;
pub use process::ProcessLimit;
#[cfg(feature = "python")]
pub(crate) use process::system_limits;
#[cfg(feature = "cuda")]
pub use quarantine::{
    CudaCapturing, CudaWaiting, Quarantined, Reuse, cuda_capturing, cuda_settle, cuda_waiting,
    set_cuda_quarantine_bytes,
};
pub use shared_memory::{SharedBlock, SharedMemory};
pub use system::System;
#[cfg(feature = "tracing")]
pub use traced::Traced;
pub use tracked::{Attribution, Frame, Group, LiveBlock, Origin, Place, Report, Thread, Totals, Tracked};
pub use zeroing::Zeroing;

use std::fmt::Debug;
use std::ptr::NonNull;
use std::sync::Arc;

/// How blocks are handed out: what stands behind a [`Handler`](crate::Handler).
///
/// A strategy keeps its own record of each block's size: it is not given the size again at a resize or release, since
/// NumPy's `free` passes wrong ones (NEP 49 calls them a best guess). Sizes are in bytes, and anybody may ask for any:
/// zero is a block like another one, and what nobody can have, such as more than `isize::MAX`, is a `None`. (The
/// handler layer turns zero into one and refuses more than `isize::MAX` before it asks.)
///
/// The methods run without Python's GIL, on any thread, during interpreter exit and after `fork`, so they must not call
/// Python. Users see the [`Debug`] text as the handler's description (`Aligned { align: 64 }`).
///
/// ```
/// use ctxalloc::strategy::{LiveBlock, Strategy, System, conformance};
/// use std::ptr::NonNull;
///
/// /// Refuses blocks above a size.
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
///         // SAFETY: the block is the upstream's, and the caller promises of it what the upstream wants.
///         if new_size_bytes > self.max_bytes { None } else { unsafe { self.upstream.resize(block, new_size_bytes) } }
///     }
///     unsafe fn release(&self, block: NonNull<u8>) {
///         // SAFETY: the block is the upstream's, and the caller promises of it what the upstream wants.
///         unsafe { self.upstream.release(block) }
///     }
///     fn trim(&self) -> usize {
///         self.upstream.trim()
///     }
///     fn live_blocks(&self) -> Option<Vec<LiveBlock>> {
///         self.upstream.live_blocks()
///     }
///     fn is_read_after_release(&self) -> bool {
///         self.upstream.is_read_after_release()
///     }
/// }
///
/// conformance::check(AtMost { upstream: System, max_bytes: 64 << 20 });
/// conformance::check_wrapper(|upstream| AtMost { upstream, max_bytes: 64 << 20 });
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
    /// The alignment of every block, in bytes: a power of two, at least 64 unless the strategy's docs say why less.
    fn alignment(&self) -> usize;

    /// A block of `size_bytes` uninitialised bytes; `None` if it cannot have one.
    fn allocate(&self, size_bytes: usize) -> Option<NonNull<u8>>;

    /// A block of `size_bytes` zeros; `None` if it cannot have one. Override it if fresh memory is zero anyway.
    fn allocate_zeroed(&self, size_bytes: usize) -> Option<NonNull<u8>> {
        let block = self.allocate(size_bytes)?;
        // SAFETY: `allocate` returned `size_bytes` writable bytes, and nobody else has them yet.
        unsafe { block.write_bytes(0, size_bytes) };
        Some(block)
    }

    /// Resizes a block to `new_size_bytes`, perhaps by moving it. The first bytes are kept, up to the smaller of the
    /// two sizes. `None` if it cannot; the block is then unchanged.
    ///
    /// # Safety
    /// - `block` came from this strategy and was not released;
    /// - after `Some`, the old pointer is not used again.
    unsafe fn resize(&self, block: NonNull<u8>, new_size_bytes: usize) -> Option<NonNull<u8>>;

    /// Takes a block back.
    ///
    /// # Safety
    /// - `block` came from this strategy, was not released, and is not used again.
    unsafe fn release(&self, block: NonNull<u8>);

    /// Returns unused memory to the system. Returns how many bytes, as far as is known.
    fn trim(&self) -> usize {
        0
    }

    /// The live blocks, the oldest first, if this strategy or one that it wraps lists them ([`Tracked`] does). `None`
    /// if not known. A wrapper passes the call on to its upstream, as it does for [`trim`](Strategy::trim).
    fn live_blocks(&self) -> Option<Vec<LiveBlock>> {
        None
    }

    /// Whether something else, a device, may go on reading a block after its release: nobody may write to it then,
    /// until this strategy hands it out again. A wrapper passes the call on to its upstream.
    fn is_read_after_release(&self) -> bool {
        false
    }
}

// SAFETY: every call goes unchanged to a strategy, which keeps these promises.
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
        // SAFETY: the caller's promises are about the strategy inside, which makes all blocks.
        unsafe { (**self).resize(block, new_size_bytes) }
    }

    unsafe fn release(&self, block: NonNull<u8>) {
        // SAFETY: the caller's promises are about the strategy inside, which makes all blocks.
        unsafe { (**self).release(block) }
    }

    fn trim(&self) -> usize {
        (**self).trim()
    }

    fn live_blocks(&self) -> Option<Vec<LiveBlock>> {
        (**self).live_blocks()
    }

    fn is_read_after_release(&self) -> bool {
        (**self).is_read_after_release()
    }
}
