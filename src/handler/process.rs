//! The table of this process: made at its first use with the built-in handlers in it, or another copy's.

use super::builtin;
use super::entry::{Draft, Entry};
use super::events::{state::Events, tell, watched};
use super::name::Name;
use super::table::{Table, TableLock, install, present};
use super::word::Handler;
use crate::error::Error;
use crate::sync::held_across_fork;
use crate::trace;
use crate::unattributed::unattributed;

use std::ptr::null_mut;
use std::sync::atomic::{AtomicPtr, Ordering};

#[cfg(feature = "python")]
use super::interpreter::{Attach, Trace};

/// The entries of `pool` and `system`, where this copy of the crate has made the process's table: NULL before, and
/// else. Relaxed: they are only compared.
static POOL: AtomicPtr<Entry> = AtomicPtr::new(null_mut());
static SYSTEM: AtomicPtr<Entry> = AtomicPtr::new(null_mut());

/// Whether it is the handler of this copy's shared pool. False where that is not known.
#[inline]
pub(super) fn is_pool(handler: Handler) -> bool {
    std::ptr::eq(handler.entry(), POOL.load(Ordering::Relaxed))
}

/// Whether it is this copy's handler of the C heap. False where that is not known.
#[inline]
pub(super) fn is_system(handler: Handler) -> bool {
    std::ptr::eq(handler.entry(), SYSTEM.load(Ordering::Relaxed))
}

/// The process's table.
#[inline]
pub(super) fn table() -> &'static Table {
    present().unwrap_or_else(first_use)
}

#[cold]
fn first_use() -> &'static Table {
    let _immortal = unattributed();
    let table = empty();
    let (default, ended) = builtin::register_all(&table);
    table.set_default(default);
    table.set_ended(ended);
    let table: &'static Table = Box::leak(Box::new(table));
    let held = held_across_fork(TableLock(table)); // first, so that no fork falls between a table and its hold
    match install(table) {
        // The only table of this process from now on.
        Ok(table) => {
            for (name, known) in [("pool", &POOL), ("system", &SYSTEM)] {
                if let Some(handler) = table.named(name).filter(|_| !cfg!(ctxalloc_loom)) {
                    known.store(std::ptr::from_ref(handler.entry()).cast_mut(), Ordering::Relaxed);
                }
            }
            std::mem::forget(held);
            table
        }
        // Another thread was faster, or `join`. Ours was never seen; it stays behind, at most once for each racer.
        Err(table) => table,
    }
}

/// A table without handlers, whose events this copy of the crate delivers.
pub(super) fn empty() -> Table {
    Table::empty(Events::none(tell::deliver, tell::begin_resize, watched::watch))
}

/// Whether a handler could be registered under this name now.
///
/// # Errors
/// [`Error::NameTaken`].
pub(super) fn check_free(name: Name<'_>) -> Result<(), Error> {
    let taken = table().named(name.as_str()).is_some();
    if taken { Err(Error::NameTaken { name: name.as_str().into() }) } else { Ok(()) }
}

/// Registers a handler in the process's table, and reports it if it is new.
pub(super) fn register(draft: Draft<'_>) -> Result<Handler, Error> {
    let (handler, is_new) = table().register(draft)?;
    if is_new {
        trace::registered(handler.entry().name());
    }
    Ok(handler)
}

#[cfg(feature = "python")]
impl Table {
    /// The process's table, to be shared with another copy of this crate.
    pub(crate) fn share() -> &'static Self {
        table()
    }

    /// Uses the table of another copy of this crate from now on; false where this copy has one of its own already.
    pub(crate) fn join(shared: &'static Self) -> bool {
        match install(shared) {
            Ok(_) => true,
            Err(present) => std::ptr::eq(present, shared),
        }
    }

    /// Contexts in which nothing was selected use `handler` from now on: NumPy's own default.
    pub(crate) fn use_as_default(handler: Handler) {
        table().set_default(handler);
    }

    /// Installs Python's callbacks in the table. The functions stay callable for ever.
    pub(crate) fn install_python(attach: Attach, trace: Option<Trace>) {
        table().interpreter.install(attach, trace);
    }
}
