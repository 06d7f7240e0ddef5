//! Finds out which Python code and which asyncio task are allocating a block. This runs inside of an allocation, so it
//! must run nobody's Python code: it reads the thread's frames and asyncio's current task through C functions and
//! getters of exact built-in types, which raise no audit or trace events and use nothing that a program could replace.
//! It does nothing unless this thread is attached to Python and no exception is pending.
//!
//! Before CPython 3.12 making a frame object may start the garbage collector, which runs finalizers, so it is paused
//! meanwhile. Later versions collect only between instructions.
#![allow(unsafe_code, reason = "CPython's frames, and whether this thread is attached")]

use super::super::attached;
use crate::python::interned::intern;
use crate::python::uncollected::{Uncollected, collects_anywhere};
use crate::strategy::{Attribution, Frame, Origin, Place};
use crate::sync::{ForkLock, HeldAcrossFork, Locked, held_across_fork};
use crate::task;
use pyo3::ffi;
use pyo3::prelude::*;
#[cfg(ctxalloc_whole)]
use pyo3::types::PyBytes;
use pyo3::types::{PyDict, PyString, PyType};
use std::collections::HashMap;
use std::collections::hash_map::{DefaultHasher, Entry};
use std::hash::{Hash, Hasher};
use std::iter::successors;
use std::sync::Arc;

/// The function for [`Tracked::with_attribution`](crate::strategy::Tracked::with_attribution): it returns the innermost
/// `frames` calls of the Python stack, and with `tasks` the name of the running task.
pub(crate) fn attribution(
    py: Python<'_>,
    frames: usize,
    tasks: bool,
) -> PyResult<impl Fn() -> Attribution + Send + Sync + 'static> {
    let collects_anywhere = collects_anywhere(py);
    let tasks = if tasks { Some(Tasks::find(py)?) } else { None };
    let places = Places::new();
    Ok(move || {
        let origin = attached_without_exception().and_then(|py| {
            let _paused = collects_anywhere.then(|| Uncollected::new(py));
            let place = if frames > 0 { places.here(py, frames) } else { None };
            let task = tasks.as_ref().and_then(|tasks| tasks.name(py));
            (place.is_some() || task.is_some()).then_some(Origin { task, place })
        });
        match origin {
            Some(origin) => Attribution::Origin(Arc::new(origin)),
            None if tasks.is_some() => task::number().into(),
            None => Attribution::Unknown,
        }
    })
}

/// The token that this thread is attached, unless an exception is pending.
fn attached_without_exception<'py>() -> Option<Python<'py>> {
    let py = attached::here()?;
    // SAFETY: attached, as `py` shows.
    unsafe { ffi::PyErr_Occurred() }.is_null().then_some(py)
}

/// The places that blocks come from, each kept once. Places without blocks are removed when the table has doubled.
struct Places {
    known: Arc<Known>,
}

struct Known {
    places: Locked<Table>,
}

#[derive(Default)]
struct Table {
    /// By the hash of their frames.
    places: HashMap<u64, Vec<Arc<Place>>>,
    count: usize,
    /// How many there were after the last removal.
    kept: usize,
}

impl HeldAcrossFork for Known {
    fn for_each_lock(&self, visit: &mut dyn FnMut(&ForkLock)) {
        visit(self.places.lock());
    }
}

/// A call on the running stack, in Python's own objects.
struct Call<'py> {
    file: Bound<'py, PyString>,
    function: Bound<'py, PyString>,
}

impl Places {
    fn new() -> Self {
        Self { known: held_across_fork(Known { places: Locked::new(Table::default()) }) }
    }

