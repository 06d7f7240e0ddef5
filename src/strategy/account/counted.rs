//! Which parts a request's chain changes beside its accounts: its own, and those of whole requests above.

use super::Chain;
use super::parts::{Parts, WholeStats};
use std::sync::Arc;

/// Of a request that counts the whole of it.
impl Chain {
    /// What is charged to it is a part of each whole request above (`around`: the chain of the request that it is
    /// inside of), and with `is_whole` of its own account.
    pub(crate) fn count_parts(&mut self, around: Option<&Self>, is_whole: bool) {
        let around = around.filter(|around| !around.wholes.is_empty());
        if !is_whole && around.is_none() {
            return;
        }
        self.whole = is_whole.then(Parts::begun);
        let above = around.into_iter().flat_map(|around| {
            let number = |at: usize| around.accounts()[at].number();
            around.wholes.iter().map(move |(at, parts)| (number(*at), parts))
        });
        let own = self.whole.iter().map(|parts| (self.own.number(), parts));
        // An ended request around it is not charged any more.
        let at = |number: u64| self.accounts().iter().position(|account| account.number() == number);
        let known = above.chain(own).filter_map(|(number, parts)| Some((at(number)?, Arc::clone(parts))));
        self.wholes = known.collect();
    }

    /// What it holds beside arrays; `None` unless it counts that.
    #[inline]
    pub(crate) fn whole_stats(&self) -> Option<WholeStats> {
        let parts = self.whole.as_ref()?;
        Some(self.own.lock.with(|| parts.stats(self.own.peak_bytes())))
    }

    /// What is nobody's from now on is after its end.
    pub(crate) fn end_the_whole(&self) {
        if let Some(parts) = &self.whole {
            parts.end();
        }
    }
}
