//! CPython's functions that go on after NULL as if nothing were, or lose somebody's work: what they ask for is given
//! beyond a limit.
//!
//! They are static, and a compiler may leave no frame of those that call them. So each is found by what stands between
//! Python's loop and a function that it calls.

use super::eval_loop::with_methods;
use super::symbol::symbol;
use crate::whole::Python as Loop;
use pyo3::exceptions::PyException;
use pyo3::prelude::*;
use pyo3::types::{PyCFunction, PyDict};
use std::sync::{Arc, Mutex, PoisonError};

/// The loop, with those of this version.
pub(super) fn with_fragile(py: Python<'_>, python: Loop) -> PyResult<Loop> {
    let mut found = Vec::new();
    if py.version_info().minor == 13 {
        found.extend(setting_defaults(py, python)?);
    }
    if py.version_info() >= (3, 12) {
        match telling_of_events(py, python) {
            Ok(functions) => found.extend(functions),
            // An audit hook's: where nobody may watch, nobody is told.
            Err(error) if error.is_instance_of::<PyException>(py) => {}
            Err(error) => return Err(error),
        }
    }
    found.retain(|&function| function != 0);
    found.sort_unstable();
    found.dedup();
    Ok(python.with_fragile(found))
}

/// What stood between the loop and a function of Python's, each time that this was called.
type Seen = Arc<Mutex<Vec<Vec<usize>>>>;

/// A function that notes what is between the loop and itself, and answers 1.
fn noting(py: Python<'_>, python: Loop) -> PyResult<(Bound<'_, PyCFunction>, Seen)> {
    let seen = Seen::default();
    let to = Arc::clone(&seen);
    let note = PyCFunction::new_closure(py, None, None, move |_, _| {
        to.lock().unwrap_or_else(PoisonError::into_inner).push(python.functions_between());
        1
    })?;
    Ok((note, seen))
}

fn those_without(functions: &[usize], others: &[usize]) -> impl Iterator<Item = usize> {
    functions.iter().copied().filter(|function| !others.contains(function))
}

/// CPython 3.13 counts an item that a dict's table had no memory for, and lets go of what it has not got (mended in
/// 3.13.6): json's keys and `sys.intern` ended the process. The functions that set a default are between the loop and a
/// key's `__hash__` there, and not where it is only looked for.
fn setting_defaults(py: Python<'_>, python: Loop) -> PyResult<Vec<usize>> {
    let (hash, seen) = noting(py, python)?;
    let names = PyDict::new(py);
    names.set_item("key", with_methods(py, ["hash"], &hash)?)?;
    py.run(c"{}.get(key)", Some(&names), None)?;
    py.run(c"{}.setdefault(key)", Some(&names), None)?;
    let seen = seen.lock().unwrap_or_else(PoisonError::into_inner);
    let [looking, setting] = &**seen else { return Ok(Vec::new()) };
    let public = [c"PyDict_SetDefaultRef", c"PyDict_SetDefault"].into_iter().filter_map(symbol).map(<*mut _>::addr);
    Ok(those_without(setting, looking).chain(public).collect())
}

/// Since 3.12 CPython tells `sys.monitoring` and `sys.settrace` of each line, and of each exception that is handled,
/// before it goes on there, and makes numbers and a frame for that. Where they were refused it left the block before
/// its handler had begun: `finally` and `__exit__` did nothing. Those functions are between the loop and what is told.
fn telling_of_events(py: Python<'_>, python: Loop) -> PyResult<Vec<usize>> {
    /// Of one code object alone: of others' CPython tells only after it has looked at the code of all. An exception
    /// that is handled is told of by the function that tells what is returned.
    const EVENTS: [&str; 5] = ["LINE", "INSTRUCTION", "PY_START", "PY_RETURN", "JUMP"];
    /// The numbers of tools, those first that CPython has no use of its own for.
    const TOOLS: [u8; 6] = [4, 3, 5, 2, 1, 0];
    let monitoring = py.import("sys")?.getattr("monitoring")?;
    let mut free = None;
    for tool in TOOLS {
        if free.is_none() && monitoring.call_method1("get_tool", (tool,))?.is_none() {
            free = Some(tool);
        }
    }
    let Some(tool) = free else { return Ok(Vec::new()) };
    let (called, by_the_loop) = noting(py, python)?;
    let names = PyDict::new(py);
    names.set_item("note", called)?;
    py.run(
        c"def watched():\n    for _ in (1, 2):\n        note()\n        note(1, *())\n    return list(map(note, (1,)))",
        Some(&names),
        None,
    )?;
    py.run(c"watched()", Some(&names), None)?;
    let (told, by_events) = noting(py, python)?;
    let code = py.eval(c"watched.__code__", Some(&names), None)?;
    let events = monitoring.getattr("events")?;
    let tell = |is_told: bool| -> PyResult<()> {
        let mut all = 0;
        for name in EVENTS {
            let event: u32 = events.getattr(name)?.extract()?;
            monitoring.call_method1("register_callback", (tool, event, is_told.then_some(&told)))?;
            all |= event;
        }
        monitoring.call_method1("set_local_events", (tool, &code, if is_told { all } else { 0 }))?;
        Ok(())
    };
    monitoring.call_method1("use_tool_id", (tool, "ctxalloc"))?;
    let ran = tell(true).and_then(|()| py.run(c"watched()", Some(&names), None));
    let ended = tell(false);
    monitoring.call_method1("free_tool_id", (tool,))?;
    ran.and(ended)?;
    let all_of = |seen: Seen| seen.lock().unwrap_or_else(PoisonError::into_inner).concat();
    Ok(those_without(&all_of(by_events), &all_of(by_the_loop)).collect())
}
