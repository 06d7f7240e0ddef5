//! `UsmBlock`: a block that one of Python's arrays owns. All USM of `ctxalloc.usm.Array`s is made by
//! [`UsmBlock::new`], with its size known; `python::usm::memory` charges it to the request around it.
//!
//! Its memory is from the pool of its context, device and kind where there is one. In any other context it is an
//! allocation of SYCL's own: such contexts come and go, and nothing of them may stay when their last array is gone.

use super::pool::UsmPool;
use crate::error::Error;
use crate::source::{Queue, UsmKind};
use crate::strategy::Strategy;
use crate::trace;
use std::collections::BTreeMap;
use std::ptr::NonNull;
use std::sync::{Mutex, PoisonError};

/// At least one byte of USM, freed with this value.
#[derive(Debug)]
pub(crate) struct UsmBlock {
    start: NonNull<u8>,
    size_bytes: usize,
    origin: Origin,
}

#[derive(Debug)]
enum Origin {
    Pool(&'static UsmPool),
    Sycl(Queue),
}

// SAFETY: it owns its block alone, and pools and queues may be called from any thread.
unsafe impl Send for UsmBlock {}
// SAFETY: shared, it says only where it is.
unsafe impl Sync for UsmBlock {}

/// Each live block, by its address. Not touched in a child of `fork`, which may find it held.
static BLOCKS: Mutex<BTreeMap<usize, Live>> = Mutex::new(BTreeMap::new());

#[derive(Debug, Clone)]
struct Live {
    size_bytes: usize,
    kind: UsmKind,
    queue: Queue,
}

/// Where an address in memory of ours lies.
#[derive(Debug, Clone)]
pub(crate) struct Located {
    pub(crate) kind: UsmKind,
    /// One of the context and the device that it belongs to.
    pub(crate) queue: Queue,
    /// How many bytes there are from the address to its block's end: none where no block is. Not known where the pool
    /// has handlers or strategies, whose blocks only the pool could tell.
    pub(crate) room_bytes: Option<usize>,
}

impl UsmBlock {
    /// `size_bytes` of a kind on a queue, which are at least one; zeros where `zeroed` says so. From `pool`, which is
    /// that of the queue and kind ([`UsmPool::found`]); from SYCL where there is none.
    ///
    /// # Errors
    /// [`Error::Sycl`] where the device has no such memory, [`Error::OutOfMemory`].
    pub(crate) fn new(
        queue: &Queue,
        pool: Option<&'static UsmPool>,
        kind: UsmKind,
        size_bytes: usize,
        zeroed: bool,
    ) -> Result<Self, Error> {
        queue.require_usable()?;
        queue.require(kind)?;
        let size_bytes = size_bytes.max(1);
        let made = match pool {
            Some(pool) => {
                let made =
                    if zeroed { pool.pool().allocate_zeroed(size_bytes) } else { pool.pool().allocate(size_bytes) };
                made.map(|start| Self { start, size_bytes, origin: Origin::Pool(pool) })
            }
            None => Self::of_sycl(queue, kind, size_bytes, zeroed)?,
        };
        let handler = match kind {
            UsmKind::Device => "usm_device",
            UsmKind::Shared => "usm_shared",
            UsmKind::Host => "usm_host",
        };
        let made = made.ok_or(Error::OutOfMemory { handler: handler.into(), requested_bytes: size_bytes })?;
        let mut blocks = BLOCKS.lock().unwrap_or_else(PoisonError::into_inner);
        blocks.insert(made.start.addr().get(), Live { size_bytes, kind, queue: made.queue().clone() });
        drop(blocks);
        Ok(made)
    }

    fn of_sycl(queue: &Queue, kind: UsmKind, size_bytes: usize, zeroed: bool) -> Result<Option<Self>, Error> {
        let allocate = || queue.allocate(kind, size_bytes, 64);
        // SYCL may refuse while pools sit on memory that nobody uses.
        let Some(start) = allocate().or_else(|| if UsmPool::trim_all() == 0 { None } else { allocate() }) else {
            return Ok(None);
        };
        let made = Self { start, size_bytes, origin: Origin::Sycl(queue.clone()) };
        if zeroed && kind.is_host_accessible() {
            // SAFETY: just allocated with that many bytes, which the host can write and nobody else has.
            unsafe { start.write_bytes(0, size_bytes) };
        } else if zeroed {
            // SAFETY: just allocated with that many bytes in this queue's context, and nobody else has them.
            unsafe { queue.fill(start, 0, size_bytes) }?;
        }
        Ok(Some(made))
    }

    pub(crate) fn as_ptr(&self) -> *const u8 {
        self.start.as_ptr()
    }

    pub(crate) fn size_bytes(&self) -> usize {
        self.size_bytes
    }

    /// Where an address lies; `None` if it is not in memory of ours. `queue` says whether SYCL may be called.
    pub(crate) fn locate(queue: &Queue, address: usize) -> Option<Located> {
        if !queue.is_usable() {
            return None;
        }
        let below = {
            let blocks = BLOCKS.lock().unwrap_or_else(PoisonError::into_inner);
            blocks.range(..=address).next_back().map(|(start, live)| (address - start, live.clone()))
        };
        if let Some((offset, Live { size_bytes, kind, queue })) = below
            && offset < size_bytes
        {
            return Some(Located { kind, queue, room_bytes: Some(size_bytes - offset) });
        }
        let pool = UsmPool::around(queue, address)?;
        let room_bytes = (!pool.has_other_users()).then_some(0);
        Some(Located { kind: pool.kind(), queue: pool.queue().clone(), room_bytes })
    }

    fn queue(&self) -> &Queue {
        match &self.origin {
            Origin::Pool(pool) => pool.queue(),
            Origin::Sycl(queue) => queue,
        }
    }
}

impl Drop for UsmBlock {
    fn drop(&mut self) {
        let start = self.start;
        if self.queue().is_usable() {
            // Before anybody else can be given the address. What it keeps is let go of without the lock.
            let gone = BLOCKS.lock().unwrap_or_else(PoisonError::into_inner).remove(&start.addr().get());
            drop(gone);
        }
        match &self.origin {
            // SAFETY: `new` took it from this pool, and it is given back once.
            Origin::Pool(pool) => unsafe { pool.pool().release(start) },
            Origin::Sycl(queue) => {
                // SAFETY: `of_sycl` took it from this queue, and it is given back once.
                if let Err(error) = unsafe { queue.release(start) } {
                    trace::misuse(&error.to_string());
                }
            }
        }
    }
}
