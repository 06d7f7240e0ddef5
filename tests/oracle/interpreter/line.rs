//! Lines of execution (tasks, threads, jobs): what they hold, the gate that the parent guards, and their end.
//!
//! Nothing that a line holds is shared: it moves to a child when that starts, and what the child has comes back when
//! it is joined. So every look-up has one answer, whatever the scheduling.

use crate::hold::{self, Hold};
use crate::run::{Hub, Worker};
use crate::trace::outcome;
use ctxalloc::task::JoinSet;
use ctxalloc::{Context, Token};
use std::any::Any;
use std::collections::BTreeMap;
use std::future::poll_fn;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Poll, Waker};
use tokio::task::{AbortHandle, JoinError, JoinHandle};

/// What `raise` raises: a panic's payload.
pub(crate) struct Boom;

/// One line of execution.
pub(crate) struct Line {
    /// No other line of this process has it.
    pub(crate) id: u64,
    store: Mutex<Store>,
    gate: Mutex<Gate>,
}

/// What a line holds, by label.
#[derive(Default)]
pub(crate) struct Store {
    pub(crate) tokens: BTreeMap<i64, Token>,
    pub(crate) contexts: BTreeMap<i64, Context>,
    pub(crate) workers: BTreeMap<i64, Worker>,
    /// In the order in which they were entered.
    pub(crate) holds: Vec<(i64, Hold)>,
    pub(crate) children: BTreeMap<i64, Child>,
}

/// Where a line stands, for its parent.
#[derive(Default)]
struct Gate {
    arrived: u64,
    opened: u64,
    /// Nobody will act on its gates any more: it passes them.
    is_free: bool,
    has_ended: bool,
    wakers: Vec<Waker>,
}

impl Line {
    pub(crate) fn new(is_free: bool) -> Arc<Self> {
        static LINES: AtomicU64 = AtomicU64::new(0);
        Arc::new(Self {
            id: LINES.fetch_add(1, Ordering::Relaxed), // only has to differ
            store: Mutex::default(),
            gate: Mutex::new(Gate { is_free, ..Gate::default() }),
        })
    }

    /// Held for one look-up only; no body runs under it.
    pub(crate) fn store(&self) -> MutexGuard<'_, Store> {
        self.store.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Moves what has these labels to a child that is about to start.
    pub(crate) fn give(&self, labels: &[i64], child: &Self) {
        let (mut have, mut get) = (self.store(), child.store());
        for label in labels {
            get.tokens.extend(have.tokens.remove_entry(label));
            get.contexts.extend(have.contexts.remove_entry(label));
            get.workers.extend(have.workers.remove_entry(label));
        }
    }

    /// Takes all that an ended child had.
    pub(crate) fn take_back(&self, child: &Self) {
        let mut left = std::mem::take(&mut *child.store());
        let mut have = self.store();
        have.tokens.append(&mut left.tokens);
        have.contexts.append(&mut left.contexts);
        have.workers.append(&mut left.workers);
    }

    /// Waits at a gate until the parent opens it.
    pub(crate) async fn pass_gate(&self) {
        let mut number = 0;
        self.change(|gate| {
            gate.arrived += 1;
            number = gate.arrived;
        });
        self.until(|gate| (gate.is_free || gate.opened >= number).then_some(())).await;
    }

    /// Waits until the line is at a gate (true) or has ended (false).
    pub(crate) async fn is_at_gate(&self) -> bool {
        self.until(|gate| {
            if gate.has_ended { Some(false) } else { (!gate.is_free && gate.arrived > gate.opened).then_some(true) }
        })
        .await
    }

    /// Opens the gate that the line is at.
    pub(crate) fn open(&self) {
        self.change(|gate| gate.opened = gate.arrived);
    }

    /// Opens all its gates, now and later.
    pub(crate) fn set_free(&self) {
        self.change(|gate| gate.is_free = true);
    }

    /// Waits until nothing of it runs any more.
    pub(crate) async fn ended(&self) {
        self.until(|gate| gate.has_ended.then_some(())).await;
    }

    fn change(&self, change: impl FnOnce(&mut Gate)) {
        let wakers = {
            let mut gate = self.gate.lock().unwrap_or_else(PoisonError::into_inner);
            change(&mut gate);
            std::mem::take(&mut gate.wakers)
        };
        wakers.into_iter().for_each(Waker::wake);
    }

