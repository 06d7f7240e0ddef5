//! What metrics and probes see of a budget, and whether more requests should be sent to it.

use super::known::{self, BudgetNumbers, Listed};
use super::{Account, Kind, RELAXED, UNLIMITED};

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

impl Listed for Account {
    fn listed(&self) -> BudgetNumbers {
        BudgetNumbers {
            id: self.id,
            parent: match &self.kind {
                Kind::Budget { parent } => parent.as_ref().map(|parent| parent.id),
                Kind::Request { .. } => None,
            },
            name: self.name().into_owned(),
            limit_bytes: (self.limit_bytes() != UNLIMITED).then(|| self.limit_bytes()),
            in_use_bytes: self.live_bytes(),
            peak_bytes: self.peak_bytes(),
            refused: self.refused(),
            reserved_bytes: self.pending_bytes(),
            waiting: self.waiting.load(RELAXED),
            max_waiting: self.max_waiting.load(RELAXED),
            victims: self.made_room().victims,
            reclaimed_bytes: self.made_room().reclaimed_bytes,
        }
    }

    fn counted_above(&self) -> (u64, Option<u64>, usize, usize) {
        let used = self.live_bytes().saturating_add(self.pending_bytes());
        let reserved = self.reservation.as_ref().map_or(0, |reservation| reservation.bytes.load(RELAXED));
        let parent = match &self.kind {
            Kind::Budget { parent } => parent.as_ref().map(|parent| parent.id),
            Kind::Request { .. } => None,
        };
        (self.id, parent, reserved.max(used), used)
    }

    fn is_ready_root(&self, idle_bytes: usize) -> bool {
        let is_root = matches!(self.kind, Kind::Budget { parent: None });
        !is_root || self.is_ready_but_for(idle_bytes)
    }
}
