//! Requests: work with memory, an account and a limit of its own. Layer 6, beside `thread`.

use crate::error::Error;
use crate::handler::Handler;
use crate::handler::requests::on_chosen::OnChosen;
use crate::handler::requests::{Begun, Terms};
use crate::room::{self, Admission};
use crate::scope::{Scoped, WithHandler, current, scope};
use crate::strategy::{Budget, LiveBlock, Strategy};
use crate::trace::{Numbers, RequestSpan};
use crate::unattributed::unattributed;
use std::borrow::Cow;
use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context as TaskContext, Poll, Wake, Waker};
use std::thread::{self, Thread};
use std::time::Duration;

pub use crate::handler::heap::HeapStats;
pub use crate::handler::requests::{AfterEnd, ExternalCharge, RequestHandle};
pub use crate::strategy::account::Stats;

/// Describes a request, which [`begin`](Builder::begin) begins.
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
/// assert_eq!(&*kept, [0; 10]); // an escaped block stays valid until it is freed
/// # Ok::<(), ctxalloc::Error>(())
/// ```
pub fn request() -> Builder {
    Builder { terms: Terms { outer: Some(current()), ..Terms::default() }, timeout: None }
}

/// The request whose handler is selected in the running context.
#[must_use]
pub fn current_request() -> Option<RequestHandle> {
    RequestHandle::from_handler(current())
}

/// Charges `bytes` that were allocated elsewhere to the [current request](current_request), until the charge is
/// dropped. `None` if there is no current request.
///
/// # Errors
/// As [`RequestHandle::charge`].
pub fn charge_current(bytes: usize) -> Result<Option<ExternalCharge>, Error> {
    current_request().map(|request| request.charge(bytes)).transpose()
}

/// The options of a request.
#[derive(Debug)]
#[must_use = "nothing begins before `begin`"]
pub struct Builder {
    terms: Terms,
    timeout: Option<Duration>,
}

impl Builder {
    /// A name, for messages and metrics.
    pub fn name(mut self, name: impl Into<String>) -> Self {
        self.terms.name = Some(name.into().into());
        self
    }

    /// The most bytes that may be live at one time. More is refused: NULL for NumPy, [`Error::BudgetExceeded`] in Rust.
    pub fn limit_bytes(mut self, limit_bytes: usize) -> Self {
        self.terms.limit_bytes = Some(limit_bytes);
        self
    }

    /// A budget that it is charged to besides its own: a tenant's or the process's.
    pub fn budget(mut self, budget: &Budget) -> Self {
        self.terms.budget = Some(budget.clone());
        self
    }

    /// By how many bytes blocks of up to 1 KiB may together exceed each limit that they are charged to; blocks of up to
    /// 32 bytes by 16 times as many. By default 0 in Rust, and 64 KiB in Python, since NumPy crashes if it cannot
    /// allocate some of its scalars.
    pub fn overdraft_bytes(mut self, overdraft_bytes: usize) -> Self {
        self.terms.overdraft_bytes = overdraft_bytes;
        self
    }

    /// Makes it a root: not inside the current request, which may be there by accident (that of a server's connection,
    /// or of a task that goes on).
    pub fn root(mut self) -> Self {
        self.terms.outer = None;
        self
    }

    /// What happens to requests for memory under its handler after its end.
    pub fn after_end(mut self, after_end: AfterEnd) -> Self {
        self.terms.after_end = after_end;
        self
    }

    /// Where its blocks come from instead of the process's pool: an [`Arena`](crate::strategy::Arena) of its own, a
    /// [`Tracked`](crate::strategy::Tracked) strategy, or any other.
    pub fn strategy(mut self, strategy: impl Strategy) -> Self {
        let _unattributed = unattributed(); // the request's own, not that of the one around it
        self.terms.strategy = Some(Arc::new(strategy));
        self
    }

    /// The most bytes that Rust's heap should hold for it at one time: what [`GlobalScoped`](crate::GlobalScoped)
    /// counts.
    ///
    /// What exceeds it is allocated nevertheless, since Rust aborts the process where a `Vec` or a `Box` gets no
    /// memory. The request is marked: [`heap_exceeded`](RequestHandle::heap_exceeded) says so, and
    /// `tower::RequestLayer` drops the service's future after the poll in which it happens and answers with 413. Where
    /// several threads work in the request at one time, each may have 64 KiB that the others do not see.
    ///
    /// At the request's end an event of `tracing` at WARN says how often it was exceeded: not at once, because where it
    /// happens an allocator is at work, perhaps for the very subscriber that would be told.
    pub fn heap_limit_bytes(mut self, heap_limit_bytes: usize) -> Self {
        self.terms.heap_limit_bytes = Some(heap_limit_bytes);
        self
    }

