//! `Slot`: type-stable memory for one request after the other.
//!
//! `holders` is the whole state of a slot:
//! - set to 1, or to 2 for a second hold: when a request begins in it. Cannot be set while anybody holds the slot: it
//!   comes from the list of free ones.
//! - above 0: the request and its state are there, `generation` and `c_struct` do not change, and holders may hold it
//!   again.
//! - incremented by others than holders (`try_hold`): only while it is above 0, and undone if the generation is
//!   another.
//! - set to 0: by the last holder, which then recycles the slot. Nobody can hold it until the next request begins.
//!
//! It has 64 bits, which no program can overflow.

use super::super::abi::{Functions, PyDataMem_Handler};
use super::super::entry::{Entry, HOLD_AGAIN, TRY_HOLD};
use super::super::held::Held;
use super::super::name;
use super::super::process::table;
use super::super::trampoline;
use super::super::word::{Handler, MAX_GENERATION, SLOT_BYTES};
use super::state::{MIN_ALIGN, State};
use crate::strategy::{LiveBlock, Strategy};
use crate::survived::survived;
use crate::sync::{ForkLock, HeldAcrossFork, Locked, Made, held_across_fork};
use crate::trace;
use std::cell::UnsafeCell;
use std::ffi::c_void;
use std::fmt;
use std::mem::{MaybeUninit, offset_of};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// Laid out for C up to `state`: copies of this crate in other extension modules know it.
#[repr(C, align(512))]
pub(in crate::handler) struct Slot {
    /// What all handlers have. First: the address of the slot is that of its entry.
    entry: Entry,
    /// What NumPy sees. Its name is the request's, written while nobody holds the slot.
    c_struct: UnsafeCell<PyDataMem_Handler>,
    holders: AtomicU64,
    generation: AtomicU32,
    /// There while somebody holds the slot.
    state: UnsafeCell<MaybeUninit<State>>,
}

// SAFETY: `c_struct` and `state` are written by the thread that begins or recycles, while nobody holds the slot;
// `try_hold` and `let_go` order that before and after all that holders do. The rest is atomic, or never changes.
unsafe impl Sync for Slot {}
// SAFETY: no field belongs to a thread: each access to `c_struct` and `state` is ordered by `try_hold` and `let_go`,
// and `State`, which another thread may drop, is `Send`.
unsafe impl Send for Slot {}

const _: () = assert!(size_of::<Slot>() == SLOT_BYTES);
const _: () = assert!(offset_of!(Slot, entry) == 0, "the address of a slot is that of its entry");

/// The hold function of this copy's slots.
///
/// # Safety
/// - `slot` is a slot of this copy; callers of `HOLD_AGAIN` and `LET_GO` hold it.
unsafe extern "C" fn hold(slot: *const c_void, what: u32, generation: u32) -> bool {
    // SAFETY: the caller passes a slot of this copy, and those are immortal.
    let slot: &'static Slot = unsafe { &*slot.cast() };
    match what {
        TRY_HOLD => return slot.try_hold(generation),
        HOLD_AGAIN => slot.hold_again(),
        _ => slot.let_go(),
    }
    true
}

