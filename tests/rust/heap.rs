//! `GlobalScoped` as this program's allocator, over one that watches: whose each block of Rust's heap is, against a
//! naive count.
#![allow(clippy::unwrap_used, reason = "a test that unwraps nothing has failed")]
#![allow(unsafe_code, reason = "a global allocator; fork")]

#[path = "heap/attribution.rs"]
mod attribution;
#[path = "heap/books.rs"]
mod books;
#[cfg(all(unix, not(miri)))]
#[path = "support/child.rs"]
mod child;
#[path = "heap/guarantees.rs"]
mod guarantees;
#[cfg(feature = "tracing")]
#[path = "support/hearing.rs"]
mod hearing;
#[path = "heap/layouts.rs"]
mod layouts;
#[path = "heap/limits.rs"]
mod limits;
#[cfg(all(unix, not(miri)))]
#[path = "heap/panics.rs"]
mod panics;
#[path = "heap/process.rs"]
mod process;
#[path = "heap/upstream.rs"]
mod upstream;

use ctxalloc::GlobalScoped;
use upstream::Upstream;

#[global_allocator]
static GLOBAL: GlobalScoped<Upstream> = GlobalScoped::new(Upstream);
