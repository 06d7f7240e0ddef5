//! A value that is made at its first use. Nobody waits for whoever makes it.
//!
//! `OnceLock` would do but for `fork`: a child born while another thread is making the value waits for that thread,
//! which it does not have. Here every thread that finds no value makes one; the first to store it wins, and the others
//! drop theirs.

use crate::unattributed::unattributed;
use std::mem::ManuallyDrop;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicPtr, Ordering};

/// Room for a value that is filled once, and goes with the room.
#[derive(Debug)]
pub(crate) struct Once<T>(AtomicPtr<T>);

// The box is reached by shared references on any thread, and dropped on the last one's.
impl<T: Send + Sync> Once<T> {
    pub(crate) const fn new() -> Self {
        Self(AtomicPtr::new(null_mut()))
    }

    /// The value, if there is one.
    #[inline]
    #[allow(unsafe_code, reason = "a box behind an atomic pointer")]
    pub(crate) fn get(&self) -> Option<&T> {
        // Acquire pairs with the exchange in `fill`.
        let value = self.0.load(Ordering::Acquire);
        // SAFETY: NULL, or a box that goes with this room.
        unsafe { value.as_ref() }
    }

    /// Fills it; false if it was filled before, or by another thread just now. `value` is dropped then.
    pub(crate) fn fill(&self, value: T) -> bool {
        let fresh = Box::into_raw(Box::new(value));
        // AcqRel: publishes ours, or sees that of whoever was faster.
        let is_ours = self.0.compare_exchange(null_mut(), fresh, Ordering::AcqRel, Ordering::Acquire).is_ok();
        if !is_ours {
            #[allow(unsafe_code, reason = "a box of our own")]
            // SAFETY: made above, and seen by nobody.
            drop(unsafe { Box::from_raw(fresh) });
        }
        is_ours
    }
}

impl<T> Drop for Once<T> {
    #[allow(unsafe_code, reason = "a box behind an atomic pointer")]
    fn drop(&mut self) {
        let value = *self.0.get_mut();
        if !value.is_null() {
            // SAFETY: the box from `fill`, which nobody can reach any more.
            drop(unsafe { Box::from_raw(value) });
        }
    }
}

/// Room for a value that is never dropped: in a static, or in what is itself immortal.
#[derive(Debug)]
pub(crate) struct Made<T>(ManuallyDrop<Once<T>>);

impl<T: Send + Sync + 'static> Made<T> {
    pub(crate) const fn new() -> Self {
        Self(ManuallyDrop::new(Once::new()))
    }

    /// The value, if somebody made it.
    #[inline]
    #[allow(unsafe_code, reason = "an immortal value")]
    pub(crate) fn get(&self) -> Option<&'static T> {
        // SAFETY: the room's drop, which alone frees the box, never runs.
        self.0.get().map(|value| unsafe { &*std::ptr::from_ref(value) })
    }

    /// The value, made now if nobody did. `make` may run on several threads at once: all but one of its values are
    /// dropped.
    pub(crate) fn get_or_make(&self, make: impl FnOnce() -> T) -> &'static T {
        if let Some(value) = self.get() {
            return value;
        }
        let unattributed = unattributed(); // whoever comes first pays for nobody else
        self.0.fill(make());
        drop(unattributed);
        self.get().expect("somebody laid one down")
    }
}

#[cfg(test)]
mod tests {
    use super::Made;
    use std::sync::Barrier;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::thread;

    #[test]
    fn one_that_is_half_made_keeps_nobody_waiting() {
        struct Counted(usize, &'static AtomicUsize);
        impl Drop for Counted {
            fn drop(&mut self) {
                self.1.fetch_add(1, Ordering::SeqCst);
            }
        }
        static MADE: Made<Counted> = Made::new();
        static DROPPED: AtomicUsize = AtomicUsize::new(0);
        let (begun, go_on) = (Barrier::new(2), Barrier::new(2));
        thread::scope(|scope| {
            let slow = scope.spawn(|| {
                MADE.get_or_make(|| {
                    begun.wait();
                    go_on.wait();
                    Counted(1, &DROPPED)
                })
                .0
            });
            begun.wait();
            assert!(MADE.get().is_none());
            assert_eq!(MADE.get_or_make(|| Counted(2, &DROPPED)).0, 2, "without waiting for the other one");
            go_on.wait();
            assert_eq!(slow.join().expect("no panic"), 2, "which comes too late");
        });
        assert_eq!(MADE.get_or_make(|| unreachable!("made already")).0, 2);
        assert_eq!(DROPPED.load(Ordering::SeqCst), 1);
    }
}