impl Slot {
    /// The slot behind a request's handler, if this copy of the crate made it. Whoever asks holds it.
    #[inline]
    pub(super) fn behind(handler: Handler) -> Option<&'static Self> {
        (handler.is_request() && handler.entry().made_here()).then(|| {
            // SAFETY: a request's word refers to a slot, this copy made it, and slots are immortal.
            unsafe { handler.place().cast::<Self>().as_ref() }
        })
    }

    /// The same, held, unless nothing is left of the request: without a call, as [`Held`] is for callers in Rust whose
    /// slot any copy of the crate may have made.
    #[cfg(ctxalloc_whole)]
    #[inline]
    pub(super) fn held_behind(handler: Handler) -> Option<HeldSlot> {
        let slot = Self::behind(handler)?;
        slot.try_hold(handler.generation()).then_some(HeldSlot(slot))
    }

    /// The request's own. For holders.
    #[inline]
    pub(super) fn state(&self) -> &State {
        debug_assert!(self.holders.load(Ordering::Relaxed) > 0, "nobody holds this slot");
        // SAFETY: callers hold the slot, so the state is there and nobody writes to it.
        unsafe { (*self.state.get()).assume_init_ref() }
    }

    #[inline]
    pub(super) fn immortal(&self) -> &'static Self {
        // SAFETY: `make` alone makes slots, and leaks them.
        unsafe { &*std::ptr::from_ref(self) }
    }

    /// Begins a request in a slot that nobody has: a hold on it, and a second one if `twice`.
    pub(super) fn begin(name: Option<&str>, number: u64, state: State, twice: bool) -> (Held, Option<Held>) {
        let slot = slots().take();
        // SAFETY: nobody holds the slot, and only we took it from the list: nobody else reads or writes these cells.
        let field = unsafe {
            (*slot.state.get()).write(state);
            &mut (*slot.c_struct.get()).name
        };
        match name {
            Some(name) => *field = name::field_of(name),
            None => name::number(field, number),
        }
        let generation = slot.generation.load(Ordering::Relaxed);
        // Release pairs with the Acquire in `try_hold`: who gets hold of it sees all of the above.
        slot.holders.store(1 + u64::from(twice), Ordering::Release);
        // SAFETY: an immortal slot of `make`'s with its own generation, and the holds that were just counted.
        unsafe {
            let handler = slot.handler(generation);
            (Held::assume(handler), twice.then(|| Held::assume(handler)))
        }
    }

    /// # Safety
    /// - `generation` is one that the slot has or had.
    unsafe fn handler(&'static self, generation: u32) -> Handler {
        // SAFETY: `make` exposed the slot, which is immortal and begins with its entry.
        unsafe { Handler::of_slot(std::ptr::from_ref(self).cast(), generation) }
    }

    #[inline]
    fn try_hold(&self, generation: u32) -> bool {
        let is_held = |holders: u64| (holders > 0).then(|| holders + 1);
        // Acquire pairs with the Release in `begin`: the generation read below is that of the request we hold.
        if self.holders.fetch_update(Ordering::Acquire, Ordering::Relaxed, is_held).is_err() {
            return false;
        }
        let is_it = self.generation.load(Ordering::Relaxed) == generation;
        if !is_it {
            self.immortal().let_go();
        }
        is_it
    }

    /// One more holder; the caller is one, or has a block that is.
    #[inline]
    pub(super) fn hold_again(&self) {
        // Relaxed: whoever hands a hold to another thread orders that by other means.
        self.holders.fetch_add(1, Ordering::Relaxed);
    }

    /// One holder less; the last one recycles the slot.
    #[inline]
    pub(super) fn let_go(&'static self) {
        // AcqRel: the recycling sees everything that was done by those who let go before.
        if self.holders.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.recycle();
        }
    }

    /// One more container, which holds the request as a block does; the caller is a holder, or has a container.
    #[inline(never)]
    pub(in crate::handler) fn add_container(&self) {
        if !self.state().own.add_another() {
            self.add_container_elsewhere();
        }
    }

    #[inline(never)]
    fn add_container_elsewhere(&self) {
        self.state().chain.add_uncounted_elsewhere(|| self.hold_again());
    }

    /// One container less; the state may go with it.
    #[inline(never)]
    pub(in crate::handler) fn remove_container(&'static self) {
        if !self.state().own.remove_another() {
            self.remove_container_elsewhere();
        }
    }

    #[inline(never)]
    fn remove_container_elsewhere(&'static self) {
        if self.state().chain.remove_uncounted_elsewhere() {
            self.let_go(); // the hold of its blocks and containers
        }
    }

    #[cold]
    fn recycle(&'static self) {
        // SAFETY: the last holder is gone, and nobody gets hold of the slot again before the next `begin`: the state is
        // there, nobody else looks at it, and it is not read again.
        let state = unsafe { (*self.state.get()).assume_init_read() };
        let generation = self.generation.load(Ordering::Relaxed);
        self.generation.store(generation + 1, Ordering::Relaxed);
        // After the last generation a slot is left alone: no word is ever used twice.
        if generation < MAX_GENERATION {
            slots().free.with(|free| free.push(self));
        } else {
            slots().count.fetch_sub(1, Ordering::Relaxed);
        }
        // Last: dropping a user's strategy may run any code. It must not unwind, since C may have called us.
        if survived(|| drop(state)).is_none() {
            trace::strategy_panicked("drop");
        }
    }
}

/// A hold on a slot of this copy of the crate.
#[cfg(ctxalloc_whole)]
pub(super) struct HeldSlot(&'static Slot);

#[cfg(ctxalloc_whole)]
impl HeldSlot {
    #[inline]
    pub(super) fn slot(&self) -> &'static Slot {
        self.0
    }
}

