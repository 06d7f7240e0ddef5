//! Leases: how a request gets memory and counters of its own without the table ever growing or dying.
//!
//! A slot is a handler in the table like any other, registered once. A request takes one that nobody uses, with terms
//! of its own (an arena, a budget, counters), and lets it go at its end. The slot is free again when nothing holds it:
//!
//! ```text
//!   state = leased | holders | blocks     0: free, in the list, for the next request
//!             │        │         └─ blocks alive that were made through it (escapes, after the end)
//!             │        └─ contexts and capsules in which it is selected (tasks that outlive the request)
//!             └─ the request itself
//! ```
//! After the end of its request a slot serves whoever still has it selected from the shared pool. Each block
//! remembers the terms it was made under and goes back by them.

mod account;
mod slot;

pub use account::{Refusal, Stats};
pub use slot::{Lease, LeaseMetrics, Terms, ceiling, metrics, set_ceiling};

pub(crate) use slot::Hold;
pub(super) use slot::HoldFunction;
