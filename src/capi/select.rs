//! Selects handlers, and says which is selected and what it is called.

use super::error::{Refusal, answer};
use super::{Selection, registered};
use crate::handler::abi::{NAME_BYTES, PyDataMem_Handler};
use crate::handler::{Handler, default_handler};
use crate::unattributed::unattributed;
use std::ffi::{CStr, CString, c_char, c_int};
use std::ptr::{null, null_mut};
use std::sync::atomic::{AtomicPtr, Ordering};

/// `ctxalloc_set_handler`.
pub(super) extern "C" fn set_handler<S: Selection>(c_struct: *const PyDataMem_Handler) -> *const PyDataMem_Handler {
    answer(null(), || {
        let handler = if c_struct.is_null() { default_handler() } else { registered(c_struct)? };
        Ok(replace::<S>(handler)?.as_ptr())
    })
}

/// Selects a handler, and answers which one was selected.
pub(super) fn replace<S: Selection>(handler: Handler) -> Result<Handler, Refusal> {
    let before = S::current()?;
    S::select(handler)?;
    Ok(before)
}

/// `ctxalloc_get_handler`.
pub(super) extern "C" fn get_handler<S: Selection>() -> *const PyDataMem_Handler {
    answer(null(), || Ok(S::current()?.as_ptr()))
}

/// `ctxalloc_default_handler`.
pub(super) extern "C" fn get_default() -> *const PyDataMem_Handler {
    answer(null(), || Ok(default_handler().as_ptr()))
}

/// The handler with this struct; the current one for NULL.
fn meant<S: Selection>(c_struct: *const PyDataMem_Handler) -> Result<Handler, Refusal> {
    if c_struct.is_null() { S::current() } else { registered(c_struct) }
}

/// `ctxalloc_handler_name`.
pub(super) extern "C" fn handler_name<S: Selection>(c_struct: *const PyDataMem_Handler) -> *const c_char {
    answer(null(), || Ok(name_in_c(meant::<S>(c_struct)?)))
}

/// A name in the table that is not in its handler's struct: it was adopted under another name than its own.
struct Renamed {
    handler: Handler,
    name: CString,
    next: *const Renamed,
}

/// The last one that was asked for; immortal, in a list of all of them.
static RENAMED: AtomicPtr<Renamed> = AtomicPtr::new(null_mut());

/// The name of a handler in the table, by which `find` finds it: NUL-terminated, for ever.
pub(super) fn name_in_c(handler: Handler) -> *const c_char {
    let field = handler.as_ptr().cast::<c_char>(); // the name is the first field
    if handler.is_request() {
        return field; // it is in no table; the name in its struct stays while the request is held
    }
    // SAFETY: the struct of a named handler is immortal, and nobody writes to its name.
    let own = unsafe { &*field.cast::<[u8; NAME_BYTES]>() };
    if CStr::from_bytes_until_nul(own).is_ok_and(|own| own.to_bytes() == handler.name().as_bytes()) {
        return field;
    }
    // Acquire pairs with the exchange below.
    let mut last = RENAMED.load(Ordering::Acquire);
    // SAFETY: only the exchange below stores pointers here, of leaked values that do not change any more.
    let get = |renamed: *const Renamed| -> Option<&'static Renamed> { unsafe { renamed.as_ref() } };
    let known = |last| {
        let mut all = std::iter::successors(get(last), |renamed| get(renamed.next));
        all.find(|renamed| renamed.handler == handler)
    };
    if let Some(known) = known(last) {
        return known.name.as_ptr();
    }
    let name = CString::new(&*handler.name()).expect("names have no NUL");
    let _immortal = unattributed();
    let fresh = Box::leak(Box::new(Renamed { handler, name, next: last }));
    // Two threads may each add a copy of one name: both are right.
    while let Err(newer) = RENAMED.compare_exchange(last, fresh, Ordering::AcqRel, Ordering::Acquire) {
        last = newer;
        fresh.next = last;
    }
    fresh.name.as_ptr()
}

/// `ctxalloc_handler_version`.
pub(super) extern "C" fn handler_version<S: Selection>(c_struct: *const PyDataMem_Handler) -> c_int {
    answer(-1, || Ok(c_int::from(meant::<S>(c_struct)?.version())))
}

/// `ctxalloc_handler_alignment`.
pub(super) extern "C" fn handler_alignment<S: Selection>(c_struct: *const PyDataMem_Handler) -> usize {
    answer(0, || Ok(meant::<S>(c_struct)?.alignment()))
}

#[cfg(all(test, not(ctxalloc_loom)))]
mod tests {
    use super::*;
    use crate::handler::{Extras, Reach, abi::Copies, adopt, handler};
    use std::ptr::NonNull;

    /// Under Miri with the stale values that a weakly ordered machine shows: `make miri-seeds`.
    #[test]
    fn threads_agree_on_a_name_that_is_not_the_structs_own() {
        // SAFETY: a struct of ours, complete; a copy of it does the same.
        let copy = NonNull::from(Box::leak(Box::new(unsafe { *handler("system").expect("built in").as_ptr() })));
        let extras = Extras { alignment: 1, copies: Copies::NONE };
        // SAFETY: an immortal struct, whose functions may be called anywhere.
        let renamed = unsafe { adopt(copy, Reach::AnyThread, Some("an alias"), extras) }.expect("a new name");
        let look = || {
            // SAFETY: a string that lives for ever.
            let found = unsafe { std::ffi::CStr::from_ptr(name_in_c(renamed)) };
            assert_eq!(found, c"an alias");
        };
        std::thread::scope(|scope| {
            scope.spawn(look);
            scope.spawn(look);
            while RENAMED.load(Ordering::Relaxed).is_null() {
                std::thread::yield_now();
            }
            look();
        });
    }
}
