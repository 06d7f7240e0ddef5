//! What a request's account must say after its events: a naive sum, which a replay and the recording are compared with.

use crate::recording::Sums;

/// One request's account.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Account {
    live_bytes: u64,
    peak_bytes: u64,
    total_bytes: u64,
    blocks: u64,
    refused: u64,
}

impl Account {
    pub(super) fn allocate(&mut self, bytes: u64) {
        self.blocks += 1;
        self.grow(bytes);
    }

    pub(super) fn grow(&mut self, bytes: u64) {
        self.live_bytes = self.live_bytes.saturating_add(bytes);
        self.total_bytes = self.total_bytes.saturating_add(bytes);
        self.peak_bytes = self.peak_bytes.max(self.live_bytes);
    }

    pub(super) fn give_back(&mut self, bytes: u64) {
        self.live_bytes = self.live_bytes.saturating_sub(bytes);
    }

    pub(super) fn refuse(&mut self) {
        self.refused += 1;
    }

    pub(super) fn sums(&self) -> Sums {
        Sums {
            peak_bytes: self.peak_bytes,
            total_bytes: self.total_bytes,
            blocks: self.blocks,
            live_bytes: self.live_bytes,
            refused: self.refused,
            includes_others: false,
        }
    }
}
