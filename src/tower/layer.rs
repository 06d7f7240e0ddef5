//! `RequestLayer`: what a service is given, and `RequestService`, which it makes of a service.

use super::future::{ResponseFuture, Unbegun};
use super::problem;
use super::serving::{Ended, Options, Serving, TenantId};
use super::waiting::WaitingLayer;
use crate::error::Error;
use crate::request::{Builder, RequestHandle, request};
use crate::room::retry_after;
use crate::scope::{Context, current};
use crate::strategy::Budget;
use crate::trace;
use http::header::CONTENT_TYPE;
use http::request::Parts;
use http::{Method, Request, Response, StatusCode};
use http_body::Body;
use std::fmt;
use std::future::Future;
use std::sync::Arc;
use std::task::{Context as TaskContext, Poll};
use std::time::Duration;
use tower_layer::Layer;
use tower_service::Service;

/// Serves each request of a service in a [request](crate::request()) of ctxalloc, which is a root.
///
/// The service finds a [`RequestHandle`] in the extensions of the [`http::Request`] (axum: `Extension<RequestHandle>`),
/// and by [`current_request`](crate::current_request). Tasks that it starts by [`task::spawn`](crate::task::spawn)
/// belong to it.
///
/// **Refusals are answered** with 413 (a second try cannot succeed), 429 (the tenant's budget refused) or 503, and a
/// problem document (RFC 9457); a gRPC request with the status RESOURCE_EXHAUSTED. This is done where the service
/// - put an [`Error`](crate::Error) into the extensions of its answer, as `Error` itself does as an answer of axum's
///   (feature `axum`);
/// - answers with 500 (a gRPC service: INTERNAL or UNKNOWN), or returns an error, and nothing was allocated in the
///   request since the refusal.
///
/// What a service says of a refusal in words of its own, with one of these statuses, or of the
/// [`refused_statuses`](Self::refused_statuses) that it was given, passes, and is
/// [`Outcome::Refused`](super::Outcome::Refused) too.
///
/// **The body of the service's answer** needs data that can be made from static bytes
/// (`Body::Data: From<&'static [u8]>`), for the layer's own answers. [`bytes::Bytes`] can, which axum, hyper and tonic
/// use. Map the data of another body first, by `http_body_util::BodyExt::map_frame`; without that the compiler says,
/// where the layered service is used, that the bound `From<&'static [u8]>` is not satisfied.
///
/// One inside of another is a request inside of another: an outer layer for the whole service, others for its routes.
#[derive(Clone)]
#[must_use = "a service must be given it"]
pub struct RequestLayer {
    options: Arc<Options>,
}

impl RequestLayer {
    /// An account for each request, without a limit.
    pub fn new() -> Self {
        Self {
            options: Arc::new(Options {
                limit_bytes: None,
                reserve_bytes: None,
                budget: None,
                tenant: None,
                choose: None,
                on_end: None,
                answers: true,
                refused_statuses: problem::REFUSED.into(),
                retry_after_seconds: 1,
            }),
        }
    }

    fn with(mut self, change: impl FnOnce(&mut Options)) -> Self {
        change(Arc::make_mut(&mut self.options));
        self
    }

    /// The most bytes that each request may have at one time.
    pub fn limit_bytes(self, limit_bytes: usize) -> Self {
        self.with(|options| options.limit_bytes = Some(limit_bytes))
    }

    /// How many bytes each request reserves of its budgets before the service is called. Where there is no room now it
    /// is refused, with 413, 429 or 503; a [`waiting`](Self::waiting) layer waits for room.
    pub fn reserve_bytes(self, reserve_bytes: usize) -> Self {
        self.with(|options| options.reserve_bytes = Some(reserve_bytes))
    }

    /// A layer that does the same, and whose requests wait for room before the service is called. It takes services
    /// that are `Clone`.
    pub fn waiting(self) -> WaitingLayer {
        WaitingLayer::new(self)
    }

    /// A budget that all requests are charged to: the service's.
    pub fn budget(self, budget: &Budget) -> Self {
        self.with(|options| options.budget = Some(budget.clone()))
    }

