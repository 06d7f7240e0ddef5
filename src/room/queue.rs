//! The queue: who waits, in which order, and who gets the room that came.
//!
//! The specification: waiters are looked at in the order in which they came. One that would need room of a closed
//! account is passed over. One for which there is room gets it; another one closes the first account, from its tenant
//! upwards, that has none: what waits for its tenant's limit holds up nobody of another tenant. Nothing else closes an
//! account. This is repeated until nobody gets any. Waiters of one budget stand in a lane, so that only
//! the first of each is looked at.

use super::drain::Drain;
use super::refusal::no_room;
use super::waiter::{ASKS_EVERY, Waiter};
use crate::counters::{self, Admitted};
use crate::error::{Error, NoRoom};
use crate::strategy::account::{Account, reclaimers, shrank};
use std::collections::{BTreeMap, VecDeque};
use std::process;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Weak};
use std::task::Waker;
use std::time::{Duration, Instant};

/// How long it takes at least, and at most, until another request is chosen for one that waits: the first one has to
/// give way.
const MIN_PATIENCE: Duration = Duration::from_millis(100);
const MAX_PATIENCE: Duration = Duration::from_secs(24 * 3600);

#[derive(Default)]
pub(super) struct Queue {
    /// By the number of the budget; each in the order of arrival, and never empty.
    pub(super) lanes: BTreeMap<u64, VecDeque<Arc<Waiter>>>,
    deadlines: BTreeMap<(Instant, u64), Arc<Waiter>>,
    /// Those that had no room the last time.
    closed: BTreeMap<u64, Arc<Account>>,
    /// Those that found an account full that has victims, which it is, and when one is looked for.
    impatient: Vec<(Instant, Arc<Waiter>, Arc<Account>)>,
    /// How many of each name wait.
    pub(super) names: BTreeMap<Box<str>, usize>,
    /// How fast those get room who wait for an account, by its number.
    pub(super) drains: BTreeMap<u64, Drain>,
    count: usize,
    pub(super) arrived: u64,
    pub(super) process_id: u32,
    /// When the runner means to look.
    pub(super) planned: Next,
    /// Whether the accounts know that these waiters are not this process's.
    is_closed: bool,
}

/// What is done once the lock is released: wakers are somebody's code, and a drop may be the last one of an account.
#[derive(Default)]
pub(super) struct Later {
    pub(super) wakers: Vec<Waker>,
    pub(super) told: Vec<(Arc<Waiter>, Admitted)>,
    pub(super) dropped: Vec<Arc<Waiter>>,
    pub(super) opened: Vec<Arc<Account>>,
    pub(super) forgotten: Queue,
    /// Whether the thread that asks reclaimers is to be woken.
    pub(super) asks: bool,
    /// For whom somebody is to be chosen.
    pub(super) chooses: Vec<(Arc<Waiter>, Arc<Account>)>,
    pub(super) spared: Vec<Weak<Account>>,
    /// Those that were impatient.
    pub(super) before: Vec<(Instant, Arc<Waiter>, Arc<Account>)>,
}

impl Later {
    pub(super) fn decide(&mut self, waiter: Arc<Waiter>, answer: Result<(), Error>) {
        let admitted = match &answer {
            Ok(()) => Admitted::Waited(waiter.since.elapsed()),
            Err(Error::NoRoom { reason: NoRoom::TimedOut, .. }) => Admitted::TimedOut,
            Err(_) => Admitted::TurnedAway,
        };
        self.wakers.extend(waiter.turn.decide(answer));
        self.told.push((waiter, admitted));
    }
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
    pub(super) fn of_this_process() -> Self {
        Self { process_id: process::id(), ..Self::default() }
    }

    pub(super) fn next(&self) -> Next {
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
    pub(super) fn is_sooner(&mut self) -> bool {
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

    pub(super) fn has(&self, waiter: &Arc<Waiter>) -> bool {
        let lane = self.lanes.get(&waiter.lane());
        lane.is_some_and(|lane| lane.binary_search_by_key(&waiter.number, |other| other.number).is_ok())
    }

    pub(super) fn add(&mut self, waiter: &Arc<Waiter>) {
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
    pub(super) fn remove(&mut self, waiter: &Arc<Waiter>, later: &mut Later) -> bool {
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
            let drain = self.drains.entry(account.number()).or_insert_with(|| Drain::new(waiter.since));
            drain.count(waiter.since, now);
        }
        if self.drains.len() > KEPT && self.arrived.is_multiple_of(KEPT as u64) {
            self.drains.retain(|_, drain| !drain.has_faded(now));
        }
    }

    pub(super) fn expire(&mut self, now: Instant, later: &mut Later) {
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
    pub(super) fn choose(&mut self, now: Instant, later: &mut Later) {
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
    pub(super) fn look(&mut self, later: &mut Later) {
        if shrank() {
            self.turn_away(later);
        }
        while self.look_once(later) {}
    }

    /// Refuses those who wait in vain, wherever they stand: also one that waits for another account than that which has
    /// become too small, with others behind it.
    fn turn_away(&mut self, later: &mut Later) {
        let waiters = self.lanes.values().flatten();
        let mut in_vain: Vec<_> =
            waiters.filter_map(|waiter| Some((Arc::clone(waiter), waiter.never_fits()?))).collect();
        in_vain.sort_unstable_by_key(|(waiter, _)| waiter.number);
        for (waiter, error) in in_vain {
            self.remove(&waiter, later);
            later.decide(waiter, Err(error));
        }
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
            if waiter.chain.admit(waiter.bytes, |account| closed.contains_key(&account.number()), Some(&mut full)) {
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
    pub(super) fn is_ours(&self) -> bool {
        self.process_id == process::id()
    }

    /// For the child of a fork: those who wait are the parent's. Once: it allocates nothing, and drops nothing.
    pub(super) fn close_nothing(&mut self) {
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
