//! A strategy's records of its blocks, kept apart from the blocks: a user who overruns a block cannot change them, and
//! a block can be found by any address inside. They are in shards by start address, whose locks are held across `fork`.

use crate::sync::{ForkLock, HeldAcrossFork, Locked, held_across_fork};
use crate::unattributed::unattributed;
use std::collections::BTreeMap;
use std::ptr::{NonNull, null_mut};
use std::sync::Arc;
use std::sync::atomic::{AtomicPtr, Ordering};

/// A record for each block, by the block's start address.
#[derive(Debug)]
pub(crate) struct Ledger<R> {
    shards: [Locked<BTreeMap<usize, R>>; SHARDS],
}

const SHARDS: usize = 32;

/// A shard stayed locked, perhaps by the asking thread itself.
#[cfg_attr(windows, allow(dead_code, reason = "for signal handlers"))]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Busy;

impl<R: Send + 'static> Ledger<R> {
    pub(crate) fn new() -> Arc<Self> {
        held_across_fork(Self { shards: std::array::from_fn(|_| Locked::new(BTreeMap::new())) })
    }

    /// Runs `work` on the shard for blocks that start at `start`, under its lock.
    fn shard<T>(&self, start: usize, work: impl FnOnce(&mut BTreeMap<usize, R>) -> T) -> T {
        // Fibonacci hashing, since all blocks may start at multiples of some power of two.
        let index = start.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> (usize::BITS - SHARDS.ilog2());
        self.shards[index].with(work)
    }

    /// Adds the record of a block that has none.
    pub(crate) fn insert(&self, start: NonNull<u8>, record: R) {
        let _unattributed = unattributed();
        let before = self.shard(start.addr().get(), |shard| shard.insert(start.addr().get(), record));
        debug_assert!(before.is_none(), "two blocks at one address");
    }

    /// Removes and returns a block's record.
    pub(crate) fn remove(&self, start: NonNull<u8>) -> Option<R> {
        self.shard(start.addr().get(), |shard| shard.remove(&start.addr().get()))
    }

    /// Runs `work` on the record of the block that starts at `start`, or on `None`. `work` must not use this ledger.
    pub(crate) fn with<T>(&self, start: NonNull<u8>, work: impl FnOnce(Option<&mut R>) -> T) -> T {
        self.shard(start.addr().get(), |shard| work(shard.get_mut(&start.addr().get())))
    }

    /// Calls `look` with the start and record of the blocks nearest to `address`, on either side, until it returns
    /// `Some`. The block that `address` lies in, if any, is among them. `look` must not use this ledger.
    pub(crate) fn near<T>(&self, address: usize, mut look: impl FnMut(usize, &R) -> Option<T>) -> Option<T> {
        self.shards.iter().find_map(|shard| shard.with(|shard| nearest(shard, address, &mut look)))
    }

    /// [`near`](Self::near) for a signal handler: it allocates nothing, and gives up on a lock after a number of
    /// attempts.
    ///
    /// The interrupted thread may hold the lock itself, and then waiting would never end. If another thread holds it, a
    /// few attempts suffice, since locks are held for a few stores only.
    #[cfg_attr(windows, allow(dead_code, reason = "for signal handlers"))]
    pub(crate) fn try_near<T>(
        &self,
        address: usize,
        mut look: impl FnMut(usize, &R) -> Option<T>,
    ) -> Result<Option<T>, Busy> {
        /// Together below a millisecond.
        const ATTEMPTS: usize = 10_000;
        let mut busy = false;
        for shard in &self.shards {
            let answer = (0..ATTEMPTS).find_map(|_| {
                let answer = shard.try_with(|shard| nearest(shard, address, &mut look));
                if answer.is_none() {
                    std::hint::spin_loop();
                }
                answer
            });
            match answer {
                Some(None) => {}
                Some(found) => return Ok(found),
                None => busy = true,
            }
        }
        if busy { Err(Busy) } else { Ok(None) }
    }
}

