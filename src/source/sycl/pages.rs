//! USM as a source for pools: whole allocations of SYCL's, cut by the pool, so that SYCL is asked seldom.
//!
//! The system cannot take pages out of an allocation (there is no madvise for it), and fresh memory may have anything in
//! it: it is cleared when it is first used.

use super::{Queue, UsmKind};
use crate::error::Error;
use crate::layout;
use crate::source::Pages;
use crate::sync::Locked;
use crate::trace;
use std::collections::BTreeMap;
use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;

/// USM of one kind, on the device of a queue.
///
/// ```no_run
/// use ctxalloc::source::{Queue, Runtime, UsmKind, UsmPages};
/// use ctxalloc::strategy::{Pool, PoolOptions};
///
/// # let path = std::path::Path::new("site-packages/dpctl/libDPCTLSyclInterface.so");
/// // SAFETY: dpctl's own library.
/// let queue = Queue::open(unsafe { Runtime::load(path) }?, None)?;
/// let pool = Pool::over(UsmPages::new(&queue, UsmKind::Shared)?, PoolOptions::default());
/// ctxalloc::register("shared with the device", pool)?;
/// # Ok::<(), ctxalloc::Error>(())
/// ```
#[derive(Clone)]
pub struct UsmPages {
    queue: Queue,
    kind: UsmKind,
    /// What is mapped, by its first address.
    chunks: Arc<Locked<BTreeMap<usize, Chunk>>>,
}

/// An allocation of SYCL's: where it starts for SYCL (before the mapping where SYCL did not align it), and how many bytes
/// the mapping has.
struct Chunk {
    raw: NonNull<u8>,
    #[cfg_attr(not(feature = "python"), allow(dead_code, reason = "Python's arrays ask"))]
    size_bytes: usize,
}

// SAFETY: an allocation that its source owns alone, reached under its lock.
unsafe impl Send for Chunk {}

impl UsmPages {
    /// USM that the host can read, so that it can stand under any strategy.
    ///
    /// # Errors
    /// [`Error::Sycl`] where the device has no such memory, and for the kind `device`: what strategies, NumPy and
    /// [`Buffer`](crate::Buffer) do with memory the host cannot do there. `handler::register_usm` serves it.
    pub fn new(queue: &Queue, kind: UsmKind) -> Result<Self, Error> {
        if !kind.is_host_accessible() {
            return Err(Error::Sycl {
                what: "USM of the kind 'device' cannot be read by the host, so no strategy can stand on it".into(),
                advice: "use the kind 'shared' or 'host'; the handler usm_device and ctxalloc.usm.empty(kind='device') \
                         serve device memory",
            });
        }
        Self::of_any_kind(queue, kind)
    }

    /// For a pool of which nobody reads the blocks.
    pub(crate) fn of_any_kind(queue: &Queue, kind: UsmKind) -> Result<Self, Error> {
        queue.require(kind)?;
        Ok(Self { queue: queue.clone(), kind, chunks: Arc::new(Locked::new(BTreeMap::new())) })
    }

    /// Whether the address lies in what is mapped. Never in a child of `fork`, which may find the lock held.
    #[cfg(feature = "python")]
    pub(crate) fn holds(&self, address: usize) -> bool {
        self.queue.is_usable()
            && self.chunks.with(|chunks| {
                let below = chunks.range(..=address).next_back();
                below.is_some_and(|(start, chunk)| address - start < chunk.size_bytes)
            })
    }
}

// SAFETY: SYCL's allocations are whole and nobody else's until freed; `commit` clears them. What SYCL does not align, it
// is asked for with room to align.
unsafe impl Pages for UsmPages {
    fn map(&self, size_bytes: usize, align: usize) -> Option<NonNull<u8>> {
        let aligned = self.queue.allocate(self.kind, size_bytes, align).map(|raw| (raw, raw));
        let (raw, start) = aligned.or_else(|| {
            // Some drivers align to 64 KiB at most.
            let raw = self.queue.allocate(self.kind, size_bytes.checked_add(align)?, 64)?;
            // SAFETY: `size_bytes + align` bytes are there, and the padding is less than `align`.
            Some((raw, unsafe { raw.add(layout::padding(raw.addr().get(), align)) }))
        })?;
        self.chunks.with(|chunks| chunks.insert(start.addr().get(), Chunk { raw, size_bytes }));
        Some(start)
    }

    /// Some of it may have been used before, and is free now.
    unsafe fn commit(&self, start: NonNull<u8>, size_bytes: usize) -> bool {
        // SAFETY: the caller's promises are the same.
        unsafe { self.clear(start, size_bytes) }
    }

    unsafe fn unmap(&self, start: NonNull<u8>, _size_bytes: usize) {
        // Perhaps on the thread that gives memory back by itself.
        let Some(_call) = self.queue.begin_call() else {
            return; // it stays: a child of `fork` does not call SYCL, and may find the lock held
        };
        let raw = self.chunks.with(|chunks| chunks.remove(&start.addr().get())).map_or(start, |chunk| chunk.raw);
        // SAFETY: `raw` is what SYCL gave for this mapping, which nobody uses any more (`unmap`'s contract).
        if let Err(error) = unsafe { self.queue.release(raw) } {
            trace::misuse(&error.to_string());
        }
    }

    unsafe fn discard(&self, _start: NonNull<u8>, _size_bytes: usize) -> bool {
        false
    }

    unsafe fn clear(&self, start: NonNull<u8>, size_bytes: usize) -> bool {
        if self.kind.is_host_accessible() {
            // SAFETY: memory of the host too, which nobody else uses, says the caller.
            unsafe { start.write_bytes(0, size_bytes) };
            return true;
        }
        // SAFETY: USM of this queue, which nobody else uses, says the caller.
        unsafe { self.queue.fill(start, 0, size_bytes) }.is_ok()
    }

    unsafe fn copy(&self, to: NonNull<u8>, from: NonNull<u8>, size_bytes: usize) -> bool {
        if self.kind.is_host_accessible() {
            // SAFETY: memory of the host too; two blocks that do not overlap, says the caller.
            unsafe { to.copy_from_nonoverlapping(from, size_bytes) };
            return true;
        }
        // SAFETY: USM of this queue; as above.
        unsafe { self.queue.copy(to.as_ptr(), from.as_ptr(), size_bytes) }.is_ok()
    }
}

impl fmt::Debug for UsmPages {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("UsmPages").field("kind", &self.kind.name()).field("device", &self.queue.device()).finish()
    }
}
