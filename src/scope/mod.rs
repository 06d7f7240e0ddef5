//! Layer 4: the selection. Which handler serves the work that runs on this thread now?
//!
//! It is a `Copy` pointer in a `const` thread-local: without a destructor or a lock, readable while thread-locals are
//! torn down. A task's selection is swapped in for each poll and out after it. The rules are those of PEP 567
//! (`contextvars`); `tests/oracle` checks Python and Rust against them.

mod context;
mod current;
mod future;
mod guard;
mod token;

pub use context::Context;
pub use current::current;
pub use future::{Scoped, WithHandler};
pub use guard::{Guard, enter, scope};
pub use token::{Token, reset, set};
