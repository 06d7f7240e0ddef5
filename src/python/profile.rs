//! A profile of the arrays that a program makes, whatever handlers it selects: an event hook in Rust that knows each
//! block's size, the code that made it and the handler that was selected. `ctxalloc run --report` shows it.
//!
//! The hook runs inside of allocations, so it runs no Python code: `tracked::attribution` reads the frames.
#![allow(unsafe_code, reason = "a C hook")]

use super::bridge;
use super::pending::SetAside;
use super::sums::{Profile, SiteNumbers, SumNumbers};
use super::tracked::attribution;
use crate::handler::events::{EventHook, Hook, changes, set_event_hook};
use crate::handler::{Handler, requests::RequestHandle};
use crate::strategy::Attribution;
use crate::sync::{ForkLock, HeldAcrossFork, Locked, Made, held_across_fork};
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

/// The hook.
///
/// # Safety
/// - this thread is attached to Python.
unsafe extern "C" fn record(inp: *mut c_void, outp: *mut c_void, size_bytes: usize, _: *mut c_void) {
    // SAFETY: this thread is attached to Python (this function's contract).
    let py = unsafe { Python::assume_attached() };
    let profiling = profiling();
    if inp.is_null() && !outp.is_null() {
        let attribute = profiling.attribute.with(|attribute| attribute.clone());
        let place = match attribute.as_ref().map(|attribute| attribute()) {
            Some(Attribution::Origin(origin)) => origin.place.clone(),
            _ => None,
        };
        let _pending = SetAside::new(py);
        let handler = bridge::current(py).map_or_else(|_| "unknown".to_owned(), name_of);
        profiling.profile.with(|profile| {
            let Some(Running { sums: profile, .. }) = profile else { return };
            let (site, handler) = (profile.site(place), profile.handler(handler));
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
    Ok(before.is_some())
}

type ProfileNumbers = (SumNumbers, u64, Vec<SiteNumbers>, Vec<(String, SumNumbers)>, bool);

/// Ends the profile: the sums, refusals, sites (the innermost frame first) and handlers, and whether it saw
/// everything: False where the program set an event hook of its own, though it may have put ours back. RuntimeError:
/// none has begun.
#[pyfunction]
#[pyo3(name = "_profile_end")]
pub(super) fn profile_end() -> PyResult<ProfileNumbers> {
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
    Ok((profile.all(), profile.refused, sites, handlers, is_ours && begun_with == hook_changes))
}
