//! A value that is only reached under its lock.

use super::{ForkLock, ReleaseAtEnd};
use std::cell::UnsafeCell;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};

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
    /// The value, until what is returned is dropped; whoever has it must not lock again.
    #[inline]
    #[cfg_attr(not(feature = "python"), allow(dead_code, reason = "for the binding"))]
    pub(crate) fn hold(&self) -> Holding<'_, T> {
        self.lock.acquire();
        Holding(self, PhantomData)
    }

    /// The same where nobody has it just now.
    #[cfg_attr(not(feature = "python"), allow(dead_code, reason = "for the binding"))]
    pub(crate) fn try_hold(&self) -> Option<Holding<'_, T>> {
        self.lock.try_acquire().then(|| Holding(self, PhantomData))
    }

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

/// The value of a [`Behind`], whose lock is let go when this is dropped. It stays on its thread: the value may be for
/// one thread at a time.
pub(crate) struct Holding<'a, T>(&'a Behind<ForkLock, T>, PhantomData<*const T>);

impl<T> Deref for Holding<'_, T> {
    type Target = T;

    #[inline]
    #[allow(unsafe_code, reason = "a lock's cell")]
    fn deref(&self) -> &T {
        // SAFETY: `hold` and `try_hold` took the lock for this, which lets it go when it is dropped.
        unsafe { &*self.0.value.get() }
    }
}

impl<T> DerefMut for Holding<'_, T> {
    #[inline]
    #[allow(unsafe_code, reason = "a lock's cell")]
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: as in `deref`, and this is the only reference to it.
        unsafe { &mut *self.0.value.get() }
    }
}

impl<T> Drop for Holding<'_, T> {
    #[inline]
    fn drop(&mut self) {
        self.0.lock.release();
    }
}
