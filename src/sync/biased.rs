//! `Biased`: a value of one thread, its owner, which other threads may reach at times.
//!
//! The owner uses no atomic read-modify-write: it marks that it is inside (two plain stores of constants, so that no
//! use waits for the number that the last one stored) and looks at the *gate*: one word that tells whether there is a
//! visitor, and if not, what the value has at hand ([`Keyed`]). So who needs that looks at nothing else.
//! A visitor closes the gate, calls `membarrier`, which runs a fence on every processor that runs a thread of this
//! process, and waits until the owner is outside. Why the two exclude each other: the owner stores its mark, then loads
//! the gate; the visitor stores the gate, then loads the mark. One of them must see the other (Dekker), as in `owner`.
//!
//! Where the system has no `membarrier` there are no visits.
//!
//! What runs inside moves pointers and numbers of our own: no code of a user, nothing that allocates. Should it panic
//! all the same, its marks are taken away as it unwinds: a mark that stayed would let visitors in beside the owner for
//! ever, or keep all of them out.

use super::{AtomicU32, AtomicU64, Ordering, membarrier, yield_now};
use std::cell::UnsafeCell;

/// A value that may have something at hand.
pub(crate) trait Keyed {
    /// What tells what it has at hand: 0 if nothing. Never [`u64::MAX`].
    fn key(&self) -> u64;
}

#[derive(Debug)]
pub(crate) struct Biased<T> {
    /// [`UNUSED`], [`INSIDE`] or [`USED`].
    /// - set to `INSIDE`: when the owner goes inside, by it alone.
    /// - set to `USED`: when the owner is outside again, by it alone.
    /// - set to `UNUSED`: from `USED` only, by who asks whether it was used ([`take_used`](Biased::take_used)).
    mark: AtomicU32,
    /// [`VISITED`], or the value's key as the owner left it; 0 since a visit.
    /// - set to `VISITED`: by a visitor, from anything else.
    /// - set to 0: by that visitor, when it leaves.
    /// - set to the key: by the owner when it goes outside, from anything but `VISITED`.
    gate: AtomicU64,
    value: UnsafeCell<T>,
}

/// The owner is outside, and was not inside since somebody asked.
const UNUSED: u32 = 0;
/// The owner is inside.
const INSIDE: u32 = 1;
/// The owner is outside, and was inside.
const USED: u32 = 2;

/// Somebody visits.
const VISITED: u64 = u64::MAX;

// SAFETY: the value is reached by the owner while nobody visits, and by one visitor while the owner is outside.
#[allow(unsafe_code, reason = "a lock's cell")]
unsafe impl<T: Send> Sync for Biased<T> {}

impl<T: Keyed> Biased<T> {
    #[cfg(not(ctxalloc_loom))]
    pub(crate) const fn new(value: T) -> Self {
        Self { mark: AtomicU32::new(UNUSED), gate: AtomicU64::new(0), value: UnsafeCell::new(value) }
    }

