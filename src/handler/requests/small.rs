//! A request's small blocks of the shared pool, where neither the pool nor the accounts need a lock: `handler::small`
//! comes here first. Where anything else is to be done, nothing is, and the C functions of the slot do it.

use super::super::trampoline::AtHand;
use super::slot::Slot;
use super::state::{AfterEnd, Memory};
use crate::strategy::account::{Account, Chain, Room, UNCOUNTED};
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
        let kept = state.kept.as_ref()?;
        let account = &**state.own;
        let Some(room) = account.begin_charge(size_bytes) else { return self.allocate_on_tab(size_bytes) };
        take(kept, account, room, size_bytes).map_or_else(|over| give_over(kept, over), Some)
    }

    /// The same where several threads use the request.
    #[inline(never)]
    fn allocate_on_tab(&self, size_bytes: usize) -> Option<NonNull<u8>> {
        let state = self.state();
        let kept = state.kept.as_ref()?;
        let Some((tab, room)) = state.chain.begin_charge_on_tab(size_bytes) else {
            return self.allocate_elsewhere(size_bytes);
        };
        take(kept, tab, room, size_bytes).map_or_else(|over| give_over(kept, over), Some)
    }

    /// Where one account is not enough.
    #[inline(never)]
    fn allocate_elsewhere(&self, size_bytes: usize) -> Option<NonNull<u8>> {
        let state = self.state();
        let kept = state.kept.as_ref()?;
        let mut over = Over::default();
        let take = || kept.take_sized(size_bytes, &mut over);
        let block = state.chain.charge_small_to_all(size_bytes, take, || self.hold_again());
        kept.give_back(over);
        block
    }

    /// Takes a block back; false if it has to go the long way, and nothing was done.
    ///
    /// # Safety
    /// - `block` is a live block of this slot; after `true` it is not used again.
    #[inline(always)]
    pub(in crate::handler) unsafe fn release_small(&self, block: NonNull<u8>) -> bool {
        let state = self.state();
        let Some(kept) = &state.kept else { return false };
        // SAFETY: a live block of this slot, whose blocks are the pool's.
        let Some((small, size_bytes)) = (unsafe { counted(block) }) else { return false };
        if !state.own.give_small_back(size_bytes) {
            // SAFETY: a live block of this slot with this record and size, which the caller gives up.
            return unsafe { self.release_on_tab(small, block, size_bytes) };
        }
        // SAFETY: a live block of the pool with this record, which the caller gives up.
        unsafe { put_away(kept, small, block) }
    }

    /// Where several threads use the request.
    ///
    /// # Safety
    /// - as for [`release_small`](Self::release_small), with the block's record and size.
    #[inline(never)]
    unsafe fn release_on_tab(&self, small: Small, block: NonNull<u8>, size_bytes: usize) -> bool {
        let state = self.state();
        let Some(kept) = &state.kept else { return false };
        if !state.chain.give_small_back_on_tab(size_bytes) {
            // SAFETY: a live block of this slot with this record and size, which the caller gives up.
            return unsafe { self.release_elsewhere(small, block, size_bytes) };
        }
        // SAFETY: a live block of the pool with this record, which the caller gives up.
        unsafe { put_away(kept, small, block) }
    }

    /// Where one account is not enough.
    ///
    /// # Safety
    /// - as for [`release_small`](Self::release_small), with the block's record and size.
    #[inline(never)]
    unsafe fn release_elsewhere(&self, small: Small, block: NonNull<u8>, size_bytes: usize) -> bool {
        let state = self.state();
        let Some(kept) = &state.kept else { return false };
        let Some(is_last) = state.chain.give_back_to_all(size_bytes) else { return false };
        // If it is the last one of a request that is over, the state may go with it; if not, another thread may have
        // taken that away.
        // SAFETY: a live block of the pool with this record, which the caller gives up.
        let is_done = unsafe { put_away(kept, small, block) };
        if is_last {
            self.immortal().let_go();
        }
        is_done
    }

    /// A large block that came back to the pool lately, charged, where that concerns the own account alone.
    #[inline]
    pub(super) fn take_recent(&self, size_bytes: usize) -> Option<NonNull<u8>> {
        let state = self.state();
        let kept = state.kept.as_ref().filter(|_| size_bytes > Kept::MAX_BYTES)?;
        let account = &**state.own;
        let room = account.begin_charge(size_bytes)?;
        if let Some(block) = kept.take_parked_sized(size_bytes) {
            account.charged(size_bytes, room);
            return Some(block);
        }
        drop(room); // the pool's lock is not taken inside of it
        Self::take_recent_of_store(kept, account, size_bytes)
    }

    #[inline(never)]
    fn take_recent_of_store(kept: &Kept, account: &Account, size_bytes: usize) -> Option<NonNull<u8>> {
        let block = kept.take_recent_sized(size_bytes)?;
        let Some(room) = account.begin_charge(size_bytes) else {
            kept.give_recent_back(block);
            return None;
        };
        account.charged(size_bytes, room);
        Some(block)
    }

    /// The block with room for more bytes, and its first bytes kept; `None` if it has to go the long way, and nothing
    /// was done.
    ///
    /// # Safety
    /// - `block` is a live block of this slot; after `Some` it is not used again.
    #[inline]
    pub(in crate::handler) unsafe fn grow_small(&self, block: NonNull<u8>, new_bytes: usize) -> Option<NonNull<u8>> {
        let state = self.state();
        let kept = state.kept.as_ref()?;
        // SAFETY: a live block of this slot, whose blocks are the pool's.
        let (small, old_bytes) = unsafe { counted(block) }?;
        let growth = new_bytes.checked_sub(old_bytes)?;
        let account = &**state.own;
        let Some(room) = account.begin_charge(growth) else {
            // SAFETY: a live block of this slot with this record and size, given up where this succeeds.
            return unsafe { self.grow_elsewhere(small, block, old_bytes, growth) };
        };
        // SAFETY: a live block of this slot with this record and size, given up where this succeeds.
        unsafe { grow_charged(kept, account, (small, block, old_bytes), growth, room) }
    }

    /// Where several threads use the request, or one account is not enough.
    ///
    /// # Safety
    /// - as for [`grow_small`](Self::grow_small), with the block's record and size.
    #[inline(never)]
    unsafe fn grow_elsewhere(
        &self,
        small: Small,
        block: NonNull<u8>,
        old_bytes: usize,
        growth: usize,
    ) -> Option<NonNull<u8>> {
        let state = self.state();
        let kept = state.kept.as_ref()?;
        let mut over = Over::default();
        // SAFETY: a live block of the pool with this record; it is charged for what it grows by.
        let grow = || unsafe { kept.grow(block, small, old_bytes + growth, &mut over) };
        let grown = state.chain.charge_growth(growth, grow);
        kept.give_back(over);
        // SAFETY: the block that `grow` made of this one, which has so many bytes and is given up.
        grown.map(|grown| unsafe { moved(kept, small, block, grown, old_bytes) })
    }
}

