//! How a Rust thread hands work to an event loop, and how the two sides share a value.

use crate::python::interned::intern;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Makes the event loop call `callback` on its own thread: in `context`, or in a copy of this thread's.
pub(super) fn call_soon<'py>(
    event_loop: &Bound<'py, PyAny>,
    callback: Bound<'py, PyAny>,
    context: Option<&Bound<'py, PyAny>>,
) -> PyResult<()> {
    let options = PyDict::new(event_loop.py());
    if let Some(context) = context {
        options.set_item("context", context)?;
    }
    event_loop.call_method(intern!(event_loop.py(), "call_soon_threadsafe"), (callback,), Some(&options)).map(drop)
}

/// Takes the value out of a mutex.
pub(super) fn take<T>(mutex: &Mutex<Option<T>>) -> Option<T> {
    lock(mutex).take()
}

/// No Python code runs while one of these is locked, so no thread waits for the lock and the GIL at once.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
