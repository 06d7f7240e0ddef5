//! The mark of a request that was chosen to make room for others.
//!
//! It has no room in its own account: `enforced_bytes` is 0 then, and else its limit. So an allocation looks at nothing
//! more than it did; the refusal finds the mark, tells it once, and takes it off.

use super::chosen::{self, Chosen};
use super::{Account, RELAXED};
use crate::unattributed::unattributed;
use std::sync::Arc;

impl Account {
    /// Chooses it: its next allocation is refused. False if it is chosen already, or has ended.
    pub(crate) fn choose(&self, chosen: Chosen) -> bool {
        let _unattributed = unattributed();
        let chosen = Arc::new(chosen);
        let is_fresh = self.lock.with(|| {
            self.call_in(); // those inside of it are refused too
            let is_fresh = !self.is_chosen() && !self.has_ended();
            if is_fresh {
                self.is_chosen.store(true, RELAXED);
                self.enforced_bytes.store(0, RELAXED);
                self.set_ceiling();
            }
            is_fresh
        });
        let _before = is_fresh.then(|| chosen::note(self.id, chosen));
        if is_fresh {
            self.was_chosen.store(true, RELAXED);
        }
        is_fresh
    }

    /// Whether it is chosen, and was not told yet.
    pub(crate) fn is_chosen(&self) -> bool {
        self.is_chosen.load(RELAXED)
    }

    /// Takes the mark off again, where room came in another way.
    pub(crate) fn spare(&self) {
        self.lock.with(|| self.take_mark());
    }

    /// Takes the mark off; whether there was one. Under the lock.
    pub(super) fn take_mark(&self) -> bool {
        let was_chosen = self.is_chosen.swap(false, RELAXED);
        if was_chosen {
            self.enforced_bytes.store(self.limit_bytes(), RELAXED);
            self.set_ceiling();
        }
        was_chosen
    }

    /// Whether it was chosen at any time.
    #[cfg(feature = "python")]
    pub(crate) fn was_chosen(&self) -> bool {
        self.was_chosen.load(RELAXED)
    }

    /// For whom it was chosen last.
    pub(super) fn chosen(&self) -> Option<Arc<Chosen>> {
        if self.was_chosen.load(RELAXED) { chosen::of(self.id) } else { None }
    }
}