/// A block that this thread keeps, where a charge of it to `account` was begun.
///
/// # Errors
/// What is to be given back: nothing mostly, for it keeps none.
#[inline(always)]
pub(super) fn take(kept: &Kept, account: &Account, room: Room, size_bytes: usize) -> Result<NonNull<u8>, Over> {
    let mut over = Over::default();
    let Some(block) = kept.take_sized(size_bytes, &mut over) else {
        drop(room); // before others may be called
        return Err(over);
    };
    account.charged(size_bytes, room);
    Ok(block)
}

#[cold]
#[inline(never)]
fn give_over(kept: &Kept, over: Over) -> Option<NonNull<u8>> {
    kept.give_back(over);
    None
}

/// A small block's record, and how many bytes were asked for; `None` for another one, or if no account counts it.
///
/// # Safety
/// - `block` is a live block of the pool that has a note.
#[inline(always)]
unsafe fn counted(block: NonNull<u8>) -> Option<(Small, usize)> {
    // SAFETY: a live block of a pool (this function's contract).
    let small = unsafe { Small::of(block) }?;
    let size_bytes = small.requested_bytes(block);
    (size_bytes != UNCOUNTED).then_some((small, size_bytes))
}

/// Keeps a small block whose charge `give` gives back; false, and nothing was done, if it cannot.
///
/// # Safety
/// - `block` is a live block of the pool that has a note; after `true` it is not used again.
#[inline(always)]
pub(super) unsafe fn put_back(kept: &Kept, block: NonNull<u8>, give: impl FnOnce(usize) -> bool) -> bool {
    // SAFETY: a live block of the pool with a note, given up where this succeeds (this function's contract).
    unsafe {
        let Some((small, size_bytes)) = counted(block) else { return false };
        give(size_bytes) && put_away(kept, small, block)
    }
}

