//! Layer 3: the immortal table. A handler is registered once, under one name, and never freed or changed.
//!
//! ```text
//!   Handler ──► Entry ──► Functions {ctx, malloc, calloc, realloc, free}   what Rust calls
//!   (Copy)        │
//!                 └─────► PyDataMem_Handler {name, version, functions}     what NumPy calls
//! ```
//! For a handler of our own both are the same functions. For a foreign one ([`adopt`]) the struct is the
//! foreign one itself, so that NumPy sees it unchanged, and the functions are how Rust may safely reach it.
#![allow(unsafe_code, reason = "NEP 49 is a table of C functions")]

pub mod abi;

mod builtin;
mod entry;
mod index;
pub mod lease;
mod name;
mod table;
mod trampoline;

pub use entry::Handler;

#[cfg(feature = "python")]
pub(crate) use table::Table;

use crate::error::Error;
use crate::strategy::Strategy;
use crate::trace;
use abi::{Functions, PyDataMem_Handler};
use entry::Draft;
use name::Name;
use std::ptr::NonNull;

/// Registers a strategy under a name, for ever.
///
/// Many threads may register at once; of two with the same name one wins.
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
    let table = table::table();
    if table.named(name.as_str()).is_some() {
        return Err(Error::NameTaken { name: name.as_str().into() }); // before anything is made immortal
    }
    check_alignment(strategy.alignment())?;
    enter(table, Draft::of_strategy(name, strategy))
}

/// Takes a handler that somebody else made into the table: any struct with NEP 49's layout.
///
/// `functions` is how Rust calls it; pass [`Functions::of`] its own allocator if those may be called on any
/// thread without Python's GIL. `name` is its name in the table, its own where `None`. `alignment` is what
/// its blocks are known to be aligned to in bytes (1 where nothing is known). The same struct adopted twice
/// is the same handler.
///
/// # Errors
/// [`Error::NameUnreadable`], [`Error::NameTaken`] and the other faults of names; [`Error::FunctionMissing`];
/// [`Error::AlreadyAdopted`] where the struct is in the table under another name than the one asked for;
/// [`Error::BadAlignment`] where `alignment` is no power of two up to 1 GiB. The table is as before.
///
/// # Safety
/// - `face` points to a `PyDataMem_Handler` that stays valid and unchanged for ever, as NEP 49 requires.
/// - `functions` keep C's contract for `malloc`, `calloc`, `realloc` and `free`, on any thread, and never unwind.
/// - blocks of `functions` are aligned to `alignment`.
pub unsafe fn adopt(
    face: NonNull<PyDataMem_Handler>,
    functions: Functions,
    name: Option<&str>,
    alignment: usize,
) -> Result<Handler, Error> {
    // SAFETY: the caller vouches for the struct.
    let own: &'static PyDataMem_Handler = unsafe { face.as_ref() };
    let table = table::table();
    let name = match name {
        Some(name) => Name::new(name)?,
        None => match table.with_face(face.as_ptr()) {
            Some(entry) => return Ok(entry), // perhaps under an alias: the caller has no wish
            None => Name::read(&own.name)?,
        },
    };
    if let Err(function) = Functions::of(&own.allocator) {
        return Err(Error::FunctionMissing { handler: name.as_str().into(), function });
    }
    check_alignment(alignment)?;
    enter(table, Draft::foreign(name, own, functions, alignment))
}

/// What blocks are aligned to is a power of two, up to the largest page there is (1 GiB): whoever asks for less than
/// that gets it, which is what [`ContextAlloc`](crate::ContextAlloc) concludes from it.
fn check_alignment(align: usize) -> Result<(), Error> {
    const MOST: usize = 1 << 30;
    if align.is_power_of_two() && align <= MOST {
        Ok(())
    } else {
        Err(Error::BadAlignment { align, least: 1, most: MOST })
    }
}

fn enter(table: &table::Table, draft: Draft<'_>) -> Result<Handler, Error> {
    let (handler, is_new) = table.register(draft)?;
    if is_new {
        trace::registered(handler.name());
    }
    Ok(handler)
}

/// The handler with that name. Takes no lock.
///
/// The slots of requests are not found: whose memory one is changes from request to request, and a name holds nobody.
#[must_use]
pub fn handler(name: &str) -> Option<Handler> {
    table::table().named(name).filter(|handler| !handler.is_slot())
}

/// The handler with that name, a request's slot too: for those who hold something that lives in it.
#[cfg(feature = "python")]
pub(crate) fn handler_or_slot(name: &str) -> Option<Handler> {
    table::table().named(name)
}

/// The handler whose C struct stands at `face`, the address in a `mem_handler` capsule. Takes no lock.
#[must_use]
pub fn handler_at(face: *const PyDataMem_Handler) -> Option<Handler> {
    table::table().with_face(face)
}

/// All handlers, in the order of their registration, but for the slots of requests. Takes no lock.
pub fn handlers() -> impl Iterator<Item = Handler> {
    table::table().iter().filter(|handler| !handler.is_slot())
}

/// The handler of a context in which nothing was selected: `system`, or NumPy's own default
/// (`default_allocator`) once Python's face is there.
#[inline]
#[must_use]
pub fn default_handler() -> Handler {
    table::table().default()
}

/// [`Error::UnknownHandler`] for a name that [`handler`] did not find.
#[must_use]
pub fn unknown(name: &str) -> Error {
    let known: Vec<_> = handlers().map(Handler::name).collect();
    Error::UnknownHandler { name: name.into(), known: known.join(", ") }
}
