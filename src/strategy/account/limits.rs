//! How an account's terms are changed while it is in use, and heard of by those who wait.

use super::{Account, NEVER, RELAXED, reserved};
use std::sync::atomic::{Ordering, fence};
use std::time::Duration;

impl Account {
    /// Changes the limit, from the next charge on.
    pub(in crate::strategy) fn set_limit_bytes(&self, limit_bytes: usize) {
        self.change_limit_bytes(|_| true, limit_bytes);
    }

    /// Changes the limit if it is `before`; whether it was.
    pub(in crate::strategy) fn replace_limit_bytes(&self, before: usize, limit_bytes: usize) -> bool {
        self.change_limit_bytes(|now| now == before, limit_bytes)
    }

    fn change_limit_bytes(&self, may_change: impl FnOnce(usize) -> bool, limit_bytes: usize) -> bool {
        let changed = self.lock.with(|| {
            self.call_in();
            let before = self.limit_bytes.load(RELAXED);
            if !may_change(before) {
                return None;
            }
            self.limit_bytes.store(limit_bytes, RELAXED);
            if !self.is_chosen() {
                self.enforced_bytes.store(limit_bytes, RELAXED);
            }
            let live_bytes = self.live_bytes.load(RELAXED);
            self.floor_bytes.store(if live_bytes > limit_bytes { live_bytes } else { 0 }, RELAXED);
            self.set_ceiling();
            Some((self.is_wanted(), limit_bytes < before))
        });
        let Some((is_wanted, is_lower)) = changed else { return false };
        fence(Ordering::SeqCst); // whoever comes to wait sees the limit, or is seen here
        if is_lower && self.is_waited_for() {
            reserved::room_shrank();
        } else if is_wanted {
            reserved::room_came();
        }
        true
    }

    /// How long somebody waits for room in it before a request is chosen to make some; `None` for ever.
    pub(crate) fn victims_after(&self) -> Option<Duration> {
        Some(self.victims_after.load(RELAXED)).filter(|&after| after != NEVER).map(Duration::from_millis)
    }

    pub(in crate::strategy) fn set_victims_after(&self, after: Option<Duration>) {
        let after = after.map_or(NEVER, |after| u64::try_from(after.as_millis()).unwrap_or(NEVER));
        self.victims_after.store(after, RELAXED);
        if after != NEVER && self.lock.with(|| self.is_wanted()) {
            reserved::room_came(); // whoever waits already
        }
    }
}
