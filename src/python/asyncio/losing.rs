//! Where an event loop would lose somebody's work at a limit of a whole request: a MemoryError between the steps of
//! tasks reaches nobody who waits. The loop tells of it, a task is never stepped again, and a `gather` never ends; one
//! within `gather` or a TaskGroup's end leaves tasks alone. So there the block is granted, and the request is told at
//! its next step.

use crate::python::attached;
use crate::python::imported::Imported;
use crate::python::pending::SetAside;
use crate::python::tracked::find_call;
use crate::sync::Made;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyDict;

/// The modules of asyncio that step tasks and wake who waits. Others tell of their errors: a transport, its protocol.
const FILES: [&str; 9] = [
    "base_events.py",
    "events.py",
    "futures.py",
    "locks.py",
    "queues.py",
    "staggered.py",
    "taskgroups.py",
    "tasks.py",
    "timeouts.py",
];

/// The folder of the standard library, which [`prepare`] has found.
static LIBRARY: Made<String> = Made::new();

/// Called before the others. What it finds stays the same.
pub(in crate::python) fn prepare(py: Python<'_>) -> PyResult<()> {
    let file: String = py.import("os")?.getattr("__file__")?.extract()?;
    LIBRARY.get_or_make(|| folder_of(&file).to_owned());
    Ok(())
}

fn folder_of(file: &str) -> &str {
    file.rsplit_once('/').map_or("", |(folder, _)| folder)
}

/// Whose code runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Code {
    /// Steps tasks, and wakes who waits.
    Steps,
    /// All else of an event loop.
    Loops,
    /// Of the standard library: whose it is, its caller knows.
    Library,
    Own,
}

fn code_of(file: &str, library: &str) -> Code {
    if file.starts_with("<frozen ") {
        return Code::Library;
    }
    let of_library = file.strip_prefix(library).filter(|path| path.starts_with('/') && !path.contains("-packages/"));
    match of_library.map(|path| path.strip_prefix("/asyncio/")) {
        Some(Some(name)) if FILES.contains(&name) => return Code::Steps,
        Some(Some(_)) => return Code::Loops,
        Some(None) => return Code::Library,
        None => {}
    }
    let Some((_, path)) = file.rsplit_once("-packages/") else { return Code::Own };
    match path {
        _ if path.starts_with("anyio/_backends/") || path.starts_with("trio/_core/") => Code::Steps,
        _ if path.starts_with("anyio/") || path.starts_with("trio/") => Code::Loops,
        _ => Code::Own,
    }
}

/// Whether an event loop would lose somebody's work here, on this thread. Inside of an allocation.
pub(in crate::python) fn loses_work() -> bool {
    let Some(py) = attached::here() else { return false };
    let _pending = SetAside::new(py);
    running(py) == Code::Steps
}

/// Whether the code that runs is an event loop's, and not somebody's own.
pub(in crate::python) fn is_of_a_loop(py: Python<'_>) -> bool {
    matches!(running(py), Code::Steps | Code::Loops)
}

/// The innermost code that is not just what that calls of the standard library.
fn running(py: Python<'_>) -> Code {
    let Some(library) = LIBRARY.get() else { return Code::Own };
    let look = |file: &str, _: &str| Some(code_of(file, library)).filter(|code| *code != Code::Library);
    find_call(py, look).unwrap_or(Code::Own)
}

/// Whether an event loop of asyncio runs on this thread. Inside of an allocation; it imports nothing.
pub(in crate::python) fn has_a_loop(py: Python<'_>) -> PyResult<bool> {
    static MODULES: Imported = Imported::new("sys", "modules");
    let Some(asyncio) = MODULES.get(py)?.cast::<PyDict>()?.get_item(intern!(py, "_asyncio"))? else { return Ok(false) };
    Ok(!asyncio.getattr(intern!(py, "_get_running_loop"))?.call0()?.is_none())
}

#[cfg(test)]
mod tests {
    use super::{Code, code_of};

    #[test]
    fn whose_code_it_is_its_file_says() {
        let library = "/usr/lib/python3.13";
        for (file, code) in [
            ("/usr/lib/python3.13/asyncio/tasks.py", Code::Steps),
            ("/usr/lib/python3.13/asyncio/streams.py", Code::Loops),
            ("/usr/lib/python3.13/_weakrefset.py", Code::Library),
            ("<frozen importlib._bootstrap>", Code::Library),
            ("/usr/lib/python3.13/site-packages/anyio/_backends/_asyncio.py", Code::Steps),
            ("/usr/lib/python3/dist-packages/trio/_core/_run.py", Code::Steps),
            ("/srv/.venv/lib/python3.13/site-packages/anyio/_core/_eventloop.py", Code::Loops),
            ("/usr/lib/python3.13/site-packages/a/asyncio/tasks.py", Code::Own),
            ("/usr/lib/python3.131/asyncio/tasks.py", Code::Own),
            ("/srv/anyio/_backends/_asyncio.py", Code::Own),
            ("<string>", Code::Own),
        ] {
            assert_eq!(code_of(file, library), code, "{file}");
        }
    }
}
