//! The Python face: NumPy's ContextVar as the selection, and the crossings between it and Rust.
//!
//! Two kinds of users. The package `ctxalloc` is the module [`_native`](self) built from here. And Rust
//! extension modules of others call the functions below, one line for each crossing:
//!
//! | crossing | function |
//! | --- | --- |
//! | Python calls Rust | [`scope`](fn@scope) |
//! | Python awaits a Rust future | [`future_into_py`] |
//! | a Rust task attaches to Python | [`attach`], [`try_attach`] |
//! | a Rust task awaits a Python awaitable | [`into_future`] |
//!
//! Nothing else carries a handler across. An extension calls [`init`] in its `#[pymodule]` first, so that it uses
//! the table of the package and not one of its own.

mod asyncio;
mod attached;
mod bridge;
mod callbacks;
mod capi;
mod errors;
mod events;
mod exit;
mod foreign;
mod handler;
mod held;
mod inspect;
mod interpreter;
mod module;
mod numpy;
mod request;
mod scope;
mod scope_type;
mod selection;
mod settings;
mod shared;
mod step;
mod strategies;
mod token;
mod tracked;
mod usm;

pub use asyncio::{PythonTask, future_into_py, into_future, into_future_with_locals};
pub use bridge::{attach, current, scope, try_attach};
pub use shared::init;
