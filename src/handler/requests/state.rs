//! `State`: where a request's blocks come from and who pays, from its beginning until nothing can reach it.

use super::slot::Slot;
use super::{AfterEnd, MIN_ALIGN, TINY_BYTES};
use crate::strategy::account::{Chain, Refused};
use crate::strategy::{Budget, Fronted, LiveBlock, Pool, Strategy};
use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;

/// One request's own. Lives in its slot while anybody holds that.
pub(super) struct State {
    pub(super) chain: Arc<Chain>,
    pub(super) memory: Memory,
    pub(super) overdraft_bytes: usize,
    pub(super) after_end: AfterEnd,
    /// The budget that it was given: while it is here, requests inside of this one are charged to it too.
    pub(super) _budget: Option<Budget>,
}

/// Where blocks come from. Each knows how many bytes were asked for; [`UNCOUNTED`] stands for one that no account has.
pub(super) enum Memory {
    /// The process's own pool, which notes the bytes beside its pages: an escape costs its own block and nothing else.
    Shared(&'static Pool),
    /// Whatever the user chose, with a record before each block.
    Chosen(Fronted<Arc<dyn Strategy>, usize>),
}

/// No block is asked for with zero bytes: the handler layer makes them one.
const UNCOUNTED: usize = 0;

impl Memory {
    pub(super) fn new(strategy: Option<Arc<dyn Strategy>>) -> Self {
        match strategy {
            Some(strategy) => Self::Chosen(Fronted::new(strategy)),
            None => Self::Shared(Pool::shared()),
        }
    }

    #[inline]
    fn allocate(&self, size_bytes: usize, zeroed: bool) -> Option<NonNull<u8>> {
        match self {
            Self::Shared(pool) => pool.allocate_sized(size_bytes, zeroed),
            Self::Chosen(blocks) => blocks.allocate(size_bytes, zeroed, size_bytes),
        }
    }

    /// # Safety
    /// - `block` is a live block of this memory.
    #[inline]
    unsafe fn asked_bytes(&self, block: NonNull<u8>) -> usize {
        match self {
            // SAFETY: made by `allocate_sized`; live, says the caller.
            Self::Shared(_) => unsafe { Pool::asked_bytes(block) },
            // SAFETY: made by `allocate`; live, says the caller.
            Self::Chosen(_) => unsafe { Fronted::<Arc<dyn Strategy>, usize>::read(block) },
        }
    }

    /// # Safety
    /// - `block` is a live block of this memory.
    unsafe fn mark_as_uncounted(&self, block: NonNull<u8>) {
        match self {
            // SAFETY: made by `allocate_sized`; live, says the caller.
            Self::Shared(_) => unsafe { Pool::note_asked(block, UNCOUNTED) },
            // SAFETY: made by `allocate`; live, says the caller.
            Self::Chosen(_) => unsafe { Fronted::<Arc<dyn Strategy>, usize>::write(block, UNCOUNTED) },
        }
    }

    /// # Safety
    /// - `block` is a live block of this memory; after `Some` it is not used again.
    unsafe fn resize(&self, block: NonNull<u8>, new_size_bytes: usize, is_counted: bool) -> Option<NonNull<u8>> {
        let moved = match self {
            // SAFETY: live, says the caller; its note says how many bytes it has.
            Self::Shared(pool) if is_counted => return unsafe { pool.resize_sized(block, new_size_bytes) },
            // SAFETY: live, says the caller; its class says how much room it has.
            Self::Shared(pool) => unsafe { pool.resize(block, new_size_bytes) }?,
            // SAFETY: live, says the caller.
            Self::Chosen(blocks) => unsafe { blocks.resize(block, new_size_bytes) }?,
        };
        if is_counted {
            // SAFETY: live, just resized, of the chosen strategy.
            unsafe { Fronted::<Arc<dyn Strategy>, usize>::write(moved, new_size_bytes) };
        } else {
            // SAFETY: live, just resized.
            unsafe { self.mark_as_uncounted(moved) };
        }
        Some(moved)
    }

