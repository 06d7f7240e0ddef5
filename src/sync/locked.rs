//! A value that is only reached under its lock.

use super::{ForkLock, ReleaseAtEnd};
use std::cell::UnsafeCell;

/// # Safety
/// - while [`with`](Self::with) runs `work`, it runs no other work under the same lock, and what that work wrote is
///   seen by the next.
#[allow(unsafe_code, reason = "a lock's cell relies on it")]
pub(crate) unsafe trait Lock {
    fn new() -> Self;
    /// Runs `work` alone; a panic in it lets the lock go. `work` must not lock again.
    fn with<R>(&self, work: impl FnOnce() -> R) -> R;
}

// SAFETY: `with` holds the lock while it runs `work`; taking it (Acquire) comes after the last release (Release).
#[allow(unsafe_code, reason = "a lock")]
unsafe impl Lock for ForkLock {
    fn new() -> Self {
        Self::new()
    }

    #[inline]
    fn with<R>(&self, work: impl FnOnce() -> R) -> R {
        self.with(work)
    }
}

/// A value behind a lock: `Locked` and `Owned`.
#[derive(Debug)]
pub(crate) struct Behind<L, T> {
    lock: L,
    value: UnsafeCell<T>,
}

// SAFETY: the value is only reached by the one who has the lock, on whatever thread.
#[allow(unsafe_code, reason = "a lock's cell")]
unsafe impl<L: Sync, T: Send> Sync for Behind<L, T> {}

impl<L: Lock, T> Behind<L, T> {
    pub(crate) fn new(value: T) -> Self {
        Self { lock: L::new(), value: UnsafeCell::new(value) }
    }

    /// Runs `work` on the value, alone. `work` must not lock again. If it panics, the value stays as it left it.
    #[inline]
    #[allow(unsafe_code, reason = "a lock's cell")]
    pub(crate) fn with<R>(&self, work: impl FnOnce(&mut T) -> R) -> R {
        // SAFETY: the lock excludes everybody else, and `work` cannot keep the reference.
        self.lock.with(|| work(unsafe { &mut *self.value.get() }))
    }

    /// The lock itself, to be held across `fork`.
    pub(crate) fn lock(&self) -> &L {
        &self.lock
    }
}

impl<T> Behind<ForkLock, T> {
    /// As [`with`](Self::with) where nobody holds the lock; else nothing, at once. For a signal handler, whose thread
    /// may be the one that holds it.
    #[cfg_attr(windows, allow(dead_code, reason = "for signal handlers"))]
    #[allow(unsafe_code, reason = "a lock's cell")]
    pub(crate) fn try_with<R>(&self, work: impl FnOnce(&mut T) -> R) -> Option<R> {
        if !self.lock.try_acquire() {
            return None;
        }
        let _release = ReleaseAtEnd(&self.lock);
        // SAFETY: this thread just took the lock, and `work` cannot keep the reference.
        Some(work(unsafe { &mut *self.value.get() }))
    }

    /// The value, for a thread that took the lock itself.
    ///
    /// # Safety
    /// - the thread holds the lock for as long as it has the reference.
    #[cfg(not(any(ctxalloc_loom, miri)))]
    #[allow(unsafe_code, reason = "a lock's cell")]
    pub(super) unsafe fn value_while_locked(&self) -> &T {
        // SAFETY: everybody else waits for the lock, which the caller holds.
        unsafe { &*self.value.get() }
    }
}
