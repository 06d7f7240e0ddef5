//! From [`Error`] to exceptions. The one place: out of memory is a MemoryError, misuse a ValueError or a RuntimeError.

use crate::error::Error;
use pyo3::exceptions::{PyMemoryError, PyRuntimeError, PyValueError};
use pyo3::{PyErr, import_exception};

// Python classes: the same ones for the package and for every extension module with its own copy of this crate.
import_exception!(ctxalloc._errors, RegistrationError);
import_exception!(ctxalloc._errors, UnknownHandlerError);
import_exception!(ctxalloc._errors, RustPanic);
import_exception!(ctxalloc._errors, BudgetExceeded);
import_exception!(ctxalloc._errors, RequestEnded);

impl From<Error> for PyErr {
    fn from(error: Error) -> Self {
        let message = error.to_string();
        match error {
            Error::OutOfMemory { .. } => PyMemoryError::new_err(message),
            Error::BudgetExceeded { budget, limit_bytes, in_use_bytes, requested_bytes } => {
                BudgetExceeded::new_err((budget, limit_bytes, in_use_bytes, requested_bytes))
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
            | Error::BadSetting { .. }
            | Error::NoSuchNode { .. }
            | Error::NullArgument { .. }
            | Error::NotRegistered { .. }
            | Error::NotABlock { .. }
            | Error::NotHostAccessible { .. }
            | Error::Overlap { .. }
            | Error::TokenForeign => PyValueError::new_err(message),
            Error::TokenUsed
            | Error::NestedTooDeep { .. }
            | Error::SettingsInUse
            | Error::NoPython
            | Error::CopyFailed { .. }
            | Error::TooManyViews { .. }
            | Error::NoHugePages { .. }
            | Error::LockLimit { .. }
            | Error::Sycl { .. }
            | Error::SystemRefused { .. } => PyRuntimeError::new_err(message),
        }
    }
}
