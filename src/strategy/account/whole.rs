//! Charges for native blocks and Python objects, beside those for arrays.

use super::above::as_set;
use super::lending::recall;
use super::parts::{Parts, Weight};
use super::refused::Refused;
use super::reserved::room_came;
use super::{Account, Accounts, Chain, RELAXED, subtract};
use crate::sync::with_all;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Why a charge is taken whatever the limits say.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Force {
    /// The caller does not survive a refusal.
    Grant,
    /// The block stays as it was: its charge is put back.
    Undo,
}

/// Under the lock.
impl Account {
    /// What was given back is in use as before.
    pub(super) fn put_back(&self, bytes: usize) {
        self.live_bytes.store(self.live_bytes.load(RELAXED) + bytes, Ordering::Release);
    }

    /// So many bytes, and a block, were counted as new ones and were there before.
    fn made_less(&self, bytes: usize) {
        self.total_bytes.store(self.total_bytes.load(RELAXED) - bytes as u64, RELAXED);
        self.total_blocks.store(self.total_blocks.load(RELAXED) - 1, RELAXED);
    }
}

/// For the chain of a request that counts the whole of it. The parts change with the accounts, under their locks.
impl Chain {
    /// Before the accounts change: see [`Parts::note_peak`](super::parts::Parts::note_peak).
    fn note_peaks(&self) {
        for (at, parts) in &self.wholes {
            parts.note_peak(self.accounts()[*at].peak_bytes());
        }
    }

    fn change_parts(&self, weight: Weight, is_more: bool) {
        self.wholes.iter().for_each(|(_, parts)| parts.change(weight, is_more));
    }

    fn take_with_parts(&self, weight: Weight, first: impl FnOnce()) {
        self.note_peaks();
        self.take_each(weight.bytes, 1);
        self.change_parts(weight, true);
        self.add_own(first);
    }

    /// The parts of this chain's own account, where a charge changes no others and draws on no reservation.
    #[inline(always)]
    fn own_parts(&self) -> Option<&Parts> {
        match &*self.wholes {
            [(0, parts)] if self.is_plain() => Some(parts),
            _ => None,
        }
    }

    /// Whether the request may borrow from the accounts above it, as it does for arrays: on one thread. Of those that
    /// several use, each charge takes all locks.
    #[inline]
    fn may_borrow(&self) -> bool {
        self.own_parts().is_some() && self.own.may_borrow_itself()
    }

    /// The common case of [`take_whole`](Self::take_whole), as [`charge_small`](Self::charge_small) is of others; false:
    /// it is not that, and nothing has changed.
    #[inline(always)]
    pub(crate) fn take_whole_shortly(&self, weight: Weight, first: impl Fn()) -> bool {
        self.grow_with_own_parts(weight.bytes, 1, |parts| {
            parts.change(weight, true);
            self.add_own(first);
        })
    }

    /// Where several threads use the request, they count in tabs, which have no parts.
    #[inline(always)]
    fn grow_with_own_parts(&self, bytes: usize, blocks: usize, change: impl FnOnce(&Parts)) -> bool {
        let Some(parts) = self.own_parts().filter(|_| !self.own.lock.is_shared()) else { return false };
        let note = || {
            parts.note_peak(self.own.peak_bytes());
            Some(())
        };
        self.grow_by(bytes, blocks, note, |_| change(parts)).is_some()
    }

    /// Charges a block; false if a limit has no room, which is remembered. `first` is as for `take_block`.
    pub(crate) fn take_whole(&self, weight: Weight, first: impl Fn()) -> bool {
        if self.take_whole_shortly(weight, &first) {
            return true;
        }
        if self.may_borrow() {
            self.ready_to_borrow();
        }
        let refused_at = self.with_accounts(|| {
            // Not by their size: what tiny arrays may exceed a limit by is for those alone.
            if let Some(at) = self.refusing(weight.bytes, usize::MAX, false) {
                self.note(self.refuse(at, weight.bytes, false));
                return Some(at);
            }
            self.take_with_parts(weight, first);
            if self.may_borrow() {
                self.borrow();
            }
            None
        });
        refused_at.inspect(|&at| self.miss(at, weight.bytes)).is_none()
    }

    /// Charges a block whatever the limits say: the overdraft is on the accounts. `is_granted`: the request is told.
    pub(crate) fn take_whole_anyway(&self, weight: Weight, is_granted: bool, first: impl FnOnce()) {
        let beyond = self.with_accounts(|| {
            let beyond = if is_granted { self.note_overdraft(weight.bytes) } else { None };
            self.take_with_parts(weight, first);
            beyond
        });
        self.miss_beyond(beyond);
    }

    /// Has reclaimers asked for what was granted beyond the limit of the account at this position.
    fn miss_beyond(&self, at: Option<usize>) {
        if let Some(at) = at {
            self.miss(at, 0); // which it has already
        }
    }

