//! `Slot`: type-stable memory for one request after the other, and the words that refer to one.
//!
//! A [`Handler`] of a request is no pointer but a word of three parts; only whoever holds the slot may follow it:
//!
//! ```text
//!   63                                     25 24             1  0
//!   | address of the slot / 512 (39 bits)    | generation      | 1 |      a named handler's word is a pointer: bit 0 is 0
//! ```
//! `holders` is the whole state. 0: free, being recycled, or being begun, and nobody gets hold of it. Above: held, and
//! the generation does not change. It counts 64 bits, which no program can run over.

use super::super::abi::PyDataMem_Handler;
use super::super::entry::{Entry, Handler};
use super::super::held::Held;
use super::super::name;
use super::super::table::table;
use super::super::trampoline;
use super::MIN_ALIGN;
use super::state::State;
use crate::sync::{AtomicPtr as SharedPtr, ForkLock, HeldAcrossFork, Locked, Made};
use std::cell::UnsafeCell;
use std::ffi::c_void;
use std::mem::{MaybeUninit, offset_of};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::{NonNull, null_mut};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// Laid out for C up to `state`: copies of this crate in other extension modules know it.
#[repr(C, align(512))]
pub(in crate::handler) struct Slot {
    /// What all handlers have. First: the address of the slot is that of its entry.
    entry: Entry,
    /// What NumPy sees. Its name is the request's, written while nobody holds the slot.
    face: UnsafeCell<PyDataMem_Handler>,
    holders: AtomicU64,
    generation: AtomicU32,
    /// There while somebody holds the slot.
    state: UnsafeCell<MaybeUninit<State>>,
}

// SAFETY: `face` and `state` are written by the one who recycles or begins, while nobody holds the slot.
unsafe impl Sync for Slot {}
// SAFETY: as above.
unsafe impl Send for Slot {}

const SLOT: usize = 512;
const _: () = assert!(size_of::<Slot>() == SLOT);
const _: () = assert!(size_of::<usize>() == 8, "a handler's word has 64 bits");

const GENERATION_BITS: u32 = 24;
const ADDRESS_SHIFT: u32 = GENERATION_BITS + 1;
const MAX_GENERATION: u32 = (1 << GENERATION_BITS) - 1;

/// The word of a request's handler.
fn word(slot: *const Slot, generation: u32) -> NonNull<c_void> {
    let word = (slot.addr() / SLOT) << ADDRESS_SHIFT | (generation as usize) << 1 | 1;
    NonNull::without_provenance(word.try_into().expect("bit 0 is set"))
}

/// Whether a handler's word is a request's.
#[inline]
pub(in crate::handler) fn is_request(word: NonNull<c_void>) -> bool {
    word.addr().get() & 1 == 1
}

/// The slot that a request's word refers to.
#[inline]
pub(in crate::handler) fn slot_at(word: NonNull<c_void>) -> NonNull<Entry> {
    let address = (word.addr().get() >> ADDRESS_SHIFT) * SLOT;
    // `Chunk::make` exposed it.
    NonNull::new(std::ptr::with_exposed_provenance_mut(address)).expect("a slot's address is not zero")
}

#[inline]
fn generation_in(word: NonNull<c_void>) -> u32 {
    (word.addr().get() >> 1) as u32 & MAX_GENERATION
}

/// What a copy of this crate does with slots that another one made: `word` is the handler's.
/// - [`TRY_HOLD`]: one more holder, if the generation is the word's and somebody holds it; says whether.
/// - [`HOLD_AGAIN`]: one more; somebody holds it, says the caller.
/// - [`LET_GO`]: one less.
///
/// For the functions of one slot, so that it is found without looking at the word.
pub(in crate::handler) type HoldFunction =
    unsafe extern "C" fn(slot: *const c_void, what: u32, generation: u32) -> bool;

const TRY_HOLD: u32 = 0;
const HOLD_AGAIN: u32 = 1;
const LET_GO: u32 = 2;

/// [`HoldFunction`] of this copy.
///
/// # Safety
/// - `slot` is a slot of this copy; `HOLD_AGAIN` and `LET_GO` come from a holder.
unsafe extern "C" fn hold_function(slot: *const c_void, what: u32, generation: u32) -> bool {
    // SAFETY: says the caller; slots are immortal.
    let slot: &'static Slot = unsafe { &*slot.cast() };
    match what {
        TRY_HOLD => return slot.try_hold(generation),
        HOLD_AGAIN => slot.hold_again(),
        _ => slot.let_go(),
    }
    true
}

