//! Whether more requests should be sent to a budget.

use super::{Account, RELAXED, UNLIMITED, known};

impl Account {
    /// Whether more requests should be sent here. No from 95 % of the limit in use or reserved, or half as many waiters
    /// as may be; yes again at 80 % or less with nobody waiting. Between the two it stays as it was.
    pub(in crate::strategy) fn is_ready(&self) -> bool {
        self.is_ready_but_for(known::idle_bytes_of(self.id))
    }

    /// The same; `idle_bytes` are guaranteed to budgets below, and not used: these are kept for requests.
    pub(super) fn is_ready_but_for(&self, idle_bytes: usize) -> bool {
        let in_use = self.live_bytes().saturating_add(self.pending_bytes()).saturating_sub(idle_bytes) as f64;
        let (limit, waiting) = (self.limit_bytes() as f64, self.waiting.load(RELAXED));
        let is_limited = self.limit_bytes() != UNLIMITED;
        let is_full = is_limited && in_use >= 0.95 * limit;
        let is_free = !is_limited || in_use <= 0.8 * limit;
        if is_full || waiting > 0 && waiting >= self.max_waiting.load(RELAXED) / 2 {
            self.was_full.store(true, RELAXED);
        } else if is_free && waiting == 0 {
            self.was_full.store(false, RELAXED);
        }
        !self.was_full.load(RELAXED)
    }
}
