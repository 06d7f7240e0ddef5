//! Layer 7, beside `tower`: what a recording says of each route (`summary`), and what it costs under another strategy
//! (`plan`, `replay`). `docs/tune.md` is the guide; decision 0046 says how a replay works and what it cannot say.
//!
//! ```text
//!   Recording ──► Plan: which steps each thread takes, and for which steps of others it waits first
//!                  │
//!                  ▼
//!                 replay under a Choice of strategy ──► Replayed: time, faults, resident memory
//! ```

mod choice;
mod ended;
mod lives;
mod measure;
mod model;
mod phases;
mod plan;
mod planner;
mod progress;
mod replay;
mod steps;
mod stored;
mod summary;
#[cfg(any(test, feature = "python", ctxalloc_fuzz))]
#[cfg_attr(not(feature = "python"), allow(dead_code, unused_imports, reason = "Python asks for all of it"))]
pub(crate) mod trace;
#[cfg(ctxalloc_fuzz)]
pub use trace::{Told, told};

pub use choice::Choice;
pub use plan::{Facts, Plan};
#[cfg(feature = "python")]
pub(crate) use planner::Planner;
pub use replay::{Replayed, replay, replay_routes};
pub use summary::{Route, routes};
#[cfg(feature = "python")]
pub(crate) use summary::{Summary, Summed};
