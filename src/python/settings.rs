//! The settings of the process, from Python: how much memory pools keep, for how long, and a call to give it back now.
#![allow(unsafe_code, reason = "a function that CPython calls later")]

use super::exit;
use super::options::Options;
use crate::handler::{Handler, handlers};
use crate::settings::{self, Settings, check_environment};
use crate::strategy::{restart_decay, trim_pools};
use pyo3::exceptions::PyImportError;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use std::ffi::{c_int, c_void};
use std::ptr::null_mut;

/// Sets how much memory pools keep for later, and for how long: the built-in pools, and all that are made without
/// options::
///
///     ctxalloc.configure(decay_seconds=2, warm_bytes=256 * ctxalloc.MiB)
///
/// ``decay_seconds``: how long memory that nobody uses is kept; ten seconds by default. ``warm_bytes``: how many bytes
/// of large arrays are kept at most; an eighth of the machine's memory by default. None leaves a setting as the
/// environment (``CTXALLOC_DECAY_SECONDS``, ``CTXALLOC_WARM_BYTES``), an earlier call or the default has set it.
///
/// RuntimeError: one of these pools has handed out memory already. TypeError, ValueError: a value is invalid; then
/// nothing is set.
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
    let options = Options::new("configure", Some(&given));
    let wanted = Settings { decay: options.maybe_seconds("decay_seconds")?, warm_bytes: options.maybe_warm_bytes()? };
    Ok(settings::configure(wanted)?)
}

/// Gives the memory that all pools, arenas, handlers and threads' caches keep for later back to the system. Returns how
/// many bytes that was, as far as is known.
///
/// On macOS, Windows and in sandboxes without `membarrier` the caches of other threads stay: at most 2 MiB for each
/// thread.
#[pyfunction]
pub(super) fn trim(py: Python<'_>) -> usize {
    py.detach(|| handlers().map(Handler::trim).sum::<usize>() + trim_pools())
}

/// Checks the environment's settings at import, and says how the thread that gives memory back starts again after
/// `fork`.
pub(super) fn begin() -> PyResult<()> {
    check_environment().map_err(|error| PyImportError::new_err(error.to_string()))?;
    restart_decay::by(after_fork);
    Ok(())
}

/// Starts the thread that gives memory back a little after `fork`, when the main thread runs Python code again. CPython
/// (since 3.12) counts the parent's threads right after `fork`, and warns if there are several.
fn after_fork() {
    extern "C" fn later(_: *mut c_void) -> c_int {
        restart_decay::now();
        0
    }
    // SAFETY: `Py_AddPendingCall` may be called on any thread, with or without the GIL, while there is an interpreter:
    // the gate is closed before it is gone. `later` may be called at any time.
    if exit::is_closed() || unsafe { pyo3::ffi::Py_AddPendingCall(Some(later), null_mut()) } != 0 {
        restart_decay::now();
    }
}
