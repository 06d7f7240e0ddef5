//! Requests: a stretch of work with an arena, counters and a limit of its own. Beside `thread`, above `scope`.

use crate::error::Error;
use crate::handler::Handler;
use crate::handler::lease::{Lease, Stats, Terms};
use crate::scope::{current, scope};
use crate::strategy::{Budget, LiveBlock, Strategy};
use std::sync::Arc;

/// Starts to describe a request; [`begin`](Builder::begin) begins it.
///
/// ```
/// use ctxalloc::{Buffer, request};
///
/// let request = request().name("thumbnail").limit_bytes(1 << 20).begin()?;
/// let kept = request.run(|| {
///     let scratch = Buffer::zeroed(100_000)?;
///     Buffer::copy_from_slice(&scratch[..10])
/// })?;
/// assert!(request.run(|| Buffer::zeroed(2 << 20)).is_err()); // over its limit
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

    /// The most bytes that may be alive at one time; more is refused (NULL to NumPy, [`Error::OutOfMemory`] in Rust).
    pub fn limit_bytes(mut self, limit_bytes: usize) -> Self {
        self.terms.limit_bytes = Some(limit_bytes);
        self
    }

    /// What it is charged to besides: a tenant's budget, the process's.
    pub fn budget(mut self, budget: &Budget) -> Self {
        self.terms.budget = Some(budget.clone());
        self
    }

    /// Where its blocks come from, instead of an arena of its own.
    pub fn strategy(mut self, strategy: impl Strategy) -> Self {
        self.terms.strategy = Some(Arc::new(strategy));
        self
    }

    /// Begins the request. Inside of another one, its numbers are part of that one's.
    ///
    /// # Errors
    /// [`Error::BadAlignment`] where the strategy aligns its blocks to less than the 16 bytes that a request promises.
    pub fn begin(self) -> Result<Request, Error> {
        Ok(Request { lease: Lease::take(self.terms)? })
    }
}

/// A request that is under way. Dropping it ends it.
///
/// Past the ceiling of slots ([`handler::lease::set_ceiling`](crate::handler::lease::set_ceiling)) it is served from the
/// shared pool, uncounted and unlimited, with a warning event and a counter
/// ([`metrics`](crate::handler::lease::metrics)).
#[derive(Debug)]
pub struct Request {
    lease: Lease,
}

/// What became of a request.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Report {
    /// Its numbers at its end.
    pub stats: Stats,
    /// Blocks that outlive it: valid until they are freed, and until then its slot waits for them.
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
    /// It is this request's until its end. Contexts in which it is selected (tasks that run on) keep it from being given
    /// to the next request, and are served from the shared pool then.
    #[must_use]
    pub fn handler(&self) -> Handler {
        self.lease.handler()
    }

    /// Runs `work` with its handler selected.
    pub fn run<R>(&self, work: impl FnOnce() -> R) -> R {
        scope(self.handler(), work)
    }

    /// Its name.
    #[must_use]
    pub fn name(&self) -> &str {
        self.lease.name()
    }

    /// Its numbers so far; those of requests inside of it are part of them.
    #[must_use]
    pub fn stats(&self) -> Stats {
        self.lease.stats()
    }

    /// Its live blocks so far, where its strategy knows them ([`Tracked`](crate::strategy::Tracked)).
    #[must_use]
    pub fn live_blocks(&self) -> Option<Vec<LiveBlock>> {
        self.lease.live_blocks()
    }

    /// Its own budget: what it may be given more of, and what a part of it may be charged to.
    #[must_use]
    pub fn budget(&self) -> &Budget {
        self.lease.budget()
    }

    /// Whether it has a slot of its own: false past the ceiling.
    #[must_use]
    pub fn is_private(&self) -> bool {
        self.lease.is_private()
    }

    /// Ends it and says what became of it.
    pub fn end(mut self) -> Report {
        let escapes = self.lease.live_blocks();
        let stats = self.lease.end();
        Report {
            stats,
            escaped_blocks: stats.live_blocks,
            escaped_bytes: stats.live_bytes,
            escapes,
            refusal: self.lease.take_refusal(),
        }
    }
}
