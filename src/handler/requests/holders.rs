//! `Holders`: the whole state of a slot, in one number.
//!
//! - set to 1: when a request begins in it. Cannot be set while anybody holds it, for it is taken from the list of free ones.
//! - above 0: the request and its state are there, its generation and struct do not change, and holders may hold it again.
//! - counted up by others than holders (`try_one_more`): only while it is above 0, and kept only if the generation is right.
//! - set to 0: by the last holder, which then recycles the slot. Nobody gets hold of it until the next request begins.
//!
//! It counts 64 bits, which no program can run over.

use crate::sync::{AtomicU64, Ordering};

/// How many hold a slot.
#[derive(Debug)]
#[repr(transparent)]
pub(super) struct Holders(AtomicU64);

impl Holders {
    pub(super) fn none() -> Self {
        Self(AtomicU64::new(0))
    }

    /// The first one, of a new request that was written before.
    pub(super) fn begin(&self) {
        // Release pairs with the Acquires below: who gets hold of the slot sees all that was written.
        self.0.store(1, Ordering::Release);
    }

    /// One more, by somebody who is none. False: there is none.
    pub(super) fn try_one_more(&self) -> bool {
        let one_more = |holders: u64| (holders > 0).then(|| holders + 1);
        // Acquire pairs with the Release in `begin`: a generation that is read afterwards is that of the request we hold.
        self.0.fetch_update(Ordering::Acquire, Ordering::Relaxed, one_more).is_ok()
    }

    /// One more, by a holder.
    #[inline]
    pub(super) fn one_more(&self) {
        // Relaxed: who hands a hold on to another thread orders that by other means.
        self.0.fetch_add(1, Ordering::Relaxed);
    }

    /// One less. True: it was the last, which recycles the slot.
    #[inline]
    pub(super) fn one_less(&self) -> bool {
        // AcqRel: the recycling sees everything that was done by those who let go before.
        self.0.fetch_sub(1, Ordering::AcqRel) == 1
    }

    /// Whether there is one. A moment's answer for who is none.
    pub(super) fn are_any(&self) -> bool {
        // Acquire pairs with the Release in `begin`: a generation that is read afterwards is that of the holders, or a newer one.
        self.0.load(Ordering::Acquire) > 0
    }
}

#[cfg(all(test, ctxalloc_loom))]
mod loom_tests {
    use super::Holders;
    use crate::sync::{AtomicU32, Ordering};
    use loom::cell::UnsafeCell;
    use loom::sync::Arc;
    use loom::thread;

    /// What of a slot is ordered by its holders: the generation, and the state, here a number of the request's.
    struct Slot {
        holders: Holders,
        generation: AtomicU32,
        state: UnsafeCell<u32>,
    }
    // SAFETY: the state is read by holders, and written where there is none; loom checks that this suffices.
    unsafe impl Sync for Slot {}
    // SAFETY: numbers and atomics.
    unsafe impl Send for Slot {}

    impl Slot {
        /// A slot in which the request of generation 0 has begun.
        fn begun() -> Arc<Self> {
            let slot = Self { holders: Holders::none(), generation: AtomicU32::new(0), state: UnsafeCell::new(0) };
            slot.begin(100);
            Arc::new(slot)
        }

        fn begin(&self, state: u32) {
            // SAFETY: nobody holds the slot, and only this thread may begin a request in it.
            self.state.with_mut(|place| unsafe { *place = state });
            self.holders.begin();
        }

        /// As `slot.rs` does it, where the next request begins at once.
        fn let_go(&self, next: u32) {
            if self.holders.one_less() {
                let generation = self.generation.load(Ordering::Relaxed);
                self.generation.store(generation + 1, Ordering::Relaxed);
                self.begin(next);
            }
        }

        fn look(&self, generation: u32) -> Option<u32> {
            if !self.holders.try_one_more() {
                return None;
            }
            let is_it = self.generation.load(Ordering::Relaxed) == generation;
            // SAFETY: held.
            let state = is_it.then(|| self.state.with(|place| unsafe { *place }));
            self.let_go(300);
            state
        }
    }

    #[test]
    fn loom_who_holds_a_slot_sees_its_own_request() {
        loom::model(|| {
            let slot = Slot::begun();
            let other = thread::spawn({
                let slot = Arc::clone(&slot);
                move || {
                    let first = slot.look(0);
                    assert!(matches!(first, None | Some(100)), "{first:?}");
                    let second = slot.look(1);
                    assert!(matches!(second, None | Some(200 | 300)), "{second:?}");
                }
            });
            slot.let_go(200);
            let late = slot.look(0);
            assert!(matches!(late, None | Some(100)), "the other thread may hold it still: {late:?}");
            other.join().expect("no panic");
        });
    }
}
