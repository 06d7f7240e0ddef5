//! What was done to make room: of each account, and of this process.

use super::{Account, RELAXED, count};
use std::sync::atomic::AtomicU64;

/// What was done to make room where somebody waited, or was refused.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct MadeRoom {
    /// How many requests were chosen to give way.
    pub victims: u64,
    /// How many bytes came back to full budgets while their reclaimers ran.
    pub reclaimed_bytes: u64,
}

static VICTIMS: AtomicU64 = AtomicU64::new(0);
static RECLAIMED_BYTES: AtomicU64 = AtomicU64::new(0);

/// What was done in this process so far. A child of `fork` goes on from its parent's numbers.
#[must_use]
pub fn made_room() -> MadeRoom {
    MadeRoom { victims: VICTIMS.load(RELAXED), reclaimed_bytes: RECLAIMED_BYTES.load(RELAXED) }
}

impl Account {
    /// What was done to make room in it.
    pub(crate) fn made_room(&self) -> MadeRoom {
        MadeRoom { victims: self.victims.load(RELAXED), reclaimed_bytes: self.reclaimed_bytes.load(RELAXED) }
    }

    pub(crate) fn count_victim(&self) {
        self.victims.fetch_add(1, RELAXED);
        VICTIMS.fetch_add(1, RELAXED);
    }

    /// So many bytes came back while its reclaimers ran.
    pub(super) fn count_reclaimed(&self, bytes: usize) {
        self.lock.with(|| count(&self.reclaimed_bytes, bytes as u64));
        RECLAIMED_BYTES.fetch_add(bytes as u64, RELAXED);
    }
}
