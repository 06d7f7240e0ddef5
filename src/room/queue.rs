//! The queue: who waits, in which order, and who gets the room that came.
//!
//! The specification: waiters are looked at in the order in which they came. One that would need room of a closed
//! account is passed over. One for which there is room gets it; another one closes the accounts that have none. Nothing
//! else closes an account. This is repeated until nobody gets any. Waiters of one budget stand in a lane, so that only
//! the first of each is looked at.

use super::drain::Drain;
use super::refusal::{no_room, no_room_in};
use super::turn::Turn;
use super::victims::choose_for;
use crate::counters::{self, Admitted, UNNAMED};
use crate::error::{Error, NoRoom};
use crate::strategy::account::{Account, Chain, reclaimers};
use crate::survived::survived;
use crate::sync::{ForkLock, HeldAcrossFork, Locked, Made, held_across_fork};
use crate::unattributed::unattributed;
use std::collections::{BTreeMap, VecDeque};
use std::process;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Weak};
use std::task::{Poll, Waker};
use std::time::{Duration, Instant};

/// How long it takes at least, and at most, until another request is chosen for one that waits: the first one has to
/// give way.
const MIN_PATIENCE: Duration = Duration::from_millis(100);
const MAX_PATIENCE: Duration = Duration::from_secs(24 * 3600);

/// How often reclaimers are asked for one that waits.
const ASKS_EVERY: Duration = Duration::from_secs(1);

/// One that waits.
pub(super) struct Waiter {
    chain: Arc<Chain>,
    bytes: usize,
    /// By age.
    number: u64,
    since: Instant,
    until: Option<Instant>,
    /// Which process it waits in.
    process_id: u32,
    /// How many reclaimers there had been when it asked them.
    asked: AtomicU64,
    /// After how many milliseconds of waiting it asks them again.
    asks_again: AtomicU64,
    /// From when on somebody else may be chosen to give way to it.
    patient_until: Locked<Option<Instant>>,
    /// Who was chosen to.
    victim: Locked<Option<Weak<Account>>>,
    turn: Turn,
}

impl Waiter {
    /// Has reclaimers asked for what it waits for: at once, where there are others since, and every second, for what
    /// they could not give then they may have by now. Whether the thread is to be woken.
    fn asks(&self) -> bool {
        let (added, waited) = (reclaimers::added(), self.since.elapsed().as_millis() as u64);
        let there_are_others = self.asked.swap(added, Relaxed) != added;
        if !there_are_others && (added == 0 || waited < self.asks_again.load(Relaxed)) {
            return false;
        }
        self.asks_again.store(waited + ASKS_EVERY.as_millis() as u64, Relaxed);
        self.chain.miss_reservation(self.bytes)
    }

    pub(super) fn ask(&self, waker: &Waker) -> Poll<Result<(), Error>> {
        if self.process_id == process::id() {
            return self.turn.ask(waker);
        }
        Poll::Ready(Err(no_room(&self.chain, self.bytes, NoRoom::Forked)))
    }

    /// Its name, as metrics have it.
    fn name(&self) -> &str {
        self.chain.own().given_name().unwrap_or(UNNAMED)
    }

    /// The number of the budget that it waits for.
    fn lane(&self) -> u64 {
        self.chain.above().first().map_or(0, |account| account.number())
    }
}

#[derive(Default)]
struct Queue {
    /// By the number of the budget; each in the order of arrival, and never empty.
    lanes: BTreeMap<u64, VecDeque<Arc<Waiter>>>,
    deadlines: BTreeMap<(Instant, u64), Arc<Waiter>>,
    /// Those that had no room the last time.
    closed: BTreeMap<u64, Arc<Account>>,
    /// Those that found an account full that has victims, which it is, and when one is looked for.
    impatient: Vec<(Instant, Arc<Waiter>, Arc<Account>)>,
    /// How many of each name wait.
    names: BTreeMap<Box<str>, usize>,
    /// How fast those get room who wait for an account, by its number.
    drains: BTreeMap<u64, Drain>,
    count: usize,
    arrived: u64,
    process_id: u32,
    /// When the runner means to look.
    planned: Next,
    /// Whether the accounts know that these waiters are not this process's.
    is_closed: bool,
}

