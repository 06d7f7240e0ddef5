//! The words of an asynchronous body that suspend, or that are done in another way there.

use crate::called::{self, Cleanup};
use crate::hold::Stretch;
use crate::line::of_task;
use crate::program::Word;
use crate::run::{Body, Frame, Mode, Owning};
use crate::start;
use crate::stream;
use crate::trace::{numbered, outcome};
use ctxalloc::WithHandler;
use futures::FutureExt;
use futures::future::{Either, join, select};
use std::future::poll_fn;
use std::panic::AssertUnwindSafe;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{LazyLock, mpsc};
use std::task::{Poll, Waker};
use std::thread;

/// `kind` of `spawn`, and `flavour` of `scoped`.
pub(crate) const CARRYING: i64 = 0;
pub(crate) const PLAIN: i64 = 1;
pub(crate) const IN_CONTEXT: i64 = 2;
pub(crate) const WITH_HANDLER: i64 = 3;

/// One body of a node, begun in the trace.
pub(crate) fn inner(frame: &Frame, node: usize, body: usize) -> Body {
    let frame = frame.clone();
    Box::pin(async move {
        frame.begin(node);
        run(&frame, node, body).await;
    })
}

/// One body of a node.
pub(crate) fn run(frame: &Frame, node: usize, body: usize) -> Body {
    let frame = frame.clone();
    Box::pin(async move {
        for &step in &frame.node(node).bodies[body] {
            call(&frame, step).await;
        }
    })
}

async fn call(frame: &Frame, node: usize) {
    match frame.node(node).word {
        Word::With => {
            let [flavour, handler] = frame.number(node);
            let stretch = Stretch::enter(&frame.line, node, flavour, handler, frame.pinned);
            inner(frame, node, 0).await;
            frame.end(node, stretch.leave());
        }
        Word::Try => {
            let cleanup = Cleanup { frame: frame.clone(), node, is_due: true };
            inner(frame, node, 0).await;
            drop(cleanup);
            frame.end(node, outcome::OK);
        }
        Word::Catch => {
            let result = AssertUnwindSafe(inner(frame, node, 0)).catch_unwind().await;
            frame.end(node, result.map_or_else(|payload| crate::line::of_panic(&*payload), |()| outcome::OK));
        }
        Word::Work => {
            let (job, worker) = start::work(frame, node);
            let outcome = of_task(job.handle.await);
            start::take_back_worker(frame, node, &job.line, worker);
            frame.end(node, outcome);
        }
        Word::Join => {
            let [label] = frame.number(node);
            let child = frame.line.store().children.remove(&label);
            let Some(child) = child else { return frame.end(node, outcome::NOTHING_THERE) };
            child.line.set_free();
            let line = child.line.clone();
            let outcome = child.outcome().await;
            frame.line.take_back(&line);
            frame.end(node, outcome);
        }
        Word::Gate => {
            frame.begin(node);
            frame.line.pass_gate().await;
            frame.end(node, outcome::OK);
        }
        Word::Open => open(frame, node).await,
        Word::Cancel => cancel(frame, node).await,
        Word::Yield => {
            frame.begin(node);
            yield_now(frame).await;
            frame.end(node, outcome::OK);
        }
        Word::Scoped => scoped(frame, node).await,
        Word::Both => {
            frame.begin(node);
            let by_hand = frame.by_hand();
            join(run(&by_hand, node, 0), run(&by_hand, node, 1)).await;
            frame.end(node, outcome::OK);
        }
        Word::Race => {
            frame.begin(node);
            let by_hand = frame.by_hand();
            let outcome = match select(run(&by_hand, node, 0), run(&by_hand, node, 1)).await {
                Either::Left(((), second)) => {
                    drop(second);
                    outcome::FIRST
                }
                Either::Right(((), first)) => {
                    drop(first);
                    outcome::SECOND
                }
            };
            frame.end(node, outcome);
        }
        Word::Stream => stream::stream(frame, node).await,
        Word::Emit => stream::emit(frame, node).await,
        Word::Next => stream::next(frame, node).await,
        _ => called::call(frame, node),
    }
}

async fn open(frame: &Frame, node: usize) {
    let [label] = frame.number(node);
    let line = {
        let store = frame.line.store();
        store.children.get(&label).filter(|child| child.is_task()).map(|child| child.line.clone())
    };
    let outcome = match line {
        None => outcome::NOTHING_THERE,
        Some(line) if line.is_at_gate().await => {
            line.open();
            outcome::OK
        }
        Some(_) => outcome::ENDED,
    };
    frame.end(node, outcome);
}

async fn cancel(frame: &Frame, node: usize) {
    let [label, flavour] = frame.number(node);
    let child = {
        let children = &mut frame.line.store().children;
        let is_task = children.get(&label).is_some_and(crate::line::Child::is_task);
        if is_task { children.remove(&label) } else { None }
    };
    let Some(child) = child else { return frame.end(node, outcome::NOTHING_THERE) };
    let line = child.line.clone();
    let outcome = if line.is_at_gate().await { child.cancel(flavour).await } else { child.outcome().await };
    frame.line.take_back(&line);
    frame.end(node, outcome);
}

async fn scoped(frame: &Frame, node: usize) {
    let [flavour, with] = frame.number(node);
    let body = Owning::new(frame, node, None);
    match flavour {
        IN_CONTEXT => {
            let context = frame.line.store().contexts.remove(&with);
            let Some(context) = context else { return frame.end(node, outcome::NOTHING_THERE) };
            body.in_context(context).await;
        }
        WITH_HANDLER => body.with_handler(numbered(with)).await,
        _ => body.in_current_handler().await,
    }
    frame.end(node, outcome::OK);
}

/// Lets others run. Where tasks may migrate, some of them are woken from outside: then any worker may take them.
async fn yield_now(frame: &Frame) {
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
