//! `Biased`: a value of one thread, its owner, which other threads may reach at times.
//!
//! The owner uses no atomic read-modify-write: it marks that it is inside (two plain stores of constants, so that no
//! use waits for the number that the last one stored) and checks for a visitor.
//! A visitor announces itself, calls `membarrier`, which runs a fence on every processor that runs a thread of this
//! process, and waits until the owner is outside. Why the two exclude each other: the owner stores its mark, then loads
//! `visited`; the visitor stores `visited`, then loads the mark. One of them must see the other (Dekker), as in
//! `owner`.
//!
//! Where the system has no `membarrier` there are no visits.
//!
//! What runs inside moves pointers and numbers of our own: no code of a user, nothing that allocates. Should it panic
//! all the same, its marks are taken away as it unwinds: a mark that stayed would let visitors in beside the owner for
//! ever, or keep all of them out.

use super::{AtomicU32, Ordering, membarrier, yield_now};
use std::cell::UnsafeCell;

#[derive(Debug)]
pub(crate) struct Biased<T> {
    /// [`UNUSED`], [`INSIDE`] or [`USED`].
    /// - set to `INSIDE`: when the owner goes inside, by it alone.
    /// - set to `USED`: when the owner is outside again, by it alone.
    /// - set to `UNUSED`: from `USED` only, by who asks whether it was used ([`take_used`](Biased::take_used)).
    mark: AtomicU32,
    /// - set to 1: by a visitor, from 0 only.
    /// - set to 0: by that visitor, when it leaves.
    visited: AtomicU32,
    value: UnsafeCell<T>,
}

/// The owner is outside, and was not inside since somebody asked.
const UNUSED: u32 = 0;
/// The owner is inside.
const INSIDE: u32 = 1;
/// The owner is outside, and was inside.
const USED: u32 = 2;

// SAFETY: the value is reached by the owner while nobody visits, and by one visitor while the owner is outside.
#[allow(unsafe_code, reason = "a lock's cell")]
unsafe impl<T: Send> Sync for Biased<T> {}

impl<T> Biased<T> {
    #[cfg(not(ctxalloc_loom))]
    pub(crate) const fn new(value: T) -> Self {
        Self { mark: AtomicU32::new(UNUSED), visited: AtomicU32::new(0), value: UnsafeCell::new(value) }
    }

    #[cfg(ctxalloc_loom)]
    pub(crate) fn new(value: T) -> Self {
        Self { mark: AtomicU32::new(UNUSED), visited: AtomicU32::new(0), value: UnsafeCell::new(value) }
    }

    /// Runs `work` on the value. `work` is short. If it panics, the owner is outside again, and the value as it left
    /// it.
    ///
    /// # Safety
    /// - only one thread, the owner, calls this; never from inside `work`, be it of `own` or of `visit`.
    #[inline]
    #[allow(unsafe_code, reason = "a lock's cell")]
    pub(crate) unsafe fn own<R>(&self, work: impl FnOnce(&mut T) -> R) -> R {
        loop {
            self.mark.store(INSIDE, Ordering::Relaxed);
            membarrier::light(); // the load comes after the store
            // Acquire pairs with the Release at the end of `visit`.
            if self.visited.load(Ordering::Acquire) == 0 {
                break;
            }
            self.wait_for_visitor();
        }
        // Release pairs with the Acquire in `visit`.
        let _outside = StoreAtEnd(&self.mark, USED);
        // SAFETY: no visitor is here, and one that comes from now on waits until the mark is gone. `work` cannot keep
        // the reference, and the owner has no other one (this function's contract).
        work(unsafe { &mut *self.value.get() })
    }

