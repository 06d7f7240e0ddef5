//! From [`Error`] to exceptions. The one place: out of memory is a MemoryError, misuse a ValueError or a RuntimeError.

use crate::error::Error;
use pyo3::exceptions::{PyMemoryError, PyRuntimeError, PyValueError};
use pyo3::{PyErr, create_exception};

create_exception!(
    ctxalloc,
    RegistrationError,
    PyValueError,
    "A handler could not be entered into the table: its name or its struct is not as it must be."
);
create_exception!(
    ctxalloc,
    UnknownHandlerError,
    PyValueError,
    "No handler has that name. The message lists those that are registered."
);

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