#[cfg(ctxalloc_whole)]
impl Drop for HeldSlot {
    #[inline]
    fn drop(&mut self) {
        self.0.let_go();
    }
}

/// The handler of the request whose struct this is, while somebody holds it.
#[inline]
pub(in crate::handler) fn at_struct(c_struct: *const PyDataMem_Handler) -> Option<Handler> {
    let (slot, offset) = table().chunks().slot_around(c_struct.cast())?;
    if offset != offset_of!(Slot, c_struct) {
        return None;
    }
    // SAFETY: a slot, which is immortal; of another copy perhaps, which lays it out in the same way up to `state`.
    let slot: &'static Slot = unsafe { slot.cast().as_ref() };
    // Acquire pairs with the Release in `begin`: the generation is that of the holders, or a newer one.
    let is_held = slot.holders.load(Ordering::Acquire) > 0;
    // SAFETY: the generation is one that this slot has or had: it was read from it.
    is_held.then(|| unsafe { slot.handler(slot.generation.load(Ordering::Relaxed)) })
}

/// The handlers of all requests that somebody holds, of this copy of the crate; held.
pub(super) fn all() -> Vec<Held> {
    let mut found = Vec::new();
    table().chunks().for_each_slot(|slot| {
        // SAFETY: a slot, which is immortal; of another copy perhaps, which lays it out in the same way up to `state`.
        let slot: &'static Slot = unsafe { slot.cast().as_ref() };
        // Acquire pairs with the Release in `begin`: the generation is that of the holders, or a newer one.
        if slot.entry.made_here() && slot.holders.load(Ordering::Acquire) > 0 {
            // SAFETY: the generation is one that this slot has or had: it was read from it.
            let handler = unsafe { slot.handler(slot.generation.load(Ordering::Relaxed)) };
            found.extend(Held::try_on(handler));
        }
    });
    found
}

/// The name that NumPy sees of a request's handler that somebody holds.
pub(super) fn name_in(handler: Handler) -> String {
    // SAFETY: the struct is immortal, has a NUL in its name, and nobody writes to it while the slot is held.
    let name = unsafe { std::ffi::CStr::from_ptr((&raw const (*handler.as_ptr()).name).cast()) };
    name.to_string_lossy().into_owned()
}

/// The slots of this copy of the crate.
struct Slots {
    free: Locked<Vec<&'static Slot>>,
    count: AtomicU64,
}

/// How many slots there are, and how many of them are free.
pub(super) fn counts() -> (usize, usize) {
    let slots = slots();
    let free = slots.free.with(|free| free.len());
    (slots.count.load(Ordering::Relaxed) as usize, free)
}

fn slots() -> &'static Slots {
    static SLOTS: Made<Arc<Slots>> = Made::new();
    SLOTS.get_or_make(|| held_across_fork(Slots { free: Locked::new(Vec::new()), count: AtomicU64::new(0) }))
}

/// Slots in the first chunk. Each further one has as many as there are, up to [`MAX_CHUNK`].
const MIN_CHUNK: usize = 64;
const MAX_CHUNK: usize = 1 << 14;

impl Slots {
    /// Takes a slot that nobody has: the one that was freed last.
    fn take(&'static self) -> &'static Slot {
        loop {
            if let Some(slot) = self.free.with(Vec::pop) {
                return slot;
            }
            self.grow();
        }
    }

    /// Makes more slots. Threads that race may each make some.
    #[cold]
    fn grow(&'static self) {
        let count = self.count.load(Ordering::Relaxed) as usize;
        let chunk = make(count.clamp(MIN_CHUNK, MAX_CHUNK));
        // Room for all there may be, so that giving one back never allocates. Not under the lock.
        let all = self.count.fetch_add(chunk.len() as u64, Ordering::Relaxed) as usize + chunk.len();
        loop {
            let room = Vec::with_capacity(all.next_power_of_two());
            let is_done = self.free.with(|free| {
                if free.capacity() < all && room.capacity() >= free.len() + chunk.len() {
                    let mut room = room;
                    room.append(free);
                    std::mem::swap(free, &mut room);
                    free.extend(chunk);
                    Ok(room)
                } else if free.capacity() >= free.len() + chunk.len() {
                    free.extend(chunk);
                    Ok(room)
                } else {
                    Err(room)
                }
            });
            if is_done.is_ok() {
                return;
            }
        }
    }
}

impl HeldAcrossFork for Slots {
    fn for_each_lock(&self, visit: &mut dyn FnMut(&ForkLock)) {
        visit(self.free.lock());
    }
}

/// So many slots, immortal, in the table's list of chunks.
fn make(count: usize) -> &'static [Slot] {
    // A pointer throughout: handlers find their slots again by their exposed addresses, which no reference may narrow.
    let start: *mut Slot = Box::into_raw(Box::<[Slot]>::new_uninit_slice(count)).cast();
    start.expose_provenance();
    for number in 0..count {
        // SAFETY: a slot inside of the chunk, to which nothing was written yet. Nobody knows it before all are
        // complete, and from then on it is an immortal strategy.
        unsafe {
            let slot = start.add(number);
            slot.write(Slot::fresh(trampoline::functions_at::<Slot>(slot), (&raw mut (*slot).c_struct).cast()));
        }
    }
    table().chunks().add(start.cast(), count * SLOT_BYTES);
    // SAFETY: `count` slots that were all written, are immortal, and are only changed through their cells.
    unsafe { std::slice::from_raw_parts(start, count) }
}

