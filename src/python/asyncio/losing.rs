//! Where an event loop would lose somebody's work at a limit of a whole request: a MemoryError between the steps of
//! tasks reaches nobody who waits. The loop tells of it, a task is never stepped again, and a `gather` never ends; one
//! within `gather` or a TaskGroup's end leaves tasks alone. So there the block is granted, and the request is told at
//! its next step.

use crate::python::attached;
use crate::python::imported::module;
use crate::python::interned::intern;
use crate::python::pending::SetAside;
use crate::python::tracked::{find_call, is_running};
use crate::sync::Made;
use pyo3::prelude::*;

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
    /// Of an event loop: it steps tasks and wakes who waits, or others of it do.
    Loop,
    /// Of the standard library: whose it is, its caller knows.
    Library,
    Own,
}

/// Whether it was made by the standard library, or by attrs, for a class: what `collections.namedtuple` and
/// `dataclasses` make has the file that `python -c` has too, but only these names.
fn is_generated(file: &str, function: &str) -> bool {
    const NAMES: [&str; 11] = [
        "<lambda>",
        "__init__",
        "__repr__",
        "__eq__",
        "__lt__",
        "__le__",
        "__gt__",
        "__ge__",
        "__hash__",
        "__setattr__",
        "__delattr__",
    ];
    let name = function.rsplit('.').next().unwrap_or(function);
    (file == "<string>" && NAMES.contains(&name)) || file.starts_with("<attrs generated ")
}

/// What reads all that a process writes.
const READS_A_PROCESS: [&str; 3] = ["Process.communicate", "Process._read_stream", "Process._feed_stdin"];

/// The same of trio and of anyio. They keep the pieces, which are made by others.
const READS_ANOTHER_PROCESS: [&str; 2] = ["run_process.<locals>.read_output", "run_process.<locals>.drain_stream"];

/// What calls a function in a worker thread, of anyio, trio and curio: no task waits on that thread, and what the
/// function takes, which may be C's, is its caller's.
const CALLS_IN_A_THREAD: [&str; 6] = [
    "WorkerThread.run",
    "run_sync_in_worker_thread.<locals>.wrapper",
    "to_thread_run_sync.<locals>.worker_fn",
    "WorkerThread._handle_job",
    "WorkerThread._work",
    "ThreadWorker.run_worker",
];

/// Packages that loops call in the middle of their own work: to step a task (`outcome`), to keep its deadlines
/// (`sortedcontainers`). asgiref takes a call from a loop to a thread and back.
const CALLED_BY_LOOPS: [&str; 6] = ["asgiref", "attr", "attrs", "outcome", "sniffio", "sortedcontainers"];

fn ends_with_any(function: &str, ends: &[&str]) -> bool {
    ends.iter().any(|end| function.ends_with(end))
}

fn code_of(file: &str, function: &str, library: &str) -> Code {
    if file.starts_with("<frozen ") || is_generated(file, function) {
        return Code::Library;
    }
    let of_library = file.strip_prefix(library).filter(|path| path.starts_with('/') && !path.contains("-packages/"));
    match of_library.map(|path| path.strip_prefix("/asyncio/")) {
        // What a coroutine reads of a stream may be as much as others send, and is told; what the loop keeps for it is
        // not much.
        Some(None | Some("streams.py")) => return Code::Library,
        Some(Some("subprocess.py")) if READS_A_PROCESS.contains(&function) => return Code::Own,
        Some(Some(_)) => return Code::Loop,
        None => {}
    }
    let package = file.rsplit_once("-packages/").and_then(|(_, path)| path.split('/').next()).unwrap_or_default();
    match package {
        "anyio" | "curio" | "trio" if ends_with_any(function, &READS_ANOTHER_PROCESS) => Code::Own,
        "anyio" | "curio" | "trio" if ends_with_any(function, &CALLS_IN_A_THREAD) => Code::Library,
        "anyio" | "curio" | "trio" => Code::Loop,
        _ if CALLED_BY_LOOPS.contains(&package) => Code::Library,
        _ => Code::Own,
    }
}

/// Whether an event loop would lose somebody's work here, on this thread, for a small block or another. Inside of an
/// allocation.
pub(in crate::python) fn loses_work(is_small: bool) -> bool {
    let Some(py) = attached::here() else { return false };
    let _pending = SetAside::new(py);
    is_of_a_loop(py) && (is_small || !calls_back(py))
}

/// Whether asyncio calls a function of C's that somebody gave it: what that raises the loop's handler is told of. The
/// call itself takes small blocks, and may be the step of a task, which would never be stepped again.
fn calls_back(py: Python<'_>) -> bool {
    let Some(library) = LIBRARY.get() else { return false };
    let calls = |file: &str, function: &str| {
        function == "Handle._run" && file.strip_prefix(&**library) == Some("/asyncio/events.py")
    };
    find_call(py, |file, function| Some(calls(file, function))).unwrap_or(false)
}

