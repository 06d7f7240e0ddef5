//! Layer 3: the table of handlers. A handler is registered once, under one name, and never freed or changed.
//!
//! ```text
//!   Handler ──► Entry ──► Functions {ctx, malloc, calloc, realloc, free}   what Rust calls
//!   (Copy)        │
//!                 └─────► PyDataMem_Handler {name, version, functions}     what NumPy calls
//! ```
//! For a handler of our own both are the same functions. For a foreign one ([`adopt`]) the struct is the foreign one
//! itself, so that NumPy sees what it knows, and the functions are how Rust may safely reach it.
//!
//! The files from the bottom up: each imports only files above it in this list (`tests/rust/circles.rs` refuses
//! circles).
//!
//! ```text
//!   abi, name                       NEP 49's structs; what a name may be
//!   heap                            what Rust's own heap holds for requests
//!   entry, word                     Entry, which the table holds; Handler, the word that refers to one
//!   interpreter, events::state      what the table knows of Python, and of the event hook
//!   index, requests::chunks, table  the table
//!   events::{tell, watched}         how the hook is called
//!   trampoline, foreign             the C functions of a strategy, and of somebody else's struct
//!   builtin, process                the handlers that are always there; the table of this process
//!   held, requests, selected        a hold that keeps a handler valid; requests; what is selected
//!   small                           small blocks by the shortest way
//!   allocating, copying, usm        what a Handler does
//! ```
#![allow(unsafe_code, reason = "NEP 49 is a table of C functions")]

pub mod abi;

mod allocating;
mod builtin;
pub(crate) mod call;
mod container;
mod copying;
mod entry;
pub mod events;
mod foreign;
pub(crate) mod heap;
mod held;
mod index;
mod interpreter;
mod name;
mod process;
pub(crate) mod requests;
pub(crate) mod selected;
pub(crate) mod small;
mod table;
mod trampoline;
#[cfg(feature = "usm")]
mod usm;
mod word;

pub(crate) use container::Container;
pub use foreign::{Extras, Reach};
pub(crate) use held::Held;
#[cfg(any(feature = "capi", feature = "python"))]
pub(crate) use table::attached;
pub(crate) use table::trace;
#[cfg(feature = "usm")]
pub use usm::register_usm;
#[cfg(feature = "python")]
pub(crate) use usm::{UsmBlock, UsmPool};
pub use word::Handler;

#[cfg(feature = "python")]
pub(crate) use table::Table;

use crate::error::Error;
use crate::strategy::Strategy;
use abi::PyDataMem_Handler;
#[cfg(any(feature = "capi", feature = "python"))]
use entry::Draft;
use name::Name;
#[cfg(any(feature = "capi", feature = "python"))]
pub(crate) use name::name_at;
use process::table;
use std::ptr::NonNull;

/// Registers a strategy under a name, for ever.
///
/// Many threads may register at the same time; of two registrations of one name, one succeeds.
///
/// # Errors
/// [`Error::NameEmpty`], [`Error::NameTooLong`] (126 bytes of UTF-8 fit NEP 49's struct),
/// [`Error::NameHasNul`], [`Error::NameTaken`]; [`Error::BadAlignment`] where the strategy's own
/// [`alignment`](Strategy::alignment) is no power of two. The table is as before.
///
/// ```
/// use ctxalloc::{handler, register, strategy::Aligned};
///
/// let page = register("page", Aligned::new(4096)?)?;
/// assert_eq!(handler("page"), Some(page));
/// assert!(register("page", Aligned::new(64)?).is_err()); // for ever
/// # Ok::<(), ctxalloc::Error>(())
/// ```
pub fn register<S: Strategy>(name: &str, strategy: S) -> Result<Handler, Error> {
    let name = Name::new(name)?;
    process::check_free(name)?; // before anything is made immortal
    check_alignment(strategy.alignment())?;
    process::register(trampoline::draft(name, strategy))
}

