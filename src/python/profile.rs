//! A profile of the arrays that a program makes, whatever handlers it selects: an event hook in Rust that knows each
//! block's size, the code that made it and the handler that was selected. `ctxalloc run --report` shows it. Of whole
//! requests it has native memory and objects too ([`Placed`]).
//!
//! The hook runs inside of allocations, so it runs no Python code: `tracked::attribution` reads the frames.
#![allow(unsafe_code, reason = "a C hook")]

use super::bridge;
use super::pending::SetAside;
use super::sums::{Part, Profile, SiteNumbers, SumNumbers};
use super::tracked::attribution;
use crate::handler::events::{EventHook, Hook, changes, set_event_hook};
use crate::handler::{Handler, requests::RequestHandle};
use crate::strategy::{Attribution, Place};
use crate::sync::{ForkLock, HeldAcrossFork, Locked, Made, held_across_fork};
use crate::unattributed::unattributed;
#[cfg(ctxalloc_whole)]
use crate::whole::profile as tell_of_blocks;
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use std::ffi::c_void;
use std::ptr::null_mut;
use std::sync::Arc;

type Attribute = Box<dyn Fn() -> Attribution + Send + Sync>;

#[derive(Default)]
struct Running {
    sums: Profile,
    /// `events::changes()` once this profile's own hook was set.
    hook_changes: usize,
}

struct Profiling {
    profile: Locked<Option<Running>>,
    attribute: Locked<Option<Arc<Attribute>>>,
}

impl HeldAcrossFork for Profiling {
    fn for_each_lock(&self, visit: &mut dyn FnMut(&ForkLock)) {
        visit(self.attribute.lock());
        visit(self.profile.lock());
    }
}

/// There are none.
#[cfg(not(ctxalloc_whole))]
fn tell_of_blocks(_is_told: bool) {}

fn profiling() -> &'static Profiling {
    static PROFILING: Made<Arc<Profiling>> = Made::new();
    PROFILING.get_or_make(|| held_across_fork(Profiling { profile: Locked::new(None), attribute: Locked::new(None) }))
}

/// What a handler is called in a profile: requests without a name have one in common.
fn name_of(handler: Handler) -> String {
    if !handler.is_request() {
        return handler.name().into_owned();
    }
    let request = RequestHandle::from_handler(handler);
    match request.as_ref().and_then(|request| request.seen().given_name()) {
        Some(name) => format!("request {name:?}"),
        None => "requests without a name".to_owned(),
    }
}

fn place_by(attribute: Option<&Attribute>) -> Option<Arc<Place>> {
    match attribute.map(|attribute| attribute()) {
        Some(Attribution::Origin(origin)) => origin.place.clone(),
        _ => None,
    }
}

/// A placed block of a whole request (`src/whole`): what is told of it while a profile runs. Inside of an allocation of
/// any kind, on any thread, so nothing here runs Python code or waits for the GIL.
#[cfg(ctxalloc_whole)]
pub(super) mod placed {
    use super::*;
    use crate::python::attached;
    use crate::strategy::account::Weight;

    pub(in crate::python) fn made(address: usize, weight: Weight, blocks: u64, handler: Handler, may_look: bool) {
        let _unattributed = unattributed();
        let profiling = profiling();
        let attribute = profiling.attribute.with(|attribute| attribute.clone()).filter(|_| may_look);
        let place = {
            // An exception that is on its way is no reason not to know the place.
            let _pending = attached::here().map(SetAside::new);
            place_by(attribute.as_deref())
        };
        let (handler, part) = (name_of(handler), if weight.is_object { Part::Object } else { Part::Native });
        profiling.profile.with(|profile| {
            let Some(Running { sums: profile, .. }) = profile else { return };
            let (site, handler) = (profile.site(place, part), profile.handler(handler));
            profile.add(address, weight.bytes, blocks, site, handler);
        });
    }

    pub(in crate::python) fn freed(address: usize) {
        let _unattributed = unattributed();
        profiling().profile.with(|profile| {
            let Some(Running { sums: profile, .. }) = profile else { return };
            if let Some(block) = profile.blocks.remove(&address) {
                profile.subtract(&block);
            }
        });
    }

    pub(in crate::python) fn resized(from: usize, to: usize, weight: Weight) {
        let _unattributed = unattributed();
        profiling().profile.with(|profile| {
            let Some(Running { sums: profile, .. }) = profile else { return };
            if let Some(block) = profile.blocks.remove(&from) {
                profile.resize(block, to, weight.bytes);
            }
        });
    }
}

