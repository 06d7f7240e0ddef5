//! Holds locks across `fork`, so that a child never starts with data that another thread was changing.
//!
//! Threads take these locks in orders of their own: one that holds a pool's lock may allocate, and where the program's
//! global allocator is another pool, or this one, that takes more locks. So no order in which `fork` takes all of them
//! would do. It waits for each of them for a moment only; if one stays busy it lets go of all, so that whoever holds
//! that one and waits for another can go on, and begins again, with that one.

use super::ForkLock;
use super::locked::Behind;
use crate::unattributed::unattributed;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Weak};

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

/// Whether this thread is between the two sides of a `fork`, and so has taken all locks that are held across it.
#[cfg(ctxalloc_whole)]
pub(crate) fn is_forking() -> bool {
    holders::is_forking()
}

/// Where [`is_forking`] finds its answer on this thread, as long as that lives: NULL is no.
#[cfg(ctxalloc_whole)]
pub(crate) fn fork_of_this_thread() -> *const *mut std::ffi::c_void {
    holders::fork_of_this_thread()
}

/// Something whose locks no child may be born without: whoever forks takes them all first.
pub(crate) trait HeldAcrossFork: Send + Sync {
    /// Calls `visit` with each lock, always in the order in which threads take them.
    fn for_each_lock(&self, visit: &mut dyn FnMut(&ForkLock));

    /// Takes them, and locks of other kinds. False if one of them stayed busy for a moment: then none is taken.
    fn before_fork(&self) -> bool {
        self.acquire_each()
    }

    /// Releases them, in the parent and in the child.
    fn after_fork(&self) {
        self.release_each();
    }

    /// Takes each lock that is visited; false if one of them stayed busy for a moment: then none is taken.
    fn acquire_each(&self) -> bool {
        let (mut taken, mut is_busy) = (0, false);
        self.for_each_lock(&mut |lock| {
            is_busy = is_busy || !lock.acquire_soon();
            taken += usize::from(!is_busy);
        });
        if is_busy {
            self.for_each_lock(&mut |lock| {
                if taken > 0 {
                    lock.release();
                    taken -= 1;
                }
            });
        }
        !is_busy
    }

    /// Releases each lock that is visited.
    fn release_each(&self) {
        self.for_each_lock(&mut ForkLock::release);
    }
}

/// Shares `holder`, and takes its locks before each `fork` from now on, and releases them on both sides after it, while
/// it lives.
pub(crate) fn held_across_fork<T: HeldAcrossFork + 'static>(holder: T) -> Arc<T> {
    let _unattributed = unattributed();
    let holder = Arc::new(holder);
    holders::add(Arc::downgrade(&holder) as Weak<dyn HeldAcrossFork>, true);
    holder
}

