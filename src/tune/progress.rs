//! How far a thread of a replay is, for those that wait for it.
//!
//! A thread counts two for each step: one when its account has changed, which is the order within a request, and one
//! when the step is over and its pages are touched, which is what another use of the block waits for.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};
use std::thread;

/// How often a waiting thread looks before it gives its processor away, and before it sleeps. What it waits for is
/// mostly another thread's next allocation.
const SPINS: u32 = 100;
const YIELDS: u32 = 20;

#[derive(Debug, Default)]
pub(super) struct Progress {
    done: AtomicU64,
    sleepers: AtomicU32,
    lock: Mutex<()>,
    changed: Condvar,
}

impl Progress {
    /// Says how far it is. Whoever waits for it and sees this sees what was done before.
    pub(super) fn publish(&self, done: u64) {
        // SeqCst, here and in `wait`: either the sleeper sees this number, or its place among `sleepers` is seen here.
        self.done.store(done, Ordering::SeqCst);
        if self.sleepers.load(Ordering::SeqCst) > 0 {
            drop(self.lock.lock().unwrap_or_else(PoisonError::into_inner));
            self.changed.notify_all();
        }
    }

    /// Waits until it is as far as `wanted`.
    pub(super) fn wait(&self, wanted: u64) {
        for turn in 0..SPINS + YIELDS {
            if self.done.load(Ordering::Acquire) >= wanted {
                return;
            }
            if turn < SPINS { std::hint::spin_loop() } else { thread::yield_now() }
        }
        let mut held = self.lock.lock().unwrap_or_else(PoisonError::into_inner);
        self.sleepers.fetch_add(1, Ordering::SeqCst);
        while self.done.load(Ordering::SeqCst) < wanted {
            held = self.changed.wait(held).unwrap_or_else(PoisonError::into_inner);
        }
        self.sleepers.fetch_sub(1, Ordering::SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use super::Progress;
    use std::sync::atomic::{AtomicU64, Ordering};

    #[test]
    fn who_waits_sees_what_was_done_before() {
        let (progress, written) = (Progress::default(), AtomicU64::new(0));
        std::thread::scope(|threads| {
            for wanted in [1, 500, 1000] {
                let (progress, written) = (&progress, &written);
                threads.spawn(move || {
                    progress.wait(wanted);
                    assert!(written.load(Ordering::Relaxed) >= wanted);
                });
            }
            for done in 1..=1000 {
                written.store(done, Ordering::Relaxed);
                progress.publish(done);
            }
        });
    }
}
