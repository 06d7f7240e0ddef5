//! A request's small blocks of the shared pool, where neither the pool nor the accounts need a lock: `handler::small`
//! comes here first. Where anything else is to be done, nothing is, and the C functions of the slot do it.

use super::super::trampoline::AtHand;
use super::slot::Slot;
use super::state::{AfterEnd, Memory};
use crate::strategy::account::{Chain, UNCOUNTED};
use crate::strategy::{Kept, Over, Small};
use std::ptr::NonNull;

/// What threads keep of a request's blocks, if these come from the shared pool, are charged whether or not the request
/// has ended, and draw on no reservation.
pub(super) fn kept(memory: &Memory, after_end: AfterEnd, chain: &Chain) -> Option<Kept> {
    match memory {
        Memory::Shared(pool) if after_end == AfterEnd::Charge && chain.is_plain() => Some(pool.kept()),
        _ => None,
    }
}

impl Slot {
    /// A block that the running thread keeps, charged. Whoever calls holds the slot.
    #[inline(always)]
    pub(in crate::handler) fn allocate_small(&self, size_bytes: usize) -> Option<NonNull<u8>> {
        let state = self.state();
        let kept = state.kept?;
        let account = state.chain.own();
        let Some(section) = account.begin_charge(size_bytes) else {
            return self.allocate_elsewhere(kept, size_bytes);
        };
        let mut over = Over::default();
        let Some(block) = kept.take_sized(size_bytes, &mut over) else {
            drop(section); // before others may be called
            kept.give_back(over);
            return None;
        };
        if account.charged(size_bytes, &section) {
            self.hold_first();
        }
        Some(block)
    }

    #[inline(never)]
    fn allocate_elsewhere(&self, kept: Kept, size_bytes: usize) -> Option<NonNull<u8>> {
        let mut over = Over::default();
        let take = || kept.take_sized(size_bytes, &mut over);
        let block = self.state().chain.charge_small_elsewhere(size_bytes, take, || self.hold_first());
        kept.give_back(over);
        block
    }

    /// For the first block after the end.
    #[cold]
    #[inline(never)]
    fn hold_first(&self) {
        self.hold_again();
    }

    /// Takes a block back; false if it has to go the long way, and nothing was done.
    ///
    /// # Safety
    /// - `block` is a live block of this slot; after `true` it is not used again.
    #[inline(always)]
    pub(in crate::handler) unsafe fn release_small(&self, block: NonNull<u8>) -> bool {
        let state = self.state();
        let Some(kept) = state.kept else { return false };
        // SAFETY: a live block of this slot, whose blocks are the pool's.
        let Some(small) = (unsafe { Small::of(block) }) else { return false };
        let size_bytes = small.requested_bytes(block);
        if size_bytes == UNCOUNTED {
            return false;
        }
        let Some(is_last) = state.chain.give_small_back(size_bytes) else { return false };
        // SAFETY: a live block of the pool with this record, which the caller gives up.
        unsafe { kept.keep(small, block) };
        if is_last {
            self.let_last_go();
        }
        true
    }

    /// After the last block of a request that is over: the state may go with it.
    #[cold]
    #[inline(never)]
    fn let_last_go(&self) {
        self.immortal().let_go();
    }

    /// The block with room for more bytes, and its first bytes kept; `None` if it has to go the long way, and nothing
    /// was done.
    ///
    /// # Safety
    /// - `block` is a live block of this slot; after `Some` it is not used again.
    #[inline]
    pub(in crate::handler) unsafe fn grow_small(&self, block: NonNull<u8>, new_bytes: usize) -> Option<NonNull<u8>> {
        let state = self.state();
        let kept = state.kept?;
        // SAFETY: a live block of this slot, whose blocks are the pool's.
        let small = unsafe { Small::of(block) }?;
        let old_bytes = Some(small.requested_bytes(block)).filter(|bytes| *bytes != UNCOUNTED)?;
        let growth = new_bytes.checked_sub(old_bytes)?;
        let mut over = Over::default();
        // SAFETY: a live block of the pool with this record; it is charged for what it grows by.
        let grown = state.chain.charge_growth(growth, || unsafe { kept.grow(block, small, new_bytes, &mut over) });
        kept.give_back(over);
        let grown = grown?;
        if grown != block {
            // SAFETY: two live blocks, the new one larger. The old one is given up.
            unsafe {
                grown.copy_from_nonoverlapping(block, old_bytes);
                kept.keep(small, block);
            }
        }
        Some(grown)
    }
}

impl AtHand for Slot {
    #[inline(always)]
    fn take(&'static self, size_bytes: usize) -> Option<NonNull<u8>> {
        self.allocate_small(size_bytes)
    }

    #[inline(always)]
    unsafe fn put_back(&'static self, block: NonNull<u8>) -> bool {
        // SAFETY: a live block of this slot, which holds it; given up where this succeeds.
        unsafe { self.release_small(block) }
    }
}