    /// The same for an array.
    pub(crate) fn take_array_anyway(&self, bytes: usize, first: impl FnOnce()) {
        let beyond = self.with_accounts(|| {
            let beyond = self.note_overdraft(bytes);
            self.take_each(bytes, 1);
            self.add_own(first);
            beyond
        });
        self.miss_beyond(beyond);
    }

    /// Notes that so many bytes are about to be given, though perhaps an account has no room: which one. Under the
    /// locks.
    fn note_overdraft(&self, bytes: usize) -> Option<usize> {
        let parts = self.whole.as_ref()?;
        // Room may have come since they were refused: then nothing is overdrawn.
        let at = self.refusing(bytes, usize::MAX, false)?;
        let account = &self.accounts()[at];
        parts.granted(&Refused {
            at,
            limit_bytes: account.limit_bytes(),
            in_use_bytes: account.counted_bytes(),
            held_bytes: self.own.live_bytes.load(RELAXED),
            requested_bytes: bytes,
            is_chosen: account.take_mark(),
        });
        Some(at)
    }

    /// Changes what a block weighs; false if a limit has no room, which is remembered.
    #[inline(always)]
    pub(crate) fn reweigh(&self, old: Weight, new: Weight, force: Option<Force>) -> bool {
        (force.is_none() && self.reweigh_shortly(old, new)) || self.reweigh_slowly(old, new, force)
    }

    /// The common case of a block that grows; false: it is not that, and nothing has changed.
    #[inline(always)]
    fn reweigh_shortly(&self, old: Weight, new: Weight) -> bool {
        let Some(growth) = new.bytes.checked_sub(old.bytes) else { return false };
        self.grow_with_own_parts(growth, 0, |parts| {
            parts.change(old, false);
            parts.change(new, true);
        })
    }

    #[inline(never)]
    fn reweigh_slowly(&self, old: Weight, new: Weight, force: Option<Force>) -> bool {
        if self.may_borrow() {
            self.ready_to_borrow();
        }
        let growth = new.bytes.saturating_sub(old.bytes);
        let done = self.with_accounts(|| {
            let mut beyond = None;
            if growth > 0 {
                match force {
                    Some(Force::Grant) => beyond = self.note_overdraft(growth),
                    Some(Force::Undo) => {}
                    None => self.check(growth, usize::MAX, false)?,
                }
            }
            self.note_peaks();
            if growth > 0 {
                self.take_each(growth, 0);
            }
            let is_wanted = old.bytes > new.bytes && self.give_back_each(old.bytes - new.bytes, 0);
            self.change_parts(old, false);
            self.change_parts(new, true);
            if self.may_borrow() {
                self.borrow();
            }
            Ok((is_wanted, beyond))
        });
        match done {
            Ok((is_wanted, beyond)) => {
                if is_wanted {
                    room_came();
                }
                self.miss_beyond(beyond);
                true
            }
            Err(refused) => {
                self.remember(refused);
                self.miss(refused.at, growth);
                false
            }
        }
    }

    /// Charges a block of another chain's request to this one, where it weighs something else. An account of both
    /// changes by the difference, and a limit is asked for no more. `None`: a limit has no room, which is remembered,
    /// and nothing has changed; else whether it was the last block of the other one, which has ended. `first` is as
    /// for `take_block`.
    pub(crate) fn take_over(
        &self,
        from: &Self,
        old: Weight,
        new: Weight,
        force: Option<Force>,
        first: impl FnOnce(),
    ) -> Option<bool> {
        // Kept: once its lock is let go of, the other chain may be gone.
        let mut all: Accounts = from.accounts().iter().chain(self.accounts()).map(Arc::clone).collect();
        as_set(&mut all);
        let mut floors: Vec<usize> = Vec::with_capacity(from.accounts().len());
        let taken = with_all(&all, || {
            from.give_own_loans_back();
            self.give_own_loans_back();
            // Nothing is lent from here on: whatever is undone below is as it was.
            recall(from.accounts());
            recall(self.accounts());
            self.note_peaks();
            from.note_peaks();
            floors.extend(from.accounts().iter().map(|account| account.floor_bytes.load(RELAXED)));
            let is_wanted = from.give_back_each(old.bytes, 0);
            let mut beyond = None;
            match force {
                Some(Force::Grant) => beyond = self.note_overdraft(new.bytes),
                Some(Force::Undo) => {}
                None => {
                    if let Some(at) = self.refusing(new.bytes, usize::MAX, false) {
                        from.put_back_each(old.bytes);
                        let each = from.accounts().iter().zip(&floors);
                        each.for_each(|(account, &floor)| {
                            account.floor_bytes.store(floor, RELAXED);
                            account.set_ceiling();
                        });
                        let was_there = if from.reaches(&self.accounts()[at]) { old.bytes } else { 0 };
                        let missing = new.bytes.saturating_sub(was_there);
                        self.note(self.refuse(at, missing, false));
                        return Err((at, missing));
                    }
                }
            }
            from.change_parts(old, false);
            from.accounts().iter().for_each(|account| subtract(&account.live_blocks, 1));
            self.take_with_parts(new, first);
            for account in self.accounts().iter().filter(|account| from.reaches(account)) {
                account.made_less(old.bytes.min(new.bytes));
            }
            Ok((is_wanted, beyond, from.remove_own()))
        });
        let (is_wanted, beyond, is_last) = match taken {
            Ok(taken) => taken,
            Err((at, missing)) => {
                self.miss(at, missing);
                return None;
            }
        };
        if is_wanted {
            room_came();
        }
        self.miss_beyond(beyond);
        Some(is_last)
    }

