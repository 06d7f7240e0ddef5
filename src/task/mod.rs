//! Layer 6: tokio. Starting a task copies the creator's context at the call, as `asyncio.create_task` does.
//!
//! Tokio's own functions copy no context: a task that they start sees the selection of the thread it happens to run on.

mod join_set;

pub use join_set::JoinSet;

use crate::scope::{Context, WithHandler};
use std::future::Future;
use std::hash::{Hash, Hasher};
use tokio::runtime::Handle;
use tokio::task::JoinHandle;

/// The number of the running tokio task, as its [`Id`](tokio::task::Id) prints it; `None` outside of a task.
///
/// For [`Tracked::with_attribution`](crate::strategy::Tracked::with_attribution).
///
/// ```
/// # let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
/// # runtime.block_on(async {
/// let task = tokio::spawn(async { (ctxalloc::task::number(), tokio::task::id()) });
/// let (number, id) = task.await.expect("no panic");
/// assert_eq!(number.map(|number| number.to_string()), Some(id.to_string()));
/// # });
/// assert_eq!(ctxalloc::task::number(), None);
/// ```
#[must_use]
pub fn number() -> Option<u64> {
    /// An `Id` gives its number only to hashers and as text, and text costs an allocation.
    struct Number(u64);
    impl Hasher for Number {
        fn write(&mut self, bytes: &[u8]) {
            self.0 = bytes.iter().rev().fold(0, |number, &byte| number << 8 | u64::from(byte));
        }
        fn write_u64(&mut self, number: u64) {
            self.0 = number;
        }
        fn finish(&self) -> u64 {
            self.0
        }
    }
    let mut number = Number(0);
    tokio::task::try_id()?.hash(&mut number);
    Some(number.finish())
}

/// [`tokio::spawn`] with a copy of the running context.
///
/// # Panics
/// Outside of a tokio runtime, as tokio's own does.
///
/// ```
/// use ctxalloc::{WithHandler, current, handler, task};
/// # let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
/// # runtime.block_on(async {
/// let aligned = handler("aligned64").expect("built in");
/// let seen = async { task::spawn(async { current() }).await }.with_handler(aligned).await;
/// assert_eq!(seen.expect("no panic"), aligned);
/// # });
/// ```
#[track_caller]
pub fn spawn<F>(future: F) -> JoinHandle<F::Output>
where
    F: Future + Send + 'static,
    F::Output: Send + 'static,
{
    tokio::spawn(future.in_current_handler())
}

/// [`Handle::spawn`] with a copy of the running context, for threads outside of the runtime.
#[track_caller]
pub fn spawn_on<F>(future: F, runtime: &Handle) -> JoinHandle<F::Output>
where
    F: Future + Send + 'static,
    F::Output: Send + 'static,
{
    runtime.spawn(future.in_current_handler())
}

/// [`tokio::task::spawn_local`] with a copy of the running context.
///
/// # Panics
/// Outside of a `LocalSet`, as tokio's own does.
#[track_caller]
pub fn spawn_local<F>(future: F) -> JoinHandle<F::Output>
where
    F: Future + 'static,
    F::Output: 'static,
{
    tokio::task::spawn_local(future.in_current_handler())
}

/// [`tokio::task::spawn_blocking`] with a copy of the running context: what `asyncio.to_thread` does.
///
/// # Panics
/// Outside of a tokio runtime, as tokio's own does.
#[track_caller]
pub fn spawn_blocking<F, R>(work: F) -> JoinHandle<R>
where
    F: FnOnce() -> R + Send + 'static,
    R: Send + 'static,
{
    tokio::task::spawn_blocking(Context::copy_current().wrap(work))
}

/// [`Handle::spawn_blocking`] with a copy of the running context.
#[track_caller]
pub fn spawn_blocking_on<F, R>(work: F, runtime: &Handle) -> JoinHandle<R>
where
    F: FnOnce() -> R + Send + 'static,
    R: Send + 'static,
{
    runtime.spawn_blocking(Context::copy_current().wrap(work))
}
