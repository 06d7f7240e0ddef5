//! The pools over USM: one for each context, device and kind that has a handler or a strategy, or that Python's default
//! queues have. They live for ever, because handlers do.

use crate::error::Error;
use crate::source::{Queue, UsmKind, UsmPages};
use crate::strategy::{Pool, PoolOptions};
use crate::unattributed::unattributed;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

/// A pool of one kind of USM in a context, on a device.
#[derive(Debug)]
pub(crate) struct UsmPool {
    queue: Queue,
    kind: UsmKind,
    pool: Pool<UsmPages>,
    #[cfg(feature = "python")]
    pages: UsmPages,
    /// Whether handlers or strategies have blocks of it: then a block that no array owns may be theirs.
    has_other_users: AtomicBool,
}

static POOLS: Mutex<Vec<&'static UsmPool>> = Mutex::new(Vec::new());

impl UsmPool {
    /// The one for this queue's context and device. Makes it where there is none.
    ///
    /// # Errors
    /// [`Error::Sycl`] where the device has no such memory.
    pub(crate) fn of(queue: &Queue, kind: UsmKind) -> Result<&'static Self, Error> {
        queue.require_usable()?; // a child of `fork` may find the lock held
        let mut pools = POOLS.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(found) = Self::among(&pools, queue, kind) {
            return Ok(found);
        }
        let _immortal = unattributed();
        let pages = UsmPages::of_any_kind(queue, kind)?;
        let pool = Pool::over(pages.clone(), PoolOptions::default());
        let made: &'static Self = Box::leak(Box::new(Self {
            queue: queue.clone(),
            kind,
            pool,
            #[cfg(feature = "python")]
            pages,
            has_other_users: AtomicBool::new(false),
        }));
        pools.push(made);
        Ok(made)
    }

    fn among(pools: &[&'static Self], queue: &Queue, kind: UsmKind) -> Option<&'static Self> {
        pools.iter().copied().find(|pool| pool.kind == kind && pool.queue.shares_memory_with(queue))
    }

    /// For a handler or a strategy, which have blocks that no array owns.
    pub(crate) fn for_handler(&self) -> Pool<UsmPages> {
        self.has_other_users.store(true, Ordering::Relaxed);
        self.pool.clone()
    }
}

#[cfg(feature = "python")]
impl UsmPool {
    /// The one for this queue's context and device, where there is one.
    pub(crate) fn found(queue: &Queue, kind: UsmKind) -> Option<&'static Self> {
        if !queue.is_usable() {
            return None; // a child of `fork` may find the lock held
        }
        Self::among(&POOLS.lock().unwrap_or_else(PoisonError::into_inner), queue, kind)
    }

    /// The one whose memory an address lies in. `queue` says whether SYCL may be called.
    pub(crate) fn around(queue: &Queue, address: usize) -> Option<&'static Self> {
        if !queue.is_usable() {
            return None;
        }
        let pools = POOLS.lock().unwrap_or_else(PoisonError::into_inner);
        pools.iter().copied().find(|pool| pool.pages.holds(address))
    }

    /// Gives back what no block needs, of all pools.
    pub(crate) fn trim_all() -> usize {
        use crate::strategy::Strategy;
        let pools = POOLS.lock().unwrap_or_else(PoisonError::into_inner).clone();
        pools.iter().map(|pool| pool.pool.trim()).sum()
    }

    pub(super) fn kind(&self) -> UsmKind {
        self.kind
    }

    pub(super) fn queue(&self) -> &Queue {
        &self.queue
    }

    pub(super) fn pool(&self) -> &Pool<UsmPages> {
        &self.pool
    }

    pub(super) fn has_other_users(&self) -> bool {
        self.has_other_users.load(Ordering::Relaxed)
    }
}
