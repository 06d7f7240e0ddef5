//! Up to how many live bytes the owner of a request may charge it, and whether it may give back, without a look at
//! anything else. One number, so that a block looks at one.

use super::{Account, Kind, RELAXED, add, subtract};

impl Account {
    /// Something has changed that the ceiling depends on. Under the lock.
    ///
    /// A request that is its only account charges itself up to its limit, while nobody has to know each change: while
    /// nothing of it is lent or being made, nobody waits for its room, no floor falls with it, and it has not ended.
    /// Any other borrows first ([`Chain::borrow`]), and up to what it has borrowed all this is so.
    pub(super) fn set_ceiling(&self) {
        let is_open = match &self.kind {
            Kind::Request { above, .. } => above.is_empty() && !self.lends() && !self.looks_at_changes(),
            Kind::Budget { .. } => false,
        };
        self.ceiling.store(if is_open { self.enforced_bytes.load(RELAXED) } else { 0 }, RELAXED);
    }

    /// Whether each change of a request's numbers has to look at more than these. So it has where the total has come so
    /// far that it may be more than is counted: with small blocks alone that takes centuries.
    pub(super) fn looks_at_changes(&self) -> bool {
        let has_floor = self.floor_bytes.load(RELAXED) > 0;
        let may_overflow = self.total_bytes.load(RELAXED) > u64::MAX / 2;
        self.is_wanted() || self.pending_bytes() > 0 || has_floor || may_overflow || self.has_ended()
    }

    /// Adds bytes of a block that is being made, or that are reserved. Under the lock.
    pub(super) fn add_pending(&self, bytes: usize) {
        add(&self.pending_bytes, bytes);
        self.set_ceiling();
    }

    /// Takes them off again.
    pub(super) fn subtract_pending(&self, bytes: usize) {
        subtract(&self.pending_bytes, bytes);
        self.set_ceiling();
    }

    /// So much is in use now, which was more. A floor no higher than the limit means nothing, but after the end.
    #[inline]
    pub(super) fn lower_floor(&self, live_bytes: usize) {
        if self.floor_bytes.load(RELAXED) > live_bytes {
            self.lower_floor_to(live_bytes);
        }
    }

    #[cold]
    fn lower_floor_to(&self, live_bytes: usize) {
        let is_over = live_bytes <= self.limit_bytes() && !self.has_ended();
        self.floor_bytes.store(if is_over { 0 } else { live_bytes }, RELAXED);
        self.set_ceiling();
    }
}

#[cfg(all(test, not(any(ctxalloc_loom, miri))))]
mod tests {
    use super::super::chosen::Chosen;
    use super::super::{Account, Chain, RELAXED};

    const LIMIT: usize = 1000;

    /// A request that is its only account, on this thread.
    fn request() -> Chain {
        Chain::of_request(None, Some(LIMIT), 0, None, None, true, false).expect("it is not inside of another one")
    }

    fn ceiling(chain: &Chain) -> usize {
        chain.own.ceiling.load(RELAXED)
    }

    fn takes(chain: &Chain, bytes: usize) -> bool {
        chain.take_block(bytes, false, || ())
    }

    #[test]
    fn a_request_charges_itself_up_to_its_limit_as_that_changes() {
        let chain = request();
        assert_eq!(ceiling(&chain), LIMIT);
        assert!(takes(&chain, 300) && takes(&chain, 400) && !takes(&chain, 301));
        chain.own.set_limit_bytes(600);
        assert_eq!(ceiling(&chain), 0, "what is in use falls with each block, and tells the floor");
        assert!(!takes(&chain, 1) && !chain.give_block_back(300));
        assert_eq!(ceiling(&chain), 600, "a floor below the limit means nothing");
        assert!(takes(&chain, 200) && !takes(&chain, 1));
        chain.own.set_limit_bytes(700);
        assert_eq!(ceiling(&chain), 700);
        assert!(takes(&chain, 100) && !takes(&chain, 1));
    }

