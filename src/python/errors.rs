//! Turns [`Error`] into exceptions, here and nowhere else: out of memory is a MemoryError, misuse a ValueError or a
//! RuntimeError.

use super::text::type_name;
use crate::error::Error;
use pyo3::exceptions::{PyMemoryError, PyOSError, PyRuntimeError, PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyString;
use pyo3::{PyTypeInfo, import_exception};
use std::borrow::Cow;

// Python classes: the same ones for the package and for every extension module with its own copy of this crate.
import_exception!(ctxalloc._errors, RegistrationError);
import_exception!(ctxalloc._errors, UnknownHandlerError);
import_exception!(ctxalloc._errors, RustPanic);
import_exception!(ctxalloc._errors, BudgetExceeded);
import_exception!(ctxalloc._errors, NoRoom);
import_exception!(ctxalloc._errors, RequestEnded);

/// Finds the classes above at import, where a failure can be reported. Later an exception may be pending, or Python may
/// be shutting down; then an import fails, and pyo3 panics where it does not find a class.
pub(super) fn import(py: Python<'_>) -> PyResult<()> {
    py.import("ctxalloc._errors")?;
    RegistrationError::type_object(py);
    UnknownHandlerError::type_object(py);
    RustPanic::type_object(py);
    BudgetExceeded::type_object(py);
    NoRoom::type_object(py);
    RequestEnded::type_object(py);
    Ok(())
}

/// `error` with its exception object, also while the interpreter shuts down, when coroutines and generators that were
/// never finished leave their scopes; or what its class raised when it was called.
///
/// pyo3 makes the exception object of a new `PyErr` after it has detached and attached again; while the interpreter
/// shuts down it panics there. Setting and fetching the error makes CPython create the object on this thread at once.
/// No other exception is pending: the caller is about to raise this one.
pub(super) fn normalized(py: Python<'_>, error: PyErr) -> PyErr {
    error.restore(py);
    PyErr::fetch(py)
}

/// `error` with `cause` as its `__cause__`, also while the interpreter shuts down: see [`normalized`].
pub(super) fn with_cause(py: Python<'_>, error: PyErr, cause: PyErr) -> PyErr {
    let [error, cause] = [error, cause].map(|error| normalized(py, error));
    error.set_cause(py, Some(cause));
    error
}

/// A TypeError for an argument, which says what the function takes and the type of what it was given.
pub(super) fn wrong_type(function: &str, expected: &str, given: &Bound<'_, PyAny>) -> PyErr {
    PyTypeError::new_err(format!("{function}() takes {expected}, got '{}'", type_name(given)))
}

/// The text of an argument that must be a str; [`wrong_type`] for anything else.
pub(super) fn text_of<'a>(function: &str, expected: &str, given: &'a Bound<'_, PyAny>) -> PyResult<Cow<'a, str>> {
    given.cast::<PyString>().map_err(|_| wrong_type(function, expected, given))?.to_cow()
}

fn reason_of(reason: crate::error::NoRoom) -> &'static str {
    use crate::error::NoRoom;
    match reason {
        NoRoom::NeverFits => "never fits",
        NoRoom::Busy => "busy",
        NoRoom::InsideOfAnother => "inside of another",
        NoRoom::InsideOfReclaimer => "inside of a reclaimer",
        NoRoom::QueueIsFull => "queue is full",
        NoRoom::TimedOut => "timed out",
        NoRoom::Forked => "forked",
    }
}

impl From<Error> for PyErr {
    fn from(error: Error) -> Self {
        let message = error.to_string();
        match error {
            Error::OutOfMemory { .. } => PyMemoryError::new_err(message),
            Error::BudgetExceeded {
                budget,
                budget_id,
                of_request,
                limit_bytes,
                in_use_bytes,
                held_bytes,
                requested_bytes,
                chosen_for,
                guaranteed_bytes,
            } => {
                // The order of its `__init__`.
                BudgetExceeded::new_err((
                    budget,
                    limit_bytes,
                    in_use_bytes,
                    requested_bytes,
                    held_bytes,
                    budget_id,
                    of_request,
                    chosen_for,
                    guaranteed_bytes,
                ))
            }
            Error::NoRoom {
                budget,
                budget_id,
                of_request,
                limit_bytes,
                in_use_bytes,
                requested_bytes,
                guaranteed_bytes,
                reason,
            } => {
                let reason = reason_of(reason);
                // The order of its `__init__`.
                NoRoom::new_err((
                    budget,
                    limit_bytes,
                    in_use_bytes,
                    requested_bytes,
                    message,
                    reason,
                    budget_id,
                    of_request,
                    guaranteed_bytes,
                ))
            }
            Error::RequestEnded { .. } => RequestEnded::new_err(message),
            Error::UnknownHandler { .. } => UnknownHandlerError::new_err(message),
            Error::NameEmpty
            | Error::NameTooLong { .. }
            | Error::NameHasNul { .. }
            | Error::NameUnreadable
            | Error::NameTaken { .. }
            | Error::AlreadyAdopted { .. }
            | Error::FunctionMissing { .. }
            | Error::UnknownVersion { .. }
            | Error::DraftChanged { .. } => RegistrationError::new_err(message),
            Error::BadAlignment { .. }
            | Error::BadOption { .. }
            | Error::BadRecording { .. }
            | Error::BadSetting { .. }
            | Error::GuaranteesExceedLimit { .. }
            | Error::NoSuchNode { .. }
            | Error::NullArgument { .. }
            | Error::NotRegistered { .. }
            | Error::NotABlock { .. }
            | Error::NotHostAccessible { .. }
            | Error::Overlap { .. }
            | Error::TokenForeign => PyValueError::new_err(message),
            Error::NoRecording { .. } => PyOSError::new_err(message),
            Error::TokenUsed
            | Error::NestedTooDeep { .. }
            | Error::SettingsInUse
            | Error::NoPython
            | Error::CopyFailed { .. }
            | Error::TooManyViews { .. }
            | Error::NoHugePages { .. }
            | Error::LockLimit { .. }
            | Error::Metrics { .. }
            | Error::Replay { .. }
            | Error::Sycl { .. }
            | Error::Cuda { .. }
            | Error::SystemRefused { .. } => PyRuntimeError::new_err(message),
        }
    }
}
