//! The queue of this process: everybody who enters, leaves or looks comes by here.

use super::queue::{Later, Next, Queue};
use super::refusal::{no_room, no_room_in};
use super::victims::choose_for;
use super::waiter::{Time, Waiter};
use crate::counters::{self, UNNAMED};
use crate::error::{Error, NoRoom};
use crate::strategy::account::{Account, Chain, reclaimers};
use crate::survived::survived;
use crate::sync::{ForkLock, HeldAcrossFork, Locked, Made, held_across_fork};
use crate::unattributed::unattributed;
use std::process;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::sync::atomic::fence;
use std::sync::{Arc, Weak};
use std::task::{Poll, Waker};
use std::time::{Duration, Instant};

impl Later {
    /// Under no lock.
    pub(super) fn run(self) {
        let Self { wakers, told, dropped, opened, forgotten, asks, chooses, spared, before } = self;
        spared.iter().filter_map(Weak::upgrade).for_each(|victim| victim.spare());
        // Before it knows itself, and may ask for the numbers.
        for (waiter, admitted) in told {
            counters::record_admission(waiter.chain.own().given_name(), admitted);
        }
        // One that panics must not cost the others their wake-up, nor the runner its thread.
        wakers.into_iter().for_each(|waker| {
            survived(|| waker.wake());
        });
        if asks {
            reclaimers::have_asked();
        }
        for (waiter, full) in &chooses {
            choose_for(&waiter.chain, waiter.bytes, full, |victim| is_too_late(waiter, victim));
        }
        drop((dropped, opened, forgotten, chooses, before));
    }
}

pub(super) struct Room(Locked<Queue>);

impl HeldAcrossFork for Room {
    fn for_each_lock(&self, visit: &mut dyn FnMut(&ForkLock)) {
        visit(self.0.lock());
    }

    fn after_fork(&self) {
        self.release_each();
        // In a child nobody else is there. What is forgotten is dropped later, under no lock.
        self.0.with(|queue| {
            if !queue.is_ours() {
                queue.close_nothing();
            }
        });
    }
}

fn room() -> &'static Room {
    static ROOM: Made<Arc<Room>> = Made::new();
    ROOM.get_or_make(|| held_across_fork(Room(Locked::new(Queue::default()))))
}

/// Runs `work` on the queue of this process.
fn with<R>(work: impl FnOnce(&mut Queue, &mut Later) -> R) -> (R, Later) {
    let _unattributed = unattributed(); // what the queue keeps belongs to no request; wakers are called after it
    let mut later = Later::default();
    let answer = room().0.with(|queue| {
        if !queue.is_ours() {
            queue.close_nothing(); // where no function for `fork` was called
            later.forgotten = std::mem::replace(queue, Queue::of_this_process());
        }
        work(queue, &mut later)
    });
    (answer, later)
}

/// What became of one that came.
pub(super) enum Entered {
    /// It has its answer: room came meanwhile, or a limit was lowered.
    Answered(Result<(), Error>),
    /// It waits, and the runner has to look sooner than it means to if the second says so.
    Waits(Arc<Waiter>, bool),
}

/// Gives a request a place in the queue. `max_waiting`: how many of its name may wait.
pub(super) fn enter(
    chain: &Arc<Chain>,
    bytes: usize,
    timeout: Option<Duration>,
    max_waiting: Option<usize>,
) -> Result<Entered, Error> {
    let time = Time::from_now(timeout);
    let (placed, later) = with(|queue, later| {
        let is_full = |account: &&Arc<Account>| account.waiting().load(Relaxed) >= account.max_waiting().load(Relaxed);
        if let Some(full) = chain.above().iter().find(is_full) {
            return Err(Some(full));
        }
        let name = chain.own().given_name().unwrap_or(UNNAMED);
        if max_waiting.is_some_and(|max| queue.names.get(name).copied().unwrap_or(0) >= max) {
            return Err(None);
        }
        let waiter = Arc::new(Waiter::new(chain, bytes, queue.arrived, time, queue.process_id));
        queue.arrived += 1;
        queue.add(&waiter);
        // Whoever lowers a limit from here on finds that it waits; whoever did so before is seen here.
        fence(SeqCst);
        if let Some(error) = waiter.never_fits() {
            queue.remove(&waiter, later);
            later.decide(Arc::clone(&waiter), Err(error));
        }
        queue.look(later);
        let is_sooner = queue.has(&waiter).then(|| queue.is_sooner());
        Ok((waiter, is_sooner))
    });
    later.run();
    let (waiter, is_sooner) = placed.map_err(|full| match full {
        Some(full) => no_room_in(chain, full, bytes, NoRoom::QueueIsFull),
        None => no_room(chain, bytes, NoRoom::QueueIsFull),
    })?;
    Ok(match is_sooner {
        Some(is_sooner) => Entered::Waits(waiter, is_sooner),
        None => match waiter.turn.ask(Waker::noop()) {
            Poll::Ready(answer) => Entered::Answered(answer),
            Poll::Pending => unreachable!("who is taken out of the queue has an answer"),
        },
    })
}

