//! `JoinSet`: tokio's, except that each `spawn` copies the running context.

use crate::scope::{Context, WithHandler};
use std::future::Future;
use std::task::{Context as TaskContext, Poll};
use tokio::runtime::Handle;
use tokio::task::{AbortHandle, Id, JoinError, LocalSet};

/// A set of tasks that each start with a copy of the spawning task's or thread's context.
///
/// Everything else is [`tokio::task::JoinSet`]'s; dropping the set aborts its tasks, each inside its context.
///
/// ```
/// use ctxalloc::{current, handler, scope, task::JoinSet};
/// # let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
/// # runtime.block_on(async {
/// let mut set = JoinSet::new();
/// for name in ["aligned64", "pool"] {
///     scope(handler(name).expect("built in"), || set.spawn(async { current().name() }));
/// }
/// let mut seen = set.join_all().await;
/// seen.sort_unstable();
/// assert_eq!(seen, ["aligned64", "pool"]);
/// # });
/// ```
#[derive(Debug)]
pub struct JoinSet<T> {
    inner: tokio::task::JoinSet<T>,
}

impl<T> JoinSet<T> {
    /// An empty set.
    #[must_use]
    pub fn new() -> Self {
        Self { inner: tokio::task::JoinSet::new() }
    }

    /// How many tasks have not been joined yet.
    #[must_use]
    pub fn len(&self) -> usize {
        self.inner.len()
    }

    /// Whether there is nothing left to join.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.inner.is_empty()
    }
}

impl<T: 'static> JoinSet<T> {
    /// Spawns a task with a copy of the running context. Panics outside of a runtime, as tokio's does.
    #[track_caller]
    pub fn spawn<F>(&mut self, task: F) -> AbortHandle
    where
        F: Future<Output = T> + Send + 'static,
        T: Send,
    {
        self.inner.spawn(task.in_current_handler())
    }

    /// [`spawn`](Self::spawn) on the given runtime.
    #[track_caller]
    pub fn spawn_on<F>(&mut self, task: F, runtime: &Handle) -> AbortHandle
    where
        F: Future<Output = T> + Send + 'static,
        T: Send,
    {
        self.inner.spawn_on(task.in_current_handler(), runtime)
    }

    /// [`spawn`](Self::spawn) for a task that is not `Send`. Panics outside of a `LocalSet`, as tokio's does.
    #[track_caller]
    pub fn spawn_local<F>(&mut self, task: F) -> AbortHandle
    where
        F: Future<Output = T> + 'static,
    {
        self.inner.spawn_local(task.in_current_handler())
    }

    /// [`spawn_local`](Self::spawn_local) on the given `LocalSet`.
    #[track_caller]
    pub fn spawn_local_on<F>(&mut self, task: F, local_set: &LocalSet) -> AbortHandle
    where
        F: Future<Output = T> + 'static,
    {
        self.inner.spawn_local_on(task.in_current_handler(), local_set)
    }

    /// Runs `work` on the blocking pool with a copy of the running context.
    #[track_caller]
    pub fn spawn_blocking<F>(&mut self, work: F) -> AbortHandle
    where
        F: FnOnce() -> T + Send + 'static,
        T: Send,
    {
        self.inner.spawn_blocking(Context::copy_current().wrap(work))
    }

    /// [`spawn_blocking`](Self::spawn_blocking) on the given runtime.
    #[track_caller]
    pub fn spawn_blocking_on<F>(&mut self, work: F, runtime: &Handle) -> AbortHandle
    where
        F: FnOnce() -> T + Send + 'static,
        T: Send,
    {
        self.inner.spawn_blocking_on(Context::copy_current().wrap(work), runtime)
    }

    /// Waits for the next task to finish; `None` once the set is empty. Cancel safe.
    pub async fn join_next(&mut self) -> Option<Result<T, JoinError>> {
        self.inner.join_next().await
    }

    /// [`join_next`](Self::join_next) with the task's id.
    pub async fn join_next_with_id(&mut self) -> Option<Result<(Id, T), JoinError>> {
        self.inner.join_next_with_id().await
    }

    /// The result of a finished task, if there is one now.
    pub fn try_join_next(&mut self) -> Option<Result<T, JoinError>> {
        self.inner.try_join_next()
    }

    /// [`try_join_next`](Self::try_join_next) with the task's id.
    pub fn try_join_next_with_id(&mut self) -> Option<Result<(Id, T), JoinError>> {
        self.inner.try_join_next_with_id()
    }

    /// Polls for a finished task.
    pub fn poll_join_next(&mut self, cx: &mut TaskContext<'_>) -> Poll<Option<Result<T, JoinError>>> {
        self.inner.poll_join_next(cx)
    }

    /// Waits for all of them, in the order in which they finish. Panics if one of them did, as tokio's does.
    pub async fn join_all(self) -> Vec<T> {
        self.inner.join_all().await
    }

    /// Aborts all of them. Their results must still be joined.
    pub fn abort_all(&mut self) {
        self.inner.abort_all();
    }

    /// Aborts all of them and waits until they are gone.
    pub async fn shutdown(&mut self) {
        self.inner.shutdown().await;
    }

    /// Lets all of them run on without the set.
    pub fn detach_all(&mut self) {
        self.inner.detach_all();
    }
}

impl<T> Default for JoinSet<T> {
    fn default() -> Self {
        Self::new()
    }
}

impl<T, F> FromIterator<F> for JoinSet<T>
where
    F: Future<Output = T> + Send + 'static,
    T: Send + 'static,
{
    /// Spawns each future with a copy of the running context.
    fn from_iter<I: IntoIterator<Item = F>>(futures: I) -> Self {
        let mut set = Self::new();
        for future in futures {
            set.spawn(future);
        }
        set
    }
}
