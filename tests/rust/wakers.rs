//! Wakers of those who wait for room are somebody's code: one that panics costs nobody else a turn, and one that polls
//! its task at once does so as on any thread (`heap/limits.rs`).
#![allow(clippy::unwrap_used, reason = "a test that unwraps nothing has failed")]

use ctxalloc::request;
use ctxalloc::request::Admitting;
use ctxalloc::strategy::Budget;
use std::panic::{AssertUnwindSafe, catch_unwind, set_hook};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};
use std::task::{Context, Wake, Waker};
use std::time::Duration;

struct Panics;

impl Wake for Panics {
    fn wake(self: Arc<Self>) {
        panic!("an executor")
    }
}

struct Tells(Sender<()>);

impl Wake for Tells {
    fn wake(self: Arc<Self>) {
        let _ = self.0.send(());
    }
}

fn waits(budget: &Budget, bytes: usize, waker: &Waker) -> Admitting {
    let mut admitting = request().root().budget(budget).reserve_bytes(bytes).admit();
    assert!(Future::poll(Pin::new(&mut admitting), &mut Context::from_waker(waker)).is_pending());
    admitting
}

#[test]
fn a_waker_that_panics_costs_nobody_else_a_turn() {
    set_hook(Box::new(|_| {})); // no time for backtraces
    let (sender, woken) = channel();
    let (panics, tells) = (Waker::from(Arc::new(Panics)), Waker::from(Arc::new(Tells(sender))));
    for _ in 0..2 {
        let budget = Budget::new("tenant", Some(100));
        let held = request().root().budget(&budget).reserve_bytes(100).begin().unwrap();
        let first = waits(&budget, 40, &panics);
        let second = waits(&budget, 40, &tells);
        drop(held);
        woken.recv_timeout(Duration::from_secs(60)).expect("the second is woken after the first one's waker panicked");
        drop((first, second));
        assert_eq!(budget.reserved_bytes(), 0);
    }
}

#[test]
fn one_that_leaves_does_not_hear_of_anothers_waker() {
    let budget = Budget::new("tenant", Some(100));
    let _held = request().root().budget(&budget).reserve_bytes(50).begin().unwrap();
    let large = waits(&budget, 90, Waker::noop());
    let _small = waits(&budget, 20, &Waker::from(Arc::new(Panics)));
    assert!(catch_unwind(AssertUnwindSafe(|| drop(large))).is_ok());
}