/// Takes a waiter out, who no longer wants what it waits for; if it has got it already, that is returned.
pub(super) fn leave(waiter: &Arc<Waiter>) {
    if waiter.process_id != process::id() {
        return; // the parent's
    }
    let (is_out, later) = with(|queue, later| {
        let is_there = queue.remove(waiter, later);
        if is_there {
            queue.look(later); // it may have closed an account that others wait behind
        }
        is_there
    });
    later.run();
    if !is_out {
        waiter.chain.return_reservation(); // nothing, where it was refused
    }
}

/// For the runner: sends away whose time is over, gives the room that came, and says when to look again if nobody
/// calls; `None` where nobody waits.
pub(super) fn look() -> (Next, Later) {
    with(|queue, later| {
        let now = Instant::now();
        queue.expire(now, later);
        queue.look(later);
        queue.choose(now, later);
        queue.planned = queue.next();
        queue.planned
    })
}

/// Gives the room that came, and says whether the runner has to look sooner than it means to.
pub(super) fn give() -> (bool, Later) {
    with(|queue, later| {
        queue.look(later);
        queue.is_sooner()
    })
}

/// Notes who was chosen to give way to a waiter; or says that it waits no more.
fn is_too_late(waiter: &Arc<Waiter>, victim: &Arc<Account>) -> bool {
    let ((is_too_late, before), later) = with(|queue, _| match queue.has(waiter) {
        true => (false, waiter.victim.with(|known| known.replace(Arc::downgrade(victim)))),
        false => (true, None),
    });
    later.run();
    drop(before);
    is_too_late
}

/// Runs `work` if nobody waits, while nobody can come.
pub(super) fn if_empty(work: impl FnOnce()) -> bool {
    let (is_empty, later) = with(|queue, _| {
        let is_empty = queue.lanes.is_empty();
        if is_empty {
            work();
        }
        is_empty
    });
    later.run();
    is_empty
}

/// How long those will take who wait for this account now, and one more; `None` where nobody got room there lately.
#[cfg(any(feature = "python", feature = "tower"))]
pub(super) fn drain_time(account: u64) -> Option<Duration> {
    let (time, later) = with(|queue, _| {
        let waits = |waiter: &&Arc<Waiter>| waiter.chain.above().iter().any(|above| above.number() == account);
        let (waiting, now) = (queue.lanes.values().flatten().filter(waits), Instant::now());
        let (count, since) = waiting.fold((0, now), |(count, since), waiter| (count + 1, since.min(waiter.since)));
        queue.drains.get(&account)?.time_of(count + 1, since, now)
    });
    later.run();
    time
}

/// One that waits for room, at one moment.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Waits {
    /// Its name, if it has one.
    pub name: Option<String>,
    /// How many bytes it is to reserve.
    pub reserve_bytes: usize,
    /// For how long it has waited.
    pub waited: Duration,
    /// For how long it will wait at most; `None`: for ever.
    pub left: Option<Duration>,
    /// The budget, or request, that has no room for it, or that those before it wait for.
    pub budget: String,
    /// Its number ([`Budget::id`](crate::strategy::Budget::id)).
    pub budget_id: u64,
}

/// The first of those who wait for room, in the order in which they came, at most `count`.
pub(super) fn waits(count: usize) -> Vec<Waits> {
    let (mut all, later) = with(|queue, _| queue.lanes.values().flatten().cloned().collect::<Vec<_>>());
    later.run();
    all.sort_unstable_by_key(|waiter| waiter.number);
    all.truncate(count);
    let now = Instant::now();
    let shown = |waiter: Arc<Waiter>| {
        let nearest = || waiter.chain.above().first();
        let budget = waiter.chain.obstacle(waiter.bytes).or_else(nearest).unwrap_or(waiter.chain.own());
        Waits {
            name: waiter.chain.own().given_name().map(str::to_owned),
            reserve_bytes: waiter.bytes,
            waited: now.saturating_duration_since(waiter.since),
            left: waiter.until.map(|until| until.saturating_duration_since(now)),
            budget: budget.name().into_owned(),
            budget_id: budget.number(),
        }
    };
    all.into_iter().map(shown).collect()
}