    /// Finds the budget of a request's tenant, which it is charged to in place of [`budget`](Self::budget). Make that
    /// one its parent. What it refuses is answered with 429.
    pub fn tenant(self, tenant: impl Fn(&Parts) -> Option<Budget> + Send + Sync + 'static) -> Self {
        self.with(|options| options.tenant = Some(Arc::new(tenant)))
    }

    /// Chooses the terms of each request, from those that the layer gives to all: its name, a limit of its own, a
    /// strategy. `None`: it gets no account, as if there were no layer.
    ///
    /// Name it after its route, never after its path: strangers choose paths. In axum the route is in
    /// `parts.extensions.get::<axum::extract::MatchedPath>()`.
    ///
    /// Terms with [`reserve_bytes`](Builder::reserve_bytes) wait in a [`waiting`](Self::waiting) layer only; in others
    /// the request is refused where there is no room now, before the service is called, with 413, 429 or 503.
    pub fn terms(self, choose: impl Fn(&Parts, Builder) -> Option<Builder> + Send + Sync + 'static) -> Self {
        self.with(|options| options.choose = Some(Arc::new(choose)))
    }

    /// What is called once for each request with an account, at its end. A panic in it becomes an event of `tracing`.
    pub fn on_end(self, on_end: impl Fn(&Ended) + Send + Sync + 'static) -> Self {
        self.with(|options| options.on_end = Some(Arc::new(on_end)))
    }

    /// Whether refusals are answered; if not, the service's own answer passes. They are, by default. What exceeds
    /// [`heap_limit_bytes`](crate::request::Builder::heap_limit_bytes) is answered in any case: there is no other
    /// answer.
    pub fn answers(self, answers: bool) -> Self {
        self.with(|options| options.answers = answers)
    }

    /// The statuses by which the service itself says that memory was refused: 413, 429 and 503, unless it is told
    /// others here. An answer with one of them passes, and is [`Outcome::Refused`](super::Outcome::Refused) where
    /// nothing was allocated in the request since a refusal.
    pub fn refused_statuses(self, statuses: impl IntoIterator<Item = StatusCode>) -> Self {
        self.with(|options| options.refused_statuses = statuses.into_iter().collect())
    }

    /// What the header `retry-after` of 429 and 503 says, 1 by default.
    pub fn retry_after_seconds(self, seconds: u32) -> Self {
        self.with(|options| options.retry_after_seconds = seconds)
    }
}

impl Default for RequestLayer {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Debug for RequestLayer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Options { limit_bytes, budget, .. } = &*self.options;
        f.debug_struct("RequestLayer").field("limit_bytes", limit_bytes).field("budget", budget).finish_non_exhaustive()
    }
}

impl<S> Layer<S> for RequestLayer {
    type Service = RequestService<S>;

    fn layer(&self, inner: S) -> RequestService<S> {
        RequestService { inner, options: Arc::clone(&self.options) }
    }
}

/// A service in a [`RequestLayer`].
#[derive(Clone)]
pub struct RequestService<S> {
    pub(super) inner: S,
    pub(super) options: Arc<Options>,
}

impl<S: fmt::Debug> fmt::Debug for RequestService<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RequestService").field("inner", &self.inner).finish_non_exhaustive()
    }
}

/// What the layer knows of one request before it begins.
pub(super) struct Asked {
    options: Arc<Options>,
    tenant: Option<TenantId>,
    is_grpc: bool,
}

/// What a request of the service gets.
pub(super) enum Begun {
    Account(Serving),
    Failed(Unbegun),
}

