//! What is alive at a request's end, and what of that outlives it.
//!
//! A step of asyncio holds the result that it was woken with until the step ends, whatever its code has let go of:
//! `x = await asyncio.to_thread(...)`, `del x`. The thread that computed it may hold it for another moment. So where
//! blocks are alive at an end on an event loop, it is settled later what has escaped: docs/decisions/0036.

use super::report::PyEscaped;
use crate::handler::requests::Begun;
use crate::python::exit;
use crate::python::imported::{Imported, module};
use crate::python::interned::intern;
use crate::python::pending::SetAside;
use crate::strategy::LiveBlock;
use pyo3::exceptions::PyRuntimeError;
use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::prelude::*;
use pyo3::types::PyDict;
use std::sync::atomic::{AtomicUsize, Ordering};

/// How long after each look the next one is, in seconds, while something is left: a thread that waits for the GIL gets
/// it within 5 ms (`sys.getswitchinterval`) and lets go of what it computed; on a busy machine, later.
const MOMENTS_S: [f64; 2] = [0.01, 0.1];

/// What was alive at the end.
pub(super) struct Left {
    count: usize,
    bytes: usize,
    blocks: Option<Vec<LiveBlock>>,
    is_settled: bool,
    /// Called once it is settled.
    told: Option<Py<PyAny>>,
}

impl Left {
    /// Ends a request on no event loop: what is alive has escaped.
    pub(super) fn settled(begun: &mut Begun) -> Self {
        let end = begun.end();
        Self::of(begun, end.live_blocks, end.live_bytes, true)
    }

    /// Ends a request on an event loop.
    pub(super) fn open(begun: &mut Begun) -> Self {
        let end = begun.end_open();
        Self::of(begun, end.live_blocks, end.live_bytes, false)
    }

    fn of(begun: &Begun, count: usize, bytes: usize, is_settled: bool) -> Self {
        let blocks = if count == 0 { None } else { begun.live_blocks() };
        Self { count, bytes, blocks, is_settled, told: None }
    }

    /// Settles it, once: what of it is still alive has escaped. Returns whether it did, and what is to be called.
    pub(super) fn settle(&mut self, begun: &Begun) -> (bool, Option<Py<PyAny>>) {
        let is_fresh = !self.is_settled;
        if is_fresh {
            (self.count, self.bytes, self.blocks) = self.alive(begun);
            self.is_settled = true;
            begun.record_escapes(self.count, self.bytes);
        }
        (is_fresh, self.told.take())
    }

    /// What of it is alive. What was made after the end cannot be told from it, so this is never too small.
    fn alive(&self, begun: &Begun) -> (usize, usize, Option<Vec<LiveBlock>>) {
        let now = begun.stats();
        let blocks = self.blocks.as_ref().map(|blocks| {
            let now = begun.live_blocks().unwrap_or_default();
            blocks.iter().filter(|block| now.contains(block)).cloned().collect()
        });
        (self.count.min(now.live_blocks), self.bytes.min(now.live_bytes), blocks)
    }

    /// Whether nothing of it is alive.
    pub(super) fn is_gone(&self, begun: &Begun) -> bool {
        self.is_settled || begun.stats().live_blocks == 0
    }

    /// What has escaped as far as is known.
    pub(super) fn escaped(&self, begun: &Begun) -> PyEscaped {
        let (count, bytes, blocks) =
            if self.is_settled { (self.count, self.bytes, self.blocks.clone()) } else { self.alive(begun) };
        PyEscaped::new(count, bytes, blocks)
    }

    /// Takes a function that is to be called once it is settled; leaves it where it is settled.
    pub(super) fn tell_later(&mut self, function: &mut Option<Py<PyAny>>) {
        if !self.is_settled {
            self.told = function.take();
        }
    }

    pub(super) fn traverse(&self, visit: &PyVisit<'_>) -> Result<(), PyTraverseError> {
        visit.call(&self.told)
    }
}

