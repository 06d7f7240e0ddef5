//! `Serving`: one request of a service. Its end is its drop, so that it ends once, on every way out: an answer, an
//! error, a panic, a client that has gone.

use super::problem;
use crate::answer::Answer;
use crate::error::Error;
use crate::request::{Builder, Report, Request};
use crate::strategy::Budget;
use crate::survived::survived;
use crate::trace;
use http::StatusCode;
use http::request::Parts;
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How a request of a service ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Outcome {
    /// The whole answer was taken by the server.
    Completed,
    /// Memory was refused, and the answer says so.
    Refused,
    /// The service, or the answer's body, returned an error.
    Failed,
    /// The service, or the answer's body, panicked.
    Panicked,
    /// The service's future was dropped before its answer, or the body before its end: the client has gone, or a
    /// time-out.
    Dropped,
}

/// A request of a service that has ended, for [`on_end`](super::RequestLayer::on_end).
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Ended {
    /// The name that its terms gave it.
    pub name: String,
    /// How it ended.
    pub outcome: Outcome,
    /// The status of its answer; `None` if there was none.
    pub status: Option<StatusCode>,
    /// From its beginning to its end.
    pub elapsed: Duration,
    /// What it used, and what outlives it: also what the server has yet to send of an answer made of ctxalloc's memory.
    pub report: Report,
}

/// Terms of one request, from the terms that all requests of the layer have. `None`: it gets no account.
type Choose = dyn Fn(&Parts, Builder) -> Option<Builder> + Send + Sync;

/// Finds the budget of a request's tenant.
type FindTenant = dyn Fn(&Parts) -> Option<Budget> + Send + Sync;

/// Hears of each end.
type OnEnd = dyn Fn(&Ended) + Send + Sync;

/// What a layer is given.
#[derive(Clone)]
pub(super) struct Options {
    pub(super) limit_bytes: Option<usize>,
    pub(super) reserve_bytes: Option<usize>,
    pub(super) budget: Option<Budget>,
    pub(super) tenant: Option<Arc<FindTenant>>,
    pub(super) choose: Option<Arc<Choose>>,
    pub(super) on_end: Option<Arc<OnEnd>>,
    pub(super) answers: bool,
    /// Statuses of the service's own that tell of a refusal.
    pub(super) refused_statuses: Arc<[StatusCode]>,
    pub(super) retry_after_seconds: u32,
}

/// The number of the tenant's budget, for layers further in, which it is charged to as well.
#[derive(Clone, Copy)]
pub(super) struct TenantId(pub(super) u64);

/// A request that is being served. Dropping it ends it, and tells so.
pub(super) struct Serving {
    /// Until the end.
    request: Option<Request>,
    options: Arc<Options>,
    tenant: Option<TenantId>,
    began: Instant,
    pub(super) status: Option<StatusCode>,
    /// How it ends if it is dropped now.
    pub(super) outcome: Outcome,
    /// Whether that is known, whatever unwinds on this thread.
    is_known: bool,
    pub(super) is_grpc: bool,
}

impl Serving {
    pub(super) fn new(request: Request, options: Arc<Options>, tenant: Option<TenantId>, is_grpc: bool) -> Self {
        let began = Instant::now();
        let outcome = Outcome::Dropped;
        Self { request: Some(request), options, tenant, began, status: None, outcome, is_known: false, is_grpc }
    }

    pub(super) fn request(&self) -> &Request {
        self.request.as_ref().expect("there until it is dropped")
    }

    /// Ends it.
    pub(super) fn end(mut self, outcome: Outcome) {
        self.outcome = outcome;
        self.is_known = true;
    }

    /// The answer to a refusal that this request's service returned, or that nothing was allocated after. `None`: it is
    /// not refused, or the layer does not answer.
    pub(super) fn answer_to(&self, returned: Option<&Error>) -> Option<Answer> {
        let last = if returned.is_none() { self.request().last_refusal() } else { None };
        returned.or(last.as_ref()).filter(|_| self.options.answers).and_then(|error| self.answer_for(error))
    }

    /// Whether memory was refused, and nothing was allocated since.
    pub(super) fn is_refused(&self) -> bool {
        self.request().last_refusal().is_some_and(|error| problem::is_refusal(&error))
    }

    /// Whether the service's own answer tells of a refusal.
    pub(super) fn tells_of_refusal(&self, parts: &http::response::Parts) -> bool {
        self.options.refused_statuses.contains(&parts.status) || (self.is_grpc && problem::is_exhausted(&parts.headers))
    }

    /// The answer to an error, if it is a refusal.
    pub(super) fn answer_for(&self, error: &Error) -> Option<Answer> {
        problem::answer_to(error, self.tenant.map(|tenant| tenant.0))
    }

    /// Whose it is.
    pub(super) fn tenant(&self) -> Option<TenantId> {
        self.tenant
    }

    pub(super) fn retry_after_seconds(&self) -> u32 {
        self.options.retry_after_seconds
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        let Some(request) = self.request.take() else { return };
        // Where the service panics before it returns a future there is nobody to note it.
        let has_panicked = !self.is_known && std::thread::panicking();
        let outcome = if has_panicked { Outcome::Panicked } else { self.outcome };
        let Some(on_end) = &self.options.on_end else { return drop(request.end()) };
        let name = request.name().into_owned();
        let ended = Ended { name, outcome, status: self.status, elapsed: self.began.elapsed(), report: request.end() };
        // A panic in a destructor may abort the process.
        if survived(|| on_end(&ended)).is_none() {
            trace::on_end_panicked(&ended.name);
        }
    }
}

impl fmt::Debug for Serving {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Serving").field("request", &self.request).finish_non_exhaustive()
    }
}
