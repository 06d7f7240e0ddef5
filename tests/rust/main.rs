//! The tests of the Python-free core, one module for each subject; what needs a process of its own is in
//! `process.rs`, what needs time in `stress.rs`. A name is a sentence: the rule that the test holds.
#![allow(unsafe_code, reason = "the tests call C functions and write strategies")]
#![allow(clippy::unwrap_used, reason = "a test that unwraps nothing has failed")]

mod architecture;
mod auto_traits;
mod circles;
mod comments;
mod layers;
mod memory;
mod selection;
mod strategies;
mod support;
mod table;

/// Every test runs under it: attributing Rust's heap changes nothing for anybody. Not under Miri, whose Stacked Borrows
/// know no allocator that keeps a word before each block: a `Box` frees by a pointer that is good for its own bytes
/// only.
#[cfg(not(miri))]
#[global_allocator]
static GLOBAL: ctxalloc::GlobalScoped = ctxalloc::GlobalScoped::new(std::alloc::System);
