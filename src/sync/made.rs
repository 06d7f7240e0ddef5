//! A value that is made at its first use and lives for ever. Nobody waits for whoever makes it.
//!
//! `OnceLock` would do but for `fork`: a child born while another thread is making the value waits for that thread,
//! which it does not have. Here every thread that finds no value makes one; the first to store it wins, and the others
//! drop theirs.

use crate::unattributed::unattributed;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicPtr, Ordering};

/// Room for the value, in a static.
#[derive(Debug)]
pub(crate) struct Made<T>(AtomicPtr<T>);

impl<T: Send + Sync + 'static> Made<T> {
    pub(crate) const fn new() -> Self {
        Self(AtomicPtr::new(null_mut()))
    }

    /// The value, if somebody made it.
    #[inline]
    #[allow(unsafe_code, reason = "an immortal value behind an atomic pointer")]
    pub(crate) fn get(&self) -> Option<&'static T> {
        // Acquire pairs with the exchange below.
        let value = self.0.load(Ordering::Acquire);
        // SAFETY: NULL, or a value that `get_or_make` leaked.
        unsafe { value.as_ref() }
    }

    /// The value, made now if nobody did. `make` may run on several threads at once: all but one of its values are
    /// dropped.
    pub(crate) fn get_or_make(&self, make: impl FnOnce() -> T) -> &'static T {
        if let Some(value) = self.get() {
            return value;
        }
        let unattributed = unattributed(); // whoever comes first pays for nobody else
        let fresh = Box::into_raw(Box::new(make()));
        // AcqRel: publishes ours, or sees that of whoever was faster.
        if self.0.compare_exchange(null_mut(), fresh, Ordering::AcqRel, Ordering::Acquire).is_err() {
            #[allow(unsafe_code, reason = "a box of our own")]
            // SAFETY: made above, and seen by nobody.
            drop(unsafe { Box::from_raw(fresh) });
        }
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
