//! What a pool may keep, and for how long.

use crate::settings;
use crate::source::pages;
use std::time::Duration;

/// What a pool may keep.
///
/// A field that is left as it is follows [`configure`](crate::configure) until the settings are first used.
///
/// ```
/// use ctxalloc::{source::PrivatePages, strategy::{Pool, PoolOptions}};
///
/// let mut options = PoolOptions::default();
/// options.warm_bytes = 64 << 20;
/// let pool = Pool::over(PrivatePages, options);
/// # drop(pool);
/// ```
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct PoolOptions {
    /// How many bytes of large blocks that nobody uses are kept with their memory at most, whatever will be wanted. An
    /// eighth of the machine's memory, at least 64 MiB, unless you or the process's [settings](crate::Settings) say
    /// otherwise.
    pub warm_bytes: usize,
    /// How long memory that nobody uses is kept. Ten seconds, unless you or the process's [settings](crate::Settings) say
    /// otherwise. Where the pool is in use it looks at the clock itself; else a thread of the process does
    /// (`ctxalloc-decay`), which sleeps while there is nothing to give back.
    pub decay: Duration,
}

impl Default for PoolOptions {
    fn default() -> Self {
        Self { warm_bytes: default_warm_bytes(), decay: settings::decay() }
    }
}

fn default_warm_bytes() -> usize {
    settings::warm_bytes().unwrap_or_else(|| (pages::physical_bytes() / 8).max(64 << 20))
}

/// The options of one pool: what was said for it alone, or else what the process says.
#[derive(Debug, Clone, Copy)]
pub(super) struct Wishes {
    warm_bytes: Option<usize>,
    decay: Option<Duration>,
}

impl Wishes {
    pub(super) fn new(options: PoolOptions) -> Self {
        let default = PoolOptions::default();
        Self {
            warm_bytes: (options.warm_bytes != default.warm_bytes).then_some(options.warm_bytes),
            decay: (options.decay != default.decay).then_some(options.decay),
        }
    }

    pub(super) fn warm_bytes(self) -> usize {
        self.warm_bytes.unwrap_or_else(default_warm_bytes)
    }

    pub(super) fn decay(self) -> Duration {
        self.decay.unwrap_or_else(settings::decay)
    }

    /// Memory is handed out: what the process says cannot change any more.
    #[inline]
    pub(super) fn fix(self) {
        if self.warm_bytes.is_none() || self.decay.is_none() {
            settings::fix();
        }
    }
}
