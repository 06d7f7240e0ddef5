//! Ways to run a future: by hand on this thread, by hand on a new thread for each poll, and on tokio's runtimes.

use ctxalloc::WithHandler;
use std::future::Future;
use std::pin::{Pin, pin};
use std::task::{Context, Poll, Waker};
use std::thread::{self, ThreadId};
use tokio::runtime::Builder;
use tokio::task::LocalSet;

/// Pending so many times, then done. Whoever polls it must come again by himself (it wakes at once).
pub(crate) struct Yield(pub(crate) usize);

impl Future for Yield {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        if self.0 == 0 {
            return Poll::Ready(());
        }
        self.0 -= 1;
        cx.waker().wake_by_ref();
        Poll::Pending
    }
}

/// One poll, here and now.
pub(crate) fn poll_once<F: Future + ?Sized>(future: Pin<&mut F>) -> Poll<F::Output> {
    future.poll(&mut Context::from_waker(Waker::noop()))
}

/// Polls until it is done; for futures that wake themselves.
pub(crate) fn block_on<F: Future>(future: F) -> F::Output {
    let mut future = pin!(future);
    loop {
        if let Poll::Ready(output) = poll_once(future.as_mut()) {
            return output;
        }
    }
}

/// Runs a future with each poll on a thread that never polled it before. Returns its output and those threads.
pub(crate) fn migrate<F>(future: F) -> (F::Output, Vec<ThreadId>)
where
    F: Future + Send + 'static,
    F::Output: Send + 'static,
{
    let mut future = Box::pin(future);
    let mut threads = Vec::new();
    loop {
        let poll = thread::spawn(move || {
            let poll = poll_once(future.as_mut());
            (future, poll, thread::current().id())
        });
        let (returned, poll, id) = poll.join().expect("the poll panicked");
        assert!(!threads.contains(&id), "the same thread polled twice");
        threads.push(id);
        future = returned;
        if let Poll::Ready(output) = poll {
            return (output, threads);
        }
    }
}

/// Runs a test's future as a task of tokio's current-thread runtime, of its multi-thread runtime (on a worker), and of
/// a `LocalSet`. The task has a context of its own, in which nothing was selected.
pub(crate) fn on_every_runtime<F, W>(work: W)
where
    F: Future<Output = ()> + Send + 'static,
    W: Fn() -> F,
{
    let own = |future: F| future.in_context(ctxalloc::Context::new());
    let current_thread = || Builder::new_current_thread().build().expect("a runtime");
    let runtime = current_thread();
    runtime.block_on(runtime.spawn(own(work()))).expect("failed on the current-thread runtime");
    let runtime = Builder::new_multi_thread().worker_threads(2).build().expect("a runtime");
    runtime.block_on(runtime.spawn(own(work()))).expect("failed on the multi-thread runtime");
    let local = LocalSet::new();
    let task = local.spawn_local(own(work()));
    current_thread().block_on(local.run_until(task)).expect("failed on a LocalSet");
}
