//! Atomics (loom's under `--cfg ctxalloc_loom`), a lock that survives `fork`, and a witness for loom.
//! A leaf: imports no layer.

mod biased;
mod called;
mod fork;
mod forking;
mod locked;
#[cfg_attr(any(ctxalloc_loom, miri), allow(dead_code, reason = "as below"))]
mod made;
mod membarrier;
mod owner;
mod standstill;
mod threads;

pub(crate) use biased::{Biased, Inside, Keyed};
pub(crate) use called::Called;
#[cfg(not(any(ctxalloc_loom, miri, windows)))]
pub(crate) use fork::{AroundFork, around_fork};
pub(crate) use fork::{HeldAcrossFork, HeldUntilDropped, Locked, forks, held_across_fork, hold_across_fork_until};
#[cfg(ctxalloc_whole)]
pub(crate) use fork::{fork_of_this_thread, is_forking};
#[cfg(feature = "python")]
pub(crate) use locked::Holding;
#[cfg_attr(
    any(ctxalloc_loom, miri),
    allow(unused_imports, reason = "its users need a process to fork, or Python")
)]
pub(crate) use made::{Made, Once};
pub(crate) use owner::{AsOwnerLock, Owned, OwnerLock, enter_all_owned, wait_for_brief_sections, with_all};
pub(crate) use threads::{Here, Section};

#[cfg(ctxalloc_loom)]
pub(crate) use loom::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, Ordering};
#[cfg(not(ctxalloc_loom))]
pub(crate) use std::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, Ordering};

#[cfg(ctxalloc_loom)]
use loom::thread::yield_now;
#[cfg(not(ctxalloc_loom))]
use std::thread::yield_now;

/// A lock for short, rare, infallible work: it spins, then yields.
///
/// `std`'s mutex would do but for `fork`: a child born while another thread holds it could never register again. This
/// one can be taken before `fork` and released on both sides, see `handler::table`. Laid out for C: it is part of the
/// table that copies of this crate share.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct ForkLock(AtomicU32);

/// How often a waiting thread looks again at once: about ten microseconds. Loom explores each look.
const SPINS: u32 = if cfg!(any(ctxalloc_loom, miri)) { 0 } else { 200 };

/// How often a thread that cannot wait for ever lets others run before it gives up.
const SOON: usize = if cfg!(any(ctxalloc_loom, miri)) { 1 } else { 1000 };

const FREE: u32 = 0;
const HELD: u32 = 1;

impl ForkLock {
    pub(crate) fn new() -> Self {
        Self(AtomicU32::new(FREE))
    }

    /// Runs `work` alone; a panic in it lets the lock go. `work` must not lock again.
    pub(crate) fn with<R>(&self, work: impl FnOnce() -> R) -> R {
        self.acquire();
        let _release = ReleaseAtEnd(self);
        work()
    }

    /// Takes the lock. Pairs with [`release`](Self::release).
    pub(crate) fn acquire(&self) {
        let mut turns = 0;
        // Acquire pairs with the Release below: the next holder sees all of the last one's writes.
        while self.0.compare_exchange_weak(FREE, HELD, Ordering::Acquire, Ordering::Relaxed).is_err() {
            // It is usually held for a moment: yielding would cost a time slice.
            if turns < SPINS {
                turns += 1;
                std::hint::spin_loop();
            } else {
                yield_now();
            }
        }
    }

    /// Takes the lock if it becomes free within a fraction of a millisecond, and says whether it did.
    pub(crate) fn acquire_soon(&self) -> bool {
        (0..SPINS).any(|_| {
            std::hint::spin_loop();
            self.try_acquire()
        }) || (0..SOON).any(|_| {
            let is_taken = self.try_acquire();
            if !is_taken {
                yield_now();
            }
            is_taken
        })
    }

    /// Takes the lock if nobody holds it, and says whether it did. Waits for nobody: fit for a signal handler.
    pub(crate) fn try_acquire(&self) -> bool {
        // Acquire pairs with the Release below, as in `acquire`.
        self.0.compare_exchange(FREE, HELD, Ordering::Acquire, Ordering::Relaxed).is_ok()
    }

    /// Releases the lock.
    pub(crate) fn release(&self) {
        self.0.store(FREE, Ordering::Release);
    }
}

/// Releases a lock when it is dropped, by a panic too.
struct ReleaseAtEnd<'a>(&'a ForkLock);

impl Drop for ReleaseAtEnd<'_> {
    #[inline]
    fn drop(&mut self) {
        self.0.release();
    }
}

/// A placeholder for the plain fields of a value that is published through an atomic. Loom sees no plain memory; it
/// sees this: a [`look`](Self::look) from a thread that cannot have seen the value being made fails the model.
/// Elsewhere it is nothing at all.
#[derive(Debug)]
pub(crate) struct Witness(#[cfg(ctxalloc_loom)] loom::cell::UnsafeCell<()>);

#[cfg(not(ctxalloc_loom))]
impl Witness {
    pub(crate) const fn new() -> Self {
        Self()
    }

    #[inline]
    pub(crate) const fn look(&self) {}
}

#[cfg(ctxalloc_loom)]
impl Witness {
    pub(crate) fn new() -> Self {
        Self(loom::cell::UnsafeCell::new(()))
    }

    pub(crate) fn look(&self) {
        self.0.with(|_| ());
    }
}

// SAFETY: there is nothing in it to race for; loom reports the access, which is its purpose.
#[cfg(ctxalloc_loom)]
#[allow(unsafe_code, reason = "loom's cell is not Sync, and the tables it stands in are")]
unsafe impl Sync for Witness {}

#[cfg(all(test, ctxalloc_loom))]
mod loom_tests {
    use super::ForkLock;
    use loom::cell::UnsafeCell;
    use loom::sync::Arc;
    use loom::thread;

    #[test]
    #[allow(unsafe_code, reason = "the counter that the lock protects")]
    fn loom_the_lock_lets_one_in_at_a_time_and_hands_its_writes_on() {
        struct Counted {
            lock: ForkLock,
            count: UnsafeCell<usize>,
        }
        // SAFETY: `count` is only touched under `lock`; loom checks that this suffices.
        unsafe impl Sync for Counted {}
        // SAFETY: a number and a lock, neither of which belongs to a thread.
        unsafe impl Send for Counted {}

        loom::model(|| {
            let counted = Arc::new(Counted { lock: ForkLock::new(), count: UnsafeCell::new(0) });
            let add = |counted: &Counted| {
                // SAFETY: the lock is held, under which alone the count is reached.
                counted.lock.with(|| counted.count.with_mut(|count| unsafe { *count += 1 }));
            };
            let other = thread::spawn({
                let counted = Arc::clone(&counted);
                move || add(&counted)
            });
            add(&counted);
            other.join().expect("no panic");
            // SAFETY: the lock is held, under which alone the count is reached.
            let total = counted.lock.with(|| counted.count.with(|count| unsafe { *count }));
            assert_eq!(total, 2);
        });
    }
}
