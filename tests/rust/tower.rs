//! `tower::RequestLayer`: each request of a service is reported once, however it ends, and nothing of it stays.
#![allow(clippy::unwrap_used, reason = "a test that unwraps nothing has failed")]

#[path = "tower/load.rs"]
mod load;
#[path = "tower/outcomes.rs"]
mod outcomes;
#[path = "tower/refusals.rs"]
mod refusals;
#[path = "tower/support.rs"]
mod support;
