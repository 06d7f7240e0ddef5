//! Where there is no `request(whole=True)`: no whole request is ever entered, so nobody calls these.

use crate::handler::Handler;
use crate::handler::requests::Begun;
use pyo3::exceptions::PyMemoryError;
use pyo3::prelude::*;

/// Nothing is set for anybody.
#[derive(Debug, Clone, Copy)]
pub(super) struct Guard;

impl Guard {
    #[allow(clippy::unnecessary_wraps, reason = "as where there is one")]
    pub(super) fn of_block(_py: Python<'_>, _handler: Handler) -> PyResult<Option<Self>> {
        Ok(None)
    }

    pub(super) fn begin(_handler: Handler) -> Option<Self> {
        None
    }

    pub(super) fn owe_what_is_untold(self) {}

    pub(super) fn end(self, _py: Python<'_>) {}
}

pub(super) fn begins(_begun: &Begun) {}

/// Never raised here.
#[pyfunction]
#[pyo3(name = "_whole_overdraft")]
pub(super) fn overdraft(py: Python<'_>) -> Py<PyAny> {
    PyMemoryError::new_err("no whole request is counted here").into_value(py).into_any()
}
