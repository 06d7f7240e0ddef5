//! `State`: where a request's blocks come from and who pays, from its beginning until nothing can reach it.

use super::on_chosen::OnChosen;
use crate::handler::heap::HeapRecord;
use crate::handler::held::Held;
use crate::recording::Noted;
use crate::strategy::account::{Chain, Own, Pending, Refused, TINY_BYTES, UNCOUNTED};
#[cfg(feature = "python")]
use crate::strategy::prefix_bytes;
use crate::strategy::{Budget, Kept, LiveBlock, Pool, Prefixed, Strategy};
use crate::survived::survived;
use crate::trace;
use std::ptr::NonNull;
use std::sync::Arc;

/// What becomes of memory that is asked for under a request's handler after the request has ended: by a task that goes
/// on, a stream, a callback. What was made before stays charged. What it grows by is charged and limited as before, or
/// refused (`Refuse`).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum AfterEnd {
    /// It is still counted, and limited, by the request and whatever it is charged to.
    #[default]
    Charge,
    /// It is refused: [`Error::RequestEnded`](crate::Error::RequestEnded), MemoryError in Python. Tiny blocks are not
    /// that its overdraft has room for, if it has one.
    Refuse,
    /// It is neither counted nor limited; unless the request is inside of one that is not over: then it is charged as
    /// before.
    Detach,
}

/// The smallest alignment, in bytes, of a strategy that a request may be given.
pub(super) const MIN_ALIGN: usize = 16;

/// How a block is counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Counting {
    Usual,
    /// After the end of a request that refuses it, except for tiny blocks within the overdraft.
    Late,
    /// Not at all.
    None,
}

/// One request's own. Lives in its slot while anybody holds that.
pub(super) struct State {
    /// For `small`.
    pub(super) kept: Option<Kept>,
    /// The chain's, so that there is no further step to it.
    pub(super) own: Own,
    pub(super) chain: Arc<Chain>,
    pub(super) memory: Memory,
    pub(super) after_end: AfterEnd,
    /// What Rust's heap holds for it, if the program's allocator counts that.
    pub(super) heap: Option<HeapRecord>,
    /// The request around it that counts native memory and objects of this one too, if this one does not.
    pub(super) payer: Option<Held>,
    #[cfg(ctxalloc_whole)]
    pub(super) ticket: super::ticket::Ticket,
    /// The budget that it was given: while it is here, requests inside of this one are charged to it too.
    pub(super) _budget: Option<Budget>,
    /// What is called when the request is chosen to make room for others.
    pub(super) on_chosen: Option<OnChosen>,
    /// The number of the recording that left it out when it began; 0: none did.
    pub(super) left_out_by: u32,
}

/// Where blocks come from. The size that was asked for is recorded for each block; [`UNCOUNTED`] for one that no
/// account counts.
pub(super) enum Memory {
    /// The process's own pool, which notes the bytes beside its pages: an escape costs its own block and nothing else.
    Shared(&'static Pool),
    /// Whatever the user chose, with a record before each block.
    Chosen(Prefixed<Arc<dyn Strategy>, usize>),
    /// One of these, and each block is noted in a recording. Whoever asks where blocks come from asks this too: so a
    /// request that is not recorded pays nothing for it.
    Recorded(Box<Recorded>),
}

/// The memory of a request that is recorded.
pub(super) struct Recorded {
    memory: Memory,
    noted: Noted,
}

// A block's size is never zero, which stands for `UNCOUNTED`: the handler layer turns a request for zero bytes into
// one.

/// How many bytes more than was asked for a chosen strategy of this alignment is asked for.
#[cfg(feature = "python")]
pub(crate) const fn record_bytes(alignment: usize) -> usize {
    prefix_bytes::<usize>(alignment)
}

impl Memory {
    pub(super) fn new(strategy: Option<Arc<dyn Strategy>>) -> Self {
        match strategy {
            Some(strategy) => Self::Chosen(Prefixed::new(strategy)),
            None => Self::Shared(Pool::shared()),
        }
    }

    /// The same, recorded.
    pub(super) fn recorded(self, noted: Noted) -> Self {
        Self::Recorded(Box::new(Recorded { memory: self, noted }))
    }

    /// The request's recording, if it is recorded.
    pub(super) fn noted(&self) -> Option<&Noted> {
        match self {
            Self::Recorded(recorded) => Some(&recorded.noted),
            Self::Shared(_) | Self::Chosen(_) => None,
        }
    }

    #[inline]
    pub(super) fn allocate(&self, size_bytes: usize, zeroed: bool) -> Option<NonNull<u8>> {
        match self {
            Self::Shared(pool) => pool.allocate_sized(size_bytes, zeroed),
            Self::Chosen(blocks) => blocks.allocate(size_bytes, zeroed, size_bytes),
            Self::Recorded(recorded) => recorded.memory.allocate(size_bytes, zeroed),
        }
    }

