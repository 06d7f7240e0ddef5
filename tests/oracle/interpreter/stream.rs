//! `stream`: a producer that suspends at every `emit`, with a context of its own, and `next`, which asks it.

use crate::line::Line;
use crate::run::{self, Frame, Owning};
use crate::suspend::suspend_once;
use crate::trace::{numbered, outcome};
use crate::words;
use ctxalloc::{Scoped, WithHandler};
use futures::{FutureExt, Stream};
use std::future::poll_fn;
use std::panic::AssertUnwindSafe;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context as TaskContext, Poll};

/// The stream as its consumer sees it; empty once it ended or raised.
pub(crate) type Items = Arc<Mutex<Option<Pin<Box<Scoped<Producer>>>>>>;

/// A body that becomes a stream.
pub(crate) struct Producer {
    body: Owning,
    emitted: Arc<AtomicBool>,
}

impl Stream for Producer {
    type Item = ();

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut TaskContext<'_>) -> Poll<Option<()>> {
        if self.body.poll_unpin(cx).is_ready() {
            return Poll::Ready(None);
        }
        // Relaxed: set by the poll above, on this thread.
        if self.emitted.swap(false, Ordering::Relaxed) { Poll::Ready(Some(())) } else { Poll::Pending }
    }
}

pub(crate) async fn stream(frame: &Frame, node: usize) -> u8 {
    let [handler] = frame.number(node);
    let emitted = Arc::new(AtomicBool::new(false));
    let line = Line::new(true);
    let inner = Frame { line, emitted: Some(emitted.clone()), ..frame.by_hand() };
    let body = run::line(&inner, node);
    let items: Items = Arc::new(Mutex::new(Some(Box::pin(Producer { body, emitted }.with_handler(numbered(handler))))));
    let frame = Frame { items: Some(items.clone()), ..frame.clone() };
    words::run(&frame, node, 2).await;
    let ended = items.lock().unwrap_or_else(PoisonError::into_inner).take();
    drop(ended);
    outcome::OK
}

pub(crate) async fn emit(frame: &Frame, node: usize) -> u8 {
    frame.begin(node);
    let emitted = frame.emitted.as_ref().expect("language.py lets producers only emit");
    emitted.store(true, Ordering::Relaxed); // read by the poll that called this one
    suspend_once(false).await;
    outcome::OK
}

pub(crate) async fn next(frame: &Frame, node: usize) -> u8 {
    frame.begin(node);
    let items = frame.items.as_ref().expect("language.py lets consumers only ask");
    let ask = poll_fn(|cx| match &mut *items.lock().unwrap_or_else(PoisonError::into_inner) {
        Some(stream) => stream.as_mut().poll_next(cx),
        None => Poll::Ready(None),
    });
    let item = match AssertUnwindSafe(ask).catch_unwind().await {
        Ok(item) => item,
        Err(payload) => {
            let raised = items.lock().unwrap_or_else(PoisonError::into_inner).take();
            drop(raised);
            std::panic::resume_unwind(payload)
        }
    };
    if item.is_some() { outcome::OK } else { outcome::ENDED }
}