/// Takes the locks of `holder` likewise until the returned value is dropped. `holder` owns it, so that a fork pays for
/// the holders that are alive, and not for those that were.
pub(crate) fn hold_across_fork_until(holder: Weak<dyn HeldAcrossFork>) -> HeldUntilDropped {
    let _unattributed = unattributed();
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

/// Has each fork from now on see to sections and records, though nothing may be held across it yet.
pub(super) fn watch() {
    holders::watch();
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
    use crate::sync::{Made, forking, standstill, threads};
    use crate::unattributed::unattributed;
    use std::cell::Cell;
    use std::collections::BTreeMap;
    use std::ptr::null_mut;
    use std::sync::atomic::Ordering;
    use std::sync::{Arc, Weak};
    use std::thread::yield_now;

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
        /// Those of earlier attempts. They may be the last references: what ends with them takes locks, and must wait
        /// until the fork is over.
        earlier: Vec<Arc<dyn HeldAcrossFork>>,
        around: Option<&'static AroundFork>,
        /// The address of the holder that was busy the last time.
        busy: usize,
        /// Whether sections were.
        were_sections_busy: bool,
    }

    static HOLDERS: Made<Locked<Holders>> = Made::new();
    static AROUND: Made<AroundFork> = Made::new();
    thread_local! {
        /// What the forking thread holds between `before` and `after`. A plain pointer: threads may fork in their last
        /// destructors.
        static HELD: Cell<*mut Held> = const { Cell::new(null_mut()) };
    }

    #[cfg(ctxalloc_whole)]
    pub(super) fn is_forking() -> bool {
        !HELD.get().is_null()
    }

    #[cfg(ctxalloc_whole)]
    pub(super) fn fork_of_this_thread() -> *const *mut std::ffi::c_void {
        HELD.with(Cell::as_ptr).cast()
    }

    extern "C" fn before() {
        // Racers of the first use may each hook in: the first of them has done it then.
        let Some(holders) = HOLDERS.get().filter(|_| HELD.get().is_null()) else { return };
        let _unattributed = unattributed();
        let around = AROUND.get();
        if let Some(around) = around {
            (around.before)();
        }
        let mut held =
            Box::new(Held { holders: Vec::new(), earlier: Vec::new(), around, busy: 0, were_sections_busy: false });
        while !held.take(holders) {
            yield_now();
        }
        HELD.set(Box::into_raw(held));
    }

    impl Held {
        /// Takes the locks of all holders, and that of their list; false if one of them is busy: then none is taken.
        fn take(&mut self, holders: &Locked<Holders>) -> bool {
            // Room for them before any lock is taken: what allocates may be one of them.
            self.holders.reserve(holders.with(|holders| holders.all.len()));
            holders.lock().acquire();
            // SAFETY: this thread took the lock just now.
            let all = unsafe { &holders.value_while_locked().all };
            if all.len() <= self.holders.capacity() {
                // The youngest first: a strategy that wraps another locks itself before it, and was made after it.
                self.holders.extend(all.values().rev().filter_map(|(holder, _)| holder.upgrade()));
                if let Some(at) = self.holders.iter().position(|holder| address(holder) == self.busy) {
                    self.holders[..=at].rotate_right(1);
                }
                if self.take_each() {
                    return true;
                }
            }
            holders.lock().release();
            keep_one_of_each(&mut self.earlier, &mut self.holders);
            false
        }

        /// Takes the locks of all holders, and lets no other thread begin a long section; false if one of them is busy:
        /// then nothing is taken. Sections are waited for last, or first if they were what was busy the last time.
        fn take_each(&mut self) -> bool {
            let is_first = self.were_sections_busy;
            if is_first && !standstill::begin() {
                return false;
            }
            let taken = self.holders.iter().take_while(|holder| holder.before_fork()).count();
            match self.holders.get(taken) {
                None if is_first || standstill::begin() => return true,
                None => self.were_sections_busy = true,
                Some(busy) => {
                    self.busy = address(busy);
                    self.were_sections_busy = false;
                    if is_first {
                        forking::end();
                    }
                }
            }
            self.holders[..taken].iter().rev().for_each(|holder| holder.after_fork());
            false
        }
    }

    fn address(holder: &Arc<dyn HeldAcrossFork>) -> usize {
        Arc::as_ptr(holder).addr()
    }

    /// Moves `more` to `kept`, and drops what is there twice: that is never the last reference.
    fn keep_one_of_each(kept: &mut Vec<Arc<dyn HeldAcrossFork>>, more: &mut Vec<Arc<dyn HeldAcrossFork>>) {
        kept.append(more);
        kept.sort_unstable_by_key(address);
        kept.dedup_by_key(|holder| address(holder));
    }

    /// Calls `first`, then releases all locks; nothing where `before` took none.
    fn after(first: fn()) -> Option<Box<Held>> {
        FORKS.fetch_add(1, Ordering::Relaxed);
        let held = HELD.replace(null_mut());
        let holders = HOLDERS.get().filter(|_| !held.is_null())?;
        first();
        // SAFETY: `before` made it from a box on this thread, and its place has no pointer to it any more.
        let held = unsafe { Box::from_raw(held) };
        held.holders.iter().rev().for_each(|holder| holder.after_fork());
        forking::end();
        holders.lock().release();
        Some(held)
    }

    extern "C" fn in_parent() {
        let Some(held) = after(|| ()) else { return };
        if let Some(around) = held.around {
            (around.in_parent)();
        }
        // Last, when nothing is locked any more: another thread may have left us the last reference to a holder, whose
        // end takes locks.
        drop(held);
    }

    extern "C" fn in_child() {
        // Before another thread of the child takes a record: a function that was called before this one may have
        // started some.
        let Some(held) = after(threads::begin_child) else { return };
        let Held { mut holders, mut earlier, around, .. } = *held;
        if let Some(around) = around {
            (around.in_child)();
        }
        // Those that only we have were being dropped by a thread that is not here. They stay: their end may need what
        // others set right in their own functions for `fork`, which may come after this one.
        keep_one_of_each(&mut holders, &mut earlier);
        holders.into_iter().filter(|holder| Arc::strong_count(holder) == 1).for_each(std::mem::forget);
    }

    pub(super) fn watch() {
        holders();
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
            assert!(holder.before_fork(), "nobody else has it yet");
            holder.after_fork();
        }
        0
    }

    pub(super) fn remove(_number: u64) {}

    pub(super) fn watch() {}
}

