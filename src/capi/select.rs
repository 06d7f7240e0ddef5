//! Which handler: set, get, and what one is called.

use super::error::{Refusal, answer};
use super::{Selection, registered};
use crate::handler::abi::{NAME_BYTES, PyDataMem_Handler};
use crate::handler::{Handler, default_handler};
use std::ffi::{CStr, CString, c_char, c_int};
use std::ptr::{null, null_mut};
use std::sync::atomic::{AtomicPtr, Ordering};

/// `ctxalloc_set_handler`.
pub(super) extern "C" fn set_handler<S: Selection>(face: *const PyDataMem_Handler) -> *const PyDataMem_Handler {
    answer(null(), || {
        let handler = if face.is_null() { default_handler() } else { registered(face)? };
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

fn meant<S: Selection>(face: *const PyDataMem_Handler) -> Result<Handler, Refusal> {
    if face.is_null() { S::current() } else { registered(face) }
}

/// `ctxalloc_handler_name`.
pub(super) extern "C" fn handler_name<S: Selection>(face: *const PyDataMem_Handler) -> *const c_char {
    answer(null(), || Ok(name_in_c(meant::<S>(face)?)))
}

/// A name of the table that does not stand in its handler's struct: it was adopted under another one than its own.
struct Renamed {
    handler: Handler,
    name: CString,
    next: *const Renamed,
}

/// The last one that was asked for; immortal, in a list of all of them.
static RENAMED: AtomicPtr<Renamed> = AtomicPtr::new(null_mut());

/// The name of a handler in the table, by which `find` finds it: NUL-terminated, for ever.
pub(super) fn name_in_c(handler: Handler) -> *const c_char {
    // SAFETY: the struct is immortal; only the address of its first field is taken.
    let field = unsafe { &raw const (*handler.as_ptr()).name };
    if handler.is_request() {
        return field.cast(); // no table has its name; that in its struct stays while the request is held
    }
    // SAFETY: as above; nobody writes to a name.
    let own = unsafe { &*field.cast::<[u8; NAME_BYTES]>() };
    if CStr::from_bytes_until_nul(own).is_ok_and(|own| own.to_bytes() == handler.name().as_bytes()) {
        return field.cast();
    }
    // Acquire pairs with the exchange below.
    let mut last = RENAMED.load(Ordering::Acquire);
    // SAFETY: only the exchange below puts pointers here, of immortal values.
    let get = |renamed: *const Renamed| -> Option<&'static Renamed> { unsafe { renamed.as_ref() } };
    let known = |last| {
        let mut all = std::iter::successors(get(last), |renamed| get(renamed.next));
        all.find(|renamed| renamed.handler == handler)
    };
    if let Some(known) = known(last) {
        return known.name.as_ptr();
    }
    let name = CString::new(&*handler.name()).expect("names have no NUL");
    let fresh = Box::into_raw(Box::new(Renamed { handler, name, next: last }));
    loop {
        // Two threads may enter one name, each its own: both are right.
        match RENAMED.compare_exchange(last, fresh, Ordering::AcqRel, Ordering::Acquire) {
            // SAFETY: immortal from now on.
            Ok(_) => return unsafe { &*fresh }.name.as_ptr(),
            Err(newer) => last = newer,
        }
        // SAFETY: nobody else knows it yet.
        unsafe { (*fresh).next = last };
    }
}

/// `ctxalloc_handler_version`.
pub(super) extern "C" fn handler_version<S: Selection>(face: *const PyDataMem_Handler) -> c_int {
    answer(-1, || Ok(c_int::from(meant::<S>(face)?.version())))
}

/// `ctxalloc_handler_alignment`.
pub(super) extern "C" fn handler_alignment<S: Selection>(face: *const PyDataMem_Handler) -> usize {
    answer(0, || Ok(meant::<S>(face)?.alignment()))
}