    /// Refuses what exceeds [`heap_limit_bytes`](Self::heap_limit_bytes). `try_reserve` then returns its error;
    /// **`push`, `Box::new` and everything else that cannot fail abort the process**, as Rust does when memory runs
    /// out. For work that reserves all of its memory. On a thread on which a panic unwinds nothing is refused.
    pub fn heap_refuses(mut self) -> Self {
        self.terms.heap_refuses = true;
        self
    }

    /// Measures by how much the process grows beside its pools meanwhile ([`Report::unseen_growth_bytes`]): memory that
    /// goes other ways than handlers, which no account counts. Costs two looks at the system, some microseconds each.
    pub fn measure_unseen(mut self) -> Self {
        self.terms.measure_unseen = true;
        self
    }

    /// Reserves `bytes` of every budget and request that it is charged to, from its beginning to its end: by all of
    /// them at once, or by none. Its blocks come out of them first. It may use more, up to its limit, while the budgets
    /// have room; what it does not use returns at its end. Requests inside of it share its reservation, and reserve
    /// from it.
    ///
    /// [`admit`](Self::admit) and [`admit_blocking`](Self::admit_blocking) wait for room; [`begin`](Self::begin) does
    /// not.
    pub fn reserve_bytes(mut self, bytes: usize) -> Self {
        self.terms.reserve_bytes = Some(bytes);
        self
    }

    /// Has `call` called when it is [chosen to make room](Budget::set_victims_after) for one that waits: to cancel its
    /// work where it allocates nothing for long. On a thread of the queue, under no lock; it must be short. What it is
    /// told is what the request's next allocation will say.
    pub fn on_chosen(mut self, call: impl Fn(&Error) + Send + Sync + 'static) -> Self {
        self.terms.on_chosen = Some(OnChosen(Arc::new(move |error, _| call(error))));
        self
    }

    /// [`reserve_bytes`](Self::reserve_bytes) of what requests of its name needed lately: of the peaks of the last
    /// hundred or so, what was enough for 95 %, times 1.2, at least 64 KiB and at most its limit. Until ten of them
    /// have ended it is the limit. One that was refused memory counts with its limit, for nobody knows what it needed.
    /// Those without a name have a history together. A process keeps it for 1024 names; others reserve their limit.
    pub fn reserve_auto(mut self) -> Self {
        self.terms.reserves_by_history = true;
        self
    }

    /// How many requests of its name may wait for room at one time; one more is refused at once. By default only the
    /// budgets say ([`Budget::set_max_waiting`]).
    pub fn max_waiting(mut self, max_waiting: usize) -> Self {
        self.terms.max_waiting = Some(max_waiting);
        self
    }

    /// How long it waits for its reservation. By default for ever.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = Some(timeout);
        self
    }

    /// Begins the request when there is room for its reservation, in the order in which they came: nobody gets room of
    /// a budget for which somebody else waits already. Works on every async runtime.
    ///
    /// The reservation is taken, or the place in the queue, before this returns: two futures that are made one after
    /// the other cannot both take the same room. Dropping the future leaves the queue.
    ///
    /// ```
    /// use ctxalloc::{Error, NoRoom, request, strategy::Budget};
    /// # let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
    /// # runtime.block_on(async {
    /// let process = Budget::new("process", Some(100 << 20));
    /// let first = request().budget(&process).reserve_bytes(60 << 20).admit().await?;
    /// let second = request().budget(&process).reserve_bytes(60 << 20).admit();
    /// assert_eq!(process.waiting(), 1);
    /// drop(first); // returns its 60 MiB
    /// let second = second.await?;
    /// assert_eq!(process.reserved_bytes(), 60 << 20);
    /// let never = request().budget(&process).reserve_bytes(101 << 20).admit().await;
    /// assert!(matches!(never, Err(Error::NoRoom { reason: NoRoom::NeverFits, .. })));
    /// # Ok::<(), Error>(())
    /// # }).expect("room");
    /// ```
    ///
    /// # Errors
    /// [`Error::NoRoom`]: it can never fit, its time is over, too many wait already, or it is inside of another request
    /// that has no room left, which might have to wait for itself. Else as [`begin`](Self::begin).
    pub fn admit(self) -> Admitting {
        let has_heap_limit = self.terms.heap_limit_bytes.is_some();
        Admitting { admission: Some(Admission::new(self.terms, self.timeout)), has_heap_limit }
    }

    /// [`admit`](Self::admit), and blocks this thread meanwhile. Not for a thread that runs other tasks, which may have
    /// what it waits for.
    ///
    /// # Errors
    /// As [`admit`](Self::admit).
    pub fn admit_blocking(self) -> Result<Request, Error> {
        struct Unpark(Thread);
        impl Wake for Unpark {
            fn wake(self: Arc<Self>) {
                self.0.unpark();
            }
        }
        let waker = {
            let _unattributed = unattributed();
            Waker::from(Arc::new(Unpark(thread::current())))
        };
        let mut admitting = self.admit();
        loop {
            match Pin::new(&mut admitting).poll(&mut TaskContext::from_waker(&waker)) {
                Poll::Ready(admitted) => return admitted,
                Poll::Pending => thread::park(),
            }
        }
    }

    /// Begins the request. If it is inside another one, that one's numbers include its own. Which one that is was
    /// decided where `request()` was called.
    ///
    /// # Errors
    /// [`Error::NestedTooDeep`] where more than 4096 requests and budgets would be charged; [`Error::BadOption`] for a
    /// strategy that aligns its blocks to less than the 16 bytes that a request promises, for a limit of Rust's heap in
    /// a program whose allocator does not count, and for [`reserve_auto`](Self::reserve_auto) without a limit;
    /// [`Error::NoRoom`] where there is no room now for its reservation.
    pub fn begin(self) -> Result<Request, Error> {
        let has_heap_limit = self.terms.heap_limit_bytes.is_some();
        Ok(Request::of(room::begin(self.terms)?, has_heap_limit))
    }
}

