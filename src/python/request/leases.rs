//! How many slots there may be, and what becomes of requests past it: `ctxalloc.leases`.

use crate::handler::lease;
use pyo3::exceptions::{PyRuntimeWarning, PyTypeError, PyValueError};
use pyo3::prelude::*;
use std::ffi::CString;
use std::sync::atomic::{AtomicBool, Ordering};

/// Whether the ceiling that is set was told of.
static WARNED: AtomicBool = AtomicBool::new(false);

/// How many slots there are, and how many requests there were.
#[pyclass(frozen, eq, hash, get_all, name = "LeaseMetrics", module = "ctxalloc.leases")]
#[derive(PartialEq, Eq, Hash)]
pub(in crate::python) struct LeaseMetrics {
    /// Slots in the table.
    slots: usize,
    /// Those that the next requests will get.
    free: usize,
    /// How many requests there were.
    requests: u64,
    /// How many of them were past the ceiling, and were served from the shared pool.
    overflowed: u64,
}

#[pymethods]
impl LeaseMetrics {
    fn __repr__(&self) -> String {
        let Self { slots, free, requests, overflowed } = self;
        format!("LeaseMetrics(slots={slots}, free={free}, requests={requests}, overflowed={overflowed})")
    }
}

/// How many slots there are, and how many requests there were.
#[pyfunction]
pub(in crate::python) fn metrics() -> LeaseMetrics {
    let now = lease::metrics();
    LeaseMetrics { slots: now.slots, free: now.free, requests: now.requests, overflowed: now.overflowed }
}

/// How many slots there may be; requests past it are served from the shared pool.
#[pyfunction]
pub(in crate::python) fn ceiling() -> usize {
    lease::ceiling()
}

/// Sets how many slots there may be: 4096 unless you say otherwise. Slots that are there stay.
///
/// The first request past it warns, once for each time that this is called.
#[pyfunction]
#[pyo3(signature = (slots, /))]
pub(in crate::python) fn set_ceiling(slots: &Bound<'_, PyAny>) -> PyResult<()> {
    let most = slots.extract::<usize>().map_err(|error| {
        let shown = slots.repr().map_or_else(|_| "?".to_owned(), |shown| shown.to_string());
        let message = format!("set_ceiling({shown}): give a number of slots, an int from 0 up");
        let wrong_type = error.is_instance_of::<PyTypeError>(slots.py());
        if wrong_type { PyTypeError::new_err(message) } else { PyValueError::new_err(message) }
    })?;
    lease::set_ceiling(most);
    WARNED.store(false, Ordering::Relaxed);
    Ok(())
}

/// Says that a request is past the ceiling, the first time only: `metrics` counts them all.
#[cold]
pub(super) fn warn(py: Python<'_>) -> PyResult<()> {
    if WARNED.swap(true, Ordering::Relaxed) {
        return Ok(());
    }
    let text = format!(
        "all {} slots for requests are in use: this one and others after it are served from the shared pool, uncounted \
         and unlimited; raise the ceiling with ctxalloc.leases.set_ceiling(), or find out which arrays and tasks \
         outlive their requests (this is said once; ctxalloc.leases.metrics() counts)",
        lease::ceiling()
    );
    PyErr::warn(py, &py.get_type::<PyRuntimeWarning>(), &CString::new(text).unwrap_or_default(), 1)
}
