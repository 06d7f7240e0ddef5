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

    /// Takes them, and locks of other kinds.
    fn before_fork(&self) {
        self.for_each_lock(&mut ForkLock::acquire);
    }

    /// Lets them go, in the parent and in the child.
    fn after_fork(&self) {
        self.for_each_lock(&mut ForkLock::release);
    }
}

/// From now on the locks of `holder` are taken before `fork` and let go on both sides after it, while it lives.
pub(crate) fn hold_across_fork(holder: Weak<dyn HeldAcrossFork>) {
    holders::enter(holder, true);
}

/// The same until the answer is dropped, which `holder` does with itself: a fork then pays for what is alive, and not
/// for what once was.
pub(crate) fn hold_across_fork_until(holder: Weak<dyn HeldAcrossFork>) -> HeldUntilDropped {
    HeldUntilDropped { number: holders::enter(holder, false) }
}

/// See [`hold_across_fork_until`].
#[derive(Debug)]
pub(crate) struct HeldUntilDropped {
    number: u64,
}

impl Drop for HeldUntilDropped {
    fn drop(&mut self) {
        holders::leave(self.number);
    }
}

/// What is called around the locks of all holders: before the first is taken, and after the last is let go.
#[derive(Debug)]
#[cfg_attr(any(ctxalloc_loom, miri), allow(dead_code, reason = "neither forks"))]
pub(crate) struct AroundFork {
    pub(crate) before: fn(),
    pub(crate) in_parent: fn(),
    pub(crate) in_child: fn(),
}

/// From now on these are called at each `fork`. There is one such set of functions: a second one is ignored.
#[cfg(not(any(ctxalloc_loom, miri)))]
pub(crate) fn around_fork(calls: AroundFork) {
    holders::around(calls);
}

#[cfg(not(any(ctxalloc_loom, miri)))]
#[allow(unsafe_code, reason = "pthread_atfork")]
mod holders {
    use super::{AroundFork, FORKS, ForkLock, HeldAcrossFork, Locked};
    use crate::sync::Made;
    use std::cell::Cell;
    use std::collections::BTreeMap;
    use std::ptr::null_mut;
    use std::sync::atomic::Ordering;
    use std::sync::{Arc, Weak};

    #[derive(Default)]
    struct Holders {
        /// By age; and whether we have to find out when it is gone.
        all: BTreeMap<u64, (Weak<dyn HeldAcrossFork>, bool)>,
        entered: u64,
        /// How many are left to us to find; looked for when there are twice as many as were alive the last time.
        left_to_us: usize,
        looked_at: usize,
    }

    struct Held {
        holders: Vec<Arc<dyn HeldAcrossFork>>,
        around: Option<&'static AroundFork>,
    }

    static HOLDERS: Made<Locked<Holders>> = Made::new();
    static AROUND: Made<AroundFork> = Made::new();
    thread_local! {
        /// What the forking thread holds between `before` and `after`. A plain pointer: threads may fork in their last
        /// destructors.
        static HELD: Cell<*mut Held> = const { Cell::new(null_mut()) };
    }

    extern "C" fn before() {
        // Racers of the first use may each hook in: the first of them has done it then.
        let Some(holders) = HOLDERS.get().filter(|_| HELD.get().is_null()) else { return };
        let around = AROUND.get();
        if let Some(around) = around {
            (around.before)();
        }
        holders.lock.acquire();
        // SAFETY: the lock is held by us alone.
        let all = unsafe { &(*holders.value.get()).all };
        // The youngest first: a strategy that wraps another locks itself before it, and was made after it.
        // In its box before any lock is taken: what allocates may be one of them.
        let holders = all.values().rev().filter_map(|(holder, _)| holder.upgrade()).collect();
        let held = Box::new(Held { holders, around });
        held.holders.iter().for_each(|holder| holder.before_fork());
        HELD.set(Box::into_raw(held));
    }

    /// Lets all locks go; nothing where `before` took none.
    fn after() -> Option<Box<Held>> {
        FORKS.fetch_add(1, Ordering::Relaxed);
        let held = HELD.replace(null_mut());
        let holders = HOLDERS.get().filter(|_| !held.is_null())?;
        // SAFETY: made by `before` on this thread, and taken out of its place.
        let held = unsafe { Box::from_raw(held) };
        held.holders.iter().rev().for_each(|holder| holder.after_fork());
        ForkLock::release(&holders.lock);
        Some(held)
    }

    extern "C" fn in_parent() {
        let Some(held) = after() else { return };
        if let Some(around) = held.around {
            (around.in_parent)();
        }
        // Last, when nothing is locked any more: another thread may have left us the last reference to a holder, whose
        // end takes locks.
        drop(held);
    }

    extern "C" fn in_child() {
        let Some(held) = after() else { return };
        let Held { holders, around } = *held;
        if let Some(around) = around {
            (around.in_child)();
        }
        // Those that only we have were being dropped by a thread that is not here. They stay: their end may need what
        // others set right in their own functions for `fork`, which may come after this one.
        holders.into_iter().filter(|holder| Arc::strong_count(holder) == 1).for_each(std::mem::forget);
    }

    fn holders() -> &'static Locked<Holders> {
        HOLDERS.get_or_make(|| {
            // Before anybody can see the list: no fork falls between it and its hold.
            // Fails only for want of memory, and then a child of a process that allocates while it forks may hang.
            // SAFETY: the functions live as long as the process: neither executables nor extension modules are unloaded.
            let _ = unsafe { libc::pthread_atfork(Some(before), Some(in_parent), Some(in_child)) };
            Locked::new(Holders::default())
        })
    }

    pub(super) fn around(calls: AroundFork) {
        holders();
        AROUND.get_or_make(|| calls);
    }

    pub(super) fn enter(holder: Weak<dyn HeldAcrossFork>, is_left_to_us: bool) -> u64 {
        holders().with(|holders| {
            if is_left_to_us && holders.left_to_us >= holders.looked_at.max(16) * 2 {
                holders.all.retain(|_, (holder, is_left_to_us)| !*is_left_to_us || holder.strong_count() > 0);
                holders.left_to_us = holders.all.values().filter(|(_, is_left_to_us)| *is_left_to_us).count();
                holders.looked_at = holders.left_to_us;
            }
            holders.left_to_us += usize::from(is_left_to_us);
            holders.entered += 1;
            holders.all.insert(holders.entered, (holder, is_left_to_us));
            holders.entered
        })
    }

    pub(super) fn leave(number: u64) {
        // What is taken out goes outside of the lock.
        drop(holders().with(|holders| holders.all.remove(&number)));
    }
}

/// Neither loom nor Miri forks; the locks are only shown, so that this much is checked there too.
#[cfg(any(ctxalloc_loom, miri))]
mod holders {
    use super::HeldAcrossFork;
    use std::sync::Weak;

    pub(super) fn enter(holder: Weak<dyn HeldAcrossFork>, _is_left_to_us: bool) -> u64 {
        if let Some(holder) = holder.upgrade() {
            holder.before_fork();
            holder.after_fork();
        }
        0
    }

    pub(super) fn leave(_number: u64) {}
}
