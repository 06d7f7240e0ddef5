//! `ResponseBody`: the body of an answer, polled and dropped inside of its request, which ends with it.

use super::problem;
use super::serving::{Outcome, Serving};
use crate::scope::Context;
use crate::survived::survived;
use http_body::{Body, Frame, SizeHint};
use pin_project::{pin_project, pinned_drop};
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::pin::Pin;
use std::task::{Context as TaskContext, Poll, ready};

/// The body of an answer. Its request ends when the body is at its end or has given its trailers, returns an error,
/// panics or is dropped.
///
/// A server that knows the length of a body takes all of its bytes and does not ask for more; and it does not ask at
/// all for the body of an answer to HEAD. Both are [completed](Outcome::Completed).
#[pin_project(PinnedDrop)]
pub struct ResponseBody<B> {
    /// `None` at its end, and for an answer of the layer's own.
    #[pin]
    inner: Option<B>,
    /// The answer of the layer's own, until it is taken.
    own: Option<&'static str>,
    /// Nothing: there is no account.
    inside: Option<Inside>,
}

/// What a body has of its request.
struct Inside {
    serving: Serving,
    context: Context,
    left: Left,
}

/// What the server will still ask for.
enum Left {
    /// Nobody knows how much.
    Unknown,
    /// So many bytes, by the body's own account or the header `content-length`.
    Bytes(u64),
    /// Nothing, whatever the body says: the answer to HEAD, 204, 304, or a change of protocols.
    Nothing,
}

impl Inside {
    /// It is dropped before its end: was that all?
    fn drop_early(self) {
        let is_whole = matches!(self.left, Left::Nothing | Left::Bytes(0));
        let outcome = match self.serving.outcome {
            Outcome::Refused => Outcome::Refused,
            _ if is_whole => Outcome::Completed,
            _ => Outcome::Dropped,
        };
        self.serving.end(outcome);
    }
}

impl<B: Body> ResponseBody<B> {
    /// The service's own body. `length`: what the header says. `is_asked_for`: whether the server will look at it at
    /// all.
    pub(super) fn new(
        inner: B,
        serving: Serving,
        mut context: Context,
        length: Option<u64>,
        is_asked_for: bool,
    ) -> Self {
        let (length, is_over) = context.run(|| (inner.size_hint().exact().or(length), inner.is_end_stream()));
        let left = match length {
            _ if !is_asked_for => Left::Nothing,
            Some(length) => Left::Bytes(length),
            None => Left::Unknown,
        };
        if is_over {
            // Nobody polls it. Dropped before the end, so that nothing of it counts as escaped.
            context.run(|| drop(inner));
            finish(Inside { serving, context, left }, Outcome::Completed);
            return Self { inner: None, own: None, inside: None };
        }
        Self { inner: Some(inner), own: None, inside: Some(Inside { serving, context, left }) }
    }

    /// As the service returned it, for a request without an account.
    pub(super) fn plain(inner: B) -> Self {
        Self { inner: Some(inner), own: None, inside: None }
    }

    /// An answer of the layer's own.
    pub(super) fn own(document: &'static str) -> Self {
        Self { inner: None, own: Some(document).filter(|document| !document.is_empty()), inside: None }
    }
}

/// Ends the request of a body that is over.
fn finish(inside: Inside, outcome: Outcome) {
    let refused = inside.serving.outcome == Outcome::Refused && outcome == Outcome::Completed;
    inside.serving.end(if refused { Outcome::Refused } else { outcome });
}

impl<B> Body for ResponseBody<B>
where
    B: Body,
    B::Data: From<&'static [u8]>,
{
    type Data = B::Data;
    type Error = B::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut TaskContext<'_>,
    ) -> Poll<Option<Result<Frame<Self::Data>, Self::Error>>> {
        let mut this = self.project();
        if let Some(own) = this.own.take() {
            return Poll::Ready(Some(Ok(Frame::data(own.as_bytes().into()))));
        }
        let Some(inner) = this.inner.as_mut().as_pin_mut() else { return Poll::Ready(None) };
        let Some(inside) = this.inside else { return inner.poll_frame(cx) };
        let _entered = inside.serving.request().entered();
        let polled = catch_unwind(AssertUnwindSafe(|| inside.context.run(|| inner.poll_frame(cx))));
        drop(_entered);
        let frame = match polled {
            Ok(polled) => ready!(polled),
            Err(panic) => {
                let Inside { serving, mut context, .. } = this.inside.take().expect("looked at above");
                // A second panic, of what is left of the body, is not worth more than the first.
                survived(|| context.run(|| this.inner.set(None)));
                serving.end(Outcome::Panicked);
                resume_unwind(panic)
            }
        };
        let outcome = match &frame {
            Some(Ok(frame)) => {
                if let (Left::Bytes(left), Some(data)) = (&mut inside.left, frame.data_ref()) {
                    *left = left.saturating_sub(bytes::Buf::remaining(data) as u64);
                }
                // A body that says that it is over is not polled again, and neither is one after its trailers.
                let is_over =
                    frame.is_trailers() || this.inner.as_ref().as_pin_ref().is_some_and(|inner| inner.is_end_stream());
                let is_refused = inside.serving.is_grpc
                    && frame.trailers_ref().is_some_and(problem::is_exhausted)
                    && inside.serving.is_refused();
                is_over.then_some(if is_refused { Outcome::Refused } else { Outcome::Completed })
            }
            Some(Err(_)) => Some(Outcome::Failed),
            None => Some(Outcome::Completed),
        };
        if let Some(outcome) = outcome
            && let Some(mut inside) = this.inside.take()
        {
            inside.context.run(|| this.inner.set(None)); // before the end, so that nothing of it counts as escaped
            finish(inside, outcome);
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.own.is_none() && self.inner.as_ref().is_none_or(Body::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        match (&self.own, &self.inner) {
            (Some(own), _) => SizeHint::with_exact(own.len() as u64),
            (None, Some(inner)) => inner.size_hint(),
            (None, None) => SizeHint::with_exact(0),
        }
    }
}

#[pinned_drop]
impl<B> PinnedDrop for ResponseBody<B> {
    fn drop(self: Pin<&mut Self>) {
        let mut this = self.project();
        if let Some(mut inside) = this.inside.take() {
            inside.context.run(|| this.inner.set(None));
            inside.drop_early();
        }
    }
}

impl<B> fmt::Debug for ResponseBody<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let serving = self.inside.as_ref().map(|inside| &inside.serving);
        f.debug_struct("ResponseBody").field("serving", &serving).finish_non_exhaustive()
    }
}
