//! `Waiter`: one that stands in the queue.

use super::refusal::{no_room, no_room_in};
use super::turn::Turn;
use crate::counters::UNNAMED;
use crate::error::{Error, NoRoom};
use crate::strategy::account::{Account, Chain, reclaimers};
use crate::sync::Locked;
use std::process;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Weak};
use std::task::{Poll, Waker};
use std::time::{Duration, Instant};

/// Since when one waits, and until when at most.
#[derive(Debug, Clone, Copy)]
pub(super) struct Time {
    pub(super) since: Instant,
    pub(super) until: Option<Instant>,
}

impl Time {
    pub(super) fn from_now(timeout: Option<Duration>) -> Self {
        let since = Instant::now();
        Self { since, until: timeout.and_then(|timeout| since.checked_add(timeout)) }
    }
}

/// One that waits.
pub(super) struct Waiter {
    pub(super) chain: Arc<Chain>,
    pub(super) bytes: usize,
    /// By age.
    pub(super) number: u64,
    pub(super) since: Instant,
    pub(super) until: Option<Instant>,
    /// Which process it waits in.
    pub(super) process_id: u32,
    /// How many reclaimers there had been when it asked them.
    asked: AtomicU64,
    /// After how many milliseconds of waiting it asks them again.
    asks_again: AtomicU64,
    /// From when on somebody else may be chosen to give way to it.
    pub(super) patient_until: Locked<Option<Instant>>,
    /// Who was chosen to.
    pub(super) victim: Locked<Option<Weak<Account>>>,
    pub(super) turn: Turn,
}

/// How often reclaimers are asked for one that waits.
pub(super) const ASKS_EVERY: Duration = Duration::from_secs(1);

impl Waiter {
    /// One that came to this queue as the one of this number.
    pub(super) fn new(chain: &Arc<Chain>, bytes: usize, number: u64, time: Time, process_id: u32) -> Self {
        Self {
            chain: Arc::clone(chain),
            bytes,
            number,
            since: time.since,
            until: time.until,
            process_id,
            asked: AtomicU64::new(0),
            asks_again: AtomicU64::new(0),
            patient_until: Locked::new(None),
            victim: Locked::new(None),
            turn: Turn::new(),
        }
    }

    /// Has reclaimers asked for what it waits for: at once, where there are others since, and every second, for what
    /// they could not give then they may have by now. Whether the thread is to be woken.
    pub(super) fn asks(&self) -> bool {
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

    /// The refusal, if it waits in vain: a limit is lower than when it came, or something was guaranteed to others.
    pub(super) fn never_fits(&self) -> Option<Error> {
        let account = self.chain.never_fits(self.bytes)?;
        Some(no_room_in(&self.chain, account, self.bytes, NoRoom::NeverFits))
    }

    /// Its name, as metrics have it.
    pub(super) fn name(&self) -> &str {
        self.chain.own().given_name().unwrap_or(UNNAMED)
    }

    /// The number of the budget that it waits for.
    pub(super) fn lane(&self) -> u64 {
        self.chain.above().first().map_or(0, |account| account.number())
    }
}
