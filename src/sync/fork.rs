//! Values behind locks that are held across `fork`, so that a child is never born with another thread's half-done work.

use super::ForkLock;
use std::cell::UnsafeCell;
use std::sync::Weak;
use std::sync::atomic::{AtomicU32, Ordering};

/// A value behind a [`ForkLock`].
#[derive(Debug)]
pub(crate) struct Locked<T> {
    lock: ForkLock,
    value: UnsafeCell<T>,
}

// SAFETY: the value is only reached by the one holder of the lock.
#[allow(unsafe_code, reason = "a lock's cell")]
unsafe impl<T: Send> Sync for Locked<T> {}

impl<T> Locked<T> {
    pub(crate) fn new(value: T) -> Self {
        Self { lock: ForkLock::new(), value: UnsafeCell::new(value) }
    }

    /// Runs `work` on the value, alone. `work` must not lock again.
    #[allow(unsafe_code, reason = "a lock's cell")]
    pub(crate) fn with<R>(&self, work: impl FnOnce(&mut T) -> R) -> R {
        // SAFETY: the lock is held by us alone, and `work` cannot keep the reference.
        self.lock.with(|| work(unsafe { &mut *self.value.get() }))
    }

    /// As [`with`](Self::with) where nobody holds the lock; else nothing, at once. For a signal handler, whose thread
    /// may be the one that holds it.
    #[allow(unsafe_code, reason = "a lock's cell")]
    pub(crate) fn try_with<R>(&self, work: impl FnOnce(&mut T) -> R) -> Option<R> {
        if !self.lock.try_acquire() {
            return None;
        }
        // SAFETY: the lock is held by us alone, and `work` cannot keep the reference.
        let answer = work(unsafe { &mut *self.value.get() });
        self.lock.release();
        Some(answer)
    }

    /// The lock itself, to be held across `fork`.
    pub(crate) fn lock(&self) -> &ForkLock {
        &self.lock
    }
}

/// How often this process, or one that it was forked from, forked since it first held locks across it. What a thread
/// knows of itself by the system's numbers holds until this changes.
#[inline]
pub(crate) fn forks() -> u32 {
    // Relaxed: a child has one thread, which counted itself.
    FORKS.load(Ordering::Relaxed)
}

static FORKS: AtomicU32 = AtomicU32::new(0);

/// Something whose locks no child may be born without: whoever forks takes them all first.
pub(crate) trait HeldAcrossFork: Send + Sync {
    /// Shows each lock, always in the same order.
    fn for_each_lock(&self, visit: &mut dyn FnMut(&ForkLock));
}

/// From now on the locks of `holder` are taken before `fork` and let go on both sides after it, while it lives.
#[cfg(not(any(ctxalloc_loom, miri)))]
#[allow(unsafe_code, reason = "pthread_atfork")]
pub(crate) fn hold_across_fork(holder: Weak<dyn HeldAcrossFork>) {
    use crate::sync::Made;
    use std::cell::Cell;
    use std::ptr::null_mut;
    use std::sync::Arc;

    type Held = Vec<Arc<dyn HeldAcrossFork>>;

    static HOLDERS: Made<Locked<Vec<Weak<dyn HeldAcrossFork>>>> = Made::new();
    thread_local! {
        /// What the forking thread holds between `before` and `after`. A plain pointer: threads may fork in their last
        /// destructors.
        static HELD: Cell<*mut Held> = const { Cell::new(null_mut()) };
    }
    extern "C" fn before() {
        // Racers of the first use may each hook in: the first of them has done it then.
        let Some(holders) = HOLDERS.get().filter(|_| HELD.get().is_null()) else { return };
        holders.lock.acquire();
        // SAFETY: the lock is held by us alone.
        let all = unsafe { &mut *holders.value.get() };
        all.retain(|holder| holder.strong_count() > 0);
        // The youngest first: a strategy that wraps another locks itself before it, and was made after it.
        let held: Held = all.iter().rev().filter_map(Weak::upgrade).collect();
        for holder in &held {
            holder.for_each_lock(&mut ForkLock::acquire);
        }
        HELD.set(Box::into_raw(Box::new(held)));
    }
    extern "C" fn after() {
        FORKS.fetch_add(1, Ordering::Relaxed);
        let held = HELD.replace(null_mut());
        let Some(holders) = HOLDERS.get().filter(|_| !held.is_null()) else { return };
        // SAFETY: made by `before` on this thread, and taken out of its place.
        let held = unsafe { Box::from_raw(held) };
        for holder in held.iter().rev() {
            holder.for_each_lock(&mut ForkLock::release);
        }
        holders.lock.release();
        // `held` goes last: the last reference to a holder may be here, and its end takes locks.
    }
    let holders = HOLDERS.get_or_make(|| {
        // Before anybody can see the list: no fork falls between it and its hold.
        // Fails only for want of memory, and then a child of a process that allocates while it forks may hang.
        // SAFETY: the functions live as long as the process: neither executables nor extension modules are unloaded.
        let _ = unsafe { libc::pthread_atfork(Some(before), Some(after), Some(after)) };
        Locked::new(Vec::new())
    });
    holders.with(|all| {
        // Those that are gone go when the list would grow: it stays within twice what is alive.
        if all.len() == all.capacity() {
            all.retain(|holder| holder.strong_count() > 0);
            all.reserve(all.len().max(16));
        }
        all.push(holder);
    });
}

/// Neither loom nor Miri forks; the locks are only shown, so that this much is checked there too.
#[cfg(any(ctxalloc_loom, miri))]
pub(crate) fn hold_across_fork(holder: Weak<dyn HeldAcrossFork>) {
    if let Some(holder) = holder.upgrade() {
        holder.for_each_lock(&mut |lock| {
            lock.acquire();
            lock.release();
        });
    }
}