#[cfg(all(test, not(any(ctxalloc_loom, miri, windows))))]
#[allow(unsafe_code, reason = "fork")]
mod tests {
    use super::{ForkLock, HeldAcrossFork, held_across_fork};
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::thread;

    struct Two([ForkLock; 2]);

    impl HeldAcrossFork for Two {
        fn for_each_lock(&self, visit: &mut dyn FnMut(&ForkLock)) {
            self.0.iter().for_each(visit);
        }
    }

    /// Waits for the end of our child; its status.
    fn end_of(pid: libc::pid_t) -> libc::c_int {
        let mut status = -1;
        // SAFETY: our child, and a place for its status.
        assert_eq!(unsafe { libc::waitpid(pid, &raw mut status, 0) }, pid);
        status
    }

    /// Forks many times while a thread takes the locks of two holders in this order. Ends the process if it hangs.
    fn fork_while_locking(order: [(usize, usize); 4]) {
        let holders = [(); 2].map(|()| held_across_fork(Two([(); 2].map(|()| ForkLock::new()))));
        let is_over = AtomicBool::new(false);
        let lock = |number: usize| &holders[order[number].0].0[order[number].1];
        thread::scope(|scope| {
            scope.spawn(|| {
                while !is_over.load(Ordering::Relaxed) {
                    (0..4).for_each(|number| lock(number).acquire());
                    (0..4).for_each(|number| lock(number).release());
                }
            });
            for _ in 0..40 {
                // SAFETY: the child takes locks that nobody else has, and ends.
                let pid = unsafe { libc::fork() };
                if pid == 0 {
                    (0..4).for_each(|number| lock(number).acquire());
                    // SAFETY: ends the child.
                    unsafe { libc::_exit(0) };
                }
                assert_eq!(end_of(pid), 0, "the child hung: it was born with a lock that nobody lets go");
            }
            is_over.store(true, Ordering::Relaxed);
        });
    }

    #[test]
    fn a_fork_waits_for_no_thread_that_waits_for_it() {
        // In a child, which an alarm ends if it hangs: it takes a second, and on a machine that has no time for it half
        // a minute.
        // SAFETY: the child runs only the code below and then ends.
        let pid = unsafe { libc::fork() };
        if pid == 0 {
            // SAFETY: alarm takes any number; nobody handles its signal.
            unsafe { libc::alarm(300) };
            let (older, younger) = (0, 1);
            fork_while_locking([(older, 0), (older, 1), (younger, 0), (younger, 1)]);
            fork_while_locking([(younger, 0), (older, 0), (younger, 1), (older, 1)]);
            // SAFETY: ends the child.
            unsafe { libc::_exit(0) };
        }
        assert_eq!(end_of(pid), 0, "a fork hung, or its child");
    }
}
