//! Layer 4: the selection. Which handler serves the work that runs here and now?
//!
//! The answer is a `Copy` pointer in a `const` thread-local: no destructor, no lock, readable while
//! thread-locals are being torn down. A task's own answer is swapped in for each poll and out after it.
//! The rules are those of PEP 567 (`contextvars`); `tests/oracle` holds both sides to it.

mod context;
mod current;
mod future;
mod guard;
mod token;

pub use context::Context;
pub use current::{current, set};
pub use future::{Scoped, WithHandler};
pub use guard::{Guard, enter, scope};
pub use token::{Token, reset};