    /// # Safety
    /// - `block` is a live block of this memory.
    #[inline]
    unsafe fn requested_bytes(&self, block: NonNull<u8>) -> usize {
        match self {
            // SAFETY: the caller passes a live block of this memory, so one of `allocate_sized`.
            Self::Shared(_) => unsafe { Pool::requested_bytes(block) },
            // SAFETY: the caller passes a live block of this memory, so one with a record before it.
            Self::Chosen(_) => unsafe { Prefixed::<Arc<dyn Strategy>, usize>::read(block) },
            // SAFETY: the caller passes a live block of this memory, all of which are the inner one's.
            Self::Recorded(recorded) => unsafe { recorded.memory.requested_bytes(block) },
        }
    }

    /// # Safety
    /// - `block` is a live block of this memory.
    unsafe fn mark_as_uncounted(&self, block: NonNull<u8>) {
        match self {
            // SAFETY: the caller passes a live block of this memory, so one of `allocate_sized`.
            Self::Shared(_) => unsafe { Pool::note_requested(block, UNCOUNTED) },
            // SAFETY: the caller passes a live block of this memory, so one with a record before it.
            Self::Chosen(_) => unsafe { Prefixed::<Arc<dyn Strategy>, usize>::write(block, UNCOUNTED) },
            // SAFETY: the caller passes a live block of this memory, all of which are the inner one's.
            Self::Recorded(recorded) => unsafe { recorded.memory.mark_as_uncounted(block) },
        }
    }

    /// # Safety
    /// - `block` is a live block of this memory; after `Some` it is not used again.
    unsafe fn resize(&self, block: NonNull<u8>, new_size_bytes: usize, is_counted: bool) -> Option<NonNull<u8>> {
        let moved = match self {
            // SAFETY: the caller passes a live block of this pool, whose note says how many bytes were asked for.
            Self::Shared(pool) if is_counted => return unsafe { pool.resize_sized(block, new_size_bytes) },
            // SAFETY: the caller passes a live block of this pool; the pool knows how much room it has.
            Self::Shared(pool) => unsafe { pool.resize(block, new_size_bytes) }?,
            // SAFETY: the caller passes a live block of this strategy.
            Self::Chosen(blocks) => unsafe { blocks.resize(block, new_size_bytes) }?,
            // SAFETY: the caller passes a live block of this memory, all of which are the inner one's.
            Self::Recorded(recorded) => return unsafe { recorded.memory.resize(block, new_size_bytes, is_counted) },
        };
        if is_counted {
            // SAFETY: the chosen strategy has just returned this block, with room for the record before it.
            unsafe { Prefixed::<Arc<dyn Strategy>, usize>::write(moved, new_size_bytes) };
        } else {
            // SAFETY: this memory has just returned this live block.
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
            // SAFETY: the caller gives up a live block of this pool.
            Self::Shared(pool) => unsafe { pool.release_sized(block) },
            Self::Chosen(blocks) => {
                // SAFETY: the caller gives up a live block of this strategy. Its record is read before it goes.
                let size_bytes = unsafe { self.requested_bytes(block) };
                // Its user has given it up, so it is charged no more, also where the user's strategy panics.
                // SAFETY: the caller gives up a live block of this strategy, which is released once, here.
                if survived(|| unsafe { blocks.release(block) }).is_none() {
                    trace::strategy_panicked("free");
                }
                size_bytes
            }
            // SAFETY: the caller gives up a live block of this memory, all of which are the inner one's.
            Self::Recorded(recorded) => unsafe { recorded.memory.release(block) },
        }
    }

    pub(super) fn live_blocks(&self) -> Option<Vec<LiveBlock>> {
        match self {
            Self::Shared(_) => None,
            Self::Chosen(blocks) => blocks.live_blocks(),
            Self::Recorded(recorded) => recorded.memory.live_blocks(),
        }
    }

    pub(super) fn is_read_after_release(&self) -> bool {
        match self {
            Self::Shared(_) => false,
            Self::Chosen(blocks) => blocks.upstream.is_read_after_release(),
            Self::Recorded(recorded) => recorded.memory.is_read_after_release(),
        }
    }

    pub(super) fn trim(&self) -> usize {
        match self {
            Self::Shared(_) => 0, // others use it too
            Self::Chosen(blocks) => blocks.upstream.trim(),
            Self::Recorded(recorded) => recorded.memory.trim(),
        }
    }
}

impl State {
    /// Whether native memory and Python objects are counted too.
    pub(super) fn counts_whole(&self) -> bool {
        self.chain.whole.is_some()
    }

