//! Crossings two and four: awaiting a Rust future from Python, and a Python awaitable from Rust. Cancelling either side
//! cancels the other.
//!
//! tokio's runtime and the event loop of each task are those of `pyo3-async-runtimes`, so that its users and ours share
//! them. What carries the handler, the cancellation and the result is here.

mod coroutine;
mod event_loop;
mod future;
#[cfg(ctxalloc_whole)]
pub(super) mod losing;

/// See `module.rs`.
pub(super) fn make_types(py: pyo3::Python<'_>) {
    coroutine::make_types(py);
    future::make_types(py);
}

pub use coroutine::{PythonTask, into_future, into_future_with_locals};
pub use future::future_into_py;
