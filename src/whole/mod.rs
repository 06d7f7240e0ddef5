//! The whole request: native memory and Python objects on the account of the request that is current, beside arrays.
//!
//! ```text
//!   malloc, PyObject_Malloc ──► preload.c counts down ──► decide: whose? ──► charge (handler::requests)
//!                                │ most blocks              place: a pool over a reserved range of addresses
//!                                ▼
//!                               the next allocator          free: is the address in a range? ──► release
//! ```
//! Blocks of 1 KiB and more are charged each; of smaller ones a sample is, which stands for the others.
//! A charged block has a record before it ([`place`]), or apart from it ([`apart`]). Whose thread it is, the binding
//! says ([`Binding`]): this layer knows no Python. Nothing here allocates by way of malloc while it holds a lock
//! (`unattributed`).
#![allow(unsafe_code, reason = "it makes and frees the blocks of malloc")]

mod addresses;
mod apart;
mod arrow;
mod binding;
mod decide;
mod decider;
mod functions;
mod loaded;
mod mappings;
mod nobodys;
mod owed;
mod place;
mod python;
mod range;
mod resize;
mod samples;
mod sampling;
mod shared;
mod twin;
mod walk;

pub(crate) use binding::{Binding, Profile, Runs};
pub(crate) use decider::profile;
pub(crate) use nobodys::by_group;
pub(crate) use python::{Python, extent, file_of};
pub(crate) use shared::AttachMappings;
pub(crate) use shared::{
    Allocator, Attach, AttachArrow, GetThread, Hook, Kind, Library, MakeTwin, Shrinks, Thread, Twins,
};
pub(crate) use shared::{NOT_RAISING, NOTED, OWED, RAISED, RAISING, REFUSES, TELLING, handler_of, word_of};
pub(crate) use walk::is_called_outside_of;

use crate::handler::requests::ask_for_imports;
use crate::strategy::account::WHOLE_REQUESTS;
use crate::unattributed;
use place::Places;
use range::Range;
use shared::Slow;
use std::ffi::c_void;

static SLOW: Slow = Slow {
    allocate: decide::allocate,
    resize: resize::resize,
    release: decide::release,
    twin: twin::twin,
    keep: twin::keep,
    usable: decide::usable,
    grows_for_nobody: decide::grows_for_nobody,
    requests: &WHOLE_REQUESTS,
};

/// Begins to charge blocks, for ever. Called once.
///
/// # Errors
/// A sentence that says what is missing.
pub(crate) fn attach(library: &Library, binding: Binding) -> Result<(), String> {
    let Some(ranges) = Range::reserve::<3>() else {
        return Err(
            "the system gave no range of addresses: raise `ulimit -v`, or vm.overcommit_memory forbids it".into()
        );
    };
    unattributed::watch();
    loaded::begin();
    nobodys::begin();
    let first = ranges[0].base();
    decider::begin(Places::over(ranges), binding, library.twins);
    ask_for_imports(decide::imports);
    // SAFETY: the ranges stay reserved for ever, and `decide` can decide from here on.
    unsafe { (library.attach)(first, decide::EXACT_FROM, &raw const SLOW) };
    arrow::attach(library);
    Ok(())
}

/// Begins to charge anonymous mappings of libraries, too, for ever. Called once, after [`attach`]. `arenas`: the
/// function that maps for Python's small objects.
pub(crate) fn attach_mappings(library: &Library, arenas: *const c_void) {
    // SAFETY: a function of the preloaded library.
    let next = unsafe { (library.next)() };
    mappings::begin(library.attach_mappings, next, arenas);
}