/// The block with room for `new_bytes`, of which `begin` begins to charge what it grows by to `account`.
///
/// # Safety
/// - as for [`put_back`]; after `Some` it is not used again.
#[inline(always)]
pub(super) unsafe fn grow(
    kept: &Kept,
    account: &Account,
    block: NonNull<u8>,
    new_bytes: usize,
    begin: impl FnOnce(usize) -> Option<Room>,
) -> Option<NonNull<u8>> {
    // SAFETY: a live block of the pool with a note, given up where this succeeds (this function's contract).
    unsafe {
        let (small, old_bytes) = counted(block)?;
        let growth = new_bytes.checked_sub(old_bytes)?;
        grow_charged(kept, account, (small, block, old_bytes), growth, begin(growth)?)
    }
}

/// # Safety
/// - the block is a live one of the pool, with this record and so many bytes; after `Some` it is not used again.
#[inline(always)]
unsafe fn grow_charged(
    kept: &Kept,
    account: &Account,
    (small, block, old_bytes): (Small, NonNull<u8>, usize),
    growth: usize,
    room: Room,
) -> Option<NonNull<u8>> {
    let mut over = Over::default();
    // SAFETY: a live block of the pool with this record (this function's contract); it is charged for what it grows by.
    let Some(grown) = (unsafe { kept.grow(block, small, old_bytes + growth, &mut over) }) else {
        drop(room); // before others may be called
        return give_over(kept, over);
    };
    account.grown(growth, room);
    // SAFETY: the block that `grow` made of this one, which has so many bytes and is given up.
    Some(unsafe { moved(kept, small, block, grown, old_bytes) })
}

/// What is in a block is in the one that it has grown to, which may be the same.
///
/// # Safety
/// - both are live blocks of the pool, the old one with this record and so many bytes, and not used again if it is
///   another one.
#[inline(always)]
unsafe fn moved(kept: &Kept, small: Small, block: NonNull<u8>, grown: NonNull<u8>, old_bytes: usize) -> NonNull<u8> {
    if grown != block {
        // SAFETY: two live blocks, the new one larger. The old one is given up (this function's contract).
        unsafe {
            grown.copy_from_nonoverlapping(block, old_bytes);
            put_away(kept, small, block);
        }
    }
    grown
}

/// Keeps a block whose charge was given back; true.
///
/// # Safety
/// - `block` is a live block of the pool with this record, and not used again.
#[inline(always)]
unsafe fn put_away(kept: &Kept, small: Small, block: NonNull<u8>) -> bool {
    // SAFETY: a live block of the pool with this record, which the caller gives up.
    let over = unsafe { kept.try_keep(small, block) };
    if over.is_none() { true } else { put_over(kept, over) }
}

#[cold]
#[inline(never)]
fn put_over(kept: &Kept, over: Over) -> bool {
    kept.give_back(over);
    true
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
