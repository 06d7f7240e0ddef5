//! The request that this thread used last, and the account that it charges there: the request's own, or this thread's
//! tab. Whoever comes with the same handler again looks at nothing else before it charges.

use super::super::word::Handler;
use super::slot::Slot;
use super::small::{grow, put_back, take};
use crate::strategy::account::Account;
use crate::strategy::{Kept, Over};
use crate::sync::Here;
use std::cell::Cell;
use std::ptr::NonNull;

thread_local! {
    /// Without a destructor: a thread makes and frees blocks until its very end.
    static LATEST: Cell<Option<Noted>> = const { Cell::new(None) };
}

/// No word is ever used twice: while somebody holds the handler, its request is the one that was noted.
#[derive(Clone, Copy)]
struct Noted {
    handler: Handler,
    account: NonNull<Account>,
    here: Here,
    kept: NonNull<Kept>,
}

/// What is known of the request that this thread used last.
#[derive(Clone, Copy)]
pub(in crate::handler) struct Latest<'a> {
    account: &'a Account,
    here: Here,
    kept: &'a Kept,
}

fn noted() -> &'static Cell<Option<Noted>> {
    let latest: *const Cell<Option<Noted>> = LATEST.with(std::ptr::from_ref);
    // SAFETY: a thread-local without a destructor is there until its thread ends, and callers use it at once.
    unsafe { &*latest }
}

impl<'a> Latest<'a> {
    /// The request of this handler, if this thread used it last.
    ///
    /// # Safety
    /// - somebody holds the handler for as long as the returned value is used.
    #[inline(always)]
    pub(in crate::handler) unsafe fn of(handler: Handler) -> Option<Self> {
        let Noted { account, here, kept, .. } = noted().get().filter(|noted| noted.handler == handler)?;
        // SAFETY: `note` had both from the request of this word, whose state, and so its accounts, is there as long as
        // somebody holds the handler (this function's contract).
        Some(unsafe { Self { account: account.as_ref(), here, kept: kept.as_ref() } })
    }

    /// Whether the account is still this thread's, and not shared by now.
    #[inline(always)]
    fn is_charged_here(self) -> bool {
        self.account.is_owned_by(self.here)
    }

    /// A block of so many bytes, charged.
    ///
    /// # Errors
    /// It has to go another way, on which this is to be given back.
    #[inline(always)]
    pub(in crate::handler) fn allocate(self, size_bytes: usize) -> Result<NonNull<u8>, Over> {
        match self.account.begin_charge_by(self.here, size_bytes) {
            Some(room) => take(self.kept, self.account, room, size_bytes),
            None => Err(Over::default()),
        }
    }

    /// Takes a block back; false, and nothing was done, if it has to go another way.
    ///
    /// # Safety
    /// - `block` is a live block of the request; after `true` it is not used again.
    #[inline(always)]
    pub(in crate::handler) unsafe fn release(self, block: NonNull<u8>) -> bool {
        // SAFETY: a live block of the request, given up where this succeeds (this function's contract).
        unsafe { put_back(self.kept, block, |bytes| self.account.give_small_back_by(self.here, bytes)) }
    }

    /// The block with room for `new_bytes`, and its first bytes kept; `None`, and nothing was done, if it has to go
    /// another way.
    ///
    /// # Safety
    /// - as for [`release`](Self::release); after `Some` it is not used again.
    #[inline(always)]
    pub(in crate::handler) unsafe fn grow(self, block: NonNull<u8>, new_bytes: usize) -> Option<NonNull<u8>> {
        let begin = |growth| self.account.begin_charge_by(self.here, growth);
        // SAFETY: a live block of the request, given up where this succeeds (this function's contract).
        unsafe { grow(self.kept, self.account, block, new_bytes, begin) }
    }

    /// One more container; false, and nothing was done, if it has to go another way.
    #[inline(always)]
    pub(in crate::handler) fn add_container(self) -> bool {
        self.account.change_containers_by(self.here, 1)
    }

    /// One container less. As [`add_container`](Self::add_container).
    #[inline(always)]
    pub(in crate::handler) fn remove_container(self) -> bool {
        self.account.change_containers_by(self.here, -1)
    }
}

impl Slot {
    /// Gives back what [`Latest::allocate`] left over.
    #[inline]
    pub(in crate::handler) fn give_back(&self, over: Over) {
        if !over.is_none()
            && let Some(kept) = &self.state().kept
        {
            kept.give_back(over);
        }
    }

    /// Notes that this thread uses the slot's request, whose handler this is and which the caller holds.
    #[inline(always)]
    pub(in crate::handler) fn note_latest(&self, handler: Handler) {
        // SAFETY: the caller holds the handler.
        if !unsafe { Latest::of(handler) }.is_some_and(Latest::is_charged_here) {
            self.note(handler);
        }
    }