impl Asked {
    /// With the request's terms; `None` where it gets no account. `timeout`: how long it waits unless they say so.
    pub(super) fn of(options: &Arc<Options>, parts: &Parts, timeout: Option<Duration>) -> Option<(Self, Builder)> {
        // Inside of another layer's request, if that one is selected. What else is selected here is there by accident.
        let outer = parts.extensions.get::<RequestHandle>();
        let is_inside = outer.is_some_and(|outer| outer.handler() == current());
        let mut terms = if is_inside { request() } else { request().root() };
        if let Some(limit_bytes) = options.limit_bytes {
            terms = terms.limit_bytes(limit_bytes);
        }
        if let Some(reserve_bytes) = options.reserve_bytes {
            terms = terms.reserve_bytes(reserve_bytes);
        }
        if let Some(timeout) = timeout {
            terms = terms.timeout(timeout);
        }
        let tenant = options.tenant.as_ref().and_then(|tenant| tenant(parts));
        if let Some(budget) = tenant.as_ref().or(options.budget.as_ref()) {
            terms = terms.budget(budget);
        }
        if let Some(choose) = &options.choose {
            terms = choose(parts, terms)?;
        }
        let around = if is_inside { parts.extensions.get().copied() } else { None };
        let tenant = tenant.map(|budget| TenantId(budget.id())).or(around);
        let kind = parts.headers.get(CONTENT_TYPE);
        let is_grpc = kind.is_some_and(|kind| kind.as_bytes().starts_with(b"application/grpc"));
        Some((Self { options: Arc::clone(options), tenant, is_grpc }, terms))
    }

    /// What it gets: the request, or an answer that says why not.
    pub(super) fn begun(self, begun: Result<crate::Request, Error>, parts: &Parts) -> Begun {
        let Self { options, tenant, is_grpc } = self;
        match begun {
            Ok(request) => Begun::Account(Serving::new(request, options, tenant, is_grpc)),
            Err(error) => {
                trace::no_request(&error);
                Begun::Failed(Unbegun {
                    answer: problem::answer_to(&error, tenant.map(|tenant| tenant.0)),
                    is_grpc,
                    is_head: parts.method == Method::HEAD,
                    retry_after_seconds: retry_after_seconds(&error, options.retry_after_seconds),
                })
            }
        }
    }
}

/// When one without room should come again: as long as those will take who wait there now, by how fast they got room
/// lately, and not less than the layer says.
fn retry_after_seconds(error: &Error, min_seconds: u32) -> u32 {
    const MAX_SECONDS: f64 = 120.0; // as in Python
    let Error::NoRoom { budget_id, .. } = *error else { return min_seconds };
    let drains_in = retry_after(budget_id).map_or(0.0, |time| time.as_secs_f64().ceil());
    min_seconds.max(drains_in.min(MAX_SECONDS) as u32)
}

/// Calls the service, inside of its request; or answers in its place.
pub(super) fn serve<S, A, B>(inner: &mut S, begun: Begun, mut parts: Parts, body: A) -> ResponseFuture<S::Future>
where
    S: Service<Request<A>, Response = Response<B>>,
{
    let serving = match begun {
        Begun::Account(serving) => serving,
        Begun::Failed(unbegun) => return ResponseFuture::unbegun(unbegun),
    };
    parts.extensions.insert(serving.request().handle());
    match serving.tenant() {
        Some(tenant) => _ = parts.extensions.insert(tenant),
        None => _ = parts.extensions.remove::<TenantId>(), // an outer one's: it is not around this request
    }
    let is_head = parts.method == Method::HEAD;
    let request = Request::from_parts(parts, body);
    let mut context = Context::with_handler(serving.request().handler());
    let future = {
        let _entered = serving.request().entered();
        context.run(|| inner.call(request))
    };
    ResponseFuture::new(future, serving, context, is_head)
}

impl<S, A, B> Service<Request<A>> for RequestService<S>
where
    S: Service<Request<A>, Response = Response<B>>,
    S::Future: Future<Output = Result<Response<B>, S::Error>>,
    B: Body,
    B::Data: From<&'static [u8]>,
{
    type Response = Response<super::body::ResponseBody<B>>;
    type Error = S::Error;
    type Future = ResponseFuture<S::Future>;

    fn poll_ready(&mut self, cx: &mut TaskContext<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: Request<A>) -> Self::Future {
        let (parts, body) = request.into_parts();
        match Asked::of(&self.options, &parts, None) {
            None => ResponseFuture::plain(self.inner.call(Request::from_parts(parts, body))),
            Some((asked, terms)) => serve(&mut self.inner, asked.begun(terms.begin(), &parts), parts, body),
        }
    }
}