    #[test]
    fn a_budget_whose_limit_was_lowered_lends_again_once_less_is_in_use() {
        let budget = Account::of_budget("tenant", Some(1 << 20), None);
        let chain = Chain::of_request(None, None, 0, Some(&budget), None, true, false).expect("it is not too deep");
        let up_and_down = || {
            assert!((0..100).all(|_| takes(&chain, 1000)));
            (0..100).for_each(|_| assert!(!chain.give_block_back(1000)));
        };
        let lends = || {
            up_and_down();
            assert!((0..10).all(|_| takes(&chain, 1000)));
            let lends = budget.may_lend();
            (0..10).for_each(|_| assert!(!chain.give_block_back(1000)));
            lends
        };
        if !chain.own.lock.is_owned_here() || !lends() {
            return; // without `membarrier` nothing is lent
        }
        assert!((0..200).all(|_| takes(&chain, 1000)));
        budget.set_limit_bytes(150_000);
        assert!(!takes(&chain, 1));
        (0..190).for_each(|_| assert!(!chain.give_block_back(1000)));
        assert!(lends(), "its floor is gone, though some of it is in use");
    }

    #[test]
    fn nothing_is_charged_shortly_while_somebody_looks_at_each_change() {
        let chain = request();
        let (budget, chosen_for) = (String::new(), String::new());
        let chosen = Chosen { budget, budget_id: 0, limit_bytes: LIMIT, in_use_bytes: 0, chosen_for };
        assert!(chain.own.choose(chosen));
        assert_eq!(ceiling(&chain), 0);
        assert!(!takes(&chain, 1) && takes(&chain, 1), "it is refused once");
        assert_eq!(ceiling(&chain), LIMIT);
        chain.reserve(900, 900, false).expect("there is room");
        assert_eq!(ceiling(&chain), 0);
        assert!(!takes(&chain, 100) && takes(&chain, 99), "a block that is being made has its room");
        chain.cancel(900);
        assert_eq!(ceiling(&chain), LIMIT);
        let inner = Chain::of_request(None, None, 0, None, Some(&chain), true, true).expect("it is not too deep");
        assert!(!inner.admit(901, |_| false, Some(&mut Vec::new())) && chain.own.is_wanted());
        assert_eq!(ceiling(&chain), 0, "who gives room back calls those who wait");
        chain.own.is_wanted_no_more();
        assert!(takes(&chain, 1));
        assert_eq!(ceiling(&chain), LIMIT, "the next block finds that nobody waits");
        assert!(inner.admit(500, |_| false, None));
        assert_eq!(ceiling(&chain), 0, "its own blocks have no more than is not reserved");
        assert!(!takes(&chain, 400) && takes(&chain, 399));
        inner.return_reservation();
        assert_eq!(ceiling(&chain), LIMIT);
    }

    #[test]
    fn what_has_ended_or_may_overflow_is_charged_the_long_way() {
        let chain = request();
        assert!(takes(&chain, 10));
        chain.own.total_bytes.store(u64::MAX / 2, RELAXED);
        chain.own.set_ceiling();
        assert!(takes(&chain, 1) && takes(&chain, 1));
        chain.reserve(1, 1, false).expect("there is room");
        chain.commit(1, 1);
        assert_eq!(ceiling(&chain), 0);
        chain.own.total_bytes.store(u64::MAX - 1, RELAXED);
        assert!(takes(&chain, 2));
        assert_eq!(chain.own.total_bytes.load(RELAXED), u64::MAX, "it stays there");
        let chain = request();
        assert!(takes(&chain, 10));
        let _numbers = chain.end(false, 0);
        assert_eq!(ceiling(&chain), 0);
        assert!(chain.give_block_back(10), "the last block of an ended request is told from others");
        let holds = std::cell::Cell::new(0);
        assert!(chain.take_block(10, false, || holds.set(holds.get() + 1)) && holds.get() == 1, "so is the first");
        assert_eq!(ceiling(&chain), 0);
        assert!(chain.give_block_back(10));
    }
}
