//! The event hook: one function that is told of every block that any handler of the table makes, moves or frees.
//!
//! NumPy had it from 1.7 to 1.26 (`PyDataMem_SetEventHook`). Our own handlers ask `tell` after each call. NumPy calls a
//! foreign struct's functions directly, its own default among them; while there is a hook, functions of ours
//! (`watched`) stand in the struct in place of them (docs/decisions/0016). Without a hook nothing stands anywhere.
//!
//! The state is a part of the table, and what runs is the code of the copy of this crate that made the table:
//! so there is one flag for each thread that says whether it is inside of the hook.

mod watched;

use super::abi::PyDataMem_Handler;
use super::interpreter;
use super::table::{Table, table};
use crate::sync::{AtomicU32, Ordering};
use std::cell::{Cell, UnsafeCell};
use std::ffi::c_void;
use std::ptr::{NonNull, null_mut};

pub use watched::MOST_WATCHED;

/// What is called after each event, as NumPy's `PyDataMem_EventHookFunc`:
///
/// | event | `inp` | `outp` | `size` |
/// | --- | --- | --- | --- |
/// | a block was made, or refused | NULL | the block, or NULL | its size in bytes |
/// | a block was resized, or refused to be | the block as it was | as it is, or NULL | the new size |
/// | a block was freed | the block as it was | NULL | 0 |
pub type EventHook =
    unsafe extern "C" fn(inp: *mut c_void, outp: *mut c_void, size_bytes: usize, user_data: *mut c_void);

/// A hook and what it is called with.
#[derive(Debug, Clone, Copy)]
pub struct Hook {
    /// The function.
    pub function: EventHook,
    /// Its last argument.
    pub user_data: *mut c_void,
}

/// The hook as it stands in the table, and the code of the copy of this crate that made the table.
#[repr(C)]
pub(super) struct Events {
    /// Whether there is a hook: what every call asks.
    armed: AtomicU32,
    /// Only under the table's lock.
    function: UnsafeCell<Option<EventHook>>,
    user_data: UnsafeCell<*mut c_void>,
    tell: extern "C" fn(*mut c_void, *mut c_void, usize),
    watch: unsafe extern "C" fn(*mut PyDataMem_Handler, bool) -> bool,
}

// SAFETY: the cells are only touched under the table's lock; `user_data` is only handed to the hook, of which
// `set_event_hook` is told that it may be called on any thread.
unsafe impl Sync for Events {}
// SAFETY: as above.
unsafe impl Send for Events {}

impl Events {
    pub(super) fn none() -> Self {
        Self {
            armed: AtomicU32::new(0),
            function: UnsafeCell::new(None),
            user_data: UnsafeCell::new(null_mut()),
            tell: deliver,
            watch: watched::watch,
        }
    }

    /// Stands in a foreign struct that has just entered the table, where there is a hook. Only under the table's lock.
    pub(super) fn entered(&self, face: NonNull<PyDataMem_Handler>) {
        if self.armed.load(Ordering::Relaxed) != 0 {
            // SAFETY: an immortal struct, under the lock.
            unsafe { (self.watch)(face.as_ptr(), true) };
        }
    }

    /// # Safety
    /// - the caller holds the table's lock.
    unsafe fn hook(&self) -> Option<Hook> {
        // SAFETY: under the lock.
        let function = unsafe { *self.function.get() }?;
        // SAFETY: under the lock.
        Some(Hook { function, user_data: unsafe { *self.user_data.get() } })
    }

    /// # Safety
    /// - the caller holds the table's lock.
    unsafe fn set(&self, hook: Option<Hook>) {
        // SAFETY: under the lock.
        unsafe { *self.function.get() = hook.map(|hook| hook.function) };
        // SAFETY: under the lock.
        unsafe { *self.user_data.get() = hook.map_or(null_mut(), |hook| hook.user_data) };
        // Relaxed: whoever sees it looks at the rest under the lock.
        self.armed.store(u32::from(hook.is_some()), Ordering::Relaxed);
    }
}

/// Has `hook` told of every block that any handler makes, resizes or frees from now on; `None` ends it. Returns the hook
/// that was there before.
///
/// It hears of NumPy's arrays and of [`Buffer`](crate::Buffer)s alike, on whatever thread they are made, attached to
/// Python where Python is present (never once the interpreter is shutting down). It may allocate: what it does to memory
/// itself, on its thread, is not told. `free(NULL)` is no event. Without Python a hook on another thread may be running
/// still when this returns.
///
/// The structs of [foreign handlers](super::adopt) are changed while there is a hook: functions that tell it stand in
/// them. Of more than [`MOST_WATCHED`] such handlers, and of one whose struct cannot be written to, it hears nothing;
/// [`unwatched`] lists them.
///
/// # Safety
/// - the function stays callable with its `user_data` for ever, on any thread, by many at once (where there is Python:
///   by those who hold the GIL), and never unwinds.
pub unsafe fn set_event_hook(hook: Option<Hook>) -> Option<Hook> {
    let table = table();
    table.lock.with(|| {
        // SAFETY: under the lock.
        let before = unsafe { table.events.hook() };
        // SAFETY: under the lock.
        unsafe { table.events.set(hook) };
        for face in foreign_faces(table) {
            // SAFETY: an immortal struct, under the lock.
            unsafe { (table.events.watch)(face, hook.is_some()) };
        }
        before
    })
}

/// The names of foreign handlers of whose blocks in NumPy's arrays an event hook hears nothing. Empty without a hook.
#[must_use]
pub fn unwatched() -> Vec<std::borrow::Cow<'static, str>> {
    let table = table();
    table.lock.with(|| {
        if table.events.armed.load(Ordering::Relaxed) == 0 {
            return Vec::new();
        }
        let foreign = table.iter().filter(|handler| handler.is_foreign());
        // SAFETY: immortal structs, under the lock; to watch what is watched changes nothing.
        foreign
            .filter(|handler| unsafe { !(table.events.watch)(handler.as_ptr().cast_mut(), true) })
            .map(super::Handler::name)
            .collect()
    })
}

fn foreign_faces(table: &Table) -> impl Iterator<Item = *mut PyDataMem_Handler> {
    table.iter().filter(|handler| handler.is_foreign()).map(|handler| handler.as_ptr().cast_mut())
}

/// Tells the hook, if there is one. After each call of a handler's function, when its work is done.
#[inline]
pub(crate) fn tell(inp: *mut c_void, outp: *mut c_void, size_bytes: usize) {
    let events = &table().events;
    // Relaxed: a hook that is set at this moment may miss this event.
    if events.armed.load(Ordering::Relaxed) != 0 {
        (events.tell)(inp, outp, size_bytes);
    }
}

/// Calls the hook, unless this thread is inside of it.
#[cold]
extern "C" fn deliver(inp: *mut c_void, outp: *mut c_void, size_bytes: usize) {
    thread_local! {
        static INSIDE: Cell<bool> = const { Cell::new(false) };
    }
    if INSIDE.replace(true) {
        return;
    }
    let _ = interpreter::attached(|| {
        let table = table();
        // Read attached: who changes the hook is attached too, so an old one is not called after the change.
        // SAFETY: under the lock.
        let hook = table.lock.with(|| unsafe { table.events.hook() });
        if let Some(Hook { function, user_data }) = hook {
            // SAFETY: callable for ever, on any thread, said who set it.
            unsafe { function(inp, outp, size_bytes, user_data) };
        }
    });
    INSIDE.set(false);
}