/// Getting hold of the slot behind a request's handler, and letting go of it, whichever copy of the crate made it.
pub(in crate::handler) mod hold {
    use super::{HOLD_AGAIN, Handler, LET_GO, TRY_HOLD, generation_in, slot_at};

    fn call(handler: Handler, what: u32) -> bool {
        let entry = handler.entry();
        let Some(function) = entry.hold else { return true };
        // SAFETY: the function stands in the slot's own entry; who lets go, or holds again, holds it.
        unsafe { function(slot_at(handler.word()).as_ptr().cast(), what, generation_in(handler.word())) }
    }

    /// One more holder, unless the request is gone.
    #[inline]
    pub(in crate::handler) fn try_hold(handler: Handler) -> bool {
        call(handler, TRY_HOLD)
    }

    /// One more holder of what is held.
    #[inline]
    pub(in crate::handler) fn again(handler: Handler) {
        call(handler, HOLD_AGAIN);
    }

    /// One holder less.
    #[inline]
    pub(in crate::handler) fn let_go(handler: Handler) {
        call(handler, LET_GO);
    }
}

impl Slot {
    /// The slot behind a request's handler, if this copy of the crate made it. Whoever asks holds it.
    #[inline]
    pub(super) fn behind(handler: Handler) -> Option<&'static Self> {
        (handler.is_request() && handler.entry().made_here()).then(|| {
            // SAFETY: a request's word leads to a slot, of this copy's own layout.
            unsafe { slot_at(handler.word()).cast::<Self>().as_ref() }
        })
    }

    /// The request's own. For holders.
    #[inline]
    pub(super) fn state(&self) -> &State {
        debug_assert!(self.holders.load(Ordering::Relaxed) > 0, "nobody holds this slot");
        // SAFETY: callers hold the slot, so the state is there and nobody writes to it.
        let state = unsafe { &*self.state.get() };
        // SAFETY: as above.
        unsafe { state.assume_init_ref() }
    }

    #[inline]
    pub(super) fn immortal(&self) -> &'static Self {
        // SAFETY: slots are made by `Chunk::make` alone, which leaks them.
        unsafe { &*std::ptr::from_ref(self) }
    }

    /// Begins a request in a slot that nobody has.
    pub(super) fn begin(name: Option<&str>, number: u64, state: State) -> Held {
        let slot = slots().take();
        // SAFETY: nobody holds it, and only we took it from the list: nobody looks at its face or state.
        let field = unsafe { &mut (*slot.face.get()).name };
        match name {
            Some(name) => *field = name::field_of(name),
            None => name::number(field, number),
        }
        // SAFETY: as above.
        unsafe { (*slot.state.get()).write(state) };
        let generation = slot.generation.load(Ordering::Relaxed);
        // Release pairs with the Acquire in `try_hold`: who gets hold of it sees all of the above.
        slot.holders.store(1, Ordering::Release);
        // SAFETY: the hold that was just made.
        unsafe { Held::assume(Handler::of_word(word(slot, generation))) }
    }

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
        // Relaxed: who hands a hold on to another thread orders that by other means.
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

    #[cold]
    fn recycle(&'static self) {
        // SAFETY: the last holder is gone, and nobody gets hold of it while there is none.
        let state = unsafe { (*self.state.get()).assume_init_read() };
        let generation = self.generation.load(Ordering::Relaxed);
        self.generation.store(generation + 1, Ordering::Relaxed);
        // After the last generation a slot is left alone: no word is ever used twice.
        if generation < MAX_GENERATION {
            slots().free.with(|free| free.push(self));
        } else {
            slots().count.fetch_sub(1, Ordering::Relaxed);
        }
        // Last: a strategy of the user's may do anything, and this may be below a function that C calls.
        if let Err(payload) = catch_unwind(AssertUnwindSafe(|| drop(state))) {
            let _: Option<()> = trampoline::panicked("drop", payload);
        }
    }
}

/// The request's handler behind a struct, while somebody holds it.
pub(in crate::handler) fn at_face(face: *const PyDataMem_Handler) -> Option<Handler> {
    let slot = table().chunks().slot_at(face)?;
    // SAFETY: a slot of this layout, immortal.
    let slot = unsafe { slot.as_ref() };
    let is_held = slot.holders.load(Ordering::Acquire) > 0;
    // SAFETY: a slot and its generation.
    is_held.then(|| unsafe { Handler::of_word(word(slot, slot.generation.load(Ordering::Relaxed))) })
}

