//! `WaitingLayer`: a [`RequestLayer`] whose requests wait for their reservation before the service is called.
//!
//! It keeps the service that was ready for the request until there is room, and leaves a copy in its place, so the
//! service has to be `Clone`, as those of axum, tonic and `tower::buffer` are.

use super::body::ResponseBody;
use super::future::ResponseFuture;
use super::layer::{Asked, RequestLayer, RequestService, serve};
use crate::request::Admitting;
use http::request::Parts;
use http::{Request, Response};
use http_body::Body;
use pin_project::pin_project;
use std::fmt;
use std::future::Future;
use std::mem;
use std::pin::Pin;
use std::task::{Context as TaskContext, Poll};
use std::time::Duration;
use tower_layer::Layer;
use tower_service::Service;

/// A [`RequestLayer`] whose requests wait for room: what [`RequestLayer::waiting`] returns.
///
/// One with a reservation ([`RequestLayer::reserve_bytes`], [`Builder::reserve_bytes`](crate::request::Builder)) waits
/// in the queue before the service is called, in the order in which they came: as
/// [`Builder::admit`](crate::request::Builder::admit). It is answered with 413 where it can never fit, and with 429 or
/// 503 where its time is over, or too many wait; `retry-after` is then as long as those will take who wait now, by how
/// fast they got room lately. A client that goes away leaves the queue, if the server drops the future then, as hyper
/// does.
///
/// While it waits it keeps the service that was ready for it, with what that holds: put a `ConcurrencyLimit` inside of
/// this layer only if those who wait are to count.
///
/// ```
/// use ctxalloc::{strategy::Budget, tower::RequestLayer};
/// use http_body_util::Full;
/// use std::time::Duration;
/// use tower::{BoxError, ServiceBuilder, ServiceExt, service_fn};
///
/// async fn work(_: http::Request<()>) -> Result<http::Response<Full<bytes::Bytes>>, BoxError> {
///     Ok(http::Response::new(Full::default()))
/// }
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), BoxError> {
/// let process = Budget::new("process", Some(100 << 20));
/// let layer = RequestLayer::new().budget(&process).reserve_bytes(60 << 20);
/// let layer = layer.waiting().timeout(Duration::from_millis(500));
/// let service = ServiceBuilder::new().layer(layer).service_fn(work);
/// let held = process.charge(50 << 20)?;
/// let late = service.clone().oneshot(http::Request::new(())).await?;
/// assert_eq!((late.status().as_u16(), &late.headers()["retry-after"]), (503, &"1".parse()?));
/// let (waits, ()) = tokio::join!(service.oneshot(http::Request::new(())), async { drop(held) });
/// assert_eq!(waits?.status(), 200);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
#[must_use = "a service must be given it"]
pub struct WaitingLayer {
    layer: RequestLayer,
    timeout: Option<Duration>,
}

impl RequestLayer {
    /// A layer that does the same, and whose requests wait for room before the service is called. It takes services
    /// that are `Clone`.
    pub fn waiting(self) -> WaitingLayer {
        WaitingLayer { layer: self, timeout: None }
    }
}

impl WaitingLayer {
    /// How long a request waits at most, unless its own terms say so. By default for ever.
    pub fn timeout(self, timeout: Duration) -> Self {
        Self { timeout: Some(timeout), ..self }
    }
}

impl<S> Layer<S> for WaitingLayer {
    type Service = WaitingService<S>;

    fn layer(&self, inner: S) -> WaitingService<S> {
        WaitingService { inner: self.layer.layer(inner), timeout: self.timeout }
    }
}

/// A service in a [`WaitingLayer`].
#[derive(Clone, Debug)]
pub struct WaitingService<S> {
    inner: RequestService<S>,
    timeout: Option<Duration>,
}

impl<S, A, B> Service<Request<A>> for WaitingService<S>
where
    S: Service<Request<A>, Response = Response<B>> + Clone,
    S::Future: Future<Output = Result<Response<B>, S::Error>>,
    B: Body,
    B::Data: From<&'static [u8]>,
{
    type Response = Response<ResponseBody<B>>;
    type Error = S::Error;
    type Future = WaitingFuture<S, A, S::Future>;

    fn poll_ready(&mut self, cx: &mut TaskContext<'_>) -> Poll<Result<(), S::Error>> {
        Service::<Request<A>>::poll_ready(&mut self.inner, cx)
    }

    fn call(&mut self, request: Request<A>) -> Self::Future {
        let (parts, body) = request.into_parts();
        let copy = self.inner.inner.clone();
        let service = mem::replace(&mut self.inner.inner, copy); // the one that is ready
        let state = match Asked::of(&self.inner.options, &parts, self.timeout) {
            None => plain(service, Request::from_parts(parts, body)),
            Some((asked, terms)) => {
                // In the queue from now on, and not from the first poll.
                let admitting = terms.admit();
                State::Waiting(Some(Box::new(Waiting { admitting, asked, service, parts, body })))
            }
        };
        WaitingFuture { state }
    }
}

fn plain<S, A>(mut service: S, request: Request<A>) -> State<S, A, S::Future>
where
    S: Service<Request<A>>,
{
    State::Serving(ResponseFuture::plain(service.call(request)))
}

/// The answer of a [`WaitingService`].
#[pin_project]
#[must_use = "it leaves the queue when it is dropped"]
pub struct WaitingFuture<S, A, F> {
    #[pin]
    state: State<S, A, F>,
}

#[pin_project(project = Projected)]
enum State<S, A, F> {
    /// `None` only while it becomes the other one.
    Waiting(Option<Box<Waiting<S, A>>>),
    Serving(#[pin] ResponseFuture<F>),
}

struct Waiting<S, A> {
    admitting: Admitting,
    asked: Asked,
    service: S,
    parts: Parts,
    body: A,
}

impl<S, A, B> Future for WaitingFuture<S, A, S::Future>
where
    S: Service<Request<A>, Response = Response<B>>,
    S::Future: Future<Output = Result<Response<B>, S::Error>>,
    B: Body,
    B::Data: From<&'static [u8]>,
{
    type Output = Result<Response<ResponseBody<B>>, S::Error>;

    fn poll(self: Pin<&mut Self>, cx: &mut TaskContext<'_>) -> Poll<Self::Output> {
        let mut state = self.project().state;
        loop {
            match state.as_mut().project() {
                Projected::Serving(future) => return future.poll(cx),
                Projected::Waiting(waiting) => {
                    let mut taken = waiting.take().expect("polled after it panicked");
                    let Poll::Ready(admitted) = Pin::new(&mut taken.admitting).poll(cx) else {
                        *waiting = Some(taken);
                        return Poll::Pending;
                    };
                    let Waiting { asked, mut service, parts, body, .. } = *taken;
                    let future = serve(&mut service, asked.begun(admitted, &parts), parts, body);
                    state.set(State::Serving(future));
                }
            }
        }
    }
}

impl<S, A, F> fmt::Debug for WaitingFuture<S, A, F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let is_waiting = matches!(self.state, State::Waiting(_));
        f.debug_struct("WaitingFuture").field("is_waiting", &is_waiting).finish_non_exhaustive()
    }
}
