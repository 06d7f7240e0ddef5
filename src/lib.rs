//! # ctxalloc: which allocator serves this piece of work?
//!
//! The work may be an OS thread, a tokio task, an asyncio coroutine, or one HTTP request that touches
//! all three. ctxalloc keeps one answer for each of them, with the rules of Python's
//! [`contextvars`](https://peps.python.org/pep-0567/): a [`Handler`] is selected for a *context*, a task
//! starts with a copy of its creator's context, and nobody sees what another one selects.
//!
//! A *handler* is NEP 49's word: a named, versioned, immortal table of `malloc`/`calloc`/`realloc`/`free`.
//! Behind one stands a [`strategy`]; every block goes back to the handler that made it, whatever is
//! selected by then and on whatever thread.
//!
//! ```
//! use ctxalloc::{Buffer, handler, scope};
//!
//! let aligned = handler("aligned64").expect("registered by the crate itself");
//! let buffer = scope(aligned, || Buffer::zeroed(4096))?;
//! assert_eq!(buffer.as_ptr().addr() % 64, 0);
//! assert_eq!(buffer.handler(), aligned); // remembered: the scope is over
//! # Ok::<(), ctxalloc::Error>(())
//! ```
//!
//! Futures carry their handler through every await and across worker threads:
//!
//! ```
//! use ctxalloc::{Buffer, WithHandler, handler};
//! # fn main() -> Result<(), ctxalloc::Error> {
//! # let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
//! # runtime.block_on(async {
//! let aligned = handler("aligned64").expect("registered by the crate itself");
//! let buffer = async { Buffer::zeroed(64) }.with_handler(aligned).await?;
//! assert_eq!(buffer.handler().name(), "aligned64");
//! # Ok(()) })
//! # }
//! ```
//!
//! | you have | you write |
//! | --- | --- |
//! | a block of code | [`scope`](fn@scope), [`enter`], [`set`] and [`reset`] |
//! | a future or a stream | [`.with_handler()`](WithHandler::with_handler), [`.in_current_handler()`](WithHandler::in_current_handler) |
//! | a task, a thread | `task::spawn`, `spawn_blocking` and others, [`thread::spawn`], [`Context::wrap`] |
//! | a request with memory, numbers and a limit of its own | [`request`](fn@request) |
//! | a question: how much, under which name? | [`metrics`] |
//! | what requests asked of memory, and when | [`recording`] |
//! | what that takes under another strategy | [`tune`] |
//! | a service of tower: axum, hyper, tonic | `tower::RequestLayer` (feature `tower`) |
//! | bytes, containers | [`Buffer`], [`ContextAlloc`]; [`memory::DeviceBuffer`] if the host cannot read them |
//! | Rust's own heap: `Box`, `Vec`, `String` | [`GlobalScoped`], a global allocator that attributes it to requests |
//! | memory of a SYCL device | `source::Queue`, `handler::register_usm` (feature `usm`) |
//! | pinned memory for a CUDA device | `source::CudaPinned`, `strategy::Quarantined` (feature `cuda`) |
//! | a way of your own to hand out memory | [`strategy::Strategy`], [`register`] |
//! | an extension module for Python | `python` (with that feature) |
//! | a program in C, or an extension in C, C++, Cython, cffi | `include/ctxalloc.h` (feature `capi`; Python's package has it) |
//!
//! ## Layers: each uses only those to its right
//!
//! `python` → `capi` → `tower` → `task` → `room` → [`memory`] → [`scope`](mod@scope) → [`handler`](mod@handler) → [`strategy`] →
//! [`source`], with [`tune`] beside `tower`, and [`thread`](mod@thread), [`request`](mod@request), [`metrics`] and
//! `rayon` beside `task`, and the leaves `answer`, `counters`, `error`, `layout`, `os`, `recording`, `settings`,
//! `sync`, `trace`, `unattributed` for all. A test reads the `use crate::` lines and checks the order.
//! `ARCHITECTURE.md` walks through one allocation and one selection.

#![cfg_attr(docsrs, feature(doc_cfg))]

pub mod handler;
pub mod memory;
pub mod metrics;
pub mod recording;
pub mod request;
mod room;
pub mod scope;
pub mod source;
pub mod strategy;
pub mod thread;
pub mod tune;
#[cfg(ctxalloc_whole)]
mod whole;

#[cfg(any(feature = "capi", feature = "python"))]
mod capi;
#[cfg(feature = "python")]
pub mod python;
#[cfg(feature = "rayon")]
pub mod rayon;
#[cfg(feature = "tokio")]
pub mod task;
#[cfg(feature = "tower")]
pub mod tower;

#[cfg(any(feature = "python", feature = "tower"))]
mod answer;
mod counters;
mod error;
mod layout;
mod os;
#[cfg(test)]
mod random;
mod settings;
mod survived;
mod sync;
mod trace;
mod unattributed;

pub use error::{Error, NoRoom};
pub use handler::{Handler, default_handler, handler, handlers, register};
pub use memory::{Buffer, ContextAlloc, GlobalScoped, Scratch};
pub use request::{AfterEnd, Request, RequestHandle, charge_current, current_request, request};
pub use scope::{Context, Guard, Scoped, Token, WithHandler, current, enter, reset, scope, set};
pub use settings::{Settings, check_environment, configure};

/// Returns the unused memory of all pools, arenas, handlers and threads' caches to the system. Returns how many bytes,
/// as far as is known. Where the system has no `membarrier` (macOS, Windows, some sandboxes) the caches of other
/// threads stay: at most 2 MiB of small blocks per thread, which keep the pages of 64 KiB that they lie in.
///
/// ```
/// drop(ctxalloc::Buffer::zeroed_in(ctxalloc::handler("pool").expect("built in"), 50 << 20)?);
/// assert!(ctxalloc::trim() >= 50 << 20);
/// # Ok::<(), ctxalloc::Error>(())
/// ```
pub fn trim() -> usize {
    let _unattributed = unattributed::unattributed(); // for all requests, and a heap at its limit has no room for it
    handlers().map(Handler::trim).sum::<usize>() + strategy::trim_pools()
}

/// The Rust in the documents, run as doc tests.
#[cfg(all(doctest, feature = "tokio", feature = "allocator-api2-02", feature = "allocator-api2"))]
mod documents {
    #[doc = include_str!("../README.md")]
    mod readme {}
    #[cfg(all(feature = "axum", feature = "rayon", feature = "metrics"))]
    #[doc = include_str!("../docs/rust.md")]
    mod guide {}
    #[doc = include_str!("../docs/strategies.md")]
    mod strategies {}
}
