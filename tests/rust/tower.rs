//! `tower::RequestLayer`: each request of a service is reported once, however it ends, and nothing of it stays.
#![allow(clippy::unwrap_used, reason = "a test that unwraps nothing has failed")]

#[path = "tower/grpc.rs"]
mod grpc;
#[path = "tower/http1.rs"]
mod http1;
#[path = "tower/load.rs"]
mod load;
#[path = "tower/outcomes.rs"]
mod outcomes;
#[path = "tower/refusals.rs"]
mod refusals;
#[path = "tower/support.rs"]
mod support;
#[path = "tower/waiting.rs"]
mod waiting;

/// Every test runs under it: attributing Rust's heap changes nothing for anybody.
#[global_allocator]
static GLOBAL: ctxalloc::GlobalScoped = ctxalloc::GlobalScoped::new(std::alloc::System);