fn nearest<R, T>(
    shard: &BTreeMap<usize, R>,
    address: usize,
    look: &mut impl FnMut(usize, &R) -> Option<T>,
) -> Option<T> {
    let before = shard.range(..=address).next_back();
    let behind = address.checked_add(1).and_then(|next| shard.range(next..).next());
    before.into_iter().chain(behind).find_map(|(&start, record)| look(start, record))
}

impl<R: Send> HeldAcrossFork for Ledger<R> {
    fn for_each_lock(&self, visit: &mut dyn FnMut(&ForkLock)) {
        self.shards.iter().for_each(|shard| visit(shard.lock()));
    }
}

/// The process's only ledger of a kind: made at its first use, never freed.
#[derive(Debug)]
pub(crate) struct ProcessLedger<R>(AtomicPtr<Ledger<R>>);

impl<R: Send + 'static> ProcessLedger<R> {
    pub(crate) const fn new() -> Self {
        Self(AtomicPtr::new(null_mut()))
    }

    /// The ledger. It waits for no other thread, since after `fork` the thread that was making it may not exist.
    pub(crate) fn get(&self) -> &'static Ledger<R> {
        if let Some(ledger) = self.if_made() {
            return ledger;
        }
        let fresh = Ledger::new();
        let pointer = Arc::as_ptr(&fresh).cast_mut();
        // Release publishes our ledger, Acquire (also on failure) sees that of a thread that was faster.
        if self.0.compare_exchange(null_mut(), pointer, Ordering::AcqRel, Ordering::Acquire).is_ok() {
            std::mem::forget(fresh); // its reference belongs to the pointer now
        }
        self.if_made().expect("this thread or another has stored one")
    }

    /// The ledger, if it was made. Safe in a signal handler.
    pub(crate) fn if_made(&self) -> Option<&'static Ledger<R>> {
        // Acquire pairs with the exchange above.
        let pointer = self.0.load(Ordering::Acquire);
        // SAFETY: NULL, or a ledger that lives for ever, since `get` forgot a reference to it.
        unsafe { pointer.as_ref() }
    }
}

#[cfg(test)]
mod tests {
    use super::{Busy, Ledger};
    use std::ptr::NonNull;

    fn at(address: usize) -> NonNull<u8> {
        NonNull::without_provenance(address.try_into().expect("not zero"))
    }

    /// A block of 100 bytes at each multiple of 4096.
    fn ledger() -> std::sync::Arc<Ledger<usize>> {
        let ledger = Ledger::new();
        for number in 1..=200 {
            ledger.insert(at(number * 4096), 100);
        }
        ledger
    }

    #[test]
    fn a_block_is_found_by_every_address_inside_of_it_and_by_no_other() {
        let ledger = ledger();
        let find =
            |address| ledger.near(address, |start, &bytes| (start..start + bytes).contains(&address).then_some(start));
        for number in 1..=200 {
            let start = number * 4096;
            for inside in [0, 1, 99] {
                assert_eq!(find(start + inside), Some(start));
            }
            assert_eq!((find(start - 1), find(start + 100)), (None, None));
        }
        assert_eq!((find(0), find(usize::MAX)), (None, None));
        assert_eq!(ledger.remove(at(4096)), Some(100));
        assert_eq!((find(4096), ledger.remove(at(4096))), (None, None));
    }

    #[test]
    fn a_signal_handler_gets_an_answer_though_its_thread_holds_a_lock() {
        let ledger = ledger();
        let found = |_start: usize, _bytes: &usize| Some(());
        assert_eq!(ledger.try_near(8192, found), Ok(Some(())));
        ledger.with(at(8192), |_| {
            assert_eq!(ledger.try_near(8192, |start, _| (start == 8192).then_some(())), Err(Busy));
        });
        assert_eq!(ledger.try_near(8192, |start, _| (start == 8192).then_some(())), Ok(Some(())));
    }
}