    /// [`own`](Self::own) until the returned value is dropped; `None`, without waiting, if somebody visits. A value and
    /// no closure, since the compiler is not sure to inline those.
    ///
    /// # Safety
    /// - as for `own`: neither it nor this is called until the returned value is dropped.
    #[inline(always)]
    #[allow(unsafe_code, reason = "a lock's cell")]
    pub(crate) unsafe fn enter(&self) -> Option<Inside<'_, T>> {
        self.mark.store(INSIDE, Ordering::Relaxed);
        membarrier::light(); // the load comes after the store
        // Release pairs with the Acquire in `visit`.
        let outside = StoreAtEnd(&self.mark, USED);
        // Acquire pairs with the Release at the end of `visit`.
        if self.visited.load(Ordering::Acquire) != 0 {
            return None;
        }
        // SAFETY: no visitor is here, and one that comes from now on waits until the mark is gone, with `outside`. The
        // owner has no other reference (this function's contract).
        Some(Inside { value: unsafe { &mut *self.value.get() }, _outside: outside })
    }

    #[cold]
    fn wait_for_visitor(&self) {
        self.mark.store(USED, Ordering::Release);
        while self.visited.load(Ordering::Relaxed) != 0 {
            yield_now();
        }
    }

    /// Whether there can be visits.
    pub(crate) fn can_be_visited() -> bool {
        membarrier::try_heavy()
    }

    /// Whether the owner was inside since this was asked last, or is. For one who asks at a time.
    pub(crate) fn take_used(&self) -> bool {
        // Acquire: a visitor that finds `UNUSED` comes after the use, as one that finds `USED` does.
        self.mark.compare_exchange(USED, UNUSED, Ordering::Acquire, Ordering::Relaxed).is_ok() || self.is_in_use()
    }

    /// Whether the owner is inside just now.
    pub(crate) fn is_in_use(&self) -> bool {
        self.mark.load(Ordering::Relaxed) == INSIDE
    }

    /// Runs `work` on the value where there is no owner any more.
    ///
    /// # Safety
    /// - the owner is gone (a child of `fork` lacks it), was outside, and nobody visits.
    #[allow(unsafe_code, reason = "a lock's cell")]
    pub(crate) unsafe fn abandoned<R>(&self, work: impl FnOnce(&mut T) -> R) -> R {
        // SAFETY: nobody else reaches it (this function's contract).
        work(unsafe { &mut *self.value.get() })
    }

    /// Runs `work` on the value in place of the owner, which waits if it comes. `None` if another thread visits, or if
    /// there can be no visits. `work` is short and uses no `Biased` of which this thread is the owner. If it panics,
    /// the visit is over, and the value as `work` left it.
    #[allow(unsafe_code, reason = "a lock's cell")]
    pub(crate) fn visit<R>(&self, work: impl FnOnce(&mut T) -> R) -> Option<R> {
        // Acquire pairs with the Release of the last visitor.
        if self.visited.compare_exchange(0, 1, Ordering::Acquire, Ordering::Relaxed).is_err() {
            return None;
        }
        let _over = StoreAtEnd(&self.visited, 0);
        membarrier::try_heavy().then(|| {
            // Until the mark is gone: a new one is stored Relaxed, which does not order the owner's work before it.
            while self.mark.load(Ordering::Acquire) == INSIDE {
                yield_now();
            }
            // SAFETY: the owner is outside; should it come again, it sees `visited`. There is one visitor, and `work`
            // cannot keep the reference.
            work(unsafe { &mut *self.value.get() })
        })
    }
}

/// The owner is inside until it is dropped.
pub(crate) struct Inside<'a, T> {
    pub(crate) value: &'a mut T,
    _outside: StoreAtEnd<'a>,
}

/// Stores a number (Release) when it is dropped, by a panic too.
struct StoreAtEnd<'a>(&'a AtomicU32, u32);

impl Drop for StoreAtEnd<'_> {
    #[inline]
    fn drop(&mut self) {
        self.0.store(self.1, Ordering::Release);
    }
}

#[cfg(all(test, not(any(ctxalloc_loom, miri))))]
mod tests {
    use super::Biased;
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use std::thread;

