//! Charges for native blocks and Python objects, beside those for arrays.

use super::Chain;
use super::parts::Weight;
use super::refused::Refused;
use crate::sync::with_all;

/// Why a charge is taken whatever the limits say.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Force {
    /// The caller does not survive a refusal.
    Grant,
    /// The block stays as it was: its charge is put back.
    Undo,
}

/// For the chain of a request that counts the whole of it.
impl Chain {
    fn change_parts(&self, weight: Weight, is_more: bool) {
        if let Some(parts) = &self.whole {
            parts.change(weight, is_more);
        }
    }

    /// Charges a block; false if a limit has no room, which is remembered. `first` is as for `take_block`.
    pub(crate) fn take_whole(&self, weight: Weight, first: impl FnOnce()) -> bool {
        let is_taken = self.take_block(weight.bytes, false, first);
        if is_taken {
            self.change_parts(weight, true);
        }
        is_taken
    }

    /// Charges a block whatever the limits say: the overdraft is on the accounts. `is_granted`: the request is told.
    pub(crate) fn take_whole_anyway(&self, weight: Weight, is_granted: bool, first: impl FnOnce()) {
        with_all(self.accounts(), || {
            if is_granted {
                self.note_overdraft(weight.bytes);
            }
            self.take_each(weight.bytes, 1);
            self.add_own(first);
        });
        self.change_parts(weight, true);
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
            in_use_bytes: account.live_bytes().saturating_add(account.pending_bytes()),
            held_bytes: self.own.live_bytes(),
            requested_bytes: bytes,
            is_chosen: account.take_mark(),
        });
    }

    /// Changes what a block weighs; false if a limit has no room, which is remembered.
    pub(crate) fn reweigh(&self, old: Weight, new: Weight, force: Option<Force>) -> bool {
        let growth = new.bytes.saturating_sub(old.bytes);
        if growth > 0 {
            if let Some(force) = force {
                with_all(self.accounts(), || {
                    if force == Force::Grant {
                        self.note_overdraft(growth);
                    }
                    self.take_each(growth, 0);
                });
            } else if let Err(refused) = self.take(growth, 0) {
                self.remember(refused);
                return false;
            }
        } else if old.bytes > new.bytes {
            self.give_back(old.bytes - new.bytes, 0);
        }
        self.change_parts(old, false);
        self.change_parts(new, true);
        true
    }

    /// Gives a block's charge back; whether it was the last block of an ended request. The parts change first: the
    /// chain may be gone afterwards.
    #[must_use]
    pub(crate) fn give_whole_back(&self, weight: Weight) -> bool {
        self.change_parts(weight, false);
        self.give_block_back(weight.bytes)
    }
}
