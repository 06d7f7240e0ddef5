//! Crossings two and four: awaiting across the border. Cancelling either side cancels the other.
//!
//! tokio's runtime and the event loop of each task are those of `pyo3-async-runtimes`, so that its users and ours
//! meet; what carries the handler, the cancellation and the answer is here.

mod coroutine;
mod future;

pub use coroutine::{PythonTask, into_future, into_future_with_locals};
pub use future::future_into_py;

use pyo3::prelude::*;
use pyo3::types::PyDict;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Has the event loop call `callback` on its own thread, in a Python context of our choice or in an empty one.
fn call_soon<'py>(
    event_loop: &Bound<'py, PyAny>,
    callback: Bound<'py, PyAny>,
    context: Option<&Bound<'py, PyAny>>,
) -> PyResult<()> {
    let options = PyDict::new(event_loop.py());
    if let Some(context) = context {
        options.set_item("context", context)?;
    }
    event_loop.call_method("call_soon_threadsafe", (callback,), Some(&options)).map(drop)
}

/// Takes what lies in a mutex. No Python runs while one of these is locked, so that none can wait for the other.
fn take<T>(mutex: &Mutex<Option<T>>) -> Option<T> {
    lock(mutex).take()
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
