//! Holds locks across `fork`, so that a child is never born with another thread's half-done work.

use super::ForkLock;
use super::locked::Behind;
use std::sync::Weak;
use std::sync::atomic::{AtomicU32, Ordering};

/// A value behind a [`ForkLock`].
pub(crate) type Locked<T> = Behind<ForkLock, T>;

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
    /// Calls `visit` with each lock, always in the same order.
    fn for_each_lock(&self, visit: &mut dyn FnMut(&ForkLock));

    /// Takes them, and locks of other kinds.
    fn before_fork(&self) {
        self.for_each_lock(&mut ForkLock::acquire);
    }

    /// Releases them, in the parent and in the child.
    fn after_fork(&self) {
        self.for_each_lock(&mut ForkLock::release);
    }
}

/// Takes the locks of `holder` before each `fork` from now on, and releases them on both sides after it, while it lives.
pub(crate) fn hold_across_fork(holder: Weak<dyn HeldAcrossFork>) {
    holders::add(holder, true);
}

/// The same until the returned value is dropped. `holder` owns it, so that a fork pays for the holders that are alive, and
/// not for those that were.
pub(crate) fn hold_across_fork_until(holder: Weak<dyn HeldAcrossFork>) -> HeldUntilDropped {
    HeldUntilDropped { number: holders::add(holder, false) }
}

/// See [`hold_across_fork_until`].
#[derive(Debug)]
pub(crate) struct HeldUntilDropped {
    number: u64,
}

impl Drop for HeldUntilDropped {
    fn drop(&mut self) {
        holders::remove(self.number);
    }
}

/// What is called around the locks of all holders: before the first is taken, and after the last is released.
#[derive(Debug)]
#[cfg_attr(any(ctxalloc_loom, miri, windows), allow(dead_code, reason = "none of them forks"))]
pub(crate) struct AroundFork {
    pub(crate) before: fn(),
    pub(crate) in_parent: fn(),
    pub(crate) in_child: fn(),
}

/// Has these called at each `fork`. There is one such set of functions: a second one is ignored.
#[cfg(not(any(ctxalloc_loom, miri, windows)))]
pub(crate) fn around_fork(calls: AroundFork) {
    holders::around(calls);
}

#[cfg(not(any(ctxalloc_loom, miri)))]
#[allow(unsafe_code, reason = "a box that goes from one side of a fork to the other")]
mod holders {
    use super::{AroundFork, FORKS, HeldAcrossFork, Locked};
    use crate::os;
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
        added: u64,
        /// How many of them we have to look for; done when there are twice as many as were alive the last time.
        ours_to_find: usize,
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
        holders.lock().acquire();
        // SAFETY: this thread took the lock just now.
        let all = unsafe { &holders.value_while_locked().all };
        // The youngest first: a strategy that wraps another locks itself before it, and was made after it.
        // In its box before any lock is taken: what allocates may be one of them.
        let holders = all.values().rev().filter_map(|(holder, _)| holder.upgrade()).collect();
        let held = Box::new(Held { holders, around });
        held.holders.iter().for_each(|holder| holder.before_fork());
        HELD.set(Box::into_raw(held));
    }

    /// Releases all locks; nothing where `before` took none.
    fn after() -> Option<Box<Held>> {
        FORKS.fetch_add(1, Ordering::Relaxed);
        let held = HELD.replace(null_mut());
        let holders = HOLDERS.get().filter(|_| !held.is_null())?;
        // SAFETY: `before` made it from a box on this thread, and its place has no pointer to it any more.
        let held = unsafe { Box::from_raw(held) };
        held.holders.iter().rev().for_each(|holder| holder.after_fork());
        holders.lock().release();
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
            let _ = os::at_fork(Some(before), Some(in_parent), Some(in_child));
            Locked::new(Holders::default())
        })
    }

    #[cfg(not(windows))]
    pub(super) fn around(calls: AroundFork) {
        holders();
        AROUND.get_or_make(|| calls);
    }

    pub(super) fn add(holder: Weak<dyn HeldAcrossFork>, is_ours_to_find: bool) -> u64 {
        holders().with(|holders| {
            if is_ours_to_find && holders.ours_to_find >= holders.looked_at.max(16) * 2 {
                holders.all.retain(|_, (holder, is_ours_to_find)| !*is_ours_to_find || holder.strong_count() > 0);
                holders.ours_to_find = holders.all.values().filter(|(_, is_ours_to_find)| *is_ours_to_find).count();
                holders.looked_at = holders.ours_to_find;
            }
            holders.ours_to_find += usize::from(is_ours_to_find);
            holders.added += 1;
            holders.all.insert(holders.added, (holder, is_ours_to_find));
            holders.added
        })
    }

    pub(super) fn remove(number: u64) {
        // What is taken out goes outside of the lock.
        drop(holders().with(|holders| holders.all.remove(&number)));
    }
}

/// Neither loom nor Miri forks; the locks are only shown, so that this much is checked there too.
#[cfg(any(ctxalloc_loom, miri))]
mod holders {
    use super::HeldAcrossFork;
    use std::sync::Weak;

    pub(super) fn add(holder: Weak<dyn HeldAcrossFork>, _is_ours_to_find: bool) -> u64 {
        if let Some(holder) = holder.upgrade() {
            holder.before_fork();
            holder.after_fork();
        }
        0
    }

    pub(super) fn remove(_number: u64) {}
}
