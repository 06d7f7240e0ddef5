//! The naive model: a chain is a set of accounts, and a charge goes to all of them or to none.

use ctxalloc::request::Stats;
use std::collections::BTreeSet;

/// What the specification says, word by word.
#[derive(Default, Clone)]
pub(super) struct Numbers {
    pub(super) limit: Option<usize>,
    pub(super) stats: Stats,
    /// Requests and budgets that this one's charges go to, itself among them, by their number.
    pub(super) set: BTreeSet<usize>,
    pub(super) ended: bool,
    /// Of a request: how far tiny blocks may go beyond its limit, and its own beyond those of budgets.
    pub(super) overdraft: Option<usize>,
    /// What was in use when its limit was lowered below that, or when it ended and refuses what comes late; falls with
    /// what is in use.
    pub(super) floor: usize,
    pub(super) name: String,
    /// What the real one is told apart by.
    pub(super) id: u64,
}

#[derive(Default)]
pub(super) struct Model {
    pub(super) accounts: Vec<Numbers>,
}

impl Model {
    pub(super) fn budget(&mut self, name: String, limit: Option<usize>, parent: Option<usize>) -> usize {
        let number = self.accounts.len();
        let mut set = parent.map_or_else(BTreeSet::new, |parent| self.accounts[parent].set.clone());
        set.insert(number);
        self.accounts.push(Numbers { limit, set, name, ..Numbers::default() });
        number
    }

    pub(super) fn request(
        &mut self,
        name: String,
        limit: Option<usize>,
        overdraft: usize,
        budget: Option<usize>,
        outer: Option<usize>,
    ) -> usize {
        let number = self.accounts.len();
        let mut set = BTreeSet::from([number]);
        set.extend(budget.iter().flat_map(|&budget| self.accounts[budget].set.clone()));
        // All that the requests around it are charged to, as far as those are not over.
        let around = outer.iter().flat_map(|&outer| &self.accounts[outer].set);
        let open =
            around.filter(|&&account| self.accounts[account].overdraft.is_some() && !self.accounts[account].ended);
        let theirs = open.flat_map(|&request| &self.accounts[request].set);
        set.extend(theirs.filter(|&&account| !self.accounts[account].ended));
        self.accounts.push(Numbers { limit, set, name, overdraft: Some(overdraft), ..Numbers::default() });
        number
    }

    pub(super) fn is_inside_of_an_open_one(&self, request: usize) -> bool {
        let is_open = |account: &usize| {
            let Numbers { overdraft, ended, .. } = &self.accounts[*account];
            overdraft.is_some() && !ended && *account != request
        };
        self.accounts[request].set.iter().any(is_open)
    }

    /// Whether a tiny block of `request` may go beyond what `account` allows.
    pub(super) fn may_exceed(&self, account: usize, request: usize, bytes: usize, size: usize, is_late: bool) -> bool {
        let Numbers { limit, stats, overdraft, floor, .. } = &self.accounts[account];
        let own = self.accounts[request].overdraft.unwrap();
        let overdraft = overdraft.unwrap_or(own);
        let usable = if size <= 32 { 16 * overdraft } else { overdraft };
        let level = if is_late { *floor } else { limit.unwrap().max(*floor) };
        size <= 1024 && own > 0 && overdraft > 0 && stats.live_bytes + bytes <= level + usable
    }

    /// Who refuses, or nobody: then all are charged. Late is what comes after the end of a request that refuses it.
    pub(super) fn charge(
        &mut self,
        request: usize,
        bytes: usize,
        blocks: usize,
        size: usize,
        is_late: bool,
    ) -> Result<(), usize> {
        let set = self.accounts[request].set.clone();
        // The youngest that has no room tells.
        for &account in set.iter().rev() {
            let Numbers { limit, stats, .. } = &self.accounts[account];
            let is_late = is_late && account == request;
            let is_full = is_late || limit.is_some_and(|limit| stats.live_bytes + bytes > limit);
            if is_full && !self.may_exceed(account, request, bytes, size, is_late) {
                self.accounts[account].stats.refused += 1;
                return Err(account);
            }
        }
        for account in set {
            let stats = &mut self.accounts[account].stats;
            stats.live_bytes += bytes;
            stats.live_blocks += blocks;
            stats.total_bytes += bytes as u64;
            stats.total_blocks += blocks as u64;
            stats.peak_bytes = stats.peak_bytes.max(stats.live_bytes);
        }
        Ok(())
    }

    pub(super) fn give_back(&mut self, request: usize, bytes: usize, blocks: usize) {
        for account in self.accounts[request].set.clone() {
            self.accounts[account].stats.live_bytes -= bytes;
            self.accounts[account].stats.live_blocks -= blocks;
            self.accounts[account].floor = self.accounts[account].floor.min(self.accounts[account].stats.live_bytes);
        }
    }
}