/// What is done once the lock is released: wakers are somebody's code, and a drop may be the last one of an account.
#[derive(Default)]
pub(super) struct Later {
    wakers: Vec<Waker>,
    told: Vec<(Arc<Waiter>, Admitted)>,
    dropped: Vec<Arc<Waiter>>,
    opened: Vec<Arc<Account>>,
    forgotten: Queue,
    /// Whether the thread that asks reclaimers is to be woken.
    asks: bool,
    /// For whom somebody is to be chosen.
    chooses: Vec<(Arc<Waiter>, Arc<Account>)>,
    spared: Vec<Weak<Account>>,
    /// Those that were impatient.
    before: Vec<(Instant, Arc<Waiter>, Arc<Account>)>,
}

impl Later {
    fn decide(&mut self, waiter: Arc<Waiter>, answer: Result<(), Error>) {
        let admitted = match &answer {
            Ok(()) => Admitted::Waited(waiter.since.elapsed()),
            Err(Error::NoRoom { reason: NoRoom::TimedOut, .. }) => Admitted::TimedOut,
            Err(_) => Admitted::TurnedAway,
        };
        self.wakers.extend(waiter.turn.decide(answer));
        self.told.push((waiter, admitted));
    }

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
            later.forgotten = std::mem::replace(queue, Queue { process_id: process::id(), ..Queue::default() });
        }
        work(queue, &mut later)
    });
    (answer, later)
}

/// Gives a request a place in the queue, and says whether the runner has to look sooner than it means to; `None` where
/// there was room for it after all. `max_waiting`: how many of its name may wait.
pub(super) fn enter(
    chain: &Arc<Chain>,
    bytes: usize,
    timeout: Option<Duration>,
    max_waiting: Option<usize>,
) -> Result<Option<(Arc<Waiter>, bool)>, Error> {
    let full =
        chain.above().iter().find(|account| account.waiting().load(Relaxed) >= account.max_waiting().load(Relaxed));
    if let Some(full) = full {
        return Err(no_room_in(full, bytes, NoRoom::QueueIsFull));
    }
    let since = Instant::now();
    let until = timeout.and_then(|timeout| since.checked_add(timeout));
    let (placed, later) = with(|queue, later| {
        let name = chain.own().given_name().unwrap_or(UNNAMED);
        if max_waiting.is_some_and(|max| queue.names.get(name).copied().unwrap_or(0) >= max) {
            return None;
        }
        let number = queue.arrived;
        queue.arrived += 1;
        let waiter = Arc::new(Waiter {
            chain: Arc::clone(chain),
            bytes,
            number,
            since,
            until,
            process_id: queue.process_id,
            asked: AtomicU64::new(0),
            asks_again: AtomicU64::new(0),
            patient_until: Locked::new(None),
            victim: Locked::new(None),
            turn: Turn::new(),
        });
        queue.add(&waiter);
        queue.look(later);
        let is_sooner = queue.has(&waiter).then(|| queue.is_sooner());
        Some((waiter, is_sooner))
    });
    later.run();
    let Some((waiter, is_sooner)) = placed else { return Err(no_room(chain, bytes, NoRoom::QueueIsFull)) };
    Ok(is_sooner.map(|is_sooner| (waiter, is_sooner)))
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

#[cfg_attr(not(feature = "python"), allow(dead_code, reason = "only Python's ends look by themselves"))]
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
        let waiting = queue.lanes.values().flatten().filter(waits).count();
        queue.drains.get(&account)?.time_of(waiting + 1, Instant::now())
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

/// When the runner has to look at the queue again.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) enum Next {
    /// Nobody waits.
    #[default]
    Nobody,
    /// When somebody calls.
    Call,
    /// Then, or when somebody calls.
    At(Instant),
}