    /// Gives a block's charge back; whether it was the last block of an ended request. The chain may be gone
    /// afterwards, as after `give_block_back`.
    #[inline(always)]
    #[must_use]
    pub(crate) fn give_whole_back(&self, weight: Weight) -> bool {
        !self.give_whole_shortly(weight) && self.give_whole_back_slowly(weight)
    }

    /// The common case, as in [`give_small_back`](Self::give_small_back); false: it is not that, and nothing has
    /// changed.
    #[inline(always)]
    fn give_whole_shortly(&self, weight: Weight) -> bool {
        let Some(parts) = self.own_parts() else { return false };
        let Some(section) = self.own.lock.enter_owned() else { return false };
        if !self.own.give_small_back_in(&section, weight.bytes) {
            return false;
        }
        parts.note_peak(self.own.peak_bytes());
        parts.change(weight, false);
        true
    }

    #[inline(never)]
    fn give_whole_back_slowly(&self, weight: Weight) -> bool {
        if self.may_borrow() {
            self.ready_to_borrow();
        }
        let (is_wanted, is_last) = self.with_accounts(|| {
            self.note_peaks();
            self.change_parts(weight, false);
            let is_wanted = self.give_back_each(weight.bytes, 1);
            if self.may_borrow() {
                self.borrow();
            }
            (is_wanted, self.remove_own())
        });
        if is_wanted {
            room_came();
        }
        is_last
    }
}

#[cfg(test)]
mod tests {
    use super::super::TINY_BYTES;
    use super::{Account, Arc, Chain, RELAXED, Weight};
    use crate::random::Random;

    fn weight(bytes: usize) -> Weight {
        Weight { bytes, is_object: !bytes.is_multiple_of(2), is_sample: false }
    }

    fn chain(limit: Option<usize>, budget: Option<&Arc<Account>>, outer: Option<&Chain>, reserves: usize) -> Chain {
        let mut chain = Chain::of_request(None, limit, 0, budget, outer, reserves.is_multiple_of(2), reserves > 0)
            .expect("not deep");
        chain.count_parts(outer, true);
        if reserves > 0 {
            let _has_room = chain.admit(reserves, Account::is_wanted, None);
        }
        chain
    }

    #[test]
    fn a_block_that_changes_hands_asks_common_accounts_for_the_difference() {
        let tenant = Account::of_budget("tenant", Some(10), None);
        let (first, second) = (chain(None, Some(&tenant), None, 0), chain(Some(7), Some(&tenant), None, 0));
        assert!(first.take_whole(weight(6), || ()));
        let _ = first.end(false, 0);
        assert_eq!(second.take_over(&first, weight(6), weight(7), None, || ()), Some(true));
        let numbers = |account: &Account| {
            let stats = account.stats();
            (stats.live_bytes, stats.peak_bytes, stats.total_bytes, stats.live_blocks, stats.total_blocks)
        };
        assert_eq!(numbers(&tenant), (7, 7, 7, 1, 1));
        assert_eq!(numbers(first.own()), (0, 6, 6, 0, 1));
        assert_eq!(numbers(second.own()), (7, 7, 7, 1, 1));
        assert!(!second.give_whole_back(weight(7)));
        assert_eq!((tenant.live_bytes(), second.own().live_bytes()), (0, 0));
    }

    /// A block of the model: which chain pays, and what it weighs.
    type Block = (usize, usize);

    /// Requests in budgets, in each other and with reservations, whose blocks others take over once they have ended:
    /// at each step each account has what the blocks of the chains that reach it weigh, and what is refused changes
    /// nothing.
    #[test]
    fn a_block_as_small_as_a_tiny_array_is_held_to_the_limit() {
        let mut chain = Chain::of_request(None, Some(4096), 65536, None, None, true, false).expect("not deep");
        chain.count_parts(None, true);
        assert!((0..4).all(|_| chain.take_whole(weight(TINY_BYTES), || ())));
        assert!(!chain.take_whole(weight(TINY_BYTES), || ()), "there is no room");
        assert_eq!((chain.own().live_bytes(), chain.own().stats().refused), (4096, 1));
        assert!(chain.take_block(TINY_BYTES, false, || ()), "a tiny array has the overdraft");
        assert!(!chain.give_block_back(TINY_BYTES));
        (0..4).for_each(|_| assert!(!chain.give_whole_back(weight(TINY_BYTES))));
    }

