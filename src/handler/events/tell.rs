//! Reports to the hook: a free before it is done, so that no other block can have its address yet; a new block when it
//! is there; a resize when it is done, and after it what other threads did at the old address meanwhile (`resizes`).

use super::super::table::{Table, attached, present};
use super::resizes::{Event, RESIZES};
use super::state::Hook;
#[cfg(not(ctxalloc_loom))]
use super::state::is_known_to_be_unarmed;
use std::cell::Cell;
use std::ffi::c_void;

/// The table, if it has a hook.
#[inline]
fn armed() -> Option<&'static Table> {
    present().filter(|table| table.events.is_armed())
}

/// Whether there is no hook. May say false while this copy of the crate gets the table.
#[inline(always)]
pub(crate) fn is_silent() -> bool {
    #[cfg(ctxalloc_loom)]
    return armed().is_none();
    #[cfg(not(ctxalloc_loom))]
    return is_known_to_be_unarmed();
}

/// Reports to the hook, if there is one: a block that was made, or one that is about to be freed.
#[inline]
pub(crate) fn tell(inp: *mut c_void, outp: *mut c_void, size_bytes: usize) {
    if let Some(table) = armed() {
        table.events.deliver(inp, outp, size_bytes);
    }
}

/// To be called before a block is resized (`block` may be NULL). [`Resizing::done`] reports the resize.
#[inline]
pub(crate) fn resizing(block: *mut c_void) -> Resizing {
    let begun = !block.is_null() && armed().is_some_and(|table| table.events.begin_resize(block));
    Resizing { block, begun }
}

/// A resize that is under way.
#[must_use = "until `done` is called, events of other threads at its address are held back"]
pub(crate) struct Resizing {
    block: *mut c_void,
    /// Whether events of other threads at its address are held back until `done`.
    begun: bool,
}

impl Resizing {
    /// Reports the resize. `moved` is the block as it is now; NULL if the resize was refused.
    #[inline]
    pub(crate) fn done(self, moved: *mut c_void, size_bytes: usize) {
        // What was begun must end, though the hook may be gone by now.
        let table = if self.begun { present() } else { armed() };
        if let Some(table) = table {
            table.events.deliver(self.block, moved, size_bytes);
        }
    }
}

thread_local! {
    /// Whether this thread is inside of the hook: what it does there is not reported. Its address identifies the
    /// thread.
    static INSIDE: Cell<bool> = const { Cell::new(false) };
}

fn this_thread() -> usize {
    INSIDE.with(|inside| std::ptr::from_ref(inside).addr())
}

/// Holds back events of other threads at the address of a block that is being resized, until the resize is reported.
pub(in crate::handler) extern "C" fn begin_resize(block: *mut c_void) -> bool {
    let Some(table) = present().filter(|_| !INSIDE.get()) else { return false };
    // SAFETY: under the table's lock, and the reference does not leave the closure.
    table.lock.with(|| unsafe { RESIZES.get() }.begin(block.addr(), this_thread()));
    true
}

/// Calls the hook, unless this thread is inside of it, or the event has to wait for a resize.
#[cold]
pub(in crate::handler) extern "C" fn deliver(inp: *mut c_void, outp: *mut c_void, size_bytes: usize) {
    let Some(table) = present() else { return };
    if INSIDE.replace(true) {
        return;
    }
    let (event, thread) = (Event { inp, outp, size_bytes }, this_thread());
    // SAFETY: here and below `RESIZES` and the hook are reached under the table's lock, and no reference leaves the
    // closure.
    let due = || table.lock.with(|| unsafe { RESIZES.get() }.turn(event, thread));
    let reported = attached(|| {
        let mut next = due();
        while let Some(now) = next {
            // Read while attached: whoever changes the hook is attached too, so an old hook is not called after the
            // change.
            // SAFETY: the table's lock is held while the hook is read.
            let hook = table.lock.with(|| unsafe { table.events.hook() });
            if let Some(Hook { function, user_data }) = hook {
                // SAFETY: whoever set the hook promised that it stays callable, on any thread.
                unsafe { function(now.inp, now.outp, now.size_bytes, user_data) };
            }
            // SAFETY: under the table's lock, and the reference does not leave the closure.
            next = table.lock.with(|| unsafe { RESIZES.get() }.after(event, thread));
        }
    });
    if reported.is_none() {
        // Python is shutting down: the hook is not called any more, and no event waits.
        // SAFETY: under the table's lock, and the reference does not leave the closure.
        table.lock.with(|| unsafe { RESIZES.get() }.end(event, thread));
    }
    INSIDE.set(false);
}
