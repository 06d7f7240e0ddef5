//! Charges for native blocks and Python objects, beside those for arrays.

use super::parts::Weight;
use super::refused::Refused;
use super::reserved::room_came;
use super::{Chain, RELAXED};

/// Why a charge is taken whatever the limits say.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Force {
    /// The caller does not survive a refusal.
    Grant,
    /// The block stays as it was: its charge is put back.
    Undo,
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

    /// Charges a block; false if a limit has no room, which is remembered. `first` is as for `take_block`.
    pub(crate) fn take_whole(&self, weight: Weight, first: impl FnOnce()) -> bool {
        // The common case, as in `take_block`: one account, with room, on the thread that owns its lock.
        if self.is_alone()
            && let Some(_section) = self.own.lock.enter_owned()
            && !self.own.lends()
            && self.own.has_room_for(weight.bytes)
        {
            self.take_with_parts(weight, first);
            return true;
        }
        self.with_accounts(|| {
            if let Some(at) = self.refusing(weight.bytes, weight.bytes, false) {
                self.note(self.refuse(at, weight.bytes, false));
                return false;
            }
            self.take_with_parts(weight, first);
            true
        })
    }

    /// Charges a block whatever the limits say: the overdraft is on the accounts. `is_granted`: the request is told.
    pub(crate) fn take_whole_anyway(&self, weight: Weight, is_granted: bool, first: impl FnOnce()) {
        self.with_accounts(|| {
            if is_granted {
                self.note_overdraft(weight.bytes);
            }
            self.take_with_parts(weight, first);
        });
    }

    /// Notes that so many bytes are about to be given, though perhaps an account has no room. Under the locks.
    fn note_overdraft(&self, bytes: usize) {
        let Some(parts) = &self.whole else { return };
        // Room may have come since they were refused: then nothing is overdrawn.
        let Some(at) = self.refusing(bytes, usize::MAX, false) else { return };
        let account = &self.accounts()[at];
        parts.granted(&Refused {
            at,
            limit_bytes: account.limit_bytes(),
            in_use_bytes: account.counted_bytes(),
            held_bytes: self.own.live_bytes.load(RELAXED),
            requested_bytes: bytes,
            is_chosen: account.take_mark(),
        });
    }

    /// Changes what a block weighs; false if a limit has no room, which is remembered.
    pub(crate) fn reweigh(&self, old: Weight, new: Weight, force: Option<Force>) -> bool {
        let growth = new.bytes.saturating_sub(old.bytes);
        let done = self.with_accounts(|| {
            if growth > 0 {
                match force {
                    Some(Force::Grant) => self.note_overdraft(growth),
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
            Ok(is_wanted)
        });
        match done {
            Ok(is_wanted) => {
                if is_wanted {
                    room_came();
                }
                true
            }
            Err(refused) => {
                self.remember(refused);
                false
            }
        }
    }

    /// Gives a block's charge back; whether it was the last block of an ended request. The chain may be gone
    /// afterwards, as after `give_block_back`.
    #[must_use]
    pub(crate) fn give_whole_back(&self, weight: Weight) -> bool {
        if self.is_alone()
            && let Some(_section) = self.own.lock.enter_owned()
            && !self.own.is_wanted()
        {
            self.note_peaks();
            self.change_parts(weight, false);
            self.own.give_back(weight.bytes, 1);
            return self.remove_own();
        }
        let (is_wanted, is_last) = self.with_accounts(|| {
            self.note_peaks();
            self.change_parts(weight, false);
            (self.give_back_each(weight.bytes, 1), self.remove_own())
        });
        if is_wanted {
            room_came();
        }
        is_last
    }
}
