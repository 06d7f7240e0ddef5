//! What keeps a request's state alive and is in no account's bytes: blocks that nobody counts, and containers.

use super::Chain;

impl Chain {
    /// Adds a block that no account counts, or a container that may have blocks. It keeps the request's state alive
    /// nevertheless. `first` is as for [`take_block`](Self::take_block).
    #[inline(always)]
    pub(crate) fn add_uncounted(&self, first: impl FnOnce()) {
        if !self.own.add_another() {
            self.add_uncounted_elsewhere(first);
        }
    }

    /// The same where the own account is not enough.
    #[inline(always)]
    pub(crate) fn add_uncounted_elsewhere(&self, first: impl FnOnce()) {
        match self.tabs.enter() {
            Some((tab, section)) => tab.change_own_in(&section, 1),
            None => self.add_uncounted_slowly(first),
        }
    }

    #[cold]
    #[inline(never)]
    fn add_uncounted_slowly(&self, first: impl FnOnce()) {
        self.own.lock.with(|| self.add_own(first));
    }

    /// [`give_block_back`](Self::give_block_back) for a block that no account counts, or a container.
    #[inline(always)]
    #[must_use]
    pub(crate) fn remove_uncounted(&self) -> bool {
        if self.own.remove_another() { false } else { self.remove_uncounted_elsewhere() }
    }

    /// The same where the own account is not enough.
    #[inline(always)]
    #[must_use]
    pub(crate) fn remove_uncounted_elsewhere(&self) -> bool {
        match self.tabs.enter() {
            Some((tab, section)) => {
                tab.change_own_in(&section, -1);
                false
            }
            None => self.remove_uncounted_slowly(),
        }
    }

    #[cold]
    #[inline(never)]
    fn remove_uncounted_slowly(&self) -> bool {
        self.own.lock.with(|| self.remove_own())
    }
}
