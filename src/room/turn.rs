//! `Turn`: what one waiter is told, and how it is woken. The queue's lock orders who decides and who leaves; only
//! asking and deciding meet here.

use crate::error::Error;
use crate::sync::Locked;
use std::task::{Poll, Waker};

/// The answer to one waiter.
pub(super) struct Turn(Locked<State>);

#[derive(Default)]
struct State {
    /// Set once, by whoever took the waiter out of the queue; taken by the waiter.
    answer: Option<Result<(), Error>>,
    /// Whom to wake. Set by the waiter while there is no answer.
    waker: Option<Waker>,
}

impl Turn {
    pub(super) fn new() -> Self {
        Self(Locked::new(State::default()))
    }

    /// Tells the answer. The returned waker is to be woken under no lock.
    #[must_use]
    pub(super) fn decide(&self, answer: Result<(), Error>) -> Option<Waker> {
        self.0.with(|state| {
            state.answer = Some(answer);
            state.waker.take()
        })
    }

    /// The answer, once; or `waker` is woken when there is one.
    pub(super) fn ask(&self, waker: &Waker) -> Poll<Result<(), Error>> {
        // Cloned and dropped outside: it is somebody's code.
        let fresh = waker.clone();
        let (answer, _stale) = self.0.with(|state| match state.answer.take() {
            Some(answer) => (Some(answer), Some(fresh)),
            None => (None, state.waker.replace(fresh)),
        });
        answer.map_or(Poll::Pending, Poll::Ready)
    }
}

#[cfg(all(test, ctxalloc_loom))]
mod loom_tests {
    use super::Turn;
    use loom::sync::Arc;
    use loom::sync::atomic::{AtomicUsize, Ordering};
    use std::task::{Poll, Wake, Waker};

    struct Counted(AtomicUsize);
    impl Wake for Counted {
        fn wake(self: std::sync::Arc<Self>) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }

    #[test]
    fn loom_a_waiter_that_saw_no_answer_is_woken() {
        loom::model(|| {
            let (turn, woken) = (Arc::new(Turn::new()), std::sync::Arc::new(Counted(AtomicUsize::new(0))));
            let decider = loom::thread::spawn({
                let turn = Arc::clone(&turn);
                move || {
                    if let Some(waker) = turn.decide(Ok(())) {
                        waker.wake();
                    }
                }
            });
            let waker = Waker::from(std::sync::Arc::clone(&woken));
            let first = turn.ask(&waker);
            decider.join().expect("no panic");
            if first.is_pending() {
                assert_eq!(woken.0.load(Ordering::SeqCst), 1, "else it sleeps for ever");
                assert_eq!(turn.ask(&waker), Poll::Ready(Ok(())));
            }
        });
    }
}
