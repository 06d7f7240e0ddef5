//! A profile of the arrays that a program makes, whatever handlers it selects: an event hook in Rust that knows each
//! block's size, the code that made it and the handler that was selected. `ctxalloc run --report` shows it.
//!
//! The hook runs inside of allocations, so it runs no Python code: `tracked::attribution` reads the frames.
#![allow(unsafe_code, reason = "a C hook")]

use super::bridge;
use super::pending::SetAside;
use super::tracked::attribution;
use crate::handler::events::{EventHook, Hook, changes, set_event_hook};
use crate::handler::{Handler, requests::RequestHandle};
use crate::strategy::{Attribution, Place};
use crate::sync::{ForkLock, HeldAcrossFork, Locked, Made, held_across_fork};
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use std::collections::HashMap;
use std::ffi::c_void;
use std::ptr::null_mut;
use std::sync::Arc;

/// What one site, one handler, or all of them allocated.
#[derive(Debug, Default, Clone, Copy)]
struct Sums {
    live_bytes: usize,
    /// The largest value of `live_bytes`.
    peak_bytes: usize,
    /// `live_bytes` at the peak of all together with the number `seen_peak`; see [`Profile::peaks`].
    at_peak_bytes: usize,
    seen_peak: u64,
    total_bytes: u64,
    count: u64,
}

impl Sums {
    /// Notes what it had at the last peak of all. Before each change: since that peak nothing has changed.
    fn note(&mut self, peaks: u64) {
        if self.seen_peak < peaks {
            self.seen_peak = peaks;
            self.at_peak_bytes = self.live_bytes;
        }
    }

    fn add(&mut self, bytes: usize, blocks: u64, peaks: u64) {
        self.note(peaks);
        self.live_bytes += bytes;
        self.peak_bytes = self.peak_bytes.max(self.live_bytes);
        self.total_bytes += bytes as u64;
        self.count += blocks;
    }

    fn numbers(&self) -> SumNumbers {
        (self.live_bytes, self.peak_bytes, self.at_peak_bytes, self.total_bytes, self.count)
    }
}

struct Block {
    bytes: usize,
    site: usize,
    handler: usize,
}

#[derive(Default)]
struct Profile {
    blocks: HashMap<usize, Block>,
    /// By the address of the place, which is kept in `sites`; 0 where no Python code runs.
    sites_by_place: HashMap<usize, usize>,
    sites: Vec<(Option<Arc<Place>>, Sums)>,
    handlers_by_name: HashMap<String, usize>,
    handlers: Vec<(String, Sums)>,
    all: Sums,
    refused: u64,
    /// How often all sites together had more than ever before. What each had at the last of these peaks is exact, and
    /// costs no walk over the sites: [`Sums::note`].
    peaks: u64,
    /// `events::changes()` once this profile's own hook was set.
    hook_changes: usize,
}

impl Profile {
    fn note_peak(&mut self) {
        let sites = self.sites.iter_mut().map(|(_, sums)| sums);
        let handlers = self.handlers.iter_mut().map(|(_, sums)| sums);
        sites.chain(handlers).chain([&mut self.all]).for_each(|sums| sums.note(self.peaks));
    }

    fn add(&mut self, address: usize, bytes: usize, blocks: u64, site: usize, handler: usize) {
        if let Some(forgotten) = self.blocks.insert(address, Block { bytes: 0, site, handler }) {
            self.subtract(&forgotten); // its end was not reported
        }
        if let Some(block) = self.blocks.get_mut(&address) {
            block.bytes = bytes;
        }
        let peak_bytes = self.all.peak_bytes;
        for sums in [&mut self.sites[site].1, &mut self.handlers[handler].1, &mut self.all] {
            sums.add(bytes, blocks, self.peaks);
        }
        if self.all.peak_bytes > peak_bytes {
            self.peaks += 1;
        }
    }

    fn subtract(&mut self, block: &Block) {
        for sums in [&mut self.sites[block.site].1, &mut self.handlers[block.handler].1, &mut self.all] {
            sums.note(self.peaks);
            sums.live_bytes = sums.live_bytes.saturating_sub(block.bytes);
        }
    }

    fn site(&mut self, place: Option<Arc<Place>>) -> usize {
        let key = place.as_ref().map_or(0, |place| Arc::as_ptr(place).addr());
        *self.sites_by_place.entry(key).or_insert_with(|| {
            self.sites.push((place, Sums::default()));
            self.sites.len() - 1
        })
    }

    fn handler(&mut self, name: String) -> usize {
        if let Some(known) = self.handlers_by_name.get(&name) {
            return *known;
        }
        self.handlers.push((name.clone(), Sums::default()));
        self.handlers_by_name.insert(name, self.handlers.len() - 1);
        self.handlers.len() - 1
    }
}

type Attribute = Box<dyn Fn() -> Attribution + Send + Sync>;

struct Profiling {
    profile: Locked<Option<Profile>>,
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
            let Some(profile) = profile else { return };
            let (site, handler) = (profile.site(place), profile.handler(handler));
            profile.add(outp.addr(), size_bytes, 1, site, handler);
        });
        return;
    }
    profiling.profile.with(|profile| {
        let Some(profile) = profile else { return };
        if outp.is_null() && size_bytes > 0 {
            profile.refused += 1; // a resize that was refused leaves its block as it was
        } else if let Some(block) = profile.blocks.remove(&inp.addr()) {
            if outp.is_null() {
                profile.subtract(&block);
                return;
            }
            // A resize: it belongs to whoever made it, and adds what it grew by.
            let grown = size_bytes.saturating_sub(block.bytes);
            profile.subtract(&Block { bytes: block.bytes.saturating_sub(size_bytes), ..block });
            profile.add(outp.addr(), grown, 0, block.site, block.handler);
            if let Some(resized) = profile.blocks.get_mut(&outp.addr()) {
                resized.bytes = size_bytes;
            }
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
            *profile = Some(Profile::default());
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

type SumNumbers = (usize, usize, usize, u64, u64);
type SiteNumbers = (Vec<(String, u32, String)>, SumNumbers);
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
    let Some(mut profile) = profile else {
        return Err(PyRuntimeError::new_err("no profile has begun"));
    };
    profile.note_peak();
    let frames = |place: &Option<Arc<Place>>| {
        let frames = place.iter().flat_map(|place| &*place.frames);
        frames.map(|frame| (frame.file.to_string(), frame.line, frame.function.to_string())).collect()
    };
    let sites = profile.sites.iter().map(|(place, sums)| (frames(place), sums.numbers())).collect();
    let handlers = profile.handlers.iter().map(|(name, sums)| (name.clone(), sums.numbers())).collect();
    Ok((profile.all.numbers(), profile.refused, sites, handlers, is_ours && profile.hook_changes == hook_changes))
}
