//! The settings of the process, from Python: what is kept, for how long, and to give it back now.
#![allow(unsafe_code, reason = "a function that CPython calls later")]

use super::exit;
use super::strategies::Options;
use crate::handler::{Handler, handlers};
use crate::settings::{self, Settings, check_environment};
use crate::strategy::{restart_decay, trim_pools};
use pyo3::exceptions::PyImportError;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use std::ffi::{c_int, c_void};
use std::ptr::null_mut;

/// Sets what the built-in pools, and all others that are made without options, keep and for how long::
///
///     ctxalloc.configure(decay_seconds=2, warm_bytes=256 * ctxalloc.MiB)
///
/// ``decay_seconds``: how long memory that nobody uses is kept for its next user; ten by default.
/// ``warm_bytes``: how much memory of large arrays is kept at most; an eighth of the machine's memory by default. What is
/// None stays as it is: as the environment (``CTXALLOC_DECAY_SECONDS``, ``CTXALLOC_WARM_BYTES``), an earlier call or the
/// default has it.
///
/// RuntimeError: one of these pools has handed out memory already. TypeError, ValueError: what cannot be; nothing is set
/// then.
#[pyfunction]
#[pyo3(signature = (*, decay_seconds=None, warm_bytes=None))]
pub(super) fn configure(
    py: Python<'_>,
    decay_seconds: Option<Bound<'_, PyAny>>,
    warm_bytes: Option<Bound<'_, PyAny>>,
) -> PyResult<()> {
    let given = PyDict::new(py);
    given.set_item("decay_seconds", decay_seconds)?;
    given.set_item("warm_bytes", warm_bytes)?;
    let options = Options::new("configure", &given);
    let wanted = Settings { decay: options.maybe_seconds("decay_seconds")?, warm_bytes: options.maybe_warm_bytes()? };
    Ok(settings::configure(wanted)?)
}

/// Gives back what all pools, arenas and handlers keep for later; returns how many bytes went, as far as is known.
///
/// Other threads keep what they have at hand, 2 MiB a thread at most.
#[pyfunction]
pub(super) fn trim(py: Python<'_>) -> usize {
    py.detach(|| handlers().map(Handler::trim).sum::<usize>() + trim_pools())
}

/// At import: whether the environment's settings can be used, and what `fork` does with the thread that gives memory back.
pub(super) fn begin() -> PyResult<()> {
    check_environment().map_err(|error| PyImportError::new_err(error.to_string()))?;
    restart_decay::by(after_fork);
    Ok(())
}

/// CPython counts the threads of the parent when `fork` returned, and warns where there are several (since 3.12): the
/// thread starts again a little later, when the main thread is back in Python.
fn after_fork() {
    extern "C" fn later(_: *mut c_void) -> c_int {
        restart_decay::now();
        0
    }
    // SAFETY: may be called on any thread, with or without the GIL, while there is an interpreter.
    if exit::is_closed() || unsafe { pyo3::ffi::Py_AddPendingCall(Some(later), null_mut()) } != 0 {
        restart_decay::now();
    }
}
