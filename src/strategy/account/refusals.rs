//! What a chain refuses: the error for it, and what its request remembers of it.

use super::refused::{ENDED, NO_MEMORY, REMEMBERED, Refusal, RefusalNote, Refused};
use super::{Chain, Kind, RELAXED, count};
use crate::error::Error;
use crate::unattributed::unattributed;

impl Chain {
    /// The error for a refusal by this chain.
    #[cold]
    pub(crate) fn error(&self, refused: Refused) -> Error {
        let _unattributed = unattributed(); // a heap at its limit could not tell of the refusal
        let Refused { at, limit_bytes, in_use_bytes, held_bytes, requested_bytes, is_chosen } = refused;
        let account = self.accounts().get(at);
        if let Some(chosen) = account.filter(|_| is_chosen).and_then(|account| account.chosen()) {
            return Error::BudgetExceeded {
                budget: chosen.budget.clone(),
                budget_id: chosen.budget_id,
                of_request: false,
                limit_bytes: chosen.limit_bytes,
                in_use_bytes: chosen.in_use_bytes,
                held_bytes,
                requested_bytes,
                chosen_for: Some(chosen.chosen_for.clone()),
                guaranteed_bytes: 0,
            };
        }
        match account {
            Some(account) => Error::BudgetExceeded {
                budget: account.name().into_owned(),
                budget_id: account.number(),
                of_request: matches!(account.kind, Kind::Request { .. }),
                limit_bytes,
                in_use_bytes,
                held_bytes,
                requested_bytes,
                chosen_for: None,
                guaranteed_bytes: self.guaranteed_to_others(at, held_bytes.saturating_add(requested_bytes)),
            },
            None => Error::RequestEnded { request: self.own.name().into_owned(), requested_bytes },
        }
    }

    /// Counts a refusal because the request has ended.
    #[cold]
    pub(crate) fn refuse_after_end(&self, requested_bytes: usize) -> Refused {
        self.own.lock.with(|| self.own.refuse(ENDED, requested_bytes))
    }

    /// Remembers that the system or a strategy had no memory, so that an earlier refusal of as many bytes is not taken
    /// for the reason.
    #[cold]
    pub(crate) fn remember_no_memory(&self, requested_bytes: usize) {
        self.remember(Refused {
            at: NO_MEMORY,
            limit_bytes: 0,
            in_use_bytes: 0,
            held_bytes: 0,
            requested_bytes,
            is_chosen: false,
        });
    }

    /// The number of the account whose limit refused; `None` where it was none.
    #[cold]
    pub(crate) fn account_of(&self, refused: Refused) -> Option<u64> {
        self.accounts().get(refused.at).filter(|_| !refused.is_chosen).map(|account| account.number())
    }

    /// The same of the last refusal, unless that was taken.
    #[cfg(ctxalloc_whole)]
    #[cold]
    pub(crate) fn refused_last_by(&self) -> Option<u64> {
        let (at_plus_one, refused) = self.own.lock.with(|| {
            let note = &self.own.refusals[0];
            (note.at_plus_one.load(RELAXED), note.read())
        });
        self.account_of(Refused { at: at_plus_one.checked_sub(1)?, ..refused })
    }

    /// Remembers a refusal.
    #[cold]
    pub(crate) fn remember(&self, refused: Refused) {
        self.own.lock.with(|| self.note(refused));
    }

    /// [`remember`](Self::remember) for a caller that holds the own account's lock.
    #[cold]
    pub(super) fn note(&self, refused: Refused) {
        if let Kind::Request { refusals, .. } = &self.own.kind
            && refused.at != NO_MEMORY
        {
            count(refusals, 1);
        }
        self.own.call_in(); // for the number of all blocks ever made
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

    /// Whether an account holds more than its limit. A moment's answer.
    #[cfg(feature = "python")]
    pub(crate) fn is_overdrawn(&self) -> bool {
        self.accounts().iter().any(|account| account.live_bytes() > account.limit_bytes())
    }

    /// [`Error::BudgetExceeded`] for a block that was given beyond a limit, since its caller does not survive a
    /// refusal: once for each such block or several of them; with `again` whether it was told or not.
    #[cfg(feature = "python")]
    pub(crate) fn overdraft(&self, again: bool) -> Option<Error> {
        let parts = self.whole.as_ref().filter(|parts| again || parts.is_untold())?;
        let refused = self.own.lock.with(|| parts.overdraft(again))?;
        Some(self.error(refused))
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
        let _unattributed = unattributed(); // as in `error`
        let (found, made) = self.own.lock.with(|| {
            let found: [_; REMEMBERED] = std::array::from_fn(|number| {
                let note = &self.own.refusals[number];
                (at_plus_one(note), note.read(), note.made_before.load(RELAXED))
            });
            self.own.call_in();
            (found, self.own.total_blocks.load(RELAXED))
        });
        // The list is allocated outside the lock: it may come from this very request.
        let there = found.into_iter().filter(|&(at_plus_one, ..)| at_plus_one != 0);
        there.map(|(at, refused, before)| (Refused { at: at - 1, ..refused }, before == made)).collect()
    }
}
