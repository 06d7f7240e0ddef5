//! `Events`: the hook, in the table, where all copies of this crate find it; and functions of the copy that made the
//! table, through which all copies deliver events. So each thread has only one flag that says whether it is inside of
//! the hook.

use super::super::abi::PyDataMem_Handler;
#[cfg(not(ctxalloc_loom))]
use crate::sync::AtomicPtr;
use crate::sync::{AtomicU32, Ordering};
use std::cell::UnsafeCell;
use std::ffi::c_void;
use std::ptr::{NonNull, null_mut};

/// What is called for each event, as NumPy's `PyDataMem_EventHookFunc`:
///
/// | event | `inp` | `outp` | `size` |
/// | --- | --- | --- | --- |
/// | a block was made, or refused | NULL | the block, or NULL | its size in bytes |
/// | a block was resized, or refused to be | the block as it was | as it is, or NULL | the new size |
/// | a block is about to be freed | the block as it was | NULL | 0 |
///
/// The order is that of the addresses: the calls for the end of a block return before the first call for the next block
/// at its address begins, on whatever threads. A free is reported before it is done, a resize after. If another thread
/// gets the old address of a resize before that, its events there are reported right after the resize, by the thread
/// that resized.
pub type EventHook =
    unsafe extern "C" fn(inp: *mut c_void, outp: *mut c_void, size_bytes: usize, user_data: *mut c_void);

/// A hook and what it is called with.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct Hook {
    /// The function.
    pub function: EventHook,
    /// Its last argument.
    pub user_data: *mut c_void,
}

impl Hook {
    /// This function, called with this last argument.
    #[must_use]
    pub const fn new(function: EventHook, user_data: *mut c_void) -> Self {
        Self { function, user_data }
    }
}

/// Delivers an event: `inp`, `outp`, size in bytes.
pub(in crate::handler) type Deliver = extern "C" fn(*mut c_void, *mut c_void, usize);
/// Announces the resize of a block; returns whether its end must be delivered.
pub(in crate::handler) type BeginResize = extern "C" fn(*mut c_void) -> bool;
/// Puts functions of ours into a foreign struct (true), or its own back; returns whether ours are in it.
pub(in crate::handler) type Watch = unsafe extern "C" fn(*mut PyDataMem_Handler, bool) -> bool;

/// Part of the table, hence laid out for C.
#[repr(C)]
pub(in crate::handler) struct Events {
    /// Whether there is a hook: what every call looks at.
    armed: AtomicU32,
    /// Only under the table's lock.
    function: UnsafeCell<Option<EventHook>>,
    user_data: UnsafeCell<*mut c_void>,
    deliver: Deliver,
    begin_resize: BeginResize,
    watch: Watch,
}

// SAFETY: the cells are only touched under the table's lock. `user_data` is only handed to the hook, and whoever set
// that promised that it may be called on any thread (`set_event_hook`).
unsafe impl Sync for Events {}
// SAFETY: nothing in it belongs to a thread; `user_data` may be handed to the hook on any, as for `Sync`.
unsafe impl Send for Events {}

/// The table's [`Events::armed`], once this copy of the crate has a table: small blocks look at nothing else of it.
#[cfg(not(ctxalloc_loom))]
static ARMED: AtomicPtr<AtomicU32> = AtomicPtr::new((&raw const UNKNOWN).cast_mut());
#[cfg(not(ctxalloc_loom))]
static UNKNOWN: AtomicU32 = AtomicU32::new(1);

/// Whether the table, which is there, has no hook. Relaxed, as in [`Events::is_armed`].
#[cfg(not(ctxalloc_loom))]
#[inline(always)]
pub(super) fn is_known_to_be_unarmed() -> bool {
    // Acquire pairs with the Release in `be_at_hand`.
    let armed = ARMED.load(Ordering::Acquire);
    // SAFETY: a static, or a part of the table, which lives for ever.
    unsafe { &*armed }.load(Ordering::Relaxed) == 0
}

impl Events {
    /// These are the table's, which this copy of the crate has from now on.
    pub(in crate::handler) fn be_at_hand(&'static self) {
        // Release: whoever finds it finds what is there.
        #[cfg(not(ctxalloc_loom))]
        ARMED.store((&raw const self.armed).cast_mut(), Ordering::Release);
    }

    /// No hook, and the functions that serve one.
    pub(in crate::handler) fn none(deliver: Deliver, begin_resize: BeginResize, watch: Watch) -> Self {
        Self {
            armed: AtomicU32::new(0),
            function: UnsafeCell::new(None),
            user_data: UnsafeCell::new(null_mut()),
            deliver,
            begin_resize,
            watch,
        }
    }

    /// Whether there is a hook. Relaxed: a hook that is set at this moment may miss the current event, and the caller
    /// reads the rest under the table's lock.
    #[inline]
    pub(super) fn is_armed(&self) -> bool {
        self.armed.load(Ordering::Relaxed) != 0
    }

    pub(super) fn deliver(&self, inp: *mut c_void, outp: *mut c_void, size_bytes: usize) {
        (self.deliver)(inp, outp, size_bytes);
    }

    pub(super) fn begin_resize(&self, block: *mut c_void) -> bool {
        (self.begin_resize)(block)
    }

    /// Puts functions that tell the hook into a foreign struct, or takes them out; returns whether they are in it.
    ///
    /// # Safety
    /// - `c_struct` is an immortal, complete struct of a foreign handler; the caller holds the table's lock.
    pub(super) unsafe fn watch(&self, c_struct: *mut PyDataMem_Handler, on: bool) -> bool {
        // SAFETY: this function has the same contract as the one that it calls.
        unsafe { (self.watch)(c_struct, on) }
    }

    /// Watches a foreign struct that was just registered, where there is a hook. Only under the table's lock.
    pub(in crate::handler) fn registered(&self, c_struct: NonNull<PyDataMem_Handler>) {
        if self.is_armed() {
            // SAFETY: the table holds immortal, complete structs only; the caller holds its lock.
            unsafe { self.watch(c_struct.as_ptr(), true) };
        }
    }

    /// # Safety
    /// - the caller holds the table's lock.
    pub(super) unsafe fn hook(&self) -> Option<Hook> {
        // SAFETY: nobody writes to the cells meanwhile: `set` holds the same lock.
        unsafe { Some(Hook { function: (*self.function.get())?, user_data: *self.user_data.get() }) }
    }

    /// # Safety
    /// - the caller holds the table's lock.
    pub(super) unsafe fn set(&self, hook: Option<Hook>) {
        // SAFETY: nobody else reads or writes the cells meanwhile: all do so under the same lock.
        unsafe {
            *self.function.get() = hook.map(|hook| hook.function);
            *self.user_data.get() = hook.map_or(null_mut(), |hook| hook.user_data);
        }
        self.armed.store(u32::from(hook.is_some()), Ordering::Relaxed);
    }
}