/// Whether this code is neither the standard library's nor an event loop's.
pub(in crate::python) fn is_own(file: &str, function: &str) -> bool {
    LIBRARY.get().is_some_and(|library| code_of(file, function, library) == Code::Own)
}

/// Whether the code that runs is an event loop's.
fn is_of_a_loop(py: Python<'_>) -> bool {
    running(py) == Code::Loop
}

/// The innermost code that is not just what that calls of the standard library.
fn running(py: Python<'_>) -> Code {
    let Some(library) = LIBRARY.get() else { return Code::Own };
    let look =
        |file: &str, function: &str| Some(code_of(file, function, library)).filter(|code| *code != Code::Library);
    find_call(py, look).unwrap_or(Code::Own)
}

/// That loop. It imports nothing.
fn running_loop(py: Python<'_>) -> PyResult<Option<Bound<'_, PyAny>>> {
    let Some(asyncio) = module(py, intern!(py, "_asyncio")) else { return Ok(None) };
    let found = asyncio.getattr(intern!(py, "_get_running_loop"))?.call0()?;
    Ok((!found.is_none()).then_some(found))
}

/// Whether the function runs on this thread that the loop's user has it call for errors nobody waits for. What it
/// raises is lost, and the error that it was called for as well. It runs no code of the user's, unless the loop is of a
/// class of theirs.
pub(in crate::python) fn tells_of_errors(py: Python<'_>) -> PyResult<bool> {
    let Some(running) = running_loop(py)? else { return Ok(false) };
    let told = match running.getattr_opt(intern!(py, "_exception_handler"))? {
        Some(told) => told, // asyncio's own loops; uvloop's has a function alone
        None => running.call_method0(intern!(py, "get_exception_handler"))?,
    };
    let function = told.getattr_opt(intern!(py, "__func__"))?.unwrap_or(told); // of a method
    Ok(function.getattr_opt(intern!(py, "__code__"))?.is_some_and(|code| is_running(py, &code)))
}

#[cfg(test)]
mod tests {
    use super::{Code, code_of};

    #[test]
    fn whose_code_it_is_its_file_says() {
        let library = "/usr/lib/python3.13";
        for (file, code) in [
            ("/usr/lib/python3.13/asyncio/tasks.py", Code::Loop),
            ("/usr/lib/python3.13/asyncio/streams.py", Code::Library),
            ("/usr/lib/python3.13/_weakrefset.py", Code::Library),
            ("<frozen importlib._bootstrap>", Code::Library),
            ("/usr/lib/python3.13/site-packages/anyio/_backends/_asyncio.py", Code::Loop),
            ("/usr/lib/python3/dist-packages/trio/_core/_run.py", Code::Loop),
            ("/srv/.venv/lib/python3.13/site-packages/anyio/_core/_eventloop.py", Code::Loop),
            ("/srv/.venv/lib/python3.13/site-packages/curio/kernel.py", Code::Loop),
            ("/srv/.venv/lib/python3.13/site-packages/outcome/_impl.py", Code::Library),
            ("/srv/.venv/lib/python3.13/site-packages/asgiref/sync.py", Code::Library),
            ("/srv/.venv/lib/python3.13/site-packages/django/core/handlers/base.py", Code::Own),
            ("/srv/outcome/_impl.py", Code::Own),
            ("/usr/lib/python3.13/site-packages/a/asyncio/tasks.py", Code::Own),
            ("/usr/lib/python3.131/asyncio/tasks.py", Code::Own),
            ("/srv/anyio/_backends/_asyncio.py", Code::Own),
            ("<string>", Code::Own),
        ] {
            assert_eq!(code_of(file, "Anything.at_all", library), code, "{file}");
        }
        for (file, function, code) in [
            ("<string>", "<lambda>", Code::Library),
            ("<string>", "__create_fn__.<locals>.__init__", Code::Library),
            ("<string>", "work", Code::Own),
            ("<string>", "Application.__call__", Code::Own),
            ("<attrs generated init trio._core._run.Task>", "__init__", Code::Library),
            ("/srv/own.py", "Own.__init__", Code::Own),
            ("/srv/site-packages/anyio/_backends/_asyncio.py", "WorkerThread.run", Code::Library),
            ("/srv/site-packages/trio/_threads.py", "to_thread_run_sync.<locals>.worker_fn", Code::Library),
            ("/srv/site-packages/trio/_threads.py", "to_thread_run_sync", Code::Loop),
            ("/srv/site-packages/trio/_subprocess.py", "_run_process.<locals>.read_output", Code::Own),
            ("/srv/own.py", "<lambda>", Code::Own),
        ] {
            assert_eq!(code_of(file, function, library), code, "{file} {function}");
        }
        let process = code_of("/usr/lib/python3.13/asyncio/subprocess.py", "Process.communicate", library);
        assert_eq!(process, Code::Own, "it is called by who reads");
    }
}
