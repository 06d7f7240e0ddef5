//! Layer 9: the Python binding. NumPy's ContextVar as the selection, and the crossings between it and Rust.
//!
//! It has two kinds of users. The package `ctxalloc` is built from here, as the module `ctxalloc._native`. And Rust
//! extension modules of others call the functions below, one for each crossing:
//!
//! | crossing | function |
//! | --- | --- |
//! | Python calls Rust | [`scope`](fn@scope) |
//! | Python awaits a Rust future | [`future_into_py`] |
//! | a Rust task attaches to Python | [`attach`], [`try_attach`] |
//! | a Rust task awaits a Python awaitable | [`into_future`] |
//!
//! Nothing else carries a handler across. [`admit`] is how a Rust task waits for room in Python's queue. An extension
//! calls [`init`] first in its `#[pymodule]`, so that it uses the table of the package and not one of its own.

mod admit;
#[cfg(ctxalloc_whole)]
mod allocating;
mod answer;
mod asked;
mod asyncgen;
mod asyncio;
mod attached;
#[cfg(ctxalloc_whole)]
mod breaking_off;
mod bridge;
mod budget;
mod callbacks;
mod capi;
mod capsule;
mod cuda;
#[cfg(ctxalloc_whole)]
mod domains;
mod entry_points;
mod errors;
#[cfg(ctxalloc_whole)]
mod eval_loop;
mod events;
mod exchange;
mod exit;
mod foreign;
#[cfg(ctxalloc_whole)]
mod found;
#[cfg(ctxalloc_whole)]
mod fragile;
#[cfg(ctxalloc_whole)]
mod gaps;
mod handler;
mod imported;
mod inspect;
mod interned;
mod interpreter;
mod lookup;
mod metrics;
mod module;
#[cfg(ctxalloc_whole)]
mod named_capsules;
mod numpy;
#[cfg(ctxalloc_whole)]
mod observed;
mod options;
#[cfg(ctxalloc_whole)]
mod overdraft;
#[cfg(not(ctxalloc_whole))]
#[path = "no_overdraft.rs"]
mod overdraft;
#[cfg(ctxalloc_whole)]
mod own_context;
mod pending;
#[cfg(ctxalloc_whole)]
mod preloaded;
mod profile;
mod reclaimers;
mod recording;
mod request;
mod scope;
mod scope_type;
#[cfg(ctxalloc_whole)]
mod selected;
mod selection;
mod serving_step;
mod settings;
mod shared;
mod sited;
mod step;
mod strategies;
mod sums;
mod symbol;
mod text;
mod token;
mod token_cell;
mod tracked;
mod tune;
#[cfg(ctxalloc_whole)]
mod uncaught;
mod uncollected;
mod usm;
mod vectorcall;
#[cfg(ctxalloc_whole)]
mod whole;
#[cfg(not(ctxalloc_whole))]
#[path = "no_whole.rs"]
mod whole;

pub use admit::{PythonAdmission, PythonRequest, admit};
pub use asyncio::{PythonTask, future_into_py, into_future, into_future_with_locals};
pub use bridge::{attach, current, scope, try_attach};
pub use shared::init;