    /// # Safety
    /// - `block` is a live block of this memory, and not used again.
    #[inline]
    unsafe fn release(&self, block: NonNull<u8>) {
        match self {
            // SAFETY: given up, says the caller.
            Self::Shared(pool) => unsafe { pool.release(block) },
            // SAFETY: given up, says the caller.
            Self::Chosen(blocks) => unsafe { blocks.release(block) },
        }
    }

    pub(super) fn live_blocks(&self) -> Option<Vec<LiveBlock>> {
        match self {
            Self::Shared(_) => None,
            Self::Chosen(blocks) => blocks.live_blocks(),
        }
    }

    fn trim(&self) -> usize {
        match self {
            Self::Shared(_) => 0, // others use it too
            Self::Chosen(blocks) => blocks.upstream.trim(),
        }
    }
}

impl State {
    /// What a block of this size may go beyond limits.
    #[inline]
    fn overdraft_for(&self, size_bytes: usize) -> usize {
        if size_bytes <= TINY_BYTES { self.overdraft_bytes } else { 0 }
    }

    /// Whether a block of so many bytes is to be counted, or is refused.
    #[inline]
    fn is_counted(&self, size_bytes: usize) -> Result<bool, Refused> {
        if self.after_end == AfterEnd::Charge || !self.chain.has_ended() {
            return Ok(true);
        }
        match self.after_end {
            AfterEnd::Refuse => Err(self.chain.refuse_after_end(size_bytes)),
            _ => Ok(false),
        }
    }

    pub(super) fn charge_external(&self, bytes: usize) -> Result<bool, Refused> {
        let is_counted = self.is_counted(bytes)?;
        if is_counted {
            self.chain.take(bytes, 1, self.overdraft_for(bytes))?;
        }
        Ok(is_counted)
    }

    fn make(&self, slot: &'static Slot, size_bytes: usize, zeroed: bool) -> Option<NonNull<u8>> {
        let made = match self.is_counted(size_bytes) {
            Ok(true) if matches!(self.memory, Memory::Shared(_)) && size_bytes <= SMALL_BYTES => {
                self.make_small(slot, size_bytes, zeroed)
            }
            Ok(true) => self.make_large(slot, size_bytes, zeroed),
            Ok(false) => Ok(self.make_uncounted(slot, size_bytes, zeroed)),
            Err(refused) => Err(refused),
        };
        made.unwrap_or_else(|refused| {
            self.chain.remember(refused);
            None
        })
    }

    /// One visit to the accounts: a block of the pool's is soon made, and soon given back where it was too much.
    #[inline]
    fn make_small(&self, slot: &'static Slot, size_bytes: usize, zeroed: bool) -> Result<Option<NonNull<u8>>, Refused> {
        let Some(block) = self.memory.allocate(size_bytes, zeroed) else { return Ok(None) };
        match self.chain.take_block(size_bytes, self.overdraft_for(size_bytes), || slot.hold_again()) {
            Ok(()) => Ok(Some(block)),
            Err(refused) => {
                // SAFETY: made above, and nobody else has it.
                unsafe { self.memory.release(block) };
                Err(refused)
            }
        }
    }

    /// Two visits: what is refused is not even asked for, and what could not be made changes no number.
    fn make_large(&self, slot: &'static Slot, size_bytes: usize, zeroed: bool) -> Result<Option<NonNull<u8>>, Refused> {
        self.chain.reserve(size_bytes, self.overdraft_for(size_bytes))?;
        // Where a strategy of the user's panics nothing stays set aside.
        let pending = Pending { chain: &self.chain, bytes: size_bytes };
        let block = self.memory.allocate(size_bytes, zeroed);
        if block.is_some() {
            std::mem::forget(pending);
            self.chain.commit_block(size_bytes, || slot.hold_again());
        }
        Ok(block)
    }

