//! The event hook: one function that is called for every block that any handler of the table makes, moves or frees.
//!
//! NumPy had it from 1.7 to 1.26 (`PyDataMem_SetEventHook`). Our own handlers call `tell` in each of their functions.
//! NumPy calls a foreign struct's functions directly, its own default among them: while there is a hook, functions of
//! ours (`watched`) take their place in the struct (docs/decisions/0016). Without a hook every struct has its own
//! functions.

mod resizes;
pub(super) mod state;
pub(super) mod tell;
pub(super) mod watched;

use super::abi::PyDataMem_Handler;
use super::process::table;
use super::table::Table;
use std::sync::atomic::{AtomicUsize, Ordering};

pub use state::{EventHook, Hook};
pub(super) use tell::is_silent;
pub use watched::MAX_WATCHED;

/// Has `hook` called for every block that any handler makes, resizes or frees from now on; `None` ends it. Returns the
/// hook that was there before.
///
/// It is called for NumPy's arrays and for [`Buffer`](crate::Buffer)s alike, on whatever thread they are made, attached
/// to Python where Python is present (never once the interpreter is shutting down). It may allocate: what it does to
/// memory itself, on its thread, is not reported. `free(NULL)` is no event. Without Python a hook on another thread may
/// be running still when this returns.
///
/// The structs of [foreign handlers](super::adopt) are changed while there is a hook: functions that call it take the
/// place of theirs. It is not called for more than [`MAX_WATCHED`] such handlers, nor for one whose struct cannot be
/// written to; [`unwatched`] lists them.
///
/// # Safety
/// - the function stays callable with its `user_data` for ever, on any thread, by many at once (where there is Python:
///   by those who hold the GIL), and never unwinds.
pub unsafe fn set_event_hook(hook: Option<Hook>) -> Option<Hook> {
    let table = table();
    CHANGES.fetch_add(1, Ordering::Relaxed);
    table.lock.with(|| {
        // SAFETY: all of this happens under the table's lock, and the table's structs are immortal and complete.
        unsafe {
            let before = table.events.hook();
            table.events.set(hook);
            for c_struct in foreign_structs(table) {
                table.events.watch(c_struct, hook.is_some());
            }
            before
        }
    })
}

/// How often this copy of the crate has set a hook.
static CHANGES: AtomicUsize = AtomicUsize::new(0);

/// How often [`set_event_hook`] was called here: whoever has set a hook sees by it that there was another meanwhile.
#[cfg(feature = "python")]
pub(crate) fn changes() -> usize {
    CHANGES.load(Ordering::Relaxed)
}

/// The names of foreign handlers for whose blocks in NumPy's arrays an event hook is not called. Empty without a hook.
#[must_use]
pub fn unwatched() -> Vec<std::borrow::Cow<'static, str>> {
    let table = table();
    table.lock.with(|| {
        if !table.events.is_armed() {
            return Vec::new();
        }
        // SAFETY: under the lock; the table's structs are immortal and complete. To watch what is watched changes
        // nothing.
        let is_watched = |c_struct| unsafe { table.events.watch(c_struct, true) };
        let foreign = table.iter().filter(|handler| handler.is_foreign());
        foreign
            .filter(|handler| !is_watched(handler.as_ptr().cast_mut()))
            .map(|handler| handler.entry().name().into())
            .collect()
    })
}

fn foreign_structs(table: &Table) -> impl Iterator<Item = *mut PyDataMem_Handler> {
    table.iter().filter(|handler| handler.is_foreign()).map(|handler| handler.as_ptr().cast_mut())
}
