//! `Called`: a thread that sleeps until somebody calls it, looks, and sleeps again.
//!
//! Whoever calls allocates nothing and waits for nobody, so it may be somebody who frees memory. No call is lost: the
//! thread takes the mark *before* each look, so whoever finds the mark set came before that look.

use super::{AtomicU32, ForkLock, HeldAcrossFork, Locked, Ordering};
use crate::unattributed::unattributed;
use std::time::Duration;
use std::{io, process};

#[cfg(ctxalloc_loom)]
use loom::thread::{Thread, current, park};
#[cfg(not(ctxalloc_loom))]
use std::thread::{Thread, current, park};

/// One thread of this process, started when it is needed.
pub(crate) struct Called {
    /// - set to 1: by whoever calls, and when the thread is started.
    /// - set to 0: by the thread, before it looks. AcqRel both: what was done before a call is seen by the look.
    mark: AtomicU32,
    /// The process that it was started in, and the thread once that has begun. `None` where it does not run.
    running: Locked<Option<(u32, Option<Thread>)>>,
}

impl HeldAcrossFork for Called {
    fn for_each_lock(&self, visit: &mut dyn FnMut(&ForkLock)) {
        visit(self.running.lock());
    }
}

impl Called {
    pub(crate) fn new() -> Self {
        Self { mark: AtomicU32::new(0), running: Locked::new(None) }
    }

    /// Has it look, if it runs.
    pub(crate) fn call(&self) {
        if self.mark.swap(1, Ordering::AcqRel) == 0 {
            self.wake();
        }
    }

    fn wake(&self) {
        self.running.with(|running| {
            if let Some((_, Some(thread))) = running {
                thread.unpark();
            }
        });
    }

    /// For the thread: it is about to look. Whether somebody has called since the last time.
    pub(crate) fn begins_to_look(&self) -> bool {
        self.mark.swap(0, Ordering::AcqRel) != 0
    }

    /// For the thread: sleeps until somebody calls, perhaps not so long; at most for this time.
    pub(crate) fn sleep(&self, at_most: Option<Duration>) {
        match at_most {
            None => park(),
            #[cfg(not(ctxalloc_loom))]
            Some(time) => std::thread::park_timeout(time),
            #[cfg(ctxalloc_loom)]
            Some(_) => loom::thread::yield_now(), // there is no time in its models
        }
    }

    /// For the thread, at its end: whoever starts it after this starts another one.
    pub(crate) fn ends(&self) {
        drop(self.running.with(Option::take));
    }

    /// Starts it, unless it runs in this process, and has it look first. `run` is its whole work.
    ///
    /// # Errors
    /// The system starts no thread.
    #[cfg_attr(ctxalloc_loom, allow(dead_code, reason = "a model starts its own"))]
    pub(crate) fn start(&'static self, name: &str, run: fn()) -> io::Result<()> {
        let _unattributed = unattributed();
        let (starts, _gone) = self.running.with(|running| match running {
            Some((process_id, _)) if *process_id == process::id() => (false, None),
            _ => (true, running.replace((process::id(), None))),
        });
        if !starts {
            return Ok(());
        }
        // It looks first: until it has begun nobody needs to wake it.
        self.mark.store(1, Ordering::Release);
        let work = move || {
            self.runs_here();
            run();
        };
        spawn(name, work).inspect_err(|_| self.ends())
    }

    /// This thread is the one that is called. It says so itself: whoever started it may come to that late, when it has
    /// ended and another one runs.
    pub(crate) fn runs_here(&self) {
        let here = Some((process::id(), Some(current())));
        let _before = self.running.with(|running| std::mem::replace(running, here));
    }
}

#[cfg(not(ctxalloc_loom))]
fn spawn(name: &str, work: impl FnOnce() + Send + 'static) -> io::Result<()> {
    std::thread::Builder::new().name(name.to_owned()).spawn(work).map(drop)
}

#[cfg(ctxalloc_loom)]
fn spawn(_: &str, work: impl FnOnce() + Send + 'static) -> io::Result<()> {
    drop(loom::thread::spawn(work));
    Ok(())
}

#[cfg(all(test, not(any(ctxalloc_loom, miri))))]
mod tests {
    use super::Called;
    use crate::sync::Made;
    use std::sync::Mutex;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::thread;
    use std::time::{Duration, Instant};

    fn called() -> &'static Called {
        static CALLED: Made<Called> = Made::new();
        CALLED.get_or_make(Called::new)
    }

    static LOOKS: AtomicUsize = AtomicUsize::new(0);
    /// How many are to end. Who ends does so under the lock: as a thread of the queue does, for which nobody waits.
    static TO_END: Mutex<usize> = Mutex::new(0);

    /// Ends as soon as somebody wants it, and may be started again before its own start has returned.
    fn run() {
        loop {
            called().begins_to_look();
            LOOKS.fetch_add(1, Ordering::SeqCst);
            let mut wanted = TO_END.lock().expect("no panic");
            if *wanted > 0 {
                *wanted -= 1;
                called().ends();
                return;
            }
            drop(wanted);
            called().sleep(None);
        }
    }

    #[test]
    fn whoever_is_started_anew_is_the_one_that_is_called() {
        for round in 0..2000 {
            thread::scope(|threads| {
                for _ in 0..4 {
                    threads.spawn(|| {
                        *TO_END.lock().expect("no panic") += 1;
                        called().start("called", run).expect("a thread");
                        called().call();
                    });
                }
            });
            *TO_END.lock().expect("no panic") = 0;
            called().start("called", run).expect("a thread");
            let seen = LOOKS.load(Ordering::SeqCst);
            let began = Instant::now();
            called().call();
            while LOOKS.load(Ordering::SeqCst) == seen {
                assert!(began.elapsed() < Duration::from_secs(5), "round {round}: a call was lost");
                thread::yield_now();
            }
        }
    }
}

#[cfg(all(test, ctxalloc_loom))]
mod loom_tests {
    use super::Called;
    use loom::sync::Arc;
    use loom::sync::atomic::{AtomicUsize, Ordering};

    #[test]
    fn loom_each_call_is_followed_by_a_look() {
        // Every interleaving with up to three preemptions: all of them would take hours.
        let mut model = loom::model::Builder::new();
        model.preemption_bound = Some(3);
        model.check(|| {
            let (called, done) = (Arc::new(Called::new()), Arc::new(AtomicUsize::new(0)));
            // A thread of its own: loom lets nobody unpark one that joins.
            let sleeper = loom::thread::spawn({
                let (called, done) = (Arc::clone(&called), Arc::clone(&done));
                move || {
                    called.runs_here();
                    // It ends only if it sees both: a lost call would leave it asleep for ever, which loom reports.
                    loop {
                        called.begins_to_look();
                        if done.load(Ordering::Relaxed) == 2 {
                            break;
                        }
                        called.sleep(None);
                    }
                }
            });
            let call = |called: &Called, done: &AtomicUsize| {
                done.fetch_add(1, Ordering::Relaxed); // the call hands it on
                called.call();
            };
            let other = loom::thread::spawn({
                let (called, done) = (Arc::clone(&called), Arc::clone(&done));
                move || call(&called, &done)
            });
            call(&called, &done);
            other.join().expect("no panic");
            sleeper.join().expect("no panic");
        });
    }
}