/// A request that waits for its reservation: what [`Builder::admit`] returns. Dropping it leaves the queue.
#[must_use = "it leaves the queue when it is dropped"]
pub struct Admitting {
    /// Until it is ready.
    admission: Option<Result<Admission, Error>>,
    has_heap_limit: bool,
}

impl Future for Admitting {
    type Output = Result<Request, Error>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut TaskContext<'_>) -> Poll<Self::Output> {
        let has_heap_limit = self.has_heap_limit;
        let admission = self.admission.take().expect("a future is not polled after it was ready");
        let mut admission = match admission {
            Ok(admission) => admission,
            Err(error) => return Poll::Ready(Err(error)),
        };
        match Pin::new(&mut admission).poll(cx) {
            Poll::Pending => {
                self.admission = Some(Ok(admission));
                Poll::Pending
            }
            Poll::Ready(begun) => Poll::Ready(begun.map(|begun| Request::of(begun, has_heap_limit))),
        }
    }
}

impl fmt::Debug for Admitting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Admitting").field("is_ready", &self.admission.is_none()).finish_non_exhaustive()
    }
}

/// A request that has begun. Dropping it ends it.
#[derive(Debug)]
pub struct Request {
    begun: Begun,
    /// Until the end.
    span: Option<RequestSpan>,
    has_heap_limit: bool,
}

/// What a request used, and what outlives it.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Report {
    /// Its numbers at its end.
    pub stats: Stats,
    /// The number of blocks that outlive it. They stay valid, and charged, until they are freed.
    pub escaped_blocks: usize,
    /// The bytes of these blocks.
    pub escaped_bytes: usize,
    /// These blocks and their makers, if the request's strategy lists them ([`Tracked`](crate::strategy::Tracked)). A
    /// strategy that several requests share lists the blocks of all of them.
    pub escapes: Option<Vec<LiveBlock>>,
    /// The last refusal that nobody has taken yet, if any.
    pub refusal: Option<Error>,
    /// What Rust's heap held for it, if a [`GlobalScoped`](crate::GlobalScoped) is the program's allocator.
    pub heap: Option<HeapStats>,
    /// By how many bytes the process grew beside its pools ([`Builder::measure_unseen`]); below zero where memory went
    /// back. `None` if another request was open, or a root was begun, meanwhile: then nobody can tell whose it is.
    /// Pages of a pool that were never touched make it too small, and other threads' work is part of it.
    pub unseen_growth_bytes: Option<i64>,
}

impl Request {
    fn of(begun: Begun, has_heap_limit: bool) -> Self {
        let span = RequestSpan::new(|| begun.name());
        Self { begun, span: Some(span), has_heap_limit }
    }

    /// How many bytes are reserved for it ([`Builder::reserve_bytes`]), in use or not; 0 after its end.
    #[must_use]
    pub fn reserved_bytes(&self) -> usize {
        self.begun.reserved_bytes()
    }

    /// The handler to select for its work: `future.with_handler(request.handler())`, [`enter`](crate::enter).
    ///
    /// It is never another request's handler. Memory that is allocated under it after the end is still charged to this
    /// request, unless [`Builder::after_end`] says otherwise.
    #[must_use]
    pub fn handler(&self) -> Handler {
        self.begun.handler()
    }

    /// Runs `work` with its handler selected.
    pub fn run<R>(&self, work: impl FnOnce() -> R) -> R {
        scope(self.handler(), work)
    }

