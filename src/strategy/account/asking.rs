//! What askers share: `Missing`, how much an account lacks until somebody asks for it, and `Alone`, by which a
//! reclaimer is asked by one thread at a time.

use crate::sync::{AtomicU32, AtomicUsize, Ordering};
use std::process;

/// How much an account lacks: the most of what was noted since reclaimers were last asked for it.
#[derive(Debug)]
pub(super) struct Missing(AtomicUsize);

impl Missing {
    pub(super) fn new() -> Self {
        Self(AtomicUsize::new(0))
    }

    /// Relaxed: whoever notes calls the asking thread after it, and that call hands it on.
    pub(super) fn note(&self, bytes: usize) {
        self.0.fetch_max(bytes, Ordering::Relaxed);
    }

    pub(super) fn is_any(&self) -> bool {
        self.0.load(Ordering::Relaxed) > 0
    }

    /// How much it is, for the one who asks for it now.
    pub(super) fn take(&self) -> usize {
        self.0.swap(0, Ordering::Relaxed)
    }
}

/// Whom nobody asks.
const NOBODY: u32 = 0;

/// The process in which somebody is asking. A child of `fork` has none of its parent's threads, so nobody asks there.
pub(super) struct Alone(AtomicU32);

impl Alone {
    pub(super) fn new() -> Self {
        Self(AtomicU32::new(NOBODY))
    }

    /// Runs `ask`, which does not panic, after whoever is asking now. `waits` is called as long as somebody is, and
    /// says whether to look again; `None` where it was not to.
    pub(super) fn ask<R>(&self, mut waits: impl FnMut() -> bool, ask: impl FnOnce() -> R) -> Option<R> {
        let here = process::id();
        let asking = |before: u32| (before != here).then_some(here);
        // Acquire and Release: what was done for the one before is seen by the next.
        while self.0.fetch_update(Ordering::Acquire, Ordering::Relaxed, asking).is_err() {
            if !waits() {
                return None;
            }
        }
        let answer = ask();
        self.0.store(NOBODY, Ordering::Release);
        Some(answer)
    }
}

#[cfg(all(test, ctxalloc_loom))]
mod loom_tests {
    use super::{Alone, Missing};
    use crate::sync::Called;
    use loom::cell::UnsafeCell;
    use loom::sync::Arc;
    use std::process;

    /// A reclaimer with what it has dropped, which loom lets one thread touch at a time.
    struct Asked {
        alone: Alone,
        times: UnsafeCell<usize>,
    }

    impl Asked {
        #[allow(unsafe_code, reason = "loom's cell, which finds out who touches it at once")]
        fn ask(&self, waits: impl FnMut() -> bool) -> Option<usize> {
            self.alone.ask(waits, || {
                // SAFETY: nobody else is asking; loom reports it otherwise.
                self.times.with_mut(|times| unsafe {
                    *times += 1;
                    *times
                })
            })
        }
    }

    fn waits() -> bool {
        loom::thread::yield_now();
        true
    }

    #[test]
    fn loom_a_reclaimer_is_asked_once_at_a_time_and_by_everybody() {
        let mut model = loom::model::Builder::new();
        model.preemption_bound = Some(3);
        model.check(|| {
            let asked = Arc::new(Asked { alone: Alone::new(), times: UnsafeCell::new(0) });
            let other = loom::thread::spawn({
                let asked = Arc::clone(&asked);
                move || asked.ask(waits).expect("it waits for its turn")
            });
            let own = asked.ask(waits).expect("it waits for its turn");
            let other = other.join().expect("no panic");
            assert_eq!(own + other, 3, "one was the first, and one the second");
            assert_eq!(asked.ask(|| false), Some(3), "and nobody holds it any more");
        });
    }

    #[test]
    fn loom_a_reclaimer_that_asks_another_does_not_wait() {
        loom::model(|| {
            let asked = Arc::new(Asked { alone: Alone::new(), times: UnsafeCell::new(0) });
            let other = loom::thread::spawn({
                let asked = Arc::clone(&asked);
                move || asked.ask(|| false)
            });
            let own = asked.ask(|| false);
            let answers = [own, other.join().expect("no panic")];
            assert!(answers.contains(&Some(1)), "one of them asked: {answers:?}");
            let done = answers.iter().flatten().count();
            assert_eq!(asked.ask(|| false), Some(done + 1), "and nobody holds it any more");
        });
    }

    #[test]
    fn loom_a_child_asks_whom_a_thread_of_its_parent_was_asking() {
        loom::model(|| {
            let asked = Asked { alone: Alone::new(), times: UnsafeCell::new(0) };
            asked.alone.0.store(process::id() ^ 1, loom::sync::atomic::Ordering::Relaxed);
            assert_eq!(asked.ask(|| false), Some(1));
        });
    }

    #[test]
    fn loom_what_is_missed_is_asked_for() {
        let mut model = loom::model::Builder::new();
        model.preemption_bound = Some(3);
        model.check(|| {
            let room = Arc::new((Missing::new(), Called::new()));
            // As `reclaiming::run`. It ends when it was asked for the most; it sleeps for ever, which loom reports, if
            // that is lost.
            let asker = loom::thread::spawn({
                let room = Arc::clone(&room);
                move || {
                    let (missing, called) = &*room;
                    called.runs_here();
                    loop {
                        match called.begins_to_look() {
                            true if missing.is_any() && missing.take() == 5 => break,
                            true => {}
                            false => called.sleep(None),
                        }
                    }
                }
            });
            // As a refused charge: it notes, and calls.
            let miss = |(missing, called): &(Missing, Called), bytes| {
                missing.note(bytes);
                called.call();
            };
            let other = loom::thread::spawn({
                let room = Arc::clone(&room);
                move || miss(&room, 3)
            });
            miss(&room, 5);
            other.join().expect("no panic");
            asker.join().expect("no panic");
        });
    }
}
