//! Where asyncio would lose somebody's work at a limit of a whole request: a MemoryError between the steps of tasks
//! reaches nobody who waits. The loop tells of it, a task is never stepped again, and a `gather` never ends; one within
//! `gather` or a TaskGroup's end leaves tasks alone. So there the block is granted, and the request is told at its next
//! step.

use crate::python::attached;
use crate::python::pending::SetAside;
use crate::python::tracked::find_call;
use pyo3::Python;

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

/// Whether asyncio is at it now, on this thread. Inside of an allocation.
pub(in crate::python) fn loses_work() -> bool {
    let Some(py) = attached::here() else { return false };
    let _pending = SetAside::new(py);
    is_asyncios_own(py, |name| FILES.contains(&name))
}

/// Whether the innermost Python code is asyncio's, in a file that `is_it` names, or what that calls of the standard
/// library; and not somebody's own code.
pub(in crate::python) fn is_asyncios_own(py: Python<'_>, is_it: impl Fn(&str) -> bool) -> bool {
    let mut inner: Vec<String> = Vec::new();
    let look = |file: &str, _: &str| match file.rsplit_once("/asyncio/").filter(|(_, name)| is_it(name)) {
        Some((library, _)) => Some(inner.iter().all(|file| is_of_library(file, library))),
        None => {
            inner.push(file.to_owned());
            None
        }
    };
    find_call(py, look).unwrap_or(false)
}

/// Whether a file is one of the standard library in this folder.
fn is_of_library(file: &str, library: &str) -> bool {
    let is_in = |path: &str| path.starts_with('/') && !path.contains("-packages/");
    file.starts_with("<frozen ") || file.strip_prefix(library).is_some_and(is_in)
}

#[cfg(test)]
mod tests {
    use super::is_of_library;

    #[test]
    fn what_asyncio_calls_of_the_library_is_not_somebodys_own() {
        let library = "/usr/lib/python3.13";
        for file in ["/usr/lib/python3.13/_weakrefset.py", "<frozen importlib._bootstrap>"] {
            assert!(is_of_library(file, library), "{file}");
        }
        for file in ["/usr/lib/python3.13/site-packages/a.py", "/usr/lib/python3.131/a.py", "/srv/a.py", "<string>"] {
            assert!(!is_of_library(file, library), "{file}");
        }
    }
}
