//! Requests: a stretch of work with memory, an account and a limit of its own. Beside `thread`, above `scope`.

use crate::error::Error;
use crate::handler::Handler;
use crate::handler::requests::{Begun, Terms};
use crate::scope::{current, scope};
use crate::strategy::{Budget, LiveBlock, Strategy};
use std::borrow::Cow;
use std::sync::Arc;

pub use crate::handler::requests::{AfterEnd, ExternalCharge, RequestHandle};
pub use crate::strategy::account::Stats;

/// Starts to describe a request; [`begin`](Builder::begin) begins it.
///
/// ```
/// use ctxalloc::{Buffer, Error, request};
///
/// let request = request().name("thumbnail").limit_bytes(1 << 20).begin()?;
/// let kept = request.run(|| {
///     let scratch = Buffer::zeroed(100_000)?;
///     Buffer::copy_from_slice(&scratch[..10])
/// })?;
/// let refused = request.run(|| Buffer::zeroed(2 << 20)).unwrap_err(); // over its limit
/// assert!(matches!(refused, Error::BudgetExceeded { budget, .. } if budget == "thumbnail"));
///
/// let report = request.end();
/// assert_eq!((report.escaped_blocks, report.escaped_bytes), (1, 10));
/// assert_eq!(report.stats.peak_bytes, 100_010);
/// assert_eq!(&*kept, [0; 10]); // an escape stays valid for as long as it likes
/// # Ok::<(), ctxalloc::Error>(())
/// ```
pub fn request() -> Builder {
    Builder { terms: Terms { outer: Some(current()), ..Terms::default() } }
}

/// The request that the running context is in: whose handler is selected here.
#[must_use]
pub fn current_request() -> Option<RequestHandle> {
    RequestHandle::by(current())
}

/// Charges bytes that come from elsewhere to the request that the running context is in, until the charge is dropped.
/// None where it is in no request.
///
/// # Errors
/// As [`RequestHandle::charge`].
pub fn charge_current(bytes: usize) -> Result<Option<ExternalCharge>, Error> {
    current_request().map(|request| request.charge(bytes)).transpose()
}

/// What a request is to be given.
#[derive(Debug)]
#[must_use = "nothing begins before `begin`"]
pub struct Builder {
    terms: Terms,
}

impl Builder {
    /// A name, for messages and metrics.
    pub fn name(mut self, name: impl Into<String>) -> Self {
        self.terms.name = Some(name.into());
        self
    }

    /// The most bytes that may be alive at one time; more is refused (NULL to NumPy, [`Error::BudgetExceeded`] in Rust).
    pub fn limit_bytes(mut self, limit_bytes: usize) -> Self {
        self.terms.limit_bytes = Some(limit_bytes);
        self
    }

    /// What it is charged to besides: a tenant's budget, the process's.
    pub fn budget(mut self, budget: &Budget) -> Self {
        self.terms.budget = Some(budget.clone());
        self
    }

    /// Blocks of up to 1 KiB may go so many bytes beyond every limit that they are charged to. None in Rust, unless you say
    /// otherwise; 64 KiB in Python, since NumPy crashes where it is refused some of its scalars.
    pub fn overdraft_bytes(mut self, overdraft_bytes: usize) -> Self {
        self.terms.overdraft_bytes = overdraft_bytes;
        self
    }

    /// A root: not inside of the request that the running context carries, which may be one that just happens to be there
    /// (a server's connection, a task that goes on).
    pub fn root(mut self) -> Self {
        self.terms.outer = None;
        self
    }

    /// What becomes of memory that is asked for under its handler after its end.
    pub fn after_end(mut self, after_end: AfterEnd) -> Self {
        self.terms.after_end = after_end;
        self
    }

    /// Where its blocks come from, instead of the process's own pool: an [`Arena`](crate::strategy::Arena) that goes with
    /// it, [`Tracked`](crate::strategy::Tracked), or any other.
    pub fn strategy(mut self, strategy: impl Strategy) -> Self {
        self.terms.strategy = Some(Arc::new(strategy));
        self
    }

    /// Begins the request. Inside of another one, its numbers are part of that one's.
    ///
    /// # Errors
    /// [`Error::BadAlignment`] where the strategy aligns its blocks to less than the 16 bytes that a request promises;
    /// [`Error::NestedTooDeep`] inside of thousands of others.
    pub fn begin(self) -> Result<Request, Error> {
        Ok(Request { begun: Begun::begin(self.terms)? })
    }
}

/// A request that is under way. Dropping it ends it.
#[derive(Debug)]
pub struct Request {
    begun: Begun,
}

/// What became of a request.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Report {
    /// Its numbers at its end.
    pub stats: Stats,
    /// Blocks that outlive it: valid until they are freed, and charged until then.
    pub escaped_blocks: usize,
    /// Their bytes.
    pub escaped_bytes: usize,
    /// They themselves, with their makers, where the request's strategy knows them
    /// ([`Tracked`](crate::strategy::Tracked)). One that several requests share knows the blocks of all of them.
    pub escapes: Option<Vec<LiveBlock>>,
    /// The last refusal of a budget that nobody asked for, if there was one.
    pub refusal: Option<Error>,
}

impl Request {
    /// The handler to select for its work: `future.with_handler(request.handler())`, [`enter`](crate::enter).
    ///
    /// It is this request's and never another one's. What is allocated under it after the end is charged to the request all
    /// the same, unless [`Builder::after_end`] says otherwise.
    #[must_use]
    pub fn handler(&self) -> Handler {
        self.begun.handler()
    }

    /// Runs `work` with its handler selected.
    pub fn run<R>(&self, work: impl FnOnce() -> R) -> R {
        scope(self.handler(), work)
    }

    /// Its name.
    #[must_use]
    pub fn name(&self) -> Cow<'_, str> {
        self.begun.name()
    }

    /// Its numbers so far; those of requests inside of it are part of them.
    #[must_use]
    pub fn stats(&self) -> Stats {
        self.begun.stats()
    }

    /// Its live blocks so far, where its strategy knows them ([`Tracked`](crate::strategy::Tracked)).
    #[must_use]
    pub fn live_blocks(&self) -> Option<Vec<LiveBlock>> {
        self.begun.live_blocks()
    }

    /// Its own budget: what it may be given more of, and what a part of it may be charged to.
    #[must_use]
    pub fn budget(&self) -> Budget {
        self.begun.budget()
    }

    /// A handle for others: numbers, handler and budget, good for as long as it lives.
    #[must_use]
    pub fn handle(&self) -> RequestHandle {
        self.begun.handle()
    }

    /// Ends it and says what became of it.
    pub fn end(mut self) -> Report {
        let escapes = self.begun.live_blocks();
        let stats = self.begun.end();
        Report {
            stats,
            escaped_blocks: stats.live_blocks,
            escaped_bytes: stats.live_bytes,
            escapes,
            refusal: self.begun.take_refusals().into_iter().next().map(|refusal| refusal.error),
        }
    }
}
