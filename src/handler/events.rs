//! The event hook: one function that is told of every block that any handler of the table makes, moves or frees.
//!
//! NumPy had it from 1.7 to 1.26 (`PyDataMem_SetEventHook`). Our own handlers call `tell` in each of their functions. NumPy calls a
//! foreign struct's functions directly, its own default among them: while there is a hook, functions of ours (`watched`) take
//! their place in the struct (docs/decisions/0016). Without a hook every struct has its own functions.

mod resizes;
pub(super) mod state;
pub(super) mod tell;
pub(super) mod watched;

use super::abi::PyDataMem_Handler;
use super::process::table;
use super::table::Table;

pub use state::{EventHook, Hook};
pub use watched::MAX_WATCHED;

/// Has `hook` told of every block that any handler makes, resizes or frees from now on; `None` ends it. Returns the hook
/// that was there before.
///
/// It hears of NumPy's arrays and of [`Buffer`](crate::Buffer)s alike, on whatever thread they are made, attached to
/// Python where Python is present (never once the interpreter is shutting down). It may allocate: what it does to memory
/// itself, on its thread, is not told. `free(NULL)` is no event. Without Python a hook on another thread may be running
/// still when this returns.
///
/// The structs of [foreign handlers](super::adopt) are changed while there is a hook: functions that tell it take the place
/// of theirs. It hears nothing of more than [`MAX_WATCHED`] such handlers, nor of one whose struct cannot be written to;
/// [`unwatched`] lists them.
///
/// # Safety
/// - the function stays callable with its `user_data` for ever, on any thread, by many at once (where there is Python:
///   by those who hold the GIL), and never unwinds.
pub unsafe fn set_event_hook(hook: Option<Hook>) -> Option<Hook> {
    let table = table();
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

/// The names of foreign handlers of whose blocks in NumPy's arrays an event hook hears nothing. Empty without a hook.
#[must_use]
pub fn unwatched() -> Vec<std::borrow::Cow<'static, str>> {
    let table = table();
    table.lock.with(|| {
        if !table.events.is_armed() {
            return Vec::new();
        }
        // SAFETY: under the lock; the table's structs are immortal and complete. To watch what is watched changes nothing.
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