    #[cfg(ctxalloc_loom)]
    pub(crate) fn new(value: T) -> Self {
        Self { mark: AtomicU32::new(UNUSED), gate: AtomicU64::new(0), value: UnsafeCell::new(value) }
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
            if self.gate.load(Ordering::Acquire) != VISITED {
                break;
            }
            self.wait_for_visitor();
        }
        let _outside = StoreAtEnd(&self.mark); // after the key
        let _key = KeyAtEnd(self);
        // SAFETY: no visitor is here, and one that comes from now on waits until the mark is gone. `work` cannot keep
        // the reference, and the owner has no other one (this function's contract).
        work(unsafe { &mut *self.value.get() })
    }

    /// [`own`](Self::own) until the returned value is dropped, of a value with this key, which is not 0; `None`,
    /// without waiting, if it had another one when the owner left it, or somebody has visited since. A value and no
    /// closure, since the compiler is not sure to inline those.
    ///
    /// # Safety
    /// - as for `own`: neither it nor this is called until the returned value is dropped;
    /// - the key is not changed meanwhile.
    #[inline(always)]
    #[allow(unsafe_code, reason = "a lock's cell")]
    pub(crate) unsafe fn enter(&self, key: u64) -> Option<Inside<'_, T>> {
        self.mark.store(INSIDE, Ordering::Relaxed);
        membarrier::light(); // the load comes after the store
        let outside = StoreAtEnd(&self.mark);
        // Acquire pairs with the Release at the end of `visit`.
        if self.gate.load(Ordering::Acquire) != key {
            return None;
        }
        // SAFETY: no visitor is here, and one that comes from now on waits until the mark is gone, with `outside`. The
        // owner has no other reference (this function's contract).
        Some(Inside { value: unsafe { &mut *self.value.get() }, _outside: outside })
    }

    #[cold]
    fn wait_for_visitor(&self) {
        self.mark.store(USED, Ordering::Release);
        while self.gate.load(Ordering::Relaxed) == VISITED {
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
        let close = |gate| if gate == VISITED { None } else { Some(VISITED) };
        self.gate.fetch_update(Ordering::Acquire, Ordering::Relaxed, close).ok()?;
        let _over = Visit(&self.gate);
        membarrier::try_heavy().then(|| {
            // Until the mark is gone: a new one is stored Relaxed, which does not order the owner's work before it.
            while self.mark.load(Ordering::Acquire) == INSIDE {
                yield_now();
            }
            // SAFETY: the owner is outside; should it come again, it sees the gate. There is one visitor, and `work`
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

/// Stores (Release) that the owner is outside when it is dropped, by a panic too.
struct StoreAtEnd<'a>(&'a AtomicU32);

impl Drop for StoreAtEnd<'_> {
    #[inline]
    fn drop(&mut self) {
        // Release pairs with the Acquire in `visit`.
        self.0.store(USED, Ordering::Release);
    }
}

/// The owner, which is about to go outside, leaves the key at the gate when it is dropped, by a panic too.
struct KeyAtEnd<'a, T: Keyed>(&'a Biased<T>);

impl<T: Keyed> Drop for KeyAtEnd<'_, T> {
    #[inline]
    #[allow(unsafe_code, reason = "a lock's cell")]
    fn drop(&mut self) {
        let Biased { gate, value, .. } = self.0;
        // SAFETY: the owner is still inside, and `work` has returned its reference.
        let key = unsafe { &*value.get() }.key();
        let left = gate.load(Ordering::Relaxed);
        if left != key && left != VISITED {
            // If this fails somebody visits, and waits for the mark. Relaxed: the owner alone looks for the key.
            let _ = gate.compare_exchange(left, key, Ordering::Relaxed, Ordering::Relaxed);
        }
    }
}

/// A visit is over when it is dropped, by a panic too.
struct Visit<'a>(&'a AtomicU64);

impl Drop for Visit<'_> {
    fn drop(&mut self) {
        // Release pairs with the Acquire in `own` and `enter`, and with that of the next visitor.
        self.0.store(0, Ordering::Release);
    }
}

#[cfg(all(test, not(any(ctxalloc_loom, miri))))]
mod tests {
    use super::{Biased, Keyed};
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use std::thread;

    /// Numbers, of which the first is the key.
    #[derive(Default)]
    struct Counts([u64; 8]);

    impl Counts {
        fn count(&mut self) {
            self.0.iter_mut().for_each(|count| *count += 1);
        }
    }

    impl Keyed for Counts {
        fn key(&self) -> u64 {
            self.0[0]
        }
    }

    #[test]
    #[allow(unsafe_code, reason = "the owner's side")]
    fn a_value_is_entered_by_the_key_it_was_left_with_until_a_visit() {
        let value = Biased::new(Counts::default());
        // SAFETY: this thread alone is the owner, and `work` does not call `own`.
        let set = |key| unsafe { value.own(|counts| counts.0[0] = key) };
        // SAFETY: this thread alone is the owner, and what it gets is dropped at once.
        let enters = |key| unsafe { value.enter(key) }.is_some();
        assert!(!enters(3));
        set(3);
        assert!(enters(3) && enters(3) && !enters(4));
        set(4);
        assert!(enters(4) && !enters(3));
        let change = |counts: &mut Counts| {
            counts.0[0] = 5;
            assert_eq!(counts.0[0], 6, "inside");
        };
        // SAFETY: this thread alone is the owner, and `work` does not call `own`.
        let panics = || unsafe { value.own(change) };
        assert!(catch_unwind(AssertUnwindSafe(panics)).is_err());
        assert!(enters(5) && !enters(4), "a panic leaves the key that there is then");
        if Biased::<Counts>::can_be_visited() {
            assert_eq!(value.visit(|counts| counts.0[0]), Some(5));
            assert!(!enters(5), "nobody knows what a visitor did");
            assert!(!value.is_in_use());
            set(5);
            assert!(enters(5));
        }
        set(0);
        assert!(!enters(5));
    }