    #[cold]
    #[inline(never)]
    fn note(&self, handler: Handler) {
        let state = self.state();
        if let (Some(here), Some(kept), Some(account)) = (Here::now(), &state.kept, state.chain.charged_here()) {
            noted().set(Some(Noted { handler, account: account.into(), here, kept: kept.into() }));
        }
    }
}

#[cfg(all(test, not(any(ctxalloc_loom, miri))))]
mod tests {
    use super::super::{Begun, Prepared, Terms};
    use super::{Here, Latest};
    use crate::handler::{Container, Handler, small};
    use std::ptr::NonNull;
    use std::sync::Barrier;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::thread;

    fn begun() -> Begun {
        Prepared::new(Terms { is_of_this_thread: true, ..Terms::default() }).expect("in range").begin()
    }

    /// By the short way, which is closed while another test listens to events, and where this thread keeps no block.
    fn allocate(handler: Handler) -> NonNull<u8> {
        let tries = std::iter::repeat_with(|| small::allocate_tight(handler, 40));
        tries.take(100).flatten().next().unwrap_or_else(|| handler.allocate(40).expect("memory"))
    }

    fn release(handler: Handler, block: NonNull<u8>) {
        // SAFETY: a live block of this handler, given up here.
        unsafe {
            if !small::release_tight(handler, block, 40) {
                handler.release(block, 40);
            }
        }
    }

    /// Whether this thread knows the request, and by an account that it owns.
    fn is_known(handler: Handler) -> bool {
        // SAFETY: the callers hold it.
        unsafe { Latest::of(handler) }.is_some_and(Latest::is_charged_here)
    }

    /// Whether threads own locks here, and nobody listens to events.
    fn may_know() -> bool {
        let request = begun();
        (0..100).for_each(|_| release(request.handler(), allocate(request.handler())));
        Here::now().is_some() && is_known(request.handler())
    }

    #[test]
    fn two_requests_in_turns_are_each_charged_their_own() {
        let requests = [begun(), begun()];
        let may_know = may_know();
        let (mut blocks, mut known) = (Vec::new(), 0);
        for turn in 0..200 {
            let request = &requests[turn % 2];
            blocks.push((request.handler(), allocate(request.handler())));
            let container = Container::of(request.handler());
            drop(container.clone());
            let counts = |at: usize| requests[at].stats().live_blocks;
            assert_eq!((counts(0), counts(1)), (turn / 2 + 1, turn.div_ceil(2)), "turn {turn}");
            // Where this thread kept no block it came another way.
            known += usize::from(is_known(request.handler()));
        }
        assert!(!may_know || known > 100, "{known} of 200");
        blocks.into_iter().for_each(|(handler, block)| release(handler, block));
        assert!(requests.iter().all(|request| request.stats().live_bytes == 0));
    }

    #[test]
    fn a_request_in_the_slot_of_one_that_is_gone_is_another() {
        let first = begun();
        let handler = first.handler();
        release(handler, allocate(handler));
        drop(first);
        for _ in 0..100 {
            let next = begun();
            assert_ne!(next.handler(), handler);
            // SAFETY: nothing is used of what it says.
            assert!(unsafe { Latest::of(next.handler()) }.is_none(), "the word is new");
            release(next.handler(), allocate(next.handler()));
            assert_eq!((next.stats().live_blocks, next.stats().total_blocks), (0, 1));
        }
    }

    #[test]
    fn a_thread_knows_its_tab_once_another_one_uses_the_request() {
        const MANY: usize = 2000;
        let (request, may_know) = (begun(), may_know());
        let (handler, container) = (request.handler(), Container::of(request.handler()));
        // Far below its peak it lends to its threads.
        let peak: Vec<_> = (0..MANY).map(|_| allocate(handler)).collect();
        peak.into_iter().for_each(|block| release(handler, block));
        let (both, total) = (Barrier::new(2), AtomicUsize::new(MANY));
        let work = || {
            both.wait();
            let mut known = 0;
            for _ in 0..MANY {
                let (block, again) = (allocate(handler), container.clone());
                known += usize::from(is_known(handler));
                release(handler, block);
                drop(again);
            }
            both.wait();
            total.fetch_add(MANY + 100, Ordering::Relaxed);
            let blocks: Vec<_> = (0..100).map(|_| (allocate(handler), container.clone())).collect();
            both.wait();
            let stats = request.stats();
            both.wait();
            blocks.into_iter().for_each(|(block, _container)| release(handler, block));
            (known, stats)
        };
        let found = thread::scope(|scope| {
            let other = scope.spawn(work);
            [work(), other.join().expect("no panic")]
        });
        for (known, stats) in found {
            let total = total.load(Ordering::Relaxed);
            assert_eq!((stats.live_blocks, stats.live_bytes, stats.total_blocks), (200, 200 * 40, total as u64));
            assert!(!may_know || known > MANY / 2, "{known} of {MANY}");
        }
        assert_eq!((request.stats().live_blocks, request.stats().live_bytes), (0, 0));
    }
}
