//! What a strategy knows of its blocks, kept apart from them: nothing that users overrun can change it, and a block may
//! be asked for by any address inside of it. Shards by start address, their locks held across `fork`.

use crate::sync::{ForkLock, HeldAcrossFork, Locked, hold_across_fork};
use std::collections::BTreeMap;
use std::ptr::{NonNull, null_mut};
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::{Arc, Weak};

/// A record for each block, by the block's start.
#[derive(Debug)]
pub(crate) struct Ledger<R> {
    shards: [Locked<BTreeMap<usize, R>>; SHARDS],
}

const SHARDS: usize = 32;

/// A shard was locked by somebody who may be the asking thread itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Busy;

impl<R: Send + 'static> Ledger<R> {
    pub(crate) fn new() -> Arc<Self> {
        let ledger = Arc::new(Self { shards: std::array::from_fn(|_| Locked::new(BTreeMap::new())) });
        hold_across_fork(Arc::downgrade(&ledger) as Weak<dyn HeldAcrossFork>);
        ledger
    }

    /// Runs `work` on the shard of blocks that start at `start`, alone.
    fn shard<T>(&self, start: usize, work: impl FnOnce(&mut BTreeMap<usize, R>) -> T) -> T {
        // Fibonacci hashing: blocks may all start at multiples of some power of two.
        let index = start.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> (usize::BITS - SHARDS.ilog2());
        self.shards[index].with(work)
    }

    /// Enters a block.
    pub(crate) fn insert(&self, start: NonNull<u8>, record: R) {
        let before = self.shard(start.addr().get(), |shard| shard.insert(start.addr().get(), record));
        debug_assert!(before.is_none(), "two blocks at one address");
    }

    /// Takes a block out.
    pub(crate) fn remove(&self, start: NonNull<u8>) -> Option<R> {
        self.shard(start.addr().get(), |shard| shard.remove(&start.addr().get()))
    }

    /// Runs `work` on the record of the block that starts at `start`, or on nothing. `work` must not come here again.
    pub(crate) fn with<T>(&self, start: NonNull<u8>, work: impl FnOnce(Option<&mut R>) -> T) -> T {
        self.shard(start.addr().get(), |shard| work(shard.get_mut(&start.addr().get())))
    }

    /// What `look` says of a block, given its start and record; asked of those nearest to `address`, on either side of
    /// it, until it says something. It sees the block in which the address lies, if there is one. `look` must not come
    /// here again.
    pub(crate) fn near<T>(&self, address: usize, mut look: impl FnMut(usize, &R) -> Option<T>) -> Option<T> {
        self.shards.iter().find_map(|shard| shard.with(|shard| nearest(shard, address, &mut look)))
    }

    /// [`near`](Self::near) for a signal handler: allocates nothing, and does not wait for a lock but for a few turns.
    pub(crate) fn try_near<T>(
        &self,
        address: usize,
        mut look: impl FnMut(usize, &R) -> Option<T>,
    ) -> Result<Option<T>, Busy> {
        const TURNS: usize = 10_000;
        let mut busy = false;
        for shard in &self.shards {
            let answer = (0..TURNS).find_map(|_| {
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

/// The one ledger of a kind in this process, made at its first use, immortal.
#[derive(Debug)]
pub(crate) struct ProcessLedger<R>(AtomicPtr<Ledger<R>>);

impl<R: Send + 'static> ProcessLedger<R> {
    pub(crate) const fn new() -> Self {
        Self(AtomicPtr::new(null_mut()))
    }

    /// The ledger. Waits for no other thread: one that makes it may not be there any more after a `fork`.
    pub(crate) fn get(&self) -> &'static Ledger<R> {
        if let Some(ledger) = self.if_made() {
            return ledger;
        }
        let fresh = Ledger::new();
        let pointer = Arc::as_ptr(&fresh).cast_mut();
        // AcqRel: publishes ours, or sees that of whoever was faster.
        if self.0.compare_exchange(null_mut(), pointer, Ordering::AcqRel, Ordering::Acquire).is_ok() {
            std::mem::forget(fresh); // the reference that stands in the pointer
        }
        self.if_made().expect("somebody put one there")
    }

    /// The ledger if there is one. For signal handlers.
    pub(crate) fn if_made(&self) -> Option<&'static Ledger<R>> {
        // Acquire pairs with the exchange above.
        let pointer = self.0.load(Ordering::Acquire);
        // SAFETY: NULL, or a ledger to which `get` left a reference for ever.
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