impl Queue {
    fn next(&self) -> Next {
        let deadline = self.deadlines.first_key_value().map(|((until, _), _)| *until);
        let choice = self.impatient.iter().map(|(due, ..)| *due).min();
        let asks = !self.lanes.is_empty() && reclaimers::added() > 0;
        let again = asks.then(|| Instant::now() + ASKS_EVERY);
        match deadline.into_iter().chain(choice).chain(again).min() {
            Some(at) => Next::At(at),
            None if self.lanes.is_empty() => Next::Nobody,
            None => Next::Call,
        }
    }

    /// Whether somebody's time is over before the runner means to look; it does then, and need not be told again.
    fn is_sooner(&mut self) -> bool {
        let next = self.next();
        let is_sooner = match (next, self.planned) {
            (Next::At(at), Next::At(planned)) => at < planned,
            (Next::At(_), _) => true,
            _ => false,
        };
        if is_sooner {
            self.planned = next;
        }
        is_sooner
    }

    fn has(&self, waiter: &Arc<Waiter>) -> bool {
        let lane = self.lanes.get(&waiter.lane());
        lane.is_some_and(|lane| lane.binary_search_by_key(&waiter.number, |other| other.number).is_ok())
    }

    fn add(&mut self, waiter: &Arc<Waiter>) {
        self.lanes.entry(waiter.lane()).or_default().push_back(Arc::clone(waiter));
        if let Some(until) = waiter.until {
            self.deadlines.insert((until, waiter.number), Arc::clone(waiter));
        }
        waiter.chain.above().iter().for_each(|account| {
            account.waiting().fetch_add(1, Relaxed);
        });
        match self.names.get_mut(waiter.name()) {
            Some(count) => *count += 1,
            None => drop(self.names.insert(waiter.name().into(), 1)),
        }
        self.count += 1;
        counters::set_waiting(self.count);
    }

    /// Takes a waiter out; false if it is not there.
    fn remove(&mut self, waiter: &Arc<Waiter>, later: &mut Later) -> bool {
        let lane = waiter.lane();
        let Some(waiters) = self.lanes.get_mut(&lane) else { return false };
        let Ok(at) = waiters.binary_search_by_key(&waiter.number, |other| other.number) else { return false };
        later.dropped.extend(waiters.remove(at));
        if waiters.is_empty() {
            self.lanes.remove(&lane);
        }
        if let Some(until) = waiter.until {
            later.dropped.extend(self.deadlines.remove(&(until, waiter.number)));
        }
        later.spared.extend(waiter.victim.with(Option::take)); // it has room, or wants none any more
        waiter.chain.above().iter().for_each(|account| {
            account.waiting().fetch_sub(1, Relaxed);
        });
        if let Some(count) = self.names.get_mut(waiter.name()) {
            *count -= 1;
            if *count == 0 {
                self.names.remove(waiter.name());
            }
        }
        self.count -= 1;
        counters::set_waiting(self.count);
        true
    }

    /// Counts one that waited and got room.
    fn count_drained(&mut self, waiter: &Waiter) {
        const KEPT: usize = 64;
        let now = Instant::now();
        for account in waiter.chain.above() {
            self.drains.entry(account.number()).or_insert_with(|| Drain::new(now)).count(now);
        }
        if self.drains.len() > KEPT && self.arrived.is_multiple_of(KEPT as u64) {
            self.drains.retain(|_, drain| !drain.has_faded(now));
        }
    }

    fn expire(&mut self, now: Instant, later: &mut Later) {
        while let Some((&(until, _), waiter)) = self.deadlines.first_key_value()
            && until <= now
        {
            let waiter = Arc::clone(waiter);
            self.remove(&waiter, later);
            let error = no_room(&waiter.chain, waiter.bytes, NoRoom::TimedOut);
            later.decide(waiter, Err(error));
        }
    }

