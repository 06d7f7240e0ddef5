//! `ResponseFuture`: the service's future, polled and dropped inside of its request, which goes on to the answer's
//! body.

use super::body::ResponseBody;
use super::problem;
use super::serving::{Outcome, Serving};
use crate::answer::Answer;
use crate::error::Error;
use crate::scope::Context;
use crate::survived::survived;
use http::header::CONTENT_LENGTH;
use http::{Response, StatusCode};
use http_body::Body;
use pin_project::{pin_project, pinned_drop};
use std::fmt;
use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::pin::Pin;
use std::task::{Context as TaskContext, Poll, ready};

/// The answer of a [`RequestService`](super::RequestService).
#[pin_project(PinnedDrop)]
#[must_use = "it does nothing until it is polled"]
pub struct ResponseFuture<F> {
    /// `None` once it is complete.
    #[pin]
    inner: Option<F>,
    inside: Inside,
}

enum Inside {
    /// A request with an account.
    Account(Serving, Context, IsHead),
    /// None was asked for, or the future is complete.
    Nothing,
    /// None could be begun. The service is not called.
    Unbegun(Option<Unbegun>),
}

/// The answer to a request that could not be begun: a refusal where its reservation has no room, else 500.
pub(super) struct Unbegun {
    pub(super) answer: Option<Answer>,
    pub(super) is_grpc: bool,
    pub(super) is_head: bool,
    pub(super) retry_after_seconds: u32,
}

/// Whether the answer's body is never looked at.
type IsHead = bool;

impl<F> ResponseFuture<F> {
    pub(super) fn new(inner: F, serving: Serving, context: Context, is_head: IsHead) -> Self {
        Self { inner: Some(inner), inside: Inside::Account(serving, context, is_head) }
    }

    pub(super) fn plain(inner: F) -> Self {
        Self { inner: Some(inner), inside: Inside::Nothing }
    }

    pub(super) fn unbegun(unbegun: Unbegun) -> Self {
        Self { inner: None, inside: Inside::Unbegun(Some(unbegun)) }
    }
}

/// An answer of the layer's own; None is 500.
fn own<B: Body>(
    answer: Option<Answer>,
    is_grpc: bool,
    is_head: bool,
    retry_after_seconds: u32,
) -> Response<ResponseBody<B>> {
    if is_grpc {
        let mut response = Response::new(ResponseBody::own(""));
        *response.headers_mut() = problem::grpc_headers();
        return response;
    }
    let mut response = Response::new(ResponseBody::own(if is_head { "" } else { problem::document(answer) }));
    *response.status_mut() = problem::status_of(answer);
    *response.headers_mut() = problem::headers(answer, retry_after_seconds);
    response
}

/// In the extensions of an answer to a refusal, for a layer outside of this one.
#[derive(Clone, Copy)]
struct Refused;

/// Whether a server looks at the body of such an answer.
fn has_body(status: StatusCode) -> bool {
    !(status.is_informational() || status == StatusCode::NO_CONTENT || status == StatusCode::NOT_MODIFIED)
}