    /// How a block of so many bytes is counted; `None` if it is refused because the request has ended.
    #[inline]
    fn counting(&self, size_bytes: usize) -> Option<Counting> {
        if self.after_end == AfterEnd::Charge || !self.chain.has_ended() {
            return Some(Counting::Usual);
        }
        match self.after_end {
            // NumPy crashes where it is refused some scalars, after the end too.
            AfterEnd::Refuse if size_bytes <= TINY_BYTES && self.chain.overdraft_bytes() > 0 => Some(Counting::Late),
            AfterEnd::Refuse => None,
            // A request detaches only itself: one around it that has not ended is still charged.
            _ if self.chain.is_inside_of_a_live_one() => Some(Counting::Usual),
            _ => Some(Counting::None),
        }
    }

    /// [`counting`](Self::counting), where a refusal is counted and returned.
    #[inline]
    fn terms(&self, size_bytes: usize) -> Result<Counting, Refused> {
        self.counting(size_bytes).ok_or_else(|| self.chain.refuse_after_end(size_bytes))
    }

    /// Whether a block of so many bytes would be given now, as far as limits and the request's end decide.
    pub(super) fn may_have_room(&self, size_bytes: usize) -> bool {
        match self.counting(size_bytes) {
            Some(Counting::Usual) => self.chain.may_have_room(size_bytes),
            Some(Counting::None) => true,
            Some(Counting::Late) | None => false,
        }
    }

    /// Charges bytes that are not a block of the request's; returns whether they were counted, and their number in a
    /// recording.
    pub(super) fn charge_external(&self, bytes: usize) -> Result<(bool, Option<u64>), Refused> {
        match self.terms(bytes)? {
            Counting::None => Ok((false, None)),
            Counting::Late => Err(self.chain.refuse_after_end(bytes)),
            Counting::Usual => {
                let Some(noted) = self.memory.noted() else { return self.chain.take(bytes, 1).map(|()| (true, None)) };
                let (taken, number) = noted.charged(bytes, || {
                    let taken = self.chain.take(bytes, 1);
                    let is_taken = taken.is_ok();
                    (taken, is_taken)
                });
                taken.map(|()| (true, number))
            }
        }
    }

    /// Counts a refusal, and remembers it for whoever asks.
    #[cold]
    pub(super) fn remember(&self, refused: Refused) {
        match self.memory.noted() {
            None => self.chain.remember(refused),
            Some(noted) => {
                let by = self.chain.account_of(refused);
                noted.refused(refused.requested_bytes, by, || self.chain.remember(refused));
            }
        }
    }

    /// Whether [`make`](Self::make) may run code of the user's: a strategy, or what the pool calls for large blocks.
    #[inline]
    pub(super) fn may_run_user_code(&self, size_bytes: usize) -> bool {
        size_bytes > SMALL_BYTES || !matches!(self.memory, Memory::Shared(_))
    }

    /// Whether a block of so many bytes is made by [`make_small`](Self::make_small), and charged whether or not the
    /// request has ended: the common case.
    #[inline]
    pub(super) fn is_small_and_charged(&self, size_bytes: usize) -> bool {
        self.after_end == AfterEnd::Charge && !self.may_run_user_code(size_bytes)
    }

    /// Makes a block. `hold` is called for the first one, while the account is locked: it adds a holder to the slot.
    pub(super) fn make(&self, size_bytes: usize, zeroed: bool, hold: impl Fn()) -> Option<NonNull<u8>> {
        let is_late = match self.terms(size_bytes) {
            Ok(Counting::Usual) => false,
            Ok(Counting::Late) => true,
            Ok(Counting::None) => return self.make_uncounted(size_bytes, zeroed, hold),
            Err(refused) => {
                self.remember(refused);
                return None;
            }
        };
        if self.may_run_user_code(size_bytes) {
            self.make_large(size_bytes, zeroed, is_late, hold)
        } else {
            self.make_small(size_bytes, zeroed, is_late, hold)
        }
    }

    /// Allocates a small block from the pool, then charges it: one visit to the accounts. If the charge is refused the
    /// block is given back, which is cheap.
    #[inline]
    pub(super) fn make_small(
        &self,
        size_bytes: usize,
        zeroed: bool,
        is_late: bool,
        hold: impl Fn(),
    ) -> Option<NonNull<u8>> {
        // Here, where it is inlined: `Memory::allocate` calls itself for what is recorded.
        let made = match &self.memory {
            Memory::Shared(pool) => pool.allocate_sized(size_bytes, zeroed),
            memory => memory.allocate(size_bytes, zeroed),
        };
        let Some(block) = made else {
            self.chain.remember_no_memory(size_bytes);
            return None;
        };
        if self.chain.take_block(size_bytes, is_late, hold) {
            return Some(block);
        }
        // SAFETY: made above, and nobody else has it.
        unsafe { self.memory.release(block) };
        None
    }

