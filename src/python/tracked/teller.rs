//! Who makes this block? Asked inside of an allocation, so nothing here runs Python code of anybody's: it reads the
//! running thread's frames and asyncio's current task through C functions of exact built-in types, which neither
//! raise events nor look up what users could replace. It does nothing unless this thread is attached to the interpreter
//! and no exception is under way.
//!
//! Before CPython 3.12 a frame object that is made may start the garbage collector, which runs finalizers: it is
//! stopped meanwhile. Later ones collect between instructions only.
#![allow(unsafe_code, reason = "CPython's frames, and whether this thread is attached")]

use super::super::attached;
use crate::strategy::{Attribution, Frame, Origin, Place};
use crate::sync::{ForkLock, HeldAcrossFork, Locked};
use crate::task;
use pyo3::ffi;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyString, PyType};
use std::collections::HashMap;
use std::collections::hash_map::{DefaultHasher, Entry};
use std::hash::{Hash, Hasher};
use std::sync::{Arc, Weak};

/// What [`Tracked::with_attribution`](crate::strategy::Tracked::with_attribution) wants: the innermost `frames` of the Python stack, and
/// the running task's name where `tasks` says so.
pub(crate) fn teller(
    py: Python<'_>,
    frames: usize,
    tasks: bool,
) -> PyResult<impl Fn() -> Attribution + Send + Sync + 'static> {
    let collects_anywhere = py.version_info() < (3, 12);
    let tasks = if tasks { Some(Tasks::find(py)?) } else { None };
    let places = Places::new();
    Ok(move || {
        let told = attached_at_ease().and_then(|py| {
            let _paused = collects_anywhere.then(Paused::new);
            let place = if frames > 0 { places.here(py, frames) } else { None };
            let task = tasks.as_ref().and_then(|tasks| tasks.name(py));
            (place.is_some() || task.is_some()).then_some(Origin { task, place })
        });
        match told {
            Some(origin) => Attribution::Origin(Arc::new(origin)),
            None if tasks.is_some() => task::number().into(),
            None => Attribution::Unknown,
        }
    })
}

/// The proof, where this thread is attached and no exception is under way.
fn attached_at_ease<'py>() -> Option<Python<'py>> {
    let py = attached::here()?;
    // SAFETY: attached.
    unsafe { ffi::PyErr_Occurred() }.is_null().then_some(py)
}

/// The garbage collector does not start while this lives.
struct Paused {
    was_enabled: bool,
}

impl Paused {
    fn new() -> Self {
        // SAFETY: attached, see `attached_at_ease`.
        Self { was_enabled: unsafe { ffi::PyGC_Disable() } != 0 }
    }
}

impl Drop for Paused {
    fn drop(&mut self) {
        if self.was_enabled {
            // SAFETY: attached, as when it was made.
            unsafe { ffi::PyGC_Enable() };
        }
    }
}

/// The places that blocks come from, each kept once. Those of which no block is left go when the table has doubled.
struct Places {
    known: Arc<Known>,
}

struct Known {
    places: Locked<Table>,
}

#[derive(Default)]
struct Table {
    /// By hash.
    places: HashMap<u64, Vec<Arc<Place>>>,
    count: usize,
    /// How many there were after the last time that some went.
    kept: usize,
}

impl HeldAcrossFork for Known {
    fn for_each_lock(&self, visit: &mut dyn FnMut(&ForkLock)) {
        visit(self.places.lock());
    }
}

/// A call of the running stack, still Python's.
struct Call<'py> {
    file: Bound<'py, PyString>,
    function: Bound<'py, PyString>,
    line: u32,
}

impl Places {
    fn new() -> Self {
        let known = Arc::new(Known { places: Locked::new(Table::default()) });
        crate::sync::hold_across_fork(Arc::downgrade(&known) as Weak<dyn HeldAcrossFork>);
        Self { known }
    }

