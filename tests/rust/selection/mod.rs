//! Contract 1 of the design, a file for each rule: the selection follows PEP 567 in threads, tasks and contexts.

mod awaits;
mod contexts;
mod drops;
mod edges;
mod guards;
mod teardown;
mod threads;
mod tokens;

#[cfg(feature = "tokio")]
mod tasks;
