//! `State`: where a request's blocks come from and who pays, from its beginning until nothing can reach it.

use super::slot::Slot;
use super::{AfterEnd, MIN_ALIGN};
use crate::strategy::account::{Chain, Refused, TINY_BYTES, UNCOUNTED};
use crate::strategy::{Budget, LiveBlock, Pool, Prefixed, Strategy};
use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;

/// One request's own. Lives in its slot while anybody holds that.
pub(super) struct State {
    pub(super) chain: Arc<Chain>,
    pub(super) memory: Memory,
    pub(super) after_end: AfterEnd,
    /// The budget that it was given: while it is here, requests inside of this one are charged to it too.
    pub(super) _budget: Option<Budget>,
}

/// Where blocks come from. Each knows how many bytes were asked for; [`UNCOUNTED`] stands for one that no account has.
pub(super) enum Memory {
    /// The process's own pool, which notes the bytes beside its pages: an escape costs its own block and nothing else.
    Shared(&'static Pool),
    /// Whatever the user chose, with a record before each block.
    Chosen(Prefixed<Arc<dyn Strategy>, usize>),
}

// No block is asked for with zero bytes, which stand for `UNCOUNTED`: the handler layer makes them one.

impl Memory {
    pub(super) fn new(strategy: Option<Arc<dyn Strategy>>) -> Self {
        match strategy {
            Some(strategy) => Self::Chosen(Prefixed::new(strategy)),
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
            Self::Chosen(_) => unsafe { Prefixed::<Arc<dyn Strategy>, usize>::read(block) },
        }
    }

    /// # Safety
    /// - `block` is a live block of this memory.
    unsafe fn mark_as_uncounted(&self, block: NonNull<u8>) {
        match self {
            // SAFETY: made by `allocate_sized`; live, says the caller.
            Self::Shared(_) => unsafe { Pool::note_asked(block, UNCOUNTED) },
            // SAFETY: made by `allocate`; live, says the caller.
            Self::Chosen(_) => unsafe { Prefixed::<Arc<dyn Strategy>, usize>::write(block, UNCOUNTED) },
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
            unsafe { Prefixed::<Arc<dyn Strategy>, usize>::write(moved, new_size_bytes) };
        } else {
            // SAFETY: live, just resized.
            unsafe { self.mark_as_uncounted(moved) };
        }
        Some(moved)
    }

    /// Takes a block back, and says how many bytes were asked for.
    ///
    /// # Safety
    /// - `block` is a live block of this memory, and not used again.
    #[inline]
    unsafe fn release(&self, block: NonNull<u8>) -> usize {
        match self {
            // SAFETY: given up, says the caller.
            Self::Shared(pool) => unsafe { pool.release_sized(block) },
            Self::Chosen(blocks) => {
                // SAFETY: live until the next step, says the caller.
                let size_bytes = unsafe { self.asked_bytes(block) };
                // SAFETY: given up, says the caller.
                unsafe { blocks.release(block) };
                size_bytes
            }
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
    /// Whether a block of so many bytes is to be counted, or is refused.
    #[inline]
    fn is_counted(&self, size_bytes: usize) -> Result<bool, Refused> {
        if self.after_end == AfterEnd::Charge || !self.chain.has_ended() {
            return Ok(true);
        }
        match self.after_end {
            // NumPy crashes where it is refused some scalars, after the end too.
            AfterEnd::Refuse if size_bytes <= TINY_BYTES && self.chain.has_overdraft() => Ok(true),
            AfterEnd::Refuse => Err(self.chain.refuse_after_end(size_bytes)),
            // It lets go of nothing that is not its own: whoever is around it and not over is charged.
            _ => Ok(self.chain.is_inside_of_a_live_one()),
        }
    }

    pub(super) fn charge_external(&self, bytes: usize) -> Result<bool, Refused> {
        let is_counted = self.is_counted(bytes)?;
        if is_counted {
            self.chain.take(bytes, 1)?;
        }
        Ok(is_counted)
    }

    fn make(&self, slot: &'static Slot, size_bytes: usize, zeroed: bool) -> Option<NonNull<u8>> {
        if self.after_end != AfterEnd::Charge && self.chain.has_ended() {
            match self.is_counted(size_bytes) {
                Ok(true) => {}
                Ok(false) => return self.make_uncounted(slot, size_bytes, zeroed),
                Err(refused) => {
                    self.chain.remember(refused);
                    return None;
                }
            }
        }
        if matches!(self.memory, Memory::Shared(_)) && size_bytes <= SMALL_BYTES {
            return self.make_small(slot, size_bytes, zeroed);
        }
        // What the user's code does meanwhile may let go of whatever else holds the request.
        let _kept = Kept::on(slot);
        self.make_large(slot, size_bytes, zeroed)
    }

    /// One visit to the accounts: a block of the pool's is soon made, and soon given back where it was too much.
    #[inline]
    fn make_small(&self, slot: &'static Slot, size_bytes: usize, zeroed: bool) -> Option<NonNull<u8>> {
        let Some(block) = self.memory.allocate(size_bytes, zeroed) else {
            self.chain.remember_no_memory(size_bytes);
            return None;
        };
        if self.chain.take_block(size_bytes, || slot.hold_again()) {
            return Some(block);
        }
        // SAFETY: made above, and nobody else has it.
        unsafe { self.memory.release(block) };
        None
    }

    /// Two visits: what is refused is not even asked for, and what could not be made changes no number.
    fn make_large(&self, slot: &'static Slot, size_bytes: usize, zeroed: bool) -> Option<NonNull<u8>> {
        if let Err(refused) = self.chain.reserve(size_bytes, size_bytes <= TINY_BYTES) {
            self.chain.remember(refused);
            return None;
        }
        // Where a strategy of the user's panics nothing stays set aside.
        let pending = Pending { chain: &self.chain, bytes: size_bytes };
        let block = self.memory.allocate(size_bytes, zeroed);
        if block.is_some() {
            std::mem::forget(pending);
            self.chain.commit_block(size_bytes, || slot.hold_again());
        } else {
            self.chain.remember_no_memory(size_bytes);
        }
        block
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
        // What is given back is never refused.
        if growth > 0 {
            let allowed = self.is_counted(new_size_bytes);
            let reserved = allowed.and_then(|_| self.chain.reserve(growth, new_size_bytes <= TINY_BYTES));
            if let Err(refused) = reserved {
                self.chain.remember(refused);
                return None;
            }
        }
        let pending = Pending { chain: &self.chain, bytes: growth };
        // SAFETY: says the caller.
        let Some(moved) = (unsafe { self.memory.resize(block, new_size_bytes, true) }) else {
            self.chain.remember_no_memory(growth);
            return None;
        };
        std::mem::forget(pending);
        self.chain.commit(growth, 0);
        self.chain.resized(old_size_bytes, new_size_bytes);
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
        let size_bytes = unsafe { self.memory.release(block) };
        if size_bytes == UNCOUNTED { self.chain.remove_uncounted() } else { self.chain.give_block_back(size_bytes) }
    }
}

/// The largest block that is made before it is charged: the pool's small ones.
const SMALL_BYTES: usize = 256 << 10;

/// One more holder of a slot, for as long as this lives.
struct Kept(&'static Slot);

impl Kept {
    fn on(slot: &'static Slot) -> Self {
        slot.hold_again();
        Self(slot)
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        self.0.let_go();
    }
}

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
        let _kept = Kept::on(self.immortal());
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
