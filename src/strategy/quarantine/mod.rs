//! `Quarantined`: a pool or an arena over CUDA's memory, whose freed blocks are handed out again only when the work
//! that was queued on the devices before is done.
//!
//! ```text
//!   release ──► open batch ──► event recorded ──► done ──► release of the pool or arena
//!               64 blocks or 1 MiB   (all devices)
//! ```
//! `waiting` has the batches of the process. Nothing is written to a block that waits. Decision 0047 has the reasons.

mod waiting;

pub use waiting::{CudaCapturing, CudaWaiting, cuda_capturing, cuda_settle, cuda_waiting, set_cuda_quarantine_bytes};

use super::Strategy;
use super::pool::{Arena, Pool, PoolOptions, room_bytes, stays};
use crate::error::Error;
use crate::source::CudaSource;
use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;
use waiting::Quarantine;

/// When a freed block is handed out again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Reuse {
    /// When an event that was recorded after it was freed is done, on every device. Needs CUDA 12.5.
    #[default]
    AfterEvents,
    /// At once. Whoever chooses this keeps each block alive until all work on it is done.
    Unchecked,
}

/// A pool, or an arena over it, on CUDA's memory. A device may go on reading a block that was freed: the block is used
/// again when the device is done.
///
/// ```no_run
/// use ctxalloc::source::{CudaDevice, CudaDriver, CudaPinned, CudaPinnedOptions};
/// use ctxalloc::strategy::{PoolOptions, Quarantined, Reuse};
///
/// // SAFETY: libcuda.so.1 is NVIDIA's.
/// let device = CudaDevice::open(unsafe { CudaDriver::load(None) }?, 0)?;
/// let source = CudaPinned::new(&device, CudaPinnedOptions::default())?;
/// let pinned = Quarantined::pool(source, PoolOptions::default(), Reuse::AfterEvents)?;
/// ctxalloc::register("pinned", pinned)?;
/// # Ok::<(), ctxalloc::Error>(())
/// ```
///
/// Blocks are aligned to 64 bytes. A resize that moves a block leaves the old one to the quarantine. In a child of
/// `fork` blocks are handed out and taken back as by any pool if the memory is there at all
/// ([`CudaSource::survives_fork`]); no device works for it. Clones are the same strategy.
pub struct Quarantined<P: CudaSource> {
    pool: Pool<P>,
    /// The pool, or an arena over it.
    upstream: Arc<dyn Strategy>,
    source: P,
    reuse: Reuse,
}

impl<P: CudaSource + Clone> Quarantined<P> {
    /// A pool over `source`.
    ///
    /// # Errors
    /// [`Error::Cuda`] if blocks are to be reused after events, and the driver is older than CUDA 12.5 and cannot
    /// record one for all streams.
    pub fn pool(source: P, options: PoolOptions, reuse: Reuse) -> Result<Self, Error> {
        let driver = source.device().driver();
        if reuse == Reuse::AfterEvents && !driver.records_contexts() {
            let (major, minor) = driver.version();
            return Err(Error::Cuda {
                what: format!(
                    "the CUDA driver serves version {major}.{minor}, and cannot tell when all streams are done with freed \
                     memory (cuCtxRecordEvent, 12.5)"
                ),
                code: 801,
                advice: "update the driver; or choose reuse='unsafe' (Reuse::Unchecked), and keep each array until work on \
                         it is done: ctxalloc.cuda.keep(array, stream=stream)",
            });
        }
        let pool = Pool::over(source.clone(), options);
        Ok(Self { upstream: Arc::new(pool.clone()), pool, source, reuse })
    }

    /// An arena over the same pool: memory of its own, for one piece of work.
    #[must_use]
    pub fn arena(&self) -> Self {
        let arena = Arena::over(&self.pool);
        Self { upstream: Arc::new(arena), ..self.clone() }
    }

    /// Whether memory can be handed out: always, but for a child of `fork` that does not have it.
    fn serves(&self) -> bool {
        self.source.device().driver().is_usable() || self.source.survives_fork()
    }

    fn allocate_by(
        &self,
        size_bytes: usize,
        allocate: impl Fn(&dyn Strategy) -> Option<NonNull<u8>>,
    ) -> Option<NonNull<u8>> {
        if !self.serves() {
            return None;
        }
        let quarantine = Quarantine::get();
        if !quarantine.has_room(size_bytes) {
            return None;
        }
        // If the source refuses, what waits can make room.
        allocate(&*self.upstream).or_else(|| quarantine.wait_for_some().then(|| allocate(&*self.upstream)).flatten())
    }
}

// SAFETY: the blocks are the upstream's, which gets each of them back once: at once, or when it has waited. Until then
// nobody has it. A resize copies to a new block before it gives up the old one.
unsafe impl<P: CudaSource + Clone> Strategy for Quarantined<P> {
    fn alignment(&self) -> usize {
        self.upstream.alignment()
    }

    fn allocate(&self, size_bytes: usize) -> Option<NonNull<u8>> {
        self.allocate_by(size_bytes, |upstream| upstream.allocate(size_bytes))
    }

    fn allocate_zeroed(&self, size_bytes: usize) -> Option<NonNull<u8>> {
        self.allocate_by(size_bytes, |upstream| upstream.allocate_zeroed(size_bytes))
    }

    unsafe fn resize(&self, block: NonNull<u8>, new_size_bytes: usize) -> Option<NonNull<u8>> {
        // SAFETY: the block is live (this function's contract), and from a pool.
        let (stays, room_bytes) = unsafe { (stays(block, new_size_bytes), room_bytes(block)) };
        if stays {
            return Some(block);
        }
        let moved = self.allocate(new_size_bytes)?;
        // SAFETY: both blocks are live, hence disjoint, and have at least the smaller of the two sizes, in memory that
        // the host reads and writes. The caller uses only the new one from here on.
        unsafe {
            moved.copy_from_nonoverlapping(block, room_bytes.min(new_size_bytes));
            self.release(block);
        }
        Some(moved)
    }

    unsafe fn release(&self, block: NonNull<u8>) {
        let driver = self.source.device().driver();
        if self.reuse == Reuse::Unchecked || driver.is_forked_from() {
            // SAFETY: the upstream's block, which is not used again (this function's contract). In a child of `fork` it
            // is a copy that no device reads.
            unsafe { self.upstream.release(block) };
        } else if driver.is_usable() {
            // SAFETY: the block is live (this function's contract), and from a pool.
            let room_bytes = unsafe { room_bytes(block) };
            Quarantine::get().take(block, room_bytes, &self.upstream);
        }
        // At the end of the process it stays: a device may read it, and nobody can be asked any more.
    }

    fn is_read_after_release(&self) -> bool {
        self.reuse == Reuse::AfterEvents
    }

    /// Returns what waits and is done to the pool, and the pool's unused memory to the system.
    fn trim(&self) -> usize {
        cuda_settle();
        self.upstream.trim()
    }
}

impl<P: CudaSource + Clone> Clone for Quarantined<P> {
    fn clone(&self) -> Self {
        Self {
            pool: self.pool.clone(),
            upstream: Arc::clone(&self.upstream),
            source: self.source.clone(),
            reuse: self.reuse,
        }
    }
}

impl<P: CudaSource> fmt::Debug for Quarantined<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Quarantined").field("upstream", &self.upstream).field("reuse", &self.reuse).finish()
    }
}