    #[test]
    #[allow(unsafe_code, reason = "the owner's side")]
    fn an_owner_and_its_visitors_lose_nothing() {
        let counts: Biased<[u64; 8]> = Biased::new([0; 8]);
        let (uses, visits): (u64, u64) = thread::scope(|scope| {
            let visitors: Vec<_> = (0..2)
                .map(|_| {
                    scope.spawn(|| {
                        let visit = || counts.visit(|counts| counts.iter_mut().for_each(|count| *count += 1));
                        (0..20_000).filter_map(|_| visit()).count() as u64
                    })
                })
                .collect();
            let mut uses = 0;
            while !visitors.iter().all(thread::ScopedJoinHandle::is_finished) {
                // SAFETY: this thread alone is the owner, and `work` does not call `own`.
                unsafe { counts.own(|counts| counts.iter_mut().for_each(|count| *count += 1)) };
                uses += 1;
            }
            (uses, visitors.into_iter().map(|visitor| visitor.join().expect("no panic")).sum::<u64>())
        });
        if cfg!(target_os = "linux") {
            assert!(visits > 0, "nobody visited");
        }
        assert_eq!(counts.value.into_inner(), [uses + visits; 8]);
    }

    #[test]
    #[allow(unsafe_code, reason = "the owner's side")]
    fn a_panic_inside_leaves_the_owner_outside_and_ends_a_visit() {
        let count = Biased::new(0);
        let panics = |work: &dyn Fn()| assert!(catch_unwind(AssertUnwindSafe(work)).is_err());
        // SAFETY: this thread alone is the owner, and `work` does not call `own`.
        panics(&|| unsafe { count.own(|_| panic!("inside")) });
        assert!(!count.is_in_use(), "the owner's mark stayed");
        if Biased::<()>::can_be_visited() {
            panics(&|| {
                count.visit(|_| panic!("a visitor"));
            });
            assert_eq!(count.visit(|count| *count += 1), Some(()), "the last visitor is still announced");
        }
        // SAFETY: this thread alone is the owner, and `work` does not call `own`.
        unsafe { count.own(|count| *count += 1) };
        assert!(!count.is_in_use());
    }

    #[test]
    #[allow(unsafe_code, reason = "the owner's side")]
    fn a_use_is_told_once() {
        let value = Biased::new(0);
        assert!(!value.take_used());
        // SAFETY: this thread alone is the owner, and `work` does not call `own`.
        unsafe { value.own(|_| assert!(value.take_used() && value.take_used(), "it is in use")) };
        assert!(value.take_used());
        assert!(!value.take_used());
    }
}

#[cfg(all(test, ctxalloc_loom))]
mod loom_tests {
    use super::Biased;
    use loom::cell::UnsafeCell;
    use loom::sync::Arc;

    #[test]
    #[allow(unsafe_code, reason = "the owner's side, and loom's cell")]
    fn loom_an_owner_and_its_visitors_exclude_each_other() {
        // A thread that waits looks again and again: all interleavings would take hours.
        let mut model = loom::model::Builder::new();
        model.preemption_bound = Some(3);
        model.check(|| {
            let counted = Arc::new(Biased::new(UnsafeCell::new(0_usize)));
            let visitors: Vec<_> = (0..2)
                .map(|_| {
                    let counted = Arc::clone(&counted);
                    // SAFETY: called inside of a visit, which excludes all others.
                    let add = |count: &mut UnsafeCell<usize>| count.with_mut(|count| unsafe { *count += 1 });
                    loom::thread::spawn(move || usize::from(counted.visit(add).is_some()))
                })
                .collect();
            // SAFETY: this thread alone is the owner, and `work` does not call `own`; the count is reached inside of
            // it.
            let uses = unsafe { counted.enter() }.map_or(1, |inside| {
                inside.value.with_mut(|count| unsafe { *count += 1 });
                2
            });
            // SAFETY: this thread alone is the owner, and the first work inside has ended.
            unsafe { counted.own(|count| count.with_mut(|count| *count += 1)) };
            let visits: usize = visitors.into_iter().map(|visitor| visitor.join().expect("no panic")).sum();
            // SAFETY: this thread alone is the owner, and the visitors have ended.
            let count = unsafe { counted.own(|count| count.with(|count| *count)) };
            assert_eq!(count, uses + visits);
            assert!(visits > 0);
        });
    }
}