    /// Reserves the bytes first, and commits them when the block is there: what is refused is not even asked for, and
    /// what could not be made changes no number.
    fn make_large(&self, size_bytes: usize, zeroed: bool, is_late: bool, hold: impl FnOnce()) -> Option<NonNull<u8>> {
        if let Err(refused) = self.chain.reserve(size_bytes, size_bytes, is_late) {
            self.remember(refused);
            return None;
        }
        let pending = Pending::new(&self.chain, size_bytes);
        let block = self.memory.allocate(size_bytes, zeroed);
        let Some(made) = block else {
            self.chain.remember_no_memory(size_bytes);
            return None;
        };
        match self.memory.noted() {
            None => pending.commit_block(hold),
            Some(noted) => noted.made(made.addr().get(), size_bytes, zeroed, || pending.commit_block(hold)),
        }
        block
    }

    fn make_uncounted(&self, size_bytes: usize, zeroed: bool, hold: impl FnOnce()) -> Option<NonNull<u8>> {
        let block = self.memory.allocate(size_bytes, zeroed)?;
        // SAFETY: this memory has just made the block, and nobody else has it.
        unsafe { self.memory.mark_as_uncounted(block) };
        self.chain.add_uncounted(hold);
        Some(block)
    }

    /// # Safety
    /// - `block` is a live block of this request; after `Some` it is not used again.
    pub(super) unsafe fn resize(&self, block: NonNull<u8>, new_size_bytes: usize) -> Option<NonNull<u8>> {
        // SAFETY: the caller passes a live block of this request.
        let old_size_bytes = unsafe { self.memory.requested_bytes(block) };
        if old_size_bytes == UNCOUNTED {
            // SAFETY: the caller passes a live block of this request, which is not counted.
            return unsafe { self.memory.resize(block, new_size_bytes, false) };
        }
        let growth = new_size_bytes.saturating_sub(old_size_bytes);
        // What is given back is never refused.
        if growth > 0 {
            // What was made before the end stays charged, also to a request that is detached from what comes after.
            let reserve = |terms| self.chain.reserve(growth, new_size_bytes, terms == Counting::Late);
            let reserved = self.terms(new_size_bytes).and_then(reserve);
            if let Err(refused) = reserved {
                self.remember(refused);
                return None;
            }
        }
        let pending = Pending::new(&self.chain, growth);
        let noted = self.memory.noted().map(|noted| (noted, noted.lift(block.addr().get())));
        // SAFETY: the caller passes a live block of this request, which is counted.
        let Some(moved) = (unsafe { self.memory.resize(block, new_size_bytes, true) }) else {
            if let Some((noted, number)) = noted {
                noted.put_back(block.addr().get(), number);
            }
            self.chain.remember_no_memory(growth);
            return None;
        };
        let commit = || {
            pending.commit(0);
            if new_size_bytes < old_size_bytes {
                self.chain.give_back(old_size_bytes - new_size_bytes, 0);
            }
        };
        match noted {
            None => commit(),
            Some((noted, number)) => {
                noted.resized(number, block.addr().get(), moved.addr().get(), new_size_bytes, commit);
            }
        }
        Some(moved)
    }

    /// Takes a block back; says whether it was the last one of a request that is over.
    ///
    /// # Safety
    /// - `block` is a live block of this request, and not used again.
    #[inline]
    pub(super) unsafe fn release(&self, block: NonNull<u8>) -> bool {
        let size_bytes = match &self.memory {
            // SAFETY: the caller gives up a live block of this request, whose memory is this pool.
            Memory::Shared(pool) => unsafe { pool.release_sized(block) },
            // SAFETY: the caller gives up a live block of this request.
            memory @ Memory::Chosen(_) => unsafe { memory.release(block) },
            Memory::Recorded(recorded) => {
                // SAFETY: the caller gives up a live block of this request.
                let (size_bytes, noted, number) = unsafe { recorded.release(block) };
                if size_bytes == UNCOUNTED {
                    return self.chain.remove_uncounted();
                }
                return noted.freed(number, || self.chain.give_block_back(size_bytes));
            }
        };
        if size_bytes == UNCOUNTED { self.chain.remove_uncounted() } else { self.chain.give_block_back(size_bytes) }
    }
}

impl Recorded {
    /// Takes a block back: how many bytes were asked for, and what notes it once that is counted.
    ///
    /// # Safety
    /// - `block` is a live block of this memory, and not used again.
    #[cold]
    unsafe fn release(&self, block: NonNull<u8>) -> (usize, Noted, Option<u64>) {
        // Before it goes: then another block may have its address.
        let number = self.noted.lift(block.addr().get());
        // SAFETY: the caller gives up a live block of this memory, all of which are the inner one's.
        let size_bytes = unsafe { self.memory.release(block) };
        (size_bytes, self.noted.clone(), number)
    }
}

/// The largest block that is made before it is charged: the pool's small ones.
const SMALL_BYTES: usize = 256 << 10;