/// The name that NumPy sees of a request's handler that somebody holds.
pub(super) fn name_in(handler: Handler) -> String {
    // SAFETY: the struct of a held slot, which nobody writes to.
    let name = unsafe { std::ffi::CStr::from_ptr((&raw const (*handler.entry().face()).name).cast()) };
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
    SLOTS.get_or_make(|| {
        let slots = Arc::new(Slots { free: Locked::new(Vec::new()), count: AtomicU64::new(0) });
        let holder: Arc<dyn HeldAcrossFork> = Arc::clone(&slots) as _;
        crate::sync::hold_across_fork(Arc::downgrade(&holder));
        slots
    })
}

/// Slots in the first chunk. Each further one has as many as there are, up to [`MAX_CHUNK`].
const MIN_CHUNK: usize = 64;
const MAX_CHUNK: usize = 1 << 14;

impl Slots {
    /// A slot that nobody has: the one that was freed last.
    fn take(&'static self) -> &'static Slot {
        loop {
            if let Some(slot) = self.free.with(Vec::pop) {
                return slot;
            }
            self.grow();
        }
    }

    /// More slots. Racing threads may each do so.
    #[cold]
    fn grow(&'static self) {
        let count = self.count.load(Ordering::Relaxed) as usize;
        let chunk = Chunk::make(count.clamp(MIN_CHUNK, MAX_CHUNK));
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

/// Slots side by side, in the list that all copies of the crate share.
#[repr(C)]
struct Chunk {
    start: *const c_void,
    bytes: usize,
    next: *mut Chunk,
}

/// All chunks of all copies: by it a struct is known to be a request's. Part of the table.
#[repr(C)]
pub(in crate::handler) struct Chunks {
    last: SharedPtr<c_void>,
}

impl Chunks {
    pub(in crate::handler) fn none() -> Self {
        Self { last: SharedPtr::new(null_mut()) }
    }

    /// The slot whose struct stands at this address, which may be any.
    fn slot_at(&self, face: *const PyDataMem_Handler) -> Option<NonNull<Slot>> {
        // Acquire pairs with the exchange in `Chunk::make`.
        let mut next = self.last.load(Ordering::Acquire).cast::<Chunk>();
        loop {
            // SAFETY: `Chunk::make` alone puts pointers here, of immortal values.
            let chunk = unsafe { next.as_ref() }?;
            let offset = face.addr().wrapping_sub(chunk.start.addr());
            if offset < chunk.bytes {
                let is_face = offset % SLOT == offset_of!(Slot, face);
                let slot = chunk.start.wrapping_byte_add(offset - offset % SLOT);
                return NonNull::new(slot.cast_mut().cast()).filter(|_| is_face);
            }
            next = chunk.next;
        }
    }
}

impl Chunk {
    /// So many slots, immortal.
    fn make(count: usize) -> &'static [Slot] {
        // A pointer all along: handlers find their slots again by their exposed addresses, which no reference may narrow.
        let start: *mut Slot = Box::into_raw(Box::<[Slot]>::new_uninit_slice(count)).cast();
        start.expose_provenance();
        for number in 0..count {
            // SAFETY: inside of the chunk.
            let slot = unsafe { start.add(number) };
            // SAFETY: the place of a field of a slot that is being made.
            let face = unsafe { &raw mut (*slot).face };
            // SAFETY: the slot is immortal and is a strategy once it is complete, before anybody knows of it.
            let functions = unsafe { trampoline::functions_at::<Slot>(slot) };
            let fresh = Slot {
                entry: Entry::of_slot::<Slot>(functions, face.cast(), hold_function, MIN_ALIGN),
                face: UnsafeCell::new(functions.face_named(name::field_of("request"))),
                holders: AtomicU64::new(0),
                generation: AtomicU32::new(0),
                state: UnsafeCell::new(MaybeUninit::uninit()),
            };
            // SAFETY: a place of ours that nothing was written to yet.
            unsafe { slot.write(fresh) };
        }
        let chunk = Box::into_raw(Box::new(Self { start: start.cast(), bytes: count * SLOT, next: null_mut() }));
        let chunks = table().chunks();
        let mut last = chunks.last.load(Ordering::Relaxed);
        loop {
            // SAFETY: nobody else knows it yet.
            unsafe { (*chunk).next = last.cast() };
            // AcqRel: publishes the slots. Pairs with the load in `slot_at`.
            match chunks.last.compare_exchange(last, chunk.cast(), Ordering::AcqRel, Ordering::Relaxed) {
                Ok(_) => break,
                Err(newer) => last = newer,
            }
        }
        // SAFETY: all of them were written, and are immortal.
        unsafe { std::slice::from_raw_parts(start, count) }
    }
}