/// Takes a handler that somebody else made into the table: any struct with NEP 49's layout.
///
/// `reach` is how Rust may call its functions. `name` is its name in the table, its own where `None`. The same struct
/// adopted twice is the same handler, as it was adopted first.
///
/// # Errors
/// [`Error::NameUnreadable`], [`Error::NameTaken`] and the other faults of names; [`Error::FunctionMissing`];
/// [`Error::AlreadyAdopted`] where the struct is in the table under another name than the one asked for;
/// [`Error::BadAlignment`] where `extras.alignment` is no power of two up to 1 GiB. The table is as before.
///
/// # Safety
/// - `c_struct` points to a `PyDataMem_Handler` that stays valid for ever, as NEP 49 requires, and that nobody changes
///   (but for an [event hook](events), which is ours).
/// - its functions keep C's contract for `malloc`, `calloc`, `realloc` and `free`, where `reach` says, and never
///   unwind; so do the copy functions, for blocks of the handler.
/// - blocks are aligned to `extras.alignment`.
pub unsafe fn adopt(
    c_struct: NonNull<PyDataMem_Handler>,
    reach: Reach,
    name: Option<&str>,
    extras: Extras,
) -> Result<Handler, Error> {
    if let Some(request) = requests::at_struct(c_struct.as_ptr()) {
        // A request's is its own, under its own name: it never enters the table.
        let is_asked_for = name.is_none_or(|name| name == request.name());
        return if is_asked_for { Ok(request) } else { Err(Error::AlreadyAdopted { name: request.name() }) };
    }
    // SAFETY: the caller promises an immortal struct. Its name is copied, and only that: an event hook may write to the
    // functions at this moment.
    let own = unsafe { (&raw const (*c_struct.as_ptr()).name).read() };
    let name = match name {
        Some(name) => Name::new(name)?,
        None => match table().with_struct(c_struct.as_ptr()) {
            Some(known) => return Ok(known), // perhaps under an alias: the caller has no wish
            None => Name::read(&own)?,
        },
    };
    // SAFETY: the caller promises an immortal struct that only event hooks change.
    if let Err(function) = unsafe { PyDataMem_Handler::functions(c_struct.as_ptr()) } {
        return Err(Error::FunctionMissing { handler: name.as_str().into(), function });
    }
    check_alignment(extras.alignment)?;
    process::register(foreign::draft(name, c_struct, reach, extras))
}

/// Whether a handler could be registered under this name now: before anything is made immortal for it.
///
/// # Errors
/// Those of [`register`] that concern names.
#[cfg(any(feature = "capi", feature = "python"))]
pub(crate) fn check_name(name: &str) -> Result<(), Error> {
    process::check_free(Name::new(name)?)
}

/// Registers four functions that tell the event hook themselves, as a handler of our own.
///
/// # Errors
/// Those of [`register`].
///
/// # Safety
/// - the functions keep C's contract on any thread, and never unwind; blocks are aligned to `extras.alignment`.
#[cfg(any(feature = "capi", feature = "python"))]
pub(crate) unsafe fn register_functions(
    name: &str,
    description: String,
    functions: abi::Functions,
    extras: Extras,
) -> Result<Handler, Error> {
    let name = Name::new(name)?;
    check_alignment(extras.alignment)?;
    let Extras { alignment, copies } = extras;
    process::register(Draft { alignment, copies, ..Draft::new(name, description, move || functions) })
}

/// What blocks are aligned to is a power of two, up to the largest page there is (1 GiB): whoever asks for less than
/// that gets it, which is what [`ContextAlloc`](crate::ContextAlloc) concludes from it.
fn check_alignment(align: usize) -> Result<(), Error> {
    const MAX: usize = 1 << 30;
    if align.is_power_of_two() && align <= MAX { Ok(()) } else { Err(Error::BadAlignment { align, min: 1, max: MAX }) }
}

/// The handler with that name. Takes no lock.
///
/// Requests are not found: they are not in the table.
#[must_use]
pub fn handler(name: &str) -> Option<Handler> {
    let table = table();
    table.named(name).filter(|&handler| handler != table.ended())
}

/// The handler with this C struct: the address in a `mem_handler` capsule. Takes no lock.
///
/// For the struct of a request: its handler while anything holds the request (the capsule does), none when all is gone.
#[must_use]
pub fn handler_at(c_struct: *const PyDataMem_Handler) -> Option<Handler> {
    table().with_struct(c_struct).or_else(|| requests::at_struct(c_struct))
}

/// All handlers, in the order of their registration; those of requests are not among them. Takes no lock.
pub fn handlers() -> impl Iterator<Item = Handler> {
    let table = table();
    table.iter().filter(|&handler| handler != table.ended())
}

/// The handler of a context in which nothing was selected: `system`, or NumPy's own default
/// (`default_allocator`) once the Python package is imported.
#[inline]
#[must_use]
pub fn default_handler() -> Handler {
    table().default()
}

/// The handler with that name, or an error that lists the names there are.
///
/// # Errors
/// [`Error::UnknownHandler`].
pub fn try_handler(name: &str) -> Result<Handler, Error> {
    handler(name).ok_or_else(|| {
        let known: Vec<_> = handlers().map(Handler::name).collect();
        Error::UnknownHandler { name: name.into(), known: known.join(", ") }
    })
}