    /// The place where this thread is now.
    fn here(&self, py: Python<'_>, max_frames: usize) -> Option<Arc<Place>> {
        let calls: Vec<_> =
            frames(py).take(max_frames).map_while(|frame| Some((call(py, &frame)?, line(&frame)))).collect();
        if calls.is_empty() {
            return None;
        }
        // The text is read before the lock is taken: nothing of Python runs under it.
        let text: Vec<_> = calls
            .iter()
            .map(|(call, line)| (call.file.to_string_lossy(), call.function.to_string_lossy(), *line))
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

/// So many calls are looked at.
#[cfg(ctxalloc_whole)]
const MAX_FRAMES: usize = 16;
/// The same where those that are meant may be far out.
#[cfg(ctxalloc_whole)]
const MAX_DEPTH: usize = 128;

/// Looks through this thread's Python stack, from the innermost call on, at the file and the qualified name of each,
/// until `look` answers. It may be called inside of an allocation.
#[cfg(ctxalloc_whole)]
pub(crate) fn find_call<R>(py: Python<'_>, mut look: impl FnMut(&str, &str) -> Option<R>) -> Option<R> {
    let _paused = Uncollected::new(py);
    let mut calls = frames(py).take(MAX_FRAMES).map_while(|frame| call(py, &frame));
    calls.find_map(|call| look(&call.file.to_string_lossy(), &call.function.to_string_lossy()))
}

/// A call of this thread's Python stack, with the instruction that it is at.
#[cfg(ctxalloc_whole)]
#[derive(Clone, Copy)]
pub(crate) struct Running<'a> {
    pub(crate) file: &'a str,
    /// Its qualified name.
    pub(crate) function: &'a str,
    /// Its instructions, two bytes each.
    pub(crate) code: &'a [u8],
    /// Where among these it is, in bytes.
    pub(crate) at: usize,
}

/// As [`find_call`], with what each call is at.
#[cfg(ctxalloc_whole)]
pub(crate) fn find_running<R>(py: Python<'_>, mut look: impl FnMut(Running<'_>) -> Option<R>) -> Option<R> {
    let _paused = Uncollected::new(py);
    frames(py).take(MAX_FRAMES).find_map(|frame| {
        let call = call(py, &frame)?;
        // Getters of exact built-in types: they run no Python code.
        let code = frame.getattr(intern!(py, "f_code")).ok()?.getattr(intern!(py, "co_code")).ok()?;
        let at = frame.getattr(intern!(py, "f_lasti")).ok()?.extract().unwrap_or(0);
        let (file, function) = (call.file.to_string_lossy(), call.function.to_string_lossy());
        look(Running { file: &file, function: &function, code: code.cast::<PyBytes>().ok()?.as_bytes(), at })
    })
}

/// How many calls of this thread's Python stack have this file and one of these qualified names, up to a number: of as
/// many calls as a nested import is deep. As [`find_call`].
#[cfg(ctxalloc_whole)]
pub(crate) fn count_calls(py: Python<'_>, file: &str, functions: &[&str], up_to: usize) -> usize {
    let _paused = Uncollected::new(py);
    let is_one = |frame: &Bound<'_, PyAny>| {
        call(py, frame).is_some_and(|call| {
            call.file.to_string_lossy() == file && functions.contains(&&*call.function.to_string_lossy())
        })
    };
    frames(py).take(MAX_DEPTH).filter(is_one).take(up_to).count()
}

/// Whether this thread runs this code, within no more calls than a nested import is deep. As [`find_call`].
#[cfg(ctxalloc_whole)]
pub(crate) fn is_running(py: Python<'_>, code: &Bound<'_, PyAny>) -> bool {
    let _paused = Uncollected::new(py);
    frames(py).take(MAX_DEPTH).any(|frame| frame.getattr(intern!(py, "f_code")).is_ok_and(|found| found.is(code)))
}

/// This thread's Python stack, from the innermost call on.
fn frames(py: Python<'_>) -> impl Iterator<Item = Bound<'_, PyAny>> {
    // SAFETY: attached, as `py` shows. `PyEval_GetFrame` returns a borrowed reference to the running frame, or NULL
    // where no Python code runs.
    let first = unsafe { Bound::from_borrowed_ptr_or_opt(py, ffi::PyEval_GetFrame().cast()) };
    // A getter of an exact built-in type, like those in `call`: it runs no Python code.
    successors(first, move |frame: &Bound<'_, PyAny>| {
        frame.getattr(intern!(py, "f_back")).ok().filter(|back| !back.is_none())
    })
}

fn call<'py>(py: Python<'py>, frame: &Bound<'py, PyAny>) -> Option<Call<'py>> {
    let pointer = frame.as_ptr().cast::<ffi::PyFrameObject>();
    // SAFETY: attached, and `frame` is a frame: the running one, or the `f_back` of another. `PyFrame_GetCode` returns
    // a new reference.
    let code = unsafe { Bound::from_owned_ptr_or_opt(py, ffi::PyFrame_GetCode(pointer).cast()) }?;
    let text = |name| code.getattr(name).ok()?.cast_into::<PyString>().ok();
    Some(Call { file: text(intern!(py, "co_filename"))?, function: text(intern!(py, "co_qualname"))? })
}

/// The line that it is at. CPython reads its code's table of lines from the start on for that.
fn line(frame: &Bound<'_, PyAny>) -> u32 {
    // SAFETY: attached, and `frame` is a frame.
    let line = unsafe { ffi::PyFrame_GetLineNumber(frame.as_ptr().cast()) };
    u32::try_from(line).unwrap_or(0)
}

/// asyncio's C functions for the running task. Only tasks of asyncio's own type have a name here: the method of another
/// could run Python code.
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