    /// Has somebody chosen for each that has waited long enough.
    fn choose(&mut self, now: Instant, later: &mut Later) {
        for (due, waiter, full) in &mut self.impatient {
            if *due <= now {
                *due = now + full.victims_after().unwrap_or_default().clamp(MIN_PATIENCE, MAX_PATIENCE);
                waiter.patient_until.with(|until| *until = Some(*due));
                later.chooses.push((Arc::clone(waiter), Arc::clone(full)));
            }
        }
    }

    /// Gives the room that there is. Once more after it gave some: one that found no room may stand behind another one
    /// since, and closes nothing then.
    fn look(&mut self, later: &mut Later) {
        while self.look_once(later) {}
    }

    fn look_once(&mut self, later: &mut Later) -> bool {
        let mut gave = false;
        let mut closed = BTreeMap::new();
        let mut full = Vec::new();
        later.before.append(&mut self.impatient);
        // The first of each lane by its number. A lane is looked at until its first one does not get what it needs.
        let mut firsts: BTreeMap<u64, Arc<Waiter>> = self
            .lanes
            .values()
            .filter_map(|lane| lane.front())
            .map(|first| (first.number, Arc::clone(first)))
            .collect();
        while let Some((_, waiter)) = firsts.pop_first() {
            full.clear();
            let lane = waiter.lane();
            if waiter.chain.never_fits(waiter.bytes).is_some() {
                self.remove(&waiter, later); // a limit was lowered
                let error = no_room(&waiter.chain, waiter.bytes, NoRoom::NeverFits);
                later.decide(waiter, Err(error));
            } else if waiter.chain.admit(
                waiter.bytes,
                |account| closed.contains_key(&account.number()),
                Some(&mut full),
            ) {
                self.remove(&waiter, later);
                self.count_drained(&waiter);
                later.decide(waiter, Ok(()));
                gave = true;
            } else {
                later.asks |= !full.is_empty() && waiter.asks();
                // Of the whole chain, whose first account is the request's own.
                let accounts = full.iter().filter_map(|&at| waiter.chain.above().get(at - 1));
                let is_impatient = |account: &&Arc<Account>| account.victims_after().is_some();
                if let Some(account) = accounts.clone().find(is_impatient)
                    && let Some(after) = account.victims_after()
                    && let Some(due) = waiter.since.checked_add(after)
                {
                    let due = waiter.patient_until.with(|until| *until).map_or(due, |until| due.max(until));
                    self.impatient.push((due, Arc::clone(&waiter), Arc::clone(account)));
                }
                closed.extend(accounts.map(|account| (account.number(), Arc::clone(account))));
                later.dropped.push(waiter);
                continue;
            }
            if let Some(next) = self.lanes.get(&lane).and_then(|lane| lane.front()) {
                firsts.insert(next.number, Arc::clone(next));
            }
        }
        let before = std::mem::replace(&mut self.closed, closed);
        for (number, account) in before {
            if !self.closed.contains_key(&number) {
                account.is_wanted_no_more();
            }
            later.opened.push(account);
        }
        gave
    }

    /// Whether those who wait are this process's, and not those of one that it was forked from.
    fn is_ours(&self) -> bool {
        self.process_id == process::id()
    }

    /// For the child of a fork: those who wait are the parent's. Once: it allocates nothing, and drops nothing.
    fn close_nothing(&mut self) {
        if std::mem::replace(&mut self.is_closed, true) {
            return;
        }
        counters::set_waiting(0);
        self.closed.values().for_each(|account| account.is_wanted_no_more());
        let waiters = self.lanes.values().flatten();
        let accounts = waiters.flat_map(|waiter| waiter.chain.above());
        accounts.for_each(|account| {
            account.waiting().fetch_sub(1, Relaxed);
        });
    }
}
