//! Under which strategy a recording is replayed.

use crate::error::Error;
use crate::request::Builder;
use crate::source::{HugePages, LockedPages, NumaPages, NumaPolicy};
use crate::strategy::{
    Aligned, Arena, Guard, GuardOptions, Pool, PoolOptions, SharedMemory, Strategy, System, Tracked,
};
use std::sync::Arc;

/// A strategy, by its name, for all requests of a replay.
#[derive(Debug, Clone)]
pub struct Choice {
    name: String,
    given: Given,
}

#[derive(Debug, Clone)]
enum Given {
    /// The process's pool.
    Pool,
    /// An arena for each request.
    Arena,
    /// One strategy for all.
    Shared(Arc<dyn Strategy>),
}

/// What a name may be.
const EXPECTED: &str = "default, pool, arena, hugepages, aligned64 (or another power of two), tracked, locked, numa, \
                        shared_memory or guard";

impl Choice {
    /// The strategy of this name: `default` (the C heap, as NumPy's default), `pool`, `arena` (one for each request),
    /// `hugepages`, `aligned64` and other powers of two, `tracked`, `locked`, `numa` (interleaved over all nodes),
    /// `shared_memory`, `guard`.
    ///
    /// # Errors
    /// [`Error::BadOption`] for any other name; what the strategy says where this machine does not have it.
    pub fn named(name: &str) -> Result<Self, Error> {
        let given = match name {
            "default" => shared(System),
            "pool" => Given::Pool,
            "arena" => Given::Arena,
            "hugepages" => shared(Pool::over(HugePages::transparent(), PoolOptions::default())),
            "tracked" => shared(Tracked::new(Pool::shared().clone())?),
            "locked" => shared(Pool::over(LockedPages::new()?, PoolOptions::default())),
            "numa" => shared(Pool::over(NumaPages::new(&[], NumaPolicy::Interleave)?, PoolOptions::default())),
            "shared_memory" => shared(SharedMemory::new()?),
            "guard" => shared(Guard::new(GuardOptions::default())?),
            _ => match name.strip_prefix("aligned").and_then(|align| align.parse().ok()) {
                Some(align) => shared(Aligned::new(align)?),
                None => return Err(Error::BadOption { option: "strategy", value: name.into(), expected: EXPECTED }),
            },
        };
        Ok(Self { name: name.to_owned(), given })
    }

    /// Its name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The terms of one request, with this strategy.
    pub(super) fn apply(&self, terms: Builder) -> Builder {
        match &self.given {
            Given::Pool => terms,
            Given::Arena => terms.strategy(Arena::over(Pool::shared())),
            Given::Shared(strategy) => terms.strategy(Arc::clone(strategy)),
        }
    }
}

fn shared(strategy: impl Strategy) -> Given {
    Given::Shared(Arc::new(strategy))
}
