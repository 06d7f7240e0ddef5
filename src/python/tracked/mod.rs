//! `strategies.Tracked` for Python: live blocks as objects, and which code and task made them (`attribution`).

mod attribution;

pub(super) use attribution::attribution;
#[cfg(ctxalloc_whole)]
pub(super) use attribution::{Running, count_calls, find_call, find_running, is_running};

use super::asked::asked;
use super::errors::wrong_type;
use crate::handler::Handler;
use crate::strategy::{LiveBlock, Report};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use std::collections::HashMap;
use std::collections::hash_map::DefaultHasher;
use std::hash::{Hash, Hasher};

/// A live block of memory, most often an array's data, as it was when ``Handler.live_blocks()`` listed it.
///
/// Two are equal if they are the same block, even if its age or size differs: the difference of two sets of blocks is
/// what was made in between.
#[pyclass(frozen, name = "Block", module = "ctxalloc.tracking")]
pub(super) struct PyBlock {
    block: LiveBlock,
}

#[pymethods]
impl PyBlock {
    /// The address where it starts: ``array.ctypes.data`` of the array that owns it. 0 if it was just being resized.
    #[getter]
    fn address(&self) -> usize {
        self.block.address
    }

    /// Its size in bytes, as it was asked for.
    #[getter]
    fn size_bytes(&self) -> usize {
        self.block.size_bytes
    }

    /// How many seconds ago it was made, accurate to a few milliseconds.
    #[getter]
    fn age_seconds(&self) -> f64 {
        self.block.age.as_secs_f64()
    }

    /// The number that the system gave the thread that made it: ``threading.get_native_id()``.
    #[getter]
    fn thread_id(&self) -> u32 {
        self.block.thread.id
    }

    /// The name of that thread: in ``threading`` if it was running when the block was listed, else the system's.
    #[getter]
    fn thread_name(&self) -> &str {
        &self.block.thread.name
    }

    /// The name of the asyncio task that made it, with ``tasks=True``; None outside of tasks.
    #[getter]
    fn task(&self) -> Option<&str> {
        self.block.task.as_deref()
    }

    /// Where it was made: a ``traceback.StackSummary``, the innermost call last; empty without ``traceback=``.
    #[getter]
    fn traceback<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let frames = self.block.place.iter().flat_map(|place| place.frames.iter().rev());
        let frames: Vec<_> = frames.map(|frame| (&*frame.file, frame.line, &*frame.function, None::<&str>)).collect();
        py.import("traceback")?.getattr("StackSummary")?.call_method1("from_list", (frames,))
    }

    fn __eq__(&self, other: &Self) -> bool {
        self.block == other.block
    }

    fn __hash__(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        self.block.hash(&mut hasher);
        hasher.finish()
    }

    fn __repr__(&self) -> String {
        let LiveBlock { size_bytes, age, thread, .. } = &self.block;
        let task = self.block.task.as_ref().map(|task| format!(", task {task:?}")).unwrap_or_default();
        let place = self.block.place.as_ref().map(|place| format!(", at {place}")).unwrap_or_default();
        let age = age.as_secs_f64();
        format!("<ctxalloc Block: {size_bytes} bytes, {age:.1} s old, thread {:?}{task}{place}>", thread.name)
    }
}

/// Live blocks as Python objects. Threads that are running have their names in ``threading``.
pub(super) fn to_python(py: Python<'_>, mut blocks: Vec<LiveBlock>) -> PyResult<Vec<Bound<'_, PyBlock>>> {
    if !blocks.is_empty() {
        let names = thread_names(py)?;
        for block in &mut blocks {
            if let Some(name) = names.get(&block.thread.id) {
                block.thread.name.clone_from(name);
            }
        }
    }
    blocks.into_iter().map(|block| Bound::new(py, PyBlock { block })).collect()
}

fn thread_names(py: Python<'_>) -> PyResult<HashMap<u32, String>> {
    let mut names = HashMap::new();
    for thread in py.import("threading")?.call_method0("enumerate")?.try_iter()? {
        let thread = thread?;
        // `native_id` is None for a thread that is just starting, and some dummy threads have none.
        let id = thread.getattr("native_id").and_then(|id| id.extract::<Option<u32>>());
        if let Ok(Some(id)) = asked(py, id)? {
            names.insert(id, thread.getattr("name")?.str()?.to_string_lossy().into_owned());
        }
    }
    Ok(names)
}

/// A handler's live blocks. ValueError: its strategy does not know them.
pub(super) fn of_handler(py: Python<'_>, handler: Handler) -> PyResult<Vec<Bound<'_, PyBlock>>> {
    let Some(blocks) = py.detach(|| handler.live_blocks()) else {
        return Err(PyValueError::new_err(format!(
            "handler '{}' does not track its blocks; use 'tracked', or register one with a strategies.Tracked()",
            handler.name()
        )));
    };
    to_python(py, blocks)
}

/// Groups live blocks by the place where they were made, else by thread, and returns the groups as text, the largest
/// first::
///
///     >>> print(ctxalloc.tracking.report(ctxalloc.handler("tracked").live_blocks()))
///     2 live blocks, 8800 bytes
///       8000 bytes in 1 block, oldest 1.2 s: thread 'MainThread'
///       800 bytes in 1 block, oldest 0.1 s: thread 'loader'
#[pyfunction]
#[pyo3(signature = (blocks, /))]
pub(super) fn report(blocks: &Bound<'_, PyAny>) -> PyResult<String> {
    let refuse = |given: &Bound<'_, PyAny>, expected| wrong_type("tracking.report", expected, given);
    let Ok(all) = asked(blocks.py(), blocks.try_iter())? else {
        return Err(refuse(blocks, "a list of blocks, as Handler.live_blocks() makes it"));
    };
    let block = |block: PyResult<Bound<'_, PyAny>>| {
        let block = block?;
        let block = block.cast::<PyBlock>().map_err(|_| refuse(&block, "a list of nothing but tracking.Block"))?;
        Ok(block.get().block.clone())
    };
    Ok(Report::of(&all.map(block).collect::<PyResult<Vec<_>>>()?).to_string())
}