impl Slot {
    fn fresh(functions: Functions, c_struct: *const PyDataMem_Handler) -> Self {
        const NAME: &str = "request";
        Self {
            entry: Entry {
                hold: Some(hold),
                trim: Some(trampoline::trim::<Self>),
                live_blocks: Some(trampoline::live_blocks::<Self>),
                alignment: MIN_ALIGN,
                ..Entry::new(functions, c_struct, NAME)
            },
            c_struct: UnsafeCell::new(functions.named(name::field_of(NAME))),
            holders: AtomicU64::new(0),
            generation: AtomicU32::new(0),
            state: UnsafeCell::new(MaybeUninit::uninit()),
        }
    }
}

/// One more holder of a slot, for as long as this lives.
pub(super) struct Kept(&'static Slot);

impl Kept {
    pub(super) fn on(slot: &Slot) -> Self {
        slot.hold_again();
        Self(slot.immortal())
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        self.0.let_go();
    }
}

impl Slot {
    #[inline]
    fn make(&self, size_bytes: usize, zeroed: bool) -> Option<NonNull<u8>> {
        let state = self.state();
        let made = if state.is_small_and_charged(size_bytes) {
            state.make_small(size_bytes, zeroed, false, || self.hold_again())
        } else {
            self.make_otherwise(size_bytes, zeroed)
        };
        #[cfg(ctxalloc_whole)]
        let made = made.or_else(|| self.make_for_import(size_bytes, zeroed));
        made
    }

    #[inline(never)]
    fn make_otherwise(&self, size_bytes: usize, zeroed: bool) -> Option<NonNull<u8>> {
        if !zeroed && let Some(block) = self.take_recent(size_bytes) {
            return Some(block);
        }
        let state = self.state();
        // What the user's code does meanwhile may let go of whatever else holds the request.
        let _kept = state.may_run_user_code(size_bytes).then(|| Kept::on(self));
        state.make(size_bytes, zeroed, || self.hold_again())
    }
}

// SAFETY: blocks are those of the state's memory, which stays while any of them does, and go back to it. Callers hold
// the slot: by a capsule, a context or whatever else selected it, or by the block that they give.
unsafe impl Strategy for Slot {
    /// What every strategy that a request may be given promises.
    fn alignment(&self) -> usize {
        MIN_ALIGN
    }

    #[inline]
    fn allocate(&self, size_bytes: usize) -> Option<NonNull<u8>> {
        self.make(size_bytes, false)
    }

    fn allocate_zeroed(&self, size_bytes: usize) -> Option<NonNull<u8>> {
        self.make(size_bytes, true)
    }

    unsafe fn resize(&self, block: NonNull<u8>, new_size_bytes: usize) -> Option<NonNull<u8>> {
        let _kept = Kept::on(self);
        // SAFETY: the caller gives a live block of this slot. It holds the slot, so the state is that of its own
        // request.
        unsafe { self.state().resize(block, new_size_bytes) }
    }

    #[inline]
    unsafe fn release(&self, block: NonNull<u8>) {
        // SAFETY: the caller gives up a live block of this slot. It held the slot, so the state is that of its own
        // request.
        if unsafe { self.state().release(block) } {
            self.immortal().let_go(); // the hold of its blocks; the state may go with it
        }
    }

    fn is_read_after_release(&self) -> bool {
        self.state().memory.is_read_after_release()
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
