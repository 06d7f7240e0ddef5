//! The requests that are present now, for metrics and the live page. It reads without locks: each number was right a
//! moment ago.

use super::slot::{self, Slot};
use crate::counters::{self, Gauges};
use crate::strategy::LiveBlock;
#[cfg(feature = "python")]
use crate::strategy::account::WholeStats;
use std::time::Duration;

/// A request that has not ended, or of which blocks, tasks or capsules are alive.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Present {
    /// Its name.
    pub name: String,
    /// How long ago it began, accurate to a few milliseconds.
    pub age: Duration,
    /// Whether it has ended.
    pub has_ended: bool,
    /// Whether it is inside of no other request that has not ended.
    pub is_root: bool,
    /// The bytes of live blocks, with those of requests inside.
    pub live_bytes: usize,
    /// The largest value of `live_bytes` so far.
    pub peak_bytes: usize,
    /// Its limit, if it has one.
    pub limit_bytes: Option<usize>,
    /// The budget or request that it is charged to next, if any.
    pub parent: Option<String>,
    /// Its live blocks, if it has ended and its strategy lists them ([`Tracked`](crate::strategy::Tracked)).
    pub escapes: Option<Vec<LiveBlock>>,
    /// The parts of its bytes, if it counts native memory and objects too.
    #[cfg(feature = "python")]
    pub(crate) whole: Option<WholeStats>,
}

/// All requests that are present and were begun by this copy of the crate, the oldest first.
#[must_use]
pub fn present() -> Vec<Present> {
    let mut found = Vec::new();
    for held in slot::all() {
        let Some(state) = Slot::behind(held.handler()).map(Slot::state) else { continue };
        let (account, has_ended) = (state.chain.own(), state.chain.has_ended());
        let limit_bytes = account.limit_bytes();
        found.push(Present {
            name: account.name().into_owned(),
            age: account.age(),
            has_ended,
            is_root: state.chain.is_root(),
            live_bytes: account.live_bytes(),
            peak_bytes: account.peak_bytes(),
            limit_bytes: (limit_bytes != crate::strategy::account::UNLIMITED).then_some(limit_bytes),
            parent: account.parent().map(|parent| parent.name().into_owned()),
            escapes: has_ended.then(|| state.memory.live_blocks()).flatten(),
            #[cfg(feature = "python")]
            whole: state.chain.whole_stats(),
        });
    }
    found.sort_by_key(|request| std::cmp::Reverse(request.age));
    found
}

/// What requests have in use now.
#[must_use]
pub(crate) fn gauges() -> Gauges {
    let mut sum = Gauges { waiting_requests: counters::waiting(), ..Gauges::default() };
    for held in slot::all() {
        let Some(chain) = Slot::behind(held.handler()).map(|slot| &slot.state().chain) else { continue };
        // What is inside of another one is part of that one's bytes.
        let bytes = if chain.is_root() { chain.own().live_bytes() as u64 } else { 0 };
        if !chain.has_ended() {
            sum.live_requests += 1;
            sum.live_bytes += bytes;
        } else if chain.has_blocks() {
            sum.escaping_requests += 1;
            sum.escaped_bytes += bytes;
        }
    }
    sum
}
