//! What went wrong in the last call on this thread: a code and a message. A call that succeeds clears both.

use crate::error::Error;
use std::borrow::Cow;
use std::cell::RefCell;
use std::ffi::{CStr, CString, c_char, c_int};
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Why a call failed.
#[derive(Debug)]
pub(crate) enum Refusal {
    /// One of the crate's errors.
    Said(Error),
    /// A Python exception is set already.
    #[cfg(feature = "python")]
    Raised,
}

impl From<Error> for Refusal {
    fn from(error: Error) -> Self {
        Self::Said(error)
    }
}

/// `enum ctxalloc_error` of the header.
pub(super) mod code {
    use std::ffi::c_int;
    pub(in crate::capi) const NONE: c_int = 0;
    pub(in crate::capi) const VALUE: c_int = 1;
    pub(in crate::capi) const MEMORY: c_int = 2;
    pub(in crate::capi) const RUNTIME: c_int = 3;
    #[cfg(feature = "python")]
    pub(in crate::capi) const RAISED: c_int = 4;
}

struct Last {
    code: c_int,
    message: Cow<'static, CStr>,
    /// The error itself, to make an exception of it.
    #[cfg_attr(not(feature = "python"), allow(dead_code, reason = "without Python there are no exceptions"))]
    error: Option<Error>,
}

thread_local! {
    static LAST: RefCell<Option<Last>> = const { RefCell::new(None) };
}

/// Runs the work of a C function; keeps what went wrong and answers `failure` then.
pub(crate) fn answer<R>(failure: R, work: impl FnOnce() -> Result<R, Refusal>) -> R {
    // What is done with an error is shielded too: to tell it may run destructors, and Python.
    shielded(None, || {
        clear();
        work().map_err(keep).ok()
    })
    .unwrap_or(failure)
}

/// The same for a function that C calls by a struct. It is no call of the header's: where it succeeds it leaves alone
/// what the last one of those kept.
pub(super) fn served<R>(failure: R, work: impl FnOnce() -> Result<R, Refusal>) -> R {
    shielded(None, || work().map_err(keep).ok()).unwrap_or(failure)
}

/// Runs what C called, and lets no panic out to it: that is kept as an error, and the answer is `failure`.
pub(crate) fn shielded<R>(failure: R, work: impl FnOnce() -> R) -> R {
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|payload| {
        // What a panic carries may itself panic when it is dropped: it stays.
        std::mem::forget(payload);
        const MESSAGE: &CStr = c"ctxalloc panicked, which is a defect: please report it with the lines on stderr";
        put(Some(Last { code: code::RUNTIME, message: MESSAGE.into(), error: None }));
        failure
    })
}

#[cold]
fn keep(refusal: Refusal) {
    match refusal {
        Refusal::Said(error) => {
            let code = match error {
                Error::OutOfMemory { .. }
                | Error::BudgetExceeded { .. }
                | Error::NoRoom { .. }
                | Error::RequestEnded { requested_bytes: 1.., .. } => code::MEMORY,
                Error::CopyFailed { .. } | Error::TooManyViews { .. } | Error::NoPython => code::RUNTIME,
                _ => code::VALUE,
            };
            set(code, &error.to_string(), Some(error));
        }
        #[cfg(feature = "python")]
        Refusal::Raised => set(code::RAISED, "a Python exception is set, which says what went wrong", None),
    }
}

fn set(code: c_int, message: &str, error: Option<Error>) {
    // A message may name what the caller gave, which C cut off at its first NUL; ours have none.
    let message = CString::new(message.replace('\0', "\\0")).expect("no NUL is left");
    put(Some(Last { code, message: message.into(), error }));
}

/// Puts it in place of what was there. Nothing happens on a thread whose thread-locals are gone.
fn put(last: Option<Last>) {
    let before = LAST.try_with(|place| place.try_borrow_mut().map(|mut place| std::mem::replace(&mut *place, last)));
    drop(before); // outside of the borrow: what it holds may be asked from here again
}

/// Nothing went wrong.
pub(super) extern "C" fn clear() {
    let _ = LAST.try_with(|last| {
        if last.try_borrow().is_ok_and(|last| last.is_some()) {
            put(None);
        }
    });
}

/// The code of the last call on this thread.
pub(super) extern "C" fn error_code() -> c_int {
    LAST.try_with(|last| last.borrow().as_ref().map_or(code::NONE, |last| last.code)).unwrap_or(code::NONE)
}

/// The message of the last call on this thread; empty where it succeeded. Valid until the next call here.
pub(super) extern "C" fn error_message() -> *const c_char {
    const NOTHING: &CStr = c"";
    LAST.try_with(|last| last.borrow().as_ref().map_or(NOTHING.as_ptr(), |last| last.message.as_ptr()))
        .unwrap_or(NOTHING.as_ptr())
}

/// What the last call on this thread failed with: the error, or a message about something else. Nothing where it
/// succeeded, or where a Python exception is set.
#[cfg(feature = "python")]
pub(crate) fn last() -> Option<Result<Error, String>> {
    LAST.try_with(|last| {
        let last = last.borrow();
        let last = last.as_ref().filter(|last| last.code != code::RAISED)?;
        Some(last.error.clone().ok_or_else(|| last.message.to_string_lossy().into_owned()))
    })
    .ok()
    .flatten()
}
