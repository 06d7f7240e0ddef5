//! Atomics (loom's under `--cfg ctxalloc_loom`), and a lock that survives `fork`. A leaf: imports no layer.

#[cfg(ctxalloc_loom)]
pub(crate) use loom::sync::atomic::{AtomicPtr, AtomicU32, Ordering};
#[cfg(not(ctxalloc_loom))]
pub(crate) use std::sync::atomic::{AtomicPtr, AtomicU32, Ordering};

#[cfg(ctxalloc_loom)]
use loom::thread::yield_now;
#[cfg(not(ctxalloc_loom))]
use std::thread::yield_now;

/// A lock for short, rare, infallible work: it spins, then yields.
///
/// `std`'s mutex would do but for `fork`: a child born while another thread holds it could never register
/// again. This one can be taken before `fork` and let go on both sides, see `handler::table`. Laid out for C:
/// it is part of the table that copies of this crate share.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct ForkLock(AtomicU32);

const FREE: u32 = 0;
const HELD: u32 = 1;

impl ForkLock {
    pub(crate) fn new() -> Self {
        Self(AtomicU32::new(FREE))
    }

    /// Runs `work` alone. `work` must not panic and must not lock again.
    pub(crate) fn with<R>(&self, work: impl FnOnce() -> R) -> R {
        struct Release<'a>(&'a ForkLock);
        impl Drop for Release<'_> {
            fn drop(&mut self) {
                self.0.release();
            }
        }
        self.acquire();
        let _release = Release(self);
        work()
    }

    /// Takes the lock. Pairs with [`release`](Self::release).
    pub(crate) fn acquire(&self) {
        // Acquire pairs with the Release below: the next holder sees all of the last one's writes.
        while self.0.compare_exchange_weak(FREE, HELD, Ordering::Acquire, Ordering::Relaxed).is_err() {
            yield_now();
        }
    }

    /// Lets the lock go.
    pub(crate) fn release(&self) {
        self.0.store(FREE, Ordering::Release);
    }
}
