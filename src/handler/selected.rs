//! The word that says what the running context has selected. It is in this layer, below `scope`, because allocating
//! under the selected handler needs no further hold: the selection already holds it.
//!
//! It is a word without a destructor, so that it can be read while thread-locals are torn down.

use super::heap;
use super::held::Held;
use super::requests;
use super::word::Handler;
use crate::unattributed::is_active;
use std::cell::Cell;

thread_local! {
    /// Owns a hold, if it is a request's.
    static SELECTED: Cell<Option<Handler>> = const { Cell::new(None) };
    /// Lets go of it at the thread's end.
    static LEAVER: Leaver = const { Leaver };
}

struct Leaver;

impl Drop for Leaver {
    fn drop(&mut self) {
        drop(replace(None));
    }
}

/// What is selected.
#[inline]
pub(crate) fn get() -> Option<Handler> {
    SELECTED.get()
}

/// What is selected, held once more.
#[inline]
pub(crate) fn held() -> Option<Held> {
    let handler = SELECTED.get()?;
    // SAFETY: the word owns a hold. `ManuallyDrop` keeps this second `Held` of it from letting it go.
    let own = std::mem::ManuallyDrop::new(unsafe { Held::assume(handler) });
    Some(Held::clone(&own))
}

/// Selects something else, and returns what was selected.
///
/// Where a request stays selected when its thread ends, it is let go of then; in a destructor that runs later still, it
/// is kept for ever (`scope::set` says so).
#[inline]
pub(crate) fn replace(selected: Option<Held>) -> Option<Held> {
    let word = selected.map(Held::into_handler);
    if word.is_some_and(Handler::is_request) {
        let _ = LEAVER.try_with(|_| ());
    }
    // SAFETY: the word owned a hold, and is overwritten: the `Held` is its only owner from now on.
    let old = SELECTED.replace(word).map(|handler| unsafe { Held::assume(handler) });
    if is_active() {
        // Before the old hold can be dropped: what this thread has yet to add to its request's record keeps that
        // request.
        heap::select(word.and_then(requests::heap_of));
    }
    old
}