    fn make_uncounted(&self, slot: &'static Slot, size_bytes: usize, zeroed: bool) -> Option<NonNull<u8>> {
        let block = self.memory.allocate(size_bytes, zeroed)?;
        // SAFETY: just made.
        unsafe { self.memory.mark_as_uncounted(block) };
        self.chain.add_uncounted(|| slot.hold_again());
        Some(block)
    }

    /// # Safety
    /// - `block` is a live block of this request; after `Some` it is not used again.
    unsafe fn resize(&self, block: NonNull<u8>, new_size_bytes: usize) -> Option<NonNull<u8>> {
        // SAFETY: says the caller.
        let old_size_bytes = unsafe { self.memory.asked_bytes(block) };
        if old_size_bytes == UNCOUNTED {
            // SAFETY: says the caller.
            return unsafe { self.memory.resize(block, new_size_bytes, false) };
        }
        let growth = new_size_bytes.saturating_sub(old_size_bytes);
        let allowed = if growth == 0 { Ok(true) } else { self.is_counted(new_size_bytes) };
        let reserved = allowed.and_then(|_| self.chain.reserve(growth, self.overdraft_for(new_size_bytes)));
        if let Err(refused) = reserved {
            self.chain.remember(refused);
            return None;
        }
        let pending = Pending { chain: &self.chain, bytes: growth };
        // SAFETY: says the caller.
        let moved = unsafe { self.memory.resize(block, new_size_bytes, true) }?;
        std::mem::forget(pending);
        self.chain.commit(growth, 0);
        if new_size_bytes < old_size_bytes {
            self.chain.give_back(old_size_bytes - new_size_bytes, 0);
        }
        Some(moved)
    }

    /// Takes a block back; says whether it was the last one of a request that is over.
    ///
    /// # Safety
    /// - `block` is a live block of this request, and not used again.
    #[inline]
    unsafe fn release(&self, block: NonNull<u8>) -> bool {
        // SAFETY: says the caller.
        let size_bytes = unsafe { self.memory.asked_bytes(block) };
        // SAFETY: says the caller.
        unsafe { self.memory.release(block) };
        if size_bytes == UNCOUNTED { self.chain.remove_uncounted() } else { self.chain.give_block_back(size_bytes) }
    }
}

/// The largest block that is made before it is charged: the pool's small ones.
const SMALL_BYTES: usize = 256 << 10;

/// Bytes that are set aside; dropping it cancels them.
struct Pending<'a> {
    chain: &'a Chain,
    bytes: usize,
}

impl Drop for Pending<'_> {
    fn drop(&mut self) {
        self.chain.cancel(self.bytes);
    }
}

// SAFETY: blocks are those of the state's memory, which stays while any of them does, and go back to it. Callers hold the
// slot: by a capsule, a context or whatever else selected it, or by the block that they give.
unsafe impl Strategy for Slot {
    /// What every strategy that a request may be given promises.
    fn alignment(&self) -> usize {
        MIN_ALIGN
    }

    #[inline]
    fn allocate(&self, size_bytes: usize) -> Option<NonNull<u8>> {
        self.state().make(self.immortal(), size_bytes, false)
    }

    fn allocate_zeroed(&self, size_bytes: usize) -> Option<NonNull<u8>> {
        self.state().make(self.immortal(), size_bytes, true)
    }

    unsafe fn resize(&self, block: NonNull<u8>, new_size_bytes: usize) -> Option<NonNull<u8>> {
        // SAFETY: says the caller; a block holds its request's slot, so the state is that request's.
        unsafe { self.state().resize(block, new_size_bytes) }
    }

    #[inline]
    unsafe fn release(&self, block: NonNull<u8>) {
        // SAFETY: as in `resize`.
        if unsafe { self.state().release(block) } {
            self.immortal().let_go(); // the hold of its blocks; the state may go with it
        }
    }

    fn trim(&self) -> usize {
        self.state().memory.trim()
    }

    fn live_blocks(&self) -> Option<Vec<LiveBlock>> {
        self.state().memory.live_blocks()
    }
}

impl fmt::Debug for Slot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Request")
    }
}