impl<F, B, E> Future for ResponseFuture<F>
where
    F: Future<Output = Result<Response<B>, E>>,
    B: Body,
    B::Data: From<&'static [u8]>,
{
    type Output = Result<Response<ResponseBody<B>>, E>;

    fn poll(self: Pin<&mut Self>, cx: &mut TaskContext<'_>) -> Poll<Self::Output> {
        let mut this = self.project();
        let (serving, context) = match this.inside {
            Inside::Account(serving, context, _) => (serving, context),
            Inside::Nothing => {
                let inner = this.inner.as_pin_mut().expect("a `ResponseFuture` was polled after it was complete");
                return inner.poll(cx).map_ok(|response| response.map(ResponseBody::plain));
            }
            Inside::Unbegun(unbegun) => {
                let Unbegun { answer, is_grpc, is_head, retry_after_seconds } =
                    unbegun.take().expect("a `ResponseFuture` was polled after it was complete");
                // RESOURCE_EXHAUSTED would be wrong where memory has nothing to do with it.
                let mut response = own(answer, is_grpc && answer.is_some(), is_head, retry_after_seconds);
                if answer.is_some() {
                    response.extensions_mut().insert(Refused);
                }
                return Poll::Ready(Ok(response));
            }
        };
        let polled = catch_unwind(AssertUnwindSafe(|| {
            let _entered = serving.request().entered();
            context.run(|| {
                let inner = this.inner.as_mut().as_pin_mut().expect("there until it is complete");
                let answer = ready!(inner.poll(cx));
                this.inner.set(None); // destructors of the future run in its request
                Poll::Ready(answer)
            })
        }));
        let polled = match polled {
            Ok(polled) => polled,
            Err(panic) => {
                if let Inside::Account(serving, mut context, _) = std::mem::replace(this.inside, Inside::Nothing) {
                    // A second panic, of what is left of the future, is not worth more than the first.
                    survived(|| context.run(|| this.inner.set(None)));
                    serving.end(Outcome::Panicked);
                }
                resume_unwind(panic)
            }
        };
        let exceeded = serving.request().heap_exceeded();
        let answer = match polled {
            Poll::Ready(answer) => Some(answer),
            Poll::Pending if exceeded.is_none() => return Poll::Pending,
            Poll::Pending => None,
        };
        let Inside::Account(mut serving, mut context, is_head) = std::mem::replace(this.inside, Inside::Nothing) else {
            unreachable!("matched above")
        };
        let refused = match &answer {
            _ if exceeded.is_some() => exceeded.as_ref().and_then(|error| serving.answer_for(error)),
            Some(Ok(response)) => match response.extensions().get::<Error>() {
                Some(error) => serving.answer_to(Some(error)),
                None if problem::is_unexplained(response.status(), response.headers(), serving.is_grpc) => {
                    serving.answer_to(None)
                }
                None => None,
            },
            Some(Err(_)) => serving.answer_to(None),
            None => None,
        };
        if refused.is_some() {
            context.run(|| {
                drop(answer);
                this.inner.set(None);
            });
            let mut response = own(refused, serving.is_grpc, is_head, serving.retry_after_seconds());
            response.extensions_mut().insert(Refused);
            serving.status = Some(response.status());
            serving.end(Outcome::Refused);
            return Poll::Ready(Ok(response));
        }
        Poll::Ready(match answer.expect("it is refused where there is none") {
            Err(error) => {
                serving.end(Outcome::Failed);
                Err(error)
            }
            Ok(response) => {
                let (parts, body) = response.into_parts();
                serving.status = Some(parts.status);
                // The service tells of it itself, or an inner layer has.
                if parts.extensions.get::<Refused>().is_some()
                    || (serving.tells_of_refusal(&parts) && serving.is_refused())
                {
                    serving.outcome = Outcome::Refused;
                }
                let length = parts.headers.get(CONTENT_LENGTH).and_then(|length| length.to_str().ok()?.parse().ok());
                let is_asked_for = !is_head && has_body(parts.status);
                Ok(Response::from_parts(parts, ResponseBody::new(body, serving, context, length, is_asked_for)))
            }
        })
    }
}

#[pinned_drop]
impl<F> PinnedDrop for ResponseFuture<F> {
    fn drop(self: Pin<&mut Self>) {
        let mut this = self.project();
        // The future first: what it frees is not alive at the request's end.
        if let Inside::Account(serving, mut context, _) = std::mem::replace(this.inside, Inside::Nothing) {
            context.run(|| this.inner.set(None));
            let outcome = serving.outcome; // also where something else unwinds, and drops it
            serving.end(outcome);
        }
    }
}

impl<F> fmt::Debug for ResponseFuture<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let serving = match &self.inside {
            Inside::Account(serving, ..) => Some(serving),
            _ => None,
        };
        f.debug_struct("ResponseFuture").field("serving", &serving).finish_non_exhaustive()
    }
}
