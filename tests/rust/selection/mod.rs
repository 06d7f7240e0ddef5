//! The selection follows PEP 567 in threads, tasks and contexts. The files name these rules:
//!
//! 1. A new OS thread starts with the default handler.
//! 2. `set` changes the current context only. Its token restores, once, in whatever order, in its own context.
//! 3. Starting a task copies the creator's context at the call. Neither sees what the other sets afterwards.
//! 4. A set lasts across every await, also when the task moves; between polls the worker's own context is untouched.
//! 5. A scoped future runs its destructors inside its context, however it ends.
//! 6. Re-entrancy, `block_on` inside of a scope, `LocalSet` and thread-local destructors behave as `contextvars` and
//!    asyncio do.
//!
//! The random programs of `tests/oracle` hold the rules themselves, beside CPython and on every runtime. Here is what
//! no such program says: panics in destructors, thread-locals, what is told, and what only Rust has.

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
