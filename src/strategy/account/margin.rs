//! How far small blocks may exceed a limit that has refused, so that the refusal can be handled.

use super::lending::with_exact;
use super::{Account, Chain};

impl Chain {
    /// Whether all accounts have room, or exceed their limit with it by no more than a sixteenth of the smallest limit
    /// of all, and at least `min_reserve_bytes`. What others reserved is in use.
    pub(crate) fn has_reserve_for(&self, bytes: usize, min_reserve_bytes: usize) -> bool {
        let limit_bytes = self.accounts().iter().map(|account| account.limit_bytes()).min().unwrap_or_default();
        let reserve_bytes = (limit_bytes / 16).max(min_reserve_bytes);
        let fits = |account: &Account, bytes: usize| {
            let in_use_bytes = account.counted_bytes();
            in_use_bytes.saturating_add(bytes) <= account.limit_bytes().saturating_add(reserve_bytes)
        };
        with_exact(self.accounts(), || match &self.covers {
            None => self.accounts().iter().all(|account| fits(account, bytes)),
            Some(covers) => self.first_without(covers, bytes, |at, step| fits(&self.accounts()[at], step)).is_none(),
        })
    }
}

#[cfg(test)]
mod tests {
    use crate::strategy::account::{Account, Chain};

    #[test]
    fn what_others_reserved_is_no_reserve() {
        let budget = Account::of_budget("b", Some(1600), None);
        let chain =
            |reserves| Chain::of_request(None, None, 0, Some(&budget), None, false, reserves).expect("not deep");
        let (patient, other) = (chain(true), chain(false));
        assert!(patient.admit(1600, Account::is_wanted, None));
        assert!(other.has_reserve_for(200, 200));
        assert!(!other.has_reserve_for(201, 200));
        assert!(patient.has_reserve_for(1600, 0), "its own reservation");
        patient.return_reservation();
        assert!(other.has_reserve_for(1700, 0), "a sixteenth of the limit");
        assert!(!other.has_reserve_for(1701, 0), "of the budget's: the request itself has none");
    }
}