    async fn until<R>(&self, mut answer: impl FnMut(&Gate) -> Option<R>) -> R {
        poll_fn(|cx| {
            let mut gate = self.gate.lock().unwrap_or_else(PoisonError::into_inner);
            match answer(&gate) {
                Some(answer) => Poll::Ready(answer),
                None => {
                    gate.wakers.push(cx.waker().clone());
                    Poll::Pending
                }
            }
        })
        .await
    }
}

/// Ends a line when it goes: on return, on a panic, on cancellation. It is the last that goes, in the line's context.
pub(crate) struct Ending(pub(crate) Arc<Line>);

impl Drop for Ending {
    fn drop(&mut self) {
        let (holds, children) = {
            let mut store = self.0.store();
            (std::mem::take(&mut store.holds), std::mem::take(&mut store.children))
        };
        hold::leave_all(holds);
        children.into_values().for_each(Child::orphan);
        self.0.change(|gate| gate.has_ended = true);
    }
}

/// A line as its parent sees it.
pub(crate) struct Child {
    pub(crate) line: Arc<Line>,
    /// The loop that runs it; none for a thread.
    pub(crate) hub: Option<Arc<Hub>>,
    pub(crate) started: Started,
}

/// What runs a child.
pub(crate) enum Started {
    Task(JoinHandle<()>),
    Set(JoinSet<()>, AbortHandle),
    Thread(std::thread::JoinHandle<()>),
    Job(JoinHandle<()>),
    Jobs(JoinSet<()>),
}

impl Child {
    /// Nobody will open, cancel or join it any more: it runs on alone.
    pub(crate) fn orphan(self) {
        self.line.set_free();
        if let Started::Set(mut set, _) | Started::Jobs(mut set) = self.started {
            set.detach_all(); // else it would cancel them, at a moment that no program names
        }
    }

    pub(crate) fn is_task(&self) -> bool {
        matches!(self.started, Started::Task(_) | Started::Set(..))
    }

    /// Waits for its end.
    pub(crate) async fn outcome(self) -> u8 {
        match self.started {
            Started::Task(handle) | Started::Job(handle) => of_task(handle.await),
            Started::Set(mut set, _) | Started::Jobs(mut set) => {
                set.join_next().await.map_or(outcome::STRANGE, of_task)
            }
            Started::Thread(handle) => {
                self.line.ended().await;
                of_thread(handle.join())
            }
        }
    }

    /// Waits for its end by blocking, which only threads allow.
    pub(crate) fn outcome_by_blocking(self) -> u8 {
        match self.started {
            Started::Thread(handle) => of_thread(handle.join()),
            _ => outcome::STRANGE,
        }
    }

    /// Cancels a task that is at a gate, in one of the ways that there are, and waits until it is gone.
    pub(crate) async fn cancel(self, flavour: i64) -> u8 {
        let Self { line, hub, started } = self;
        match started {
            Started::Set(mut set, abort) => match flavour {
                0 => {
                    abort.abort();
                    Self { line, hub, started: Started::Set(set, abort) }.outcome().await
                }
                1 => {
                    drop(set);
                    line.ended().await;
                    outcome::CANCELLED
                }
                _ => {
                    set.shutdown().await;
                    outcome::CANCELLED
                }
            },
            Started::Task(handle) => {
                handle.abort();
                of_task(handle.await)
            }
            _ => outcome::STRANGE,
        }
    }
}

/// k, p or c.
pub(crate) fn of_task(result: Result<(), JoinError>) -> u8 {
    match result {
        Ok(()) => outcome::OK,
        Err(error) if error.is_cancelled() => outcome::CANCELLED,
        Err(error) => of_panic(&*error.into_panic()),
    }
}

fn of_thread(result: std::thread::Result<()>) -> u8 {
    result.map_or_else(|payload| of_panic(&*payload), |()| outcome::OK)
}

/// p for the program's own panic.
pub(crate) fn of_panic(payload: &(dyn Any + Send)) -> u8 {
    if payload.is::<Boom>() { outcome::RAISED } else { outcome::STRANGE }
}