    /// The place where this thread is.
    fn here(&self, py: Python<'_>, most: usize) -> Option<Arc<Place>> {
        let calls = calls(py, most);
        if calls.is_empty() {
            return None;
        }
        // Text is taken before the lock: no Python runs under it.
        let text: Vec<_> = calls
            .iter()
            .map(|call| (call.file.to_string_lossy(), call.function.to_string_lossy(), call.line))
            .collect();
        let mut hasher = DefaultHasher::new();
        text.hash(&mut hasher);
        let hash = hasher.finish();
        let is_here = |place: &&Arc<Place>| {
            place.frames.len() == text.len()
                && place.frames.iter().zip(&text).all(|(frame, (file, function, line))| {
                    *frame.file == **file && *frame.function == **function && frame.line == *line
                })
        };
        let find = |table: &Table| table.places.get(&hash).and_then(|places| places.iter().find(is_here).cloned());
        if let Some(place) = self.known.places.with(|table| find(table)) {
            return Some(place);
        }
        let frames = text.iter().map(|(file, function, line)| Frame {
            file: (**file).into(),
            line: *line,
            function: (**function).into(),
        });
        let fresh = Arc::new(Place { frames: frames.collect() });
        Some(self.known.places.with(|table| {
            find(table).unwrap_or_else(|| {
                table.add(hash, Arc::clone(&fresh));
                fresh
            })
        }))
    }
}

impl Table {
    fn add(&mut self, hash: u64, place: Arc<Place>) {
        if self.count >= 2 * self.kept.max(512) {
            self.places.retain(|_, places| {
                places.retain(|place| Arc::strong_count(place) > 1);
                !places.is_empty()
            });
            self.kept = self.places.values().map(Vec::len).sum();
            self.count = self.kept;
        }
        self.count += 1;
        match self.places.entry(hash) {
            Entry::Occupied(places) => places.into_mut().push(place),
            Entry::Vacant(vacant) => {
                vacant.insert(vec![place]);
            }
        }
    }
}

/// The innermost calls of this thread's Python stack.
fn calls(py: Python<'_>, most: usize) -> Vec<Call<'_>> {
    let mut calls = Vec::new();
    // SAFETY: attached.
    let running = unsafe { ffi::PyEval_GetFrame() };
    // SAFETY: a borrowed reference to a running frame, or NULL where no Python code runs.
    let mut next = unsafe { Bound::from_borrowed_ptr_or_opt(py, running.cast()) };
    while let Some(frame) = next.filter(|_| calls.len() < most) {
        let Some(call) = call(py, &frame) else { break };
        calls.push(call);
        // A getter of an exact built-in type, as those in `call`.
        next = frame.getattr(intern!(py, "f_back")).ok().filter(|back| !back.is_none());
    }
    calls
}

fn call<'py>(py: Python<'py>, frame: &Bound<'py, PyAny>) -> Option<Call<'py>> {
    // SAFETY: a frame, and attached.
    let line = unsafe { ffi::PyFrame_GetLineNumber(frame.as_ptr().cast()) };
    // SAFETY: as above.
    let code = unsafe { ffi::PyFrame_GetCode(frame.as_ptr().cast()) };
    // SAFETY: a new reference.
    let code = unsafe { Bound::from_owned_ptr_or_opt(py, code.cast()) }?;
    let text = |name| code.getattr(name).ok()?.cast_into::<PyString>().ok();
    Some(Call {
        file: text(intern!(py, "co_filename"))?,
        function: text(intern!(py, "co_qualname"))?,
        line: u32::try_from(line).unwrap_or(0),
    })
}

/// asyncio's own C functions for the running task; a task of another type than asyncio's own has no name here.
struct Tasks {
    running_loop: Py<PyAny>,
    current: Current,
    task_type: Py<PyType>,
}

enum Current {
    /// `_asyncio.current_task`, from CPython 3.12 on.
    Function(Py<PyAny>),
    /// The tasks that run, by event loop.
    Running(Py<PyDict>),
}

impl Tasks {
    fn find(py: Python<'_>) -> PyResult<Self> {
        let native = py.import("_asyncio")?;
        let current = match native.getattr_opt("current_task")? {
            Some(function) => Current::Function(function.unbind()),
            None => Current::Running(py.import("asyncio.tasks")?.getattr("_current_tasks")?.cast_into()?.unbind()),
        };
        let running_loop = native.getattr("_get_running_loop")?.unbind();
        Ok(Self { running_loop, current, task_type: native.getattr("Task")?.cast_into()?.unbind() })
    }

    fn name(&self, py: Python<'_>) -> Option<Box<str>> {
        let running_loop = self.running_loop.bind(py).call0().ok().filter(|found| !found.is_none())?;
        let task = match &self.current {
            Current::Function(function) => function.bind(py).call1((running_loop,)).ok(),
            Current::Running(tasks) => tasks.bind(py).get_item(running_loop).ok().flatten(),
        };
        let task = task.filter(|task| task.get_type().is(self.task_type.bind(py)))?;
        let name = task.call_method0(intern!(py, "get_name")).ok()?;
        Some(name.cast::<PyString>().ok()?.to_string_lossy().into())
    }
}
