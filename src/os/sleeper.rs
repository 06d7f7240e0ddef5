//! A thread's sleep on a word where there is no futex: a mutex and a condition variable of POSIX. Unlike those of the
//! standard library they allocate nothing, and a child of `fork` can begin with new ones.
//!
//! There is one pair for the process, since only one thread sleeps (`ctxalloc-decay`). Linux has futexes: there, only
//! the tests use this.

use std::cell::UnsafeCell;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

struct Bed {
    mutex: UnsafeCell<libc::pthread_mutex_t>,
    changed: UnsafeCell<libc::pthread_cond_t>,
}

// SAFETY: POSIX lets any thread use both, and `forget_sleepers` runs where there is one thread.
unsafe impl Sync for Bed {}

static BED: Bed = Bed {
    mutex: UnsafeCell::new(libc::PTHREAD_MUTEX_INITIALIZER),
    changed: UnsafeCell::new(libc::PTHREAD_COND_INITIALIZER),
};

/// Sleeps until `word` is not `seen`, [`wake_sleeper`] is called, or `limit` is over; perhaps less.
pub(crate) fn sleep_while(word: &'static AtomicU32, seen: u32, limit: Option<Duration>) {
    let until = limit.map(deadline);
    // SAFETY: a static mutex and condition variable, initialised by their constants; this thread locks, waits and
    // unlocks. The time is NULL or lives until the call returns.
    unsafe {
        libc::pthread_mutex_lock(BED.mutex.get());
        // Whoever changes the word then takes the lock (`wake_sleeper`): no change falls between this look and the
        // sleep.
        if word.load(Ordering::SeqCst) == seen {
            match &until {
                Some(until) => libc::pthread_cond_timedwait(BED.changed.get(), BED.mutex.get(), until),
                None => libc::pthread_cond_wait(BED.changed.get(), BED.mutex.get()),
            };
        }
        libc::pthread_mutex_unlock(BED.mutex.get());
    }
}

/// When `limit` is over, by the clock of POSIX's condition variables, which is that of the day. Should somebody set it,
/// one sleep is longer or shorter by as much.
fn deadline(limit: Duration) -> libc::timespec {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: a timespec of ours; POSIX has this clock.
    let _ = unsafe { libc::clock_gettime(libc::CLOCK_REALTIME, &raw mut now) };
    let nanoseconds = now.tv_nsec + libc::c_long::from(limit.subsec_nanos().cast_signed());
    let (carry, rest) = (nanoseconds / 1_000_000_000, nanoseconds % 1_000_000_000);
    let seconds = i64::try_from(limit.as_secs()).unwrap_or(i64::MAX);
    libc::timespec { tv_sec: now.tv_sec.saturating_add(seconds).saturating_add(carry), tv_nsec: rest }
}

/// Wakes the thread that sleeps on `word`, which has changed.
pub(crate) fn wake_sleeper(_word: &'static AtomicU32) {
    // SAFETY: a mutex and a condition variable of a static, initialised by POSIX's constants, and never destroyed; this
    // thread locks the mutex and unlocks it again.
    unsafe {
        libc::pthread_mutex_lock(BED.mutex.get());
        libc::pthread_cond_signal(BED.changed.get());
        libc::pthread_mutex_unlock(BED.mutex.get());
    }
}

/// Called in a child of `fork`, where nobody sleeps: a thread that only the parent has may hold the mutex.
pub(crate) fn forget_sleepers() {
    // SAFETY: the child has one thread, which does not hold the mutex: it forked.
    unsafe {
        BED.mutex.get().write(libc::PTHREAD_MUTEX_INITIALIZER);
        BED.changed.get().write(libc::PTHREAD_COND_INITIALIZER);
    }
}

#[cfg(all(test, not(any(miri, ctxalloc_loom))))]
mod tests {
    use super::{deadline, forget_sleepers, sleep_while, wake_sleeper};
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::thread;
    use std::time::{Duration, Instant};

    #[test]
    fn a_sleeper_without_futex_misses_no_change() {
        static WORD: AtomicU32 = AtomicU32::new(0);
        static ECHO: AtomicU32 = AtomicU32::new(0);
        const ROUNDS: u32 = 2000;
        let sleeper = thread::spawn(|| {
            while ECHO.load(Ordering::SeqCst) < ROUNDS {
                let seen = WORD.load(Ordering::SeqCst);
                ECHO.store(seen, Ordering::SeqCst);
                if seen < ROUNDS {
                    sleep_while(&WORD, seen, None); // without a limit: a change that is missed hangs here
                }
            }
        });
        for round in 1..=ROUNDS {
            WORD.store(round, Ordering::SeqCst);
            wake_sleeper(&WORD);
            while ECHO.load(Ordering::SeqCst) < round {
                thread::yield_now();
            }
        }
        sleeper.join().expect("no panic");
        // What changed before does not wait, and a limit ends a sleep that nobody ends.
        sleep_while(&WORD, 0, None);
        forget_sleepers();
        sleep_while(&WORD, ROUNDS, Some(Duration::from_millis(1)));
    }

    #[test]
    fn a_deadline_carries_its_nanoseconds() {
        let before = Instant::now();
        let (now, later) = (deadline(Duration::ZERO), deadline(Duration::new(5, 999_999_999)));
        assert!((0..1_000_000_000).contains(&later.tv_nsec));
        let seconds = later.tv_sec - now.tv_sec;
        assert!(seconds >= 5 && seconds <= 7 + before.elapsed().as_secs().cast_signed(), "{seconds}");
        assert_eq!(deadline(Duration::MAX).tv_sec, i64::MAX);
    }
}