/// The event loop of asyncio's kind that runs on this thread, if any.
pub(super) fn running_loop(py: Python<'_>) -> Option<Bound<'_, PyAny>> {
    // The names of modules, not their attributes: every request that reserves memory asks, and half of the time was
    // spent on looking for them. What replaces the function is found.
    static EVENTS: Imported = Imported::new("asyncio.events", "__dict__");
    let names = match EVENTS.known(py) {
        Some(names) => names,
        None => {
            module(py, intern!(py, "asyncio.events"))?; // where nobody has imported it, no loop runs
            EVENTS.get(py).ok()?
        }
    };
    let function = names.cast::<PyDict>().ok()?.get_item(intern!(py, "_get_running_loop")).ok()??;
    function.call0().ok().filter(|found| !found.is_none())
}

/// Looks a turn of the loop later whether anything of the request is left, and again some moments after that. Where the
/// loop closes first, it drops this, which settles it too.
#[pyclass(frozen, name = "_Settling", module = "ctxalloc._native")]
pub(super) struct Settling {
    request: Py<PyAny>,
    settle: Settle,
    event_loop: Py<PyAny>,
    pid: u32,
    looks: AtomicUsize,
}

/// Settles the request; with `false`, only if nothing that may have escaped is alive. Returns whether it is settled.
type Settle = fn(&Bound<'_, PyAny>, bool) -> PyResult<bool>;

impl Settling {
    pub(super) fn new(request: Bound<'_, PyAny>, settle: Settle, event_loop: Bound<'_, PyAny>) -> Self {
        Self {
            request: request.unbind(),
            settle,
            event_loop: event_loop.unbind(),
            pid: std::process::id(),
            looks: AtomicUsize::new(0),
        }
    }

    /// Asks the loop to call it. Where that fails it is settled at once, by the drop.
    ///
    /// # Errors
    /// What a signal's handler raised meanwhile.
    pub(super) fn begin(self, py: Python<'_>) -> PyResult<()> {
        let event_loop = self.event_loop.bind(py).clone(); // no `Py`: see `block.rs`
        let asked = Bound::new(py, self).and_then(|this| {
            let options = in_empty_context(py)?;
            event_loop.call_method(intern!(py, "call_soon"), (this,), Some(&options))
        });
        match asked {
            // The loop is closed.
            Err(error) if error.is_instance_of::<PyRuntimeError>(py) => Ok(()),
            asked => asked.map(drop),
        }
    }
}

/// The keyword `context`: a copy of the running one would keep alive what it holds.
fn in_empty_context(py: Python<'_>) -> PyResult<Bound<'_, PyDict>> {
    static CONTEXT: Imported = Imported::new("contextvars", "Context");
    let options = PyDict::new(py);
    options.set_item(intern!(py, "context"), CONTEXT.get(py)?.call0()?)?;
    Ok(options)
}

#[pymethods]
impl Settling {
    /// An interrupt in what it calls stops the loop; of another exception the loop tells.
    fn __call__(slf: &Bound<'_, Self>) -> PyResult<()> {
        let (py, this) = (slf.py(), slf.get());
        let request = this.request.bind(py);
        let moment = MOMENTS_S.get(this.looks.fetch_add(1, Ordering::Relaxed));
        let mut raised = Ok(());
        if let Some(moment) = moment {
            if (this.settle)(request, false)? {
                return Ok(());
            }
            let later = in_empty_context(py).and_then(|options| {
                this.event_loop.bind(py).call_method(intern!(py, "call_later"), (*moment, slf), Some(&options))
            });
            match later {
                Ok(_) => return Ok(()),
                Err(error) if error.is_instance_of::<PyRuntimeError>(py) => {} // the loop is closed
                Err(error) => raised = Err(error),
            }
        }
        let settled = (this.settle)(request, true).map(drop);
        raised.and(settled)
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        visit.call(&self.request)?;
        visit.call(&self.event_loop)
    }
}

impl Drop for Settling {
    fn drop(&mut self) {
        if self.pid == std::process::id() {
            // A request of the parent's is not this process's.
            exit::try_attach(|py| {
                let _pending = SetAside::new(py);
                let request = self.request.bind(py);
                if let Err(error) = (self.settle)(request, true) {
                    error.write_unraisable(py, Some(request)); // nobody is there to catch it
                }
            });
        }
    }
}
