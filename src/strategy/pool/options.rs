//! How much unused memory a pool may keep, and for how long.

use crate::settings;
use crate::source::pages;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

/// How much unused memory a pool may keep, and for how long.
///
/// A field that is not changed follows [`configure`](crate::configure) until the settings are first used.
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
    /// The most bytes of unused large blocks that are kept with their memory, whatever the expected demand. By default,
    /// and unless the process's [settings](crate::Settings) say otherwise, an eighth of the machine's memory, but at
    /// least 64 MiB.
    pub warm_bytes: usize,
    /// How long unused memory is kept. By default, and unless the process's [settings](crate::Settings) say otherwise,
    /// ten seconds. Of large blocks a pool in use keeps at most twice what it used at its busiest moment of the last
    /// quarter of it. A pool in use checks this itself; for others the thread `ctxalloc-decay` does, which sleeps while
    /// there is nothing to give back.
    pub decay: Duration,
}

impl Default for PoolOptions {
    fn default() -> Self {
        Self { warm_bytes: default_warm_bytes(), decay: settings::decay() }
    }
}

/// What the process may have, where that is known to be less than what the machine has.
static ALLOWED_BYTES: AtomicUsize = AtomicUsize::new(usize::MAX);

/// Says how much the process may have. Pools that have not kept a large block yet go by it.
pub(in crate::strategy) fn allow(bytes: usize) {
    ALLOWED_BYTES.store(bytes, Ordering::Relaxed);
}

fn default_warm_bytes() -> usize {
    // Not read here: a pool may be the allocator that reading a file needs.
    let allowed = || pages::physical_bytes().min(ALLOWED_BYTES.load(Ordering::Relaxed));
    settings::warm_bytes().unwrap_or_else(|| (allowed() / 8).max(64 << 20))
}

/// The options of one pool. `None` follows the process's settings.
#[derive(Debug, Clone, Copy)]
pub(super) struct Retention {
    warm_bytes: Option<usize>,
    decay: Option<Duration>,
}

impl Retention {
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

    /// Called when memory is handed out: the process's settings cannot change after that.
    #[inline]
    pub(super) fn fix(self) {
        if self.warm_bytes.is_none() || self.decay.is_none() {
            settings::fix();
        }
    }
}
