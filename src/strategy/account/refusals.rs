//! What an account refuses, and what a request remembers of it for whoever asks why there was no memory.

use super::{Account, Chain, RELAXED, count};
use crate::error::Error;
use std::sync::atomic::{AtomicU64, AtomicUsize};

/// A charge that was refused.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Refusal {
    /// [`Error::BudgetExceeded`], with the budget whose limit it was, or [`Error::RequestEnded`].
    pub error: Error,
    /// Whether nothing was allocated in the request since then.
    pub is_last: bool,
}

/// A refusal as it is passed up from where it happens: numbers only, so nothing is allocated.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Refused {
    /// The position in the chain of the account that refused; or [`ENDED`], or [`NO_MEMORY`].
    at: usize,
    limit_bytes: usize,
    in_use_bytes: usize,
    requested_bytes: usize,
}

/// Instead of an account: the request has ended and refuses memory.
const ENDED: usize = usize::MAX - 1;
/// Instead of an account: the system or a strategy had no memory.
const NO_MEMORY: usize = usize::MAX - 2;

/// How many refusals a request remembers. More than one, because cleaning up after a refusal may cause another.
pub(super) const REMEMBERED: usize = 4;

/// A remembered refusal. Changed under the own account's lock.
#[derive(Debug, Default)]
pub(super) struct RefusalNote {
    /// [`Refused::at`] plus one. Set by `fill`; 0 before the first refusal and once the refusal was taken.
    at_plus_one: AtomicUsize,
    limit_bytes: AtomicUsize,
    in_use_bytes: AtomicUsize,
    requested_bytes: AtomicUsize,
    /// The account's `total_blocks` at that moment.
    made_before: AtomicU64,
}

impl Account {
    /// Counts a refusal by this account, under its lock.
    #[cold]
    pub(super) fn refuse(&self, at: usize, requested_bytes: usize) -> Refused {
        count(&self.refused, 1);
        // Reserved bytes count as in use here, as they do for the limit.
        let in_use_bytes = self.live_bytes() + self.pending_bytes.load(RELAXED);
        let limit_bytes = self.limit_bytes();
        Refused { at, limit_bytes, in_use_bytes, requested_bytes }
    }
}

impl Chain {
    /// The error for a refusal by this chain.
    #[cold]
    pub(crate) fn error(&self, refused: Refused) -> Error {
        let Refused { at, limit_bytes, in_use_bytes, requested_bytes } = refused;
        match self.accounts().get(at) {
            Some(account) => Error::BudgetExceeded {
                budget: account.name().into_owned(),
                limit_bytes,
                in_use_bytes,
                requested_bytes,
            },
            None => Error::RequestEnded { request: self.own.name().into_owned(), requested_bytes },
        }
    }

    /// Counts a refusal because the request has ended.
    #[cold]
    pub(crate) fn refuse_after_end(&self, requested_bytes: usize) -> Refused {
        self.own.lock.with(|| self.own.refuse(ENDED, requested_bytes))
    }

    /// Remembers that there was no memory, so that an earlier refusal of as many bytes is not taken for the reason.
    #[cold]
    pub(crate) fn remember_no_memory(&self, requested_bytes: usize) {
        self.remember(Refused { at: NO_MEMORY, limit_bytes: 0, in_use_bytes: 0, requested_bytes });
    }

    /// Remembers a refusal.
    #[cold]
    pub(crate) fn remember(&self, refused: Refused) {
        self.own.lock.with(|| self.note(refused));
    }

    /// [`remember`](Self::remember) for a caller that holds the own account's lock.
    #[cold]
    pub(super) fn note(&self, refused: Refused) {
        let notes = &self.own.refusals;
        for (to, from) in (1..REMEMBERED).rev().map(|number| (&notes[number], &notes[number - 1])) {
            to.fill(&from.read(), from.at_plus_one.load(RELAXED), from.made_before.load(RELAXED));
        }
        notes[0].fill(&refused, refused.at + 1, self.own.total_blocks.load(RELAXED));
    }

    /// Takes the remembered refusals, the latest first. Each is returned once.
    pub(crate) fn take_refusals(&self) -> Vec<Refusal> {
        let refusals = self.refusals(|note| note.at_plus_one.swap(0, RELAXED));
        refusals.into_iter().filter(|(refused, _)| refused.at != NO_MEMORY).map(|found| self.refusal(found)).collect()
    }

    /// The latest refusal of `requested_bytes`; with `None` the last refusal, if nothing was allocated since.
    pub(crate) fn refusal_of(&self, requested_bytes: Option<usize>) -> Option<Error> {
        let all = self.refusals(|note| note.at_plus_one.load(RELAXED));
        let fits = |(refused, is_last): &(Refused, bool)| match requested_bytes {
            Some(bytes) => refused.requested_bytes == bytes,
            None => *is_last,
        };
        let found = all.into_iter().find(fits).filter(|(refused, _)| refused.at != NO_MEMORY);
        found.map(|found| self.refusal(found).error)
    }

    fn refusal(&self, (refused, is_last): (Refused, bool)) -> Refusal {
        Refusal { error: self.error(refused), is_last }
    }

    /// The remembered refusals, the latest first, each with whether nothing was allocated since.
    fn refusals(&self, at_plus_one: impl Fn(&RefusalNote) -> usize) -> Vec<(Refused, bool)> {
        let (found, made) = self.own.lock.with(|| {
            let found: [_; REMEMBERED] = std::array::from_fn(|number| {
                let note = &self.own.refusals[number];
                (at_plus_one(note), note.read(), note.made_before.load(RELAXED))
            });
            (found, self.own.total_blocks.load(RELAXED))
        });
        // The list is allocated outside the lock: it may come from this very request.
        let there = found.into_iter().filter(|&(at_plus_one, ..)| at_plus_one != 0);
        there.map(|(at, refused, before)| (Refused { at: at - 1, ..refused }, before == made)).collect()
    }
}

impl RefusalNote {
    fn read(&self) -> Refused {
        Refused {
            at: 0,
            limit_bytes: self.limit_bytes.load(RELAXED),
            in_use_bytes: self.in_use_bytes.load(RELAXED),
            requested_bytes: self.requested_bytes.load(RELAXED),
        }
    }

    fn fill(&self, refused: &Refused, at_plus_one: usize, made_before: u64) {
        self.at_plus_one.store(at_plus_one, RELAXED);
        self.limit_bytes.store(refused.limit_bytes, RELAXED);
        self.in_use_bytes.store(refused.in_use_bytes, RELAXED);
        self.requested_bytes.store(refused.requested_bytes, RELAXED);
        self.made_before.store(made_before, RELAXED);
    }
}
