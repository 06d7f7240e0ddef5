//! Threads that begin with a copy of the context of the thread or task that starts them. Layer 6, beside `task`.

use crate::scope::Context;
use std::thread::JoinHandle;

/// [`std::thread::spawn`] with a copy of the running context, taken at the call.
///
/// A thread from `std` starts with the default handler instead, as a plain `threading.Thread` does in Python.
/// For a `std::thread::Builder`, a scoped thread or a pool, wrap the closure:
/// `Context::copy_current().wrap(work)`.
///
/// # Panics
/// If the system cannot start a thread, as [`std::thread::spawn`] does.
///
/// ```
/// use ctxalloc::{current, handler, scope, thread};
///
/// let aligned = handler("aligned64").expect("built in");
/// let child = scope(aligned, || thread::spawn(current));
/// assert_eq!(child.join().expect("no panic"), aligned);
/// ```
pub fn spawn<F, T>(work: F) -> JoinHandle<T>
where
    F: FnOnce() -> T + Send + 'static,
    T: Send + 'static,
{
    std::thread::spawn(Context::copy_current().wrap(work))
}
