//! How much the process grows outside of its pools during a request: [`Outside`] is measured before it and compared
//! after it.
//!
//! Nothing says which request that memory belongs to. So the growth is a request's only if no other request ran
//! meanwhile.

use super::list::gauges;
use crate::os::resident_bytes;
use crate::strategy::pool_bytes;
use std::sync::atomic::{AtomicU64, Ordering};

/// Requests that were begun: roots, and those inside of another one.
static ROOTS: AtomicU64 = AtomicU64::new(0);
static NESTED: AtomicU64 = AtomicU64::new(0);

/// Counts a request that was begun.
pub(super) fn count(is_nested: bool) {
    if is_nested { &NESTED } else { &ROOTS }.fetch_add(1, Ordering::Relaxed);
}

/// How many requests were begun.
pub(super) fn begun() -> u64 {
    ROOTS.load(Ordering::Relaxed) + NESTED.load(Ordering::Relaxed)
}

/// The process's memory outside of its pools before a request that was alone.
#[derive(Debug, Clone, Copy)]
pub(super) struct Outside {
    bytes: i64,
    roots: u64,
}

impl Outside {
    /// Now, before the request begins. `None` if another request has not ended, or the system does not say.
    pub(super) fn before() -> Option<Self> {
        // First: a request that begins while we look is counted, or seen.
        let roots = ROOTS.load(Ordering::Acquire);
        let is_alone = gauges().live_requests == 0;
        is_alone.then(|| Some(Self { bytes: now()?, roots })).flatten()
    }

    /// By how many bytes it has grown since. `None` if another root request was begun meanwhile.
    pub(super) fn growth(self) -> Option<i64> {
        let own = 1;
        let is_alone = ROOTS.load(Ordering::Acquire) == self.roots + own;
        is_alone.then(|| Some(now()? - self.bytes)).flatten()
    }
}

/// What the process has in memory, less the pages of all pools.
fn now() -> Option<i64> {
    let pools = pool_bytes();
    let resident = i64::try_from(resident_bytes()?).ok()?;
    Some(resident - i64::try_from(pools.in_use + pools.warm).ok()?)
}
