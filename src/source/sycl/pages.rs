//! USM as a source for pools: the pool cuts its blocks from whole allocations, so SYCL is called seldom.
//!
//! Pages of an allocation cannot be returned to the system one by one (there is no madvise for USM). New memory is not
//! zero, so it is cleared when it is first used.

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
    /// The allocations, by the first address of their mappings.
    chunks: Arc<Locked<BTreeMap<usize, Chunk>>>,
}

/// An allocation: where it starts for SYCL (before the mapping, if SYCL did not align it), and the size of the mapping.
struct Chunk {
    raw: NonNull<u8>,
    #[cfg_attr(not(feature = "python"), allow(dead_code, reason = "Python's arrays ask"))]
    size_bytes: usize,
}

// SAFETY: the source alone owns the allocation and reaches it under its lock.
unsafe impl Send for Chunk {}

impl UsmPages {
    /// USM that the host can access, so that any strategy can use it.
    ///
    /// # Errors
    /// [`Error::Sycl`] if the device has no such memory, and for the kind `device`, which strategies, NumPy and
    /// [`Buffer`](crate::Buffer) cannot access from the host. `handler::register_usm` serves that kind.
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

    /// USM of any kind, for a pool whose blocks nobody reads from the host.
    pub(crate) fn of_any_kind(queue: &Queue, kind: UsmKind) -> Result<Self, Error> {
        queue.require(kind)?;
        Ok(Self { queue: queue.clone(), kind, chunks: Arc::new(Locked::new(BTreeMap::new())) })
    }

    /// Whether an address lies in one of the mappings. False in a child of `fork`, where the lock may be held for ever.
    #[cfg(feature = "python")]
    pub(crate) fn holds(&self, address: usize) -> bool {
        self.queue.is_usable()
            && self.chunks.with(|chunks| {
                let below = chunks.range(..=address).next_back();
                below.is_some_and(|(start, chunk)| address - start < chunk.size_bytes)
            })
    }
}

// SAFETY: an allocation of SYCL's belongs to this source alone until it is freed, and `commit` clears it. If SYCL does
// not align it, it is requested with room for aligning.
unsafe impl Pages for UsmPages {
    fn map(&self, size_bytes: usize, align: usize) -> Option<NonNull<u8>> {
        let aligned = self.queue.allocate(self.kind, size_bytes, align).map(|raw| (raw, raw));
        let (raw, start) = aligned.or_else(|| {
            // Some drivers align to 64 KiB at most.
            let raw = self.queue.allocate(self.kind, size_bytes.checked_add(align)?, 64)?;
            // SAFETY: the allocation has `size_bytes + align` bytes, and the padding is less than `align`.
            Some((raw, unsafe { raw.add(layout::padding(raw.addr().get(), align)) }))
        })?;
        self.chunks.with(|chunks| chunks.insert(start.addr().get(), Chunk { raw, size_bytes }));
        Some(start)
    }

    /// Clears the pages: they are not zero when new, and may have been used before.
    unsafe fn commit(&self, start: NonNull<u8>, size_bytes: usize) -> bool {
        // SAFETY: pages of this source that nobody else has (this function's contract); all are writable here.
        unsafe { self.clear(start, size_bytes) }
    }

    unsafe fn unmap(&self, start: NonNull<u8>, _size_bytes: usize) {
        // This may run on the decay thread, which the process does not wait for at exit.
        let Some(_call) = self.queue.begin_call() else {
            return; // stays allocated: a child of `fork` must not call SYCL, and the lock may be held for ever there
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
            // SAFETY: the host can access these bytes, and nobody else uses them (this function's contract).
            unsafe { start.write_bytes(0, size_bytes) };
            return true;
        }
        // SAFETY: USM of this queue that nobody else uses (this function's contract).
        unsafe { self.queue.fill(start, 0, size_bytes) }.is_ok()
    }

    unsafe fn copy(&self, to: NonNull<u8>, from: NonNull<u8>, size_bytes: usize) -> bool {
        if self.kind.is_host_accessible() {
            // SAFETY: the host can access both blocks, which do not overlap (this function's contract).
            unsafe { to.copy_from_nonoverlapping(from, size_bytes) };
            return true;
        }
        // SAFETY: two blocks of USM of this queue that do not overlap (this function's contract).
        unsafe { self.queue.copy(to.as_ptr(), from.as_ptr(), size_bytes) }.is_ok()
    }
}

impl fmt::Debug for UsmPages {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("UsmPages").field("kind", &self.kind.name()).field("device", &self.queue.device()).finish()
    }
}
