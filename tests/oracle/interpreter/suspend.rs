//! How a future suspends itself, and how a thread waits for one.

use crate::run::{Frame, Mode};
use std::future::poll_fn;
use std::pin::pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, mpsc};
use std::task::{Context as TaskContext, Poll, Wake, Waker};
use std::thread;

/// Lets others run. Where tasks may migrate, some of them are woken from outside: then any worker may take them.
pub(crate) async fn yield_now(frame: &Frame) {
    if frame.by_hand {
        return suspend_once(true).await;
    }
    let is_multi = frame.hub.as_ref().is_some_and(|hub| hub.mode == Mode::Multi);
    let before = thread::current().id();
    for _ in 0..=frame.random(2) {
        if is_multi && frame.random(2) == 0 {
            woken_from_outside().await;
        } else {
            tokio::task::yield_now().await;
        }
    }
    if is_multi {
        // Relaxed: two counts for people.
        SUSPENDED.fetch_add(1, Ordering::Relaxed);
        MIGRATED.fetch_add(u64::from(thread::current().id() != before), Ordering::Relaxed);
    }
}

/// One `Pending`, until a thread outside of the runtime wakes it.
async fn woken_from_outside() {
    static ALARM: LazyLock<mpsc::Sender<Waker>> = LazyLock::new(|| {
        let (sender, wakers) = mpsc::channel();
        thread::spawn(move || wakers.into_iter().for_each(Waker::wake));
        sender
    });
    let mut suspended = false;
    poll_fn(|cx| {
        if std::mem::replace(&mut suspended, true) {
            return Poll::Ready(());
        }
        ALARM.send(cx.waker().clone()).expect("the thread lives for ever");
        Poll::Pending
    })
    .await;
}

static SUSPENDED: AtomicU64 = AtomicU64::new(0);
static MIGRATED: AtomicU64 = AtomicU64::new(0);

/// How many yields there were on the multi_thread runtime since the last question, and how many moved their task.
pub(crate) fn take_migrations() -> (u64, u64) {
    (SUSPENDED.swap(0, Ordering::Relaxed), MIGRATED.swap(0, Ordering::Relaxed))
}

/// One `Pending`, with or without a wake-up.
pub(crate) async fn suspend_once(wakes: bool) {
    let mut suspended = false;
    poll_fn(|cx| {
        if std::mem::replace(&mut suspended, true) {
            return Poll::Ready(());
        }
        if wakes {
            cx.waker().wake_by_ref();
        }
        Poll::Pending
    })
    .await;
}

/// Waits for a future on a thread that may block.
pub(crate) fn block_on<R>(future: impl Future<Output = R>) -> R {
    struct Unpark(thread::Thread);
    impl Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }
    let waker = Waker::from(Arc::new(Unpark(thread::current())));
    let mut future = pin!(future);
    loop {
        match future.as_mut().poll(&mut TaskContext::from_waker(&waker)) {
            Poll::Ready(result) => return result,
            Poll::Pending => thread::park(),
        }
    }
}