/// The hook.
///
/// # Safety
/// - this thread is attached to Python.
unsafe extern "C" fn record(inp: *mut c_void, outp: *mut c_void, size_bytes: usize, _: *mut c_void) {
    // SAFETY: this thread is attached to Python (this function's contract).
    let py = unsafe { Python::assume_attached() };
    let _unattributed = unattributed(); // what is made here is not told of, which would come back here
    let profiling = profiling();
    if inp.is_null() && !outp.is_null() {
        let attribute = profiling.attribute.with(|attribute| attribute.clone());
        let place = place_by(attribute.as_deref());
        let _pending = SetAside::new(py);
        let handler = bridge::current(py).map_or_else(|_| "unknown".to_owned(), name_of);
        profiling.profile.with(|profile| {
            let Some(Running { sums: profile, .. }) = profile else { return };
            let (site, handler) = (profile.site(place, Part::Array), profile.handler(handler));
            profile.add(outp.addr(), size_bytes, 1, site, handler);
        });
        return;
    }
    profiling.profile.with(|profile| {
        let Some(Running { sums: profile, .. }) = profile else { return };
        if outp.is_null() && size_bytes > 0 {
            profile.refused += 1; // a resize that was refused leaves its block as it was
        } else if let Some(block) = profile.blocks.remove(&inp.addr()) {
            if outp.is_null() {
                profile.subtract(&block);
                return;
            }
            profile.resize(block, outp.addr(), size_bytes);
        }
    });
}

/// Begins a profile with so many frames of each allocation. RuntimeError: one has begun. Returns whether it took the
/// place of another event hook, which is not called meanwhile.
#[pyfunction]
#[pyo3(name = "_profile_begin", signature = (frames, /))]
pub(super) fn profile_begin(py: Python<'_>, frames: usize) -> PyResult<bool> {
    bridge::current(py)?;
    let attribute: Attribute = Box::new(attribution(py, frames, false)?);
    let _ = attribute(); // it makes what it keeps while nothing is being made around it
    let profiling = profiling();
    let has_begun = profiling.profile.with(|profile| {
        let has_begun = profile.is_some();
        if !has_begun {
            *profile = Some(Running::default());
        }
        has_begun
    });
    if has_begun {
        return Err(PyRuntimeError::new_err("a profile has begun already; end it first"));
    }
    let before = profiling.attribute.with(|place| place.replace(Arc::new(attribute)));
    drop(before);
    // SAFETY: `record` may be called by any attached thread, at any time.
    let before = unsafe { set_event_hook(Some(Hook { function: record, user_data: null_mut() })) };
    let hook_changes = changes();
    profiling.profile.with(|profile| {
        if let Some(profile) = profile {
            profile.hook_changes = hook_changes;
        }
    });
    tell_of_blocks(true);
    Ok(before.is_some())
}

type ProfileNumbers = (SumNumbers, u64, Vec<SiteNumbers>, Vec<(String, SumNumbers)>, bool, Vec<SumNumbers>, Vec<usize>);

/// Ends the profile: the sums, refusals, sites (the innermost frame first) and handlers, whether it saw everything, the
/// sums of arrays, native memory and objects, and which of these each site is of. It did not see everything (False)
/// where the program set an event hook of its own, though it may have put ours back. RuntimeError: none has begun.
#[pyfunction]
#[pyo3(name = "_profile_end")]
pub(super) fn profile_end() -> PyResult<ProfileNumbers> {
    tell_of_blocks(false);
    let hook_changes = changes();
    // SAFETY: the contract is about the new hook, and there is none.
    let before = unsafe { set_event_hook(None) };
    let is_ours = before.as_ref().is_some_and(|hook| std::ptr::fn_addr_eq(hook.function, record as EventHook));
    if let Some(hook) = before.filter(|_| !is_ours) {
        // SAFETY: whoever set it promised that it may be called; it was only out for a moment.
        unsafe { set_event_hook(Some(hook)) };
    }
    let profile = profiling().profile.with(Option::take);
    drop(profiling().attribute.with(Option::take));
    let Some(Running { sums: mut profile, hook_changes: begun_with }) = profile else {
        return Err(PyRuntimeError::new_err("no profile has begun"));
    };
    let sites = profile.sites();
    let handlers = profile.handlers();
    let (parts, parts_of_sites) = (profile.parts(), profile.parts_of_sites());
    let is_complete = is_ours && begun_with == hook_changes;
    Ok((profile.all(), profile.refused, sites, handlers, is_complete, parts, parts_of_sites))
}