    #[test]
    #[allow(unsafe_code, reason = "the owner's side")]
    fn an_owner_and_its_visitors_lose_nothing() {
        let counts = Biased::new(Counts::default());
        let (uses, visits): (u64, u64) = thread::scope(|scope| {
            let visitors: Vec<_> = (0..2)
                .map(|_| {
                    scope.spawn(|| {
                        let visit = || counts.visit(Counts::count);
                        (0..20_000).filter_map(|_| visit()).count() as u64
                    })
                })
                .collect();
            let mut uses = 0;
            while !visitors.iter().all(thread::ScopedJoinHandle::is_finished) {
                // SAFETY: this thread alone is the owner, and `work` does not call `own`.
                unsafe { counts.own(Counts::count) };
                uses += 1;
            }
            (uses, visitors.into_iter().map(|visitor| visitor.join().expect("no panic")).sum::<u64>())
        });
        if cfg!(target_os = "linux") {
            assert!(visits > 0, "nobody visited");
        }
        assert_eq!(counts.value.into_inner().0, [uses + visits; 8]);
    }

    #[test]
    #[allow(unsafe_code, reason = "the owner's side")]
    fn a_panic_inside_leaves_the_owner_outside_and_ends_a_visit() {
        let count = Biased::new(Counts::default());
        let panics = |work: &dyn Fn()| assert!(catch_unwind(AssertUnwindSafe(work)).is_err());
        // SAFETY: this thread alone is the owner, and `work` does not call `own`.
        panics(&|| unsafe { count.own(|_| panic!("inside")) });
        assert!(!count.is_in_use(), "the owner's mark stayed");
        if Biased::<Counts>::can_be_visited() {
            panics(&|| {
                count.visit(|_| panic!("a visitor"));
            });
            assert_eq!(count.visit(Counts::count), Some(()), "the last visitor is still announced");
        }
        // SAFETY: this thread alone is the owner, and `work` does not call `own`.
        unsafe { count.own(Counts::count) };
        assert!(!count.is_in_use());
    }

    #[test]
    #[allow(unsafe_code, reason = "the owner's side")]
    fn a_use_is_told_once() {
        let value = Biased::new(Counts::default());
        assert!(!value.take_used());
        // SAFETY: this thread alone is the owner, and `work` does not call `own`.
        unsafe { value.own(|_| assert!(value.take_used() && value.take_used(), "it is in use")) };
        assert!(value.take_used());
        assert!(!value.take_used());
    }
}

#[cfg(all(test, ctxalloc_loom))]
mod loom_tests {
    use super::{Biased, Keyed};
    use loom::cell::UnsafeCell;
    use loom::sync::Arc;

    const KEY: u64 = 5;

    struct Counted {
        count: UnsafeCell<usize>,
        key: u64,
    }

    impl Counted {
        #[allow(unsafe_code, reason = "loom's cell")]
        fn add(&mut self) {
            // SAFETY: called inside, which excludes all others; loom sees to that.
            self.count.with_mut(|count| unsafe { *count += 1 });
        }
    }

    impl Keyed for Counted {
        fn key(&self) -> u64 {
            self.key
        }
    }

    #[test]
    #[allow(unsafe_code, reason = "the owner's side, and loom's cell")]
    fn loom_an_owner_and_its_visitors_exclude_each_other() {
        // A thread that waits looks again and again: all interleavings would take hours.
        let mut model = loom::model::Builder::new();
        model.preemption_bound = Some(3);
        model.check(|| {
            let counted = Arc::new(Biased::new(Counted { count: UnsafeCell::new(0), key: 0 }));
            let visitors: Vec<_> = (0..2)
                .map(|_| {
                    let counted = Arc::clone(&counted);
                    let visit = |counted: &mut Counted| {
                        counted.add();
                        counted.key = 0;
                    };
                    loom::thread::spawn(move || usize::from(counted.visit(visit).is_some()))
                })
                .collect();
            let own = |counted: &mut Counted| {
                counted.add();
                counted.key = KEY;
            };
            // SAFETY: this thread alone is the owner, and each is over before the next one begins.
            let uses = unsafe {
                counted.own(own);
                counted.enter(KEY).map_or(1, |inside| {
                    assert_eq!(inside.value.key, KEY);
                    inside.value.add();
                    2
                })
            };
            let visits: usize = visitors.into_iter().map(|visitor| visitor.join().expect("no panic")).sum();
            // SAFETY: as above, and the visitors have ended.
            let (count, key) = unsafe { counted.own(|counted| (counted.count.with(|count| *count), counted.key)) };
            assert_eq!(count, uses + visits);
            // SAFETY: this thread alone is the owner, and what it gets is dropped at once.
            assert_eq!(unsafe { counted.enter(KEY) }.is_some(), key == KEY);
            assert!(visits > 0);
        });
    }
}
