//! From [`Error`] to exceptions. The one place: out of memory is a MemoryError, misuse a ValueError or a RuntimeError.

use crate::error::Error;
use pyo3::exceptions::{PyMemoryError, PyRuntimeError, PyValueError};
use pyo3::{PyErr, import_exception};

// Python classes: the same ones for the package and for every extension module with its own copy of this crate.
import_exception!(ctxalloc._errors, RegistrationError);
import_exception!(ctxalloc._errors, UnknownHandlerError);
import_exception!(ctxalloc._errors, RustPanic);

impl From<Error> for PyErr {
    fn from(error: Error) -> Self {
        let message = error.to_string();
        match error {
            Error::OutOfMemory { .. } | Error::BudgetExceeded { .. } => PyMemoryError::new_err(message),
            Error::UnknownHandler { .. } => UnknownHandlerError::new_err(message),
            Error::NameEmpty
            | Error::NameTooLong { .. }
            | Error::NameHasNul { .. }
            | Error::NameUnreadable
            | Error::NameTaken { .. }
            | Error::AlreadyAdopted { .. }
            | Error::FunctionMissing { .. } => RegistrationError::new_err(message),
            Error::BadAlignment { .. } | Error::BadOption { .. } | Error::TokenForeign => {
                PyValueError::new_err(message)
            }
            Error::TokenUsed | Error::NoPython => PyRuntimeError::new_err(message),
        }
    }
}