    /// Gives `future` a context of its own with the request's handler selected. It does not end the request.
    ///
    /// ```
    /// use ctxalloc::{Buffer, request};
    /// # let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
    /// # runtime.block_on(async {
    /// let request = request().name("thumbnail").begin()?;
    /// let answer = request.scope(async { Buffer::copy_from_slice(b"answer") }).await?;
    /// assert_eq!(request.stats().live_bytes, answer.len());
    /// # Ok::<(), ctxalloc::Error>(())
    /// # }).expect("memory");
    /// ```
    pub fn scope<F: Future>(&self, future: F) -> Scoped<F> {
        future.with_handler(self.handler())
    }

    /// The span of `tracing` in which its events belong: `request`, of the target `ctxalloc` and the level DEBUG. Its
    /// field `name` is the request's name; at the end it gets `peak_bytes`, `total_blocks`, `escaped` (blocks) and
    /// `refused`.
    ///
    /// `request.scope(future).instrument(request.span().clone())` puts what the future reports into it.
    #[cfg(feature = "tracing")]
    #[must_use]
    pub fn span(&self) -> &tracing::Span {
        self.own_span().get()
    }

    /// Enters its span until the returned value is dropped.
    #[cfg(feature = "tower")]
    pub(crate) fn entered(&self) -> impl Drop + use<'_> {
        #[cfg(feature = "tracing")]
        return self.own_span().get().enter();
        #[cfg(not(feature = "tracing"))]
        {
            struct Nothing;
            impl Drop for Nothing {
                fn drop(&mut self) {}
            }
            Nothing
        }
    }

    /// Its name.
    #[must_use]
    pub fn name(&self) -> Cow<'_, str> {
        self.begun.name()
    }

    /// What Rust's heap holds for it. `None` unless a [`GlobalScoped`](crate::GlobalScoped) is the program's allocator.
    #[must_use]
    pub fn heap(&self) -> Option<HeapStats> {
        self.begun.heap()
    }

    /// [`Error::BudgetExceeded`] if Rust's heap held more for it than its
    /// [`heap_limit_bytes`](Builder::heap_limit_bytes), however much that is by now.
    #[must_use]
    pub fn heap_exceeded(&self) -> Option<Error> {
        if self.has_heap_limit { self.begun.heap_exceeded() } else { None }
    }

    /// The last refusal, unless something was allocated in it since: why its work may have failed.
    #[must_use]
    pub fn last_refusal(&self) -> Option<Error> {
        self.begun.last_refusal()
    }

    /// Its numbers so far, including those of requests inside.
    #[must_use]
    pub fn stats(&self) -> Stats {
        self.begun.stats()
    }

    /// Its live blocks, if its strategy lists them ([`Tracked`](crate::strategy::Tracked)).
    #[must_use]
    pub fn live_blocks(&self) -> Option<Vec<LiveBlock>> {
        self.begun.live_blocks()
    }

    /// Its own budget: to change its limit, or to charge other work to it.
    #[must_use]
    pub fn budget(&self) -> Budget {
        self.begun.budget()
    }

    /// A handle with its numbers, handler and budget, for other code. It stays valid as long as it lives.
    #[must_use]
    pub fn handle(&self) -> RequestHandle {
        self.begun.handle()
    }

    /// Ends it and reports what it used.
    pub fn end(mut self) -> Report {
        let escapes = self.begun.live_blocks();
        let heap = self.begun.heap(); // before the end, with which the request may be gone
        let (stats, exceeded) = self.finish();
        Report {
            stats,
            escaped_blocks: stats.live_blocks,
            escaped_bytes: stats.live_bytes,
            escapes,
            heap,
            unseen_growth_bytes: self.begun.unseen_growth_bytes(),
            refusal: self.begun.take_refusals().into_iter().next().map(|refusal| refusal.error).or(exceeded),
        }
    }

    #[cfg(feature = "tracing")]
    fn own_span(&self) -> &RequestSpan {
        self.span.as_ref().expect("there until the end, which consumes the request")
    }

    /// Ends it; returns its numbers, and whether the limit of its heap was exceeded.
    fn finish(&mut self) -> (Stats, Option<Error>) {
        let exceeded = self.span.as_ref().and_then(|_| self.heap_exceeded()); // once
        let heap = exceeded.as_ref().and_then(|_| self.begun.heap());
        let stats = self.begun.end();
        if let Some(span) = self.span.take() {
            if let (Some(error), Some(heap)) = (&exceeded, heap) {
                span.heap_exceeded(error, heap.exceeded, heap.refused);
            }
            span.record(&Numbers {
                peak_bytes: stats.peak_bytes,
                total_blocks: stats.total_blocks,
                escaped: stats.live_blocks,
                refused: stats.refused,
            });
        }
        (stats, exceeded)
    }
}

impl Drop for Request {
    fn drop(&mut self) {
        self.finish();
    }
}