    #[test]
    fn blocks_that_change_hands_are_where_a_naive_model_has_them() {
        const STEPS: usize = if cfg!(miri) { 150 } else { 20_000 };
        let mut random = Random::new(1);
        let all = Account::of_budget("all", Some(3000), None);
        let tenants = [600, 900].map(|limit| Account::of_budget("tenant", Some(limit), Some(Arc::clone(&all))));
        let budgets = || std::iter::once(&all).chain(&tenants);
        let mut chains: Vec<Chain> = Vec::new();
        let mut blocks: Vec<Block> = Vec::new();
        let (mut taken, mut refused) = (0, 0);
        for _ in 0..STEPS {
            match random.below(9) {
                0 if chains.len() < 12 => {
                    let outer = if chains.is_empty() || random.below(3) > 0 {
                        None
                    } else {
                        chains.get(random.below(chains.len()))
                    };
                    let budget = [None, Some(&all), Some(&tenants[0]), Some(&tenants[1])][random.below(4)];
                    let limit = [None, Some(300)][random.below(2)];
                    let reserves = if random.below(3) == 0 { 1 + random.below(200) } else { 0 };
                    chains.push(chain(limit, budget, outer, reserves));
                }
                1 if !chains.is_empty() => {
                    let _ = chains[random.below(chains.len())].end(false, 0);
                }
                2 | 3 if !chains.is_empty() => {
                    let (at, bytes) = (random.below(chains.len()), 1 + random.below(80));
                    if chains[at].take_whole(weight(bytes), || ()) {
                        blocks.push((at, bytes));
                    }
                }
                4 if !blocks.is_empty() => {
                    let (at, bytes) = blocks.swap_remove(random.below(blocks.len()));
                    let _ = chains[at].give_whole_back(weight(bytes));
                }
                8 if !blocks.is_empty() => {
                    let (number, new) = (random.below(blocks.len()), 1 + random.below(120));
                    let (at, old) = blocks[number];
                    if chains[at].reweigh(weight(old), weight(new), None) {
                        blocks[number].1 = new;
                    }
                }
                5..=7 if !blocks.is_empty() => {
                    let number = random.below(blocks.len());
                    let ((from, old), to, new) = (blocks[number], random.below(chains.len()), 1 + random.below(120));
                    if from == to || !chains[from].has_ended() {
                        continue;
                    }
                    let accounts = || chains.iter().flat_map(Chain::accounts).map(Arc::as_ref);
                    let state = || -> Vec<_> {
                        let numbers = |one: &Account| {
                            let covered = one.reservation.as_ref().map(|own| own.covered_bytes.load(RELAXED));
                            (one.stats().live_bytes, one.pending_bytes(), one.floor_bytes.load(RELAXED), covered)
                        };
                        accounts().map(numbers).collect()
                    };
                    let before = state();
                    match chains[to].take_over(&chains[from], weight(old), weight(new), None, || ()) {
                        Some(_) => {
                            taken += 1;
                            blocks[number] = (to, new);
                        }
                        None => {
                            refused += 1;
                            assert_eq!(state(), before);
                        }
                    }
                }
                _ => {}
            }
            // Each account has what reaches it, and parts that add up.
            let counted = |account: &Arc<Account>| -> usize {
                blocks.iter().filter(|(at, _)| chains[*at].reaches(account)).map(|(_, bytes)| bytes).sum()
            };
            for account in chains.iter().map(Chain::own).chain(budgets()) {
                let stats = account.stats();
                assert_eq!(stats.live_bytes, counted(account));
                assert!(stats.live_bytes <= account.limit_bytes() && stats.live_bytes <= stats.peak_bytes);
                assert!(stats.total_bytes >= stats.live_bytes as u64 && stats.total_blocks >= stats.live_blocks as u64);
            }
            for chain in &chains {
                let parts = chain.whole_stats().expect("it is whole");
                assert_eq!(parts.native_bytes + parts.object_bytes, chain.own().live_bytes());
            }
        }
        assert!(taken > STEPS / 50 && refused > STEPS / 50, "{taken} taken, {refused} refused");
        for (at, bytes) in blocks {
            let _ = chains[at].give_whole_back(weight(bytes));
        }
        for chain in &chains {
            let _ = chain.end(false, 0);
        }
        for account in budgets() {
            assert_eq!((account.live_bytes(), account.pending_bytes()), (0, 0));
        }
    }
}
