//! Where asyncio would lose somebody's work at a limit of a whole request: what it makes between the steps of tasks is
//! theirs, and a MemoryError there reaches nobody who waits. The loop tells of it, a task is never stepped again, and a
//! `gather` never ends. So there the block is granted, and the request is told at its next step.

use crate::python::attached;
use crate::python::pending::SetAside;
use crate::python::tracked::find_call;

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

/// What of these is called by the loop or by a future, or notes what the loop is to call, in CPython 3.11 to 3.14; by
/// the last part of its qualified name.
const FUNCTIONS: [&str; 15] = [
    "_call_set_state",
    "_call_soon",
    "_done_callback",
    "_handle_completion",
    "_handle_timeout",
    "_inner_done_callback",
    "_on_completion",
    "_on_task_done",
    "_on_timeout",
    "_outer_done_callback",
    "_release_waiter",
    "_set_result_unless_cancelled",
    "_set_state",
    "call_soon",
    "call_soon_threadsafe",
];

/// The loop's own call of a callback: beyond it, no Python code of the callback's is running.
const CALLS: &str = "Handle._run";

/// Whether asyncio is at it now, on this thread. Inside of an allocation.
pub(in crate::python) fn loses_work() -> bool {
    let Some(py) = attached::here() else { return false };
    let _pending = SetAside::new(py);
    let is_it = |file: &str, function: &str| {
        let mut parts = file.rsplit('/');
        if !parts.next().is_some_and(|name| FILES.contains(&name)) || parts.next() != Some("asyncio") {
            return Some(false); // somebody's own code, which is told
        }
        let name = function.rsplit('.').next().unwrap_or(function);
        (function == CALLS || FUNCTIONS.contains(&name)).then_some(true)
    };
    find_call(py, is_it).unwrap_or(false)
}
