//! rayon: `scope`, `join` and thread pools that carry the caller's context to its threads. Layer 6, beside `thread`.
//!
//! rayon's own functions carry nothing: their closures see what is selected on the thread that takes them. For a
//! parallel iterator there is `map_init`, which copies the context once for each piece of the work:
//!
//! ```
//! use ctxalloc::{Buffer, Context, request};
//! use rayon::prelude::*;
//!
//! let request = request().name("tiles").begin()?;
//! let context = request.run(Context::copy_current);
//! let tiles: Vec<Buffer> = (0..100_usize)
//!     .into_par_iter()
//!     .map_init(|| context.clone(), |context, tile| context.run(|| Buffer::zeroed(1 + tile)))
//!     .collect::<Result<_, _>>()?;
//! assert_eq!(request.stats().live_blocks, tiles.len());
//! # Ok::<(), ctxalloc::Error>(())
//! ```

use crate::scope::Context;
use rayon_core::ThreadPoolBuilder;
use std::fmt;
use std::marker::PhantomData;

/// [`rayon::join`](rayon_core::join) with copies of the running context.
///
/// ```
/// use ctxalloc::{Buffer, rayon::join, request};
///
/// let request = request().begin()?;
/// let (left, right) = request.run(|| join(|| Buffer::zeroed(100), || Buffer::zeroed(200)));
/// assert_eq!(request.stats().live_bytes, left?.len() + right?.len());
/// # Ok::<(), ctxalloc::Error>(())
/// ```
pub fn join<A, B, RA, RB>(left: A, right: B) -> (RA, RB)
where
    A: FnOnce() -> RA + Send,
    B: FnOnce() -> RB + Send,
    RA: Send,
    RB: Send,
{
    let context = Context::copy_current();
    rayon_core::join(context.clone().wrap(left), context.wrap(right))
}

/// [`rayon::scope`](rayon_core::scope()) with copies of the running context: for `work`, which runs on a thread of the
/// pool, and for all that it spawns.
///
/// ```
/// use ctxalloc::{Buffer, rayon::scope, request};
///
/// let request = request().begin()?;
/// let mut halves = [None, None];
/// request.run(|| {
///     scope(|scope| {
///         for half in &mut halves {
///             scope.spawn(move |_| *half = Buffer::zeroed(50).ok());
///         }
///     });
/// });
/// assert_eq!(request.stats().live_bytes, 100);
/// # drop(halves);
/// # Ok::<(), ctxalloc::Error>(())
/// ```
pub fn scope<'scope, R: Send>(work: impl FnOnce(&Scope<'_, 'scope>) -> R + Send) -> R {
    let mut context = Context::copy_current();
    rayon_core::scope(move |scope| context.run(|| work(&Scope { scope, not_send: PhantomData })))
}

/// A [`rayon::Scope`](rayon_core::Scope) whose jobs carry the context.
pub struct Scope<'a, 'scope> {
    scope: &'a rayon_core::Scope<'scope>,
    /// It stands for the context of its thread.
    not_send: PhantomData<*const ()>,
}

impl<'scope> Scope<'_, 'scope> {
    /// Spawns a job with a copy of the running context.
    pub fn spawn(&self, job: impl FnOnce(&Scope<'_, 'scope>) + Send + 'scope) {
        let mut context = Context::copy_current();
        self.scope.spawn(move |scope| context.run(|| job(&Scope { scope, not_send: PhantomData })));
    }
}

impl fmt::Debug for Scope<'_, '_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Scope").field(self.scope).finish()
    }
}

/// Has all threads of the pool start with what is selected now, and keep it: for a pool that works for one request or
/// under one handler. It takes the place of the builder's `start_handler`.
///
/// ```
/// use ctxalloc::{current, handler, rayon::in_current_handler, scope};
/// use rayon::ThreadPoolBuilder;
///
/// let aligned = handler("aligned64").expect("built in");
/// let pool = scope(aligned, || in_current_handler(ThreadPoolBuilder::new().num_threads(2))).build().expect("threads");
/// assert!(pool.broadcast(|_| current()).into_iter().all(|seen| seen == aligned));
/// ```
#[must_use]
pub fn in_current_handler(builder: ThreadPoolBuilder) -> ThreadPoolBuilder {
    let context = Context::copy_current();
    builder.start_handler(move |_| {
        if !context.is_unset() {
            drop(crate::scope::set(context.handler())); // for the thread's life, at whose end the selection goes
        }
    })
}
