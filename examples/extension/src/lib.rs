//! An extension module of somebody else's that follows the handlers of whoever calls it. It shows the four
//! crossings of `ctxalloc::python`, one line each, and has no `unsafe` and no allocator of its own.

mod blur;
mod panics;
mod picture;

use ctxalloc::{WithHandler, task};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use std::borrow::Cow;
use std::thread;

/// The handler that Rust code called from here sees: the caller's.
#[pyfunction]
fn handler_here(py: Python<'_>) -> PyResult<Cow<'static, str>> {
    ctxalloc::python::scope(py, || ctxalloc::current().name())
}

/// The handlers that a Rust future sees on its way: at its start, and after each of ``hops`` tasks it starts and
/// awaits. Each comes with the name of the thread it was seen on.
#[pyfunction]
fn handlers_on_the_way(py: Python<'_>, hops: usize) -> PyResult<Bound<'_, PyAny>> {
    fn seen() -> (Cow<'static, str>, String) {
        (ctxalloc::current().name(), format!("{:?}", thread::current().id()))
    }
    ctxalloc::python::future_into_py(py, async move {
        let mut all = vec![seen()];
        for _ in 0..hops {
            all.push(task::spawn(async { seen() }).await.map_err(failed)?);
            all.push(task::spawn_blocking(seen).await.map_err(failed)?);
            all.push(seen());
        }
        Ok(all)
    })
}

/// Blurs a picture (uint8, height x width or height x width x channels) with a box of ``2 * radius + 1`` pixels.
///
/// Awaitable. Copies, works and answers in the handler of the call: the pixels are copied at the call, blurred on
/// tokio's blocking pool, and the new array is made from them.
#[pyfunction]
fn box_blur<'py>(image: &Bound<'py, PyAny>, radius: usize) -> PyResult<Bound<'py, PyAny>> {
    let py = image.py();
    let picture = ctxalloc::python::scope(py, || picture::read(image))??;
    ctxalloc::python::future_into_py(py, async move {
        Ok(task::spawn_blocking(move || blur::box_blur(&picture, radius)).await.map_err(failed)??)
    })
}

/// A new array of ``n`` bytes, made by a Rust task of its own that runs in the handler ``name``.
///
/// Awaitable. The array lives in ``name``, whatever the caller has selected.
#[pyfunction]
fn array_made_in<'py>(py: Python<'py>, name: &str, n: usize) -> PyResult<Bound<'py, PyAny>> {
    let chosen = ctxalloc::handler::try_handler(name)?;
    ctxalloc::python::future_into_py(py, async move {
        let made = async move { ctxalloc::python::attach(|py| picture::empty(py, &[n]).map(Bound::unbind)) };
        task::spawn(made.with_handler(chosen)).await.map_err(failed)?
    })
}

/// What ``function()`` returns, called by Rust code that has selected the handler ``name`` on the caller's own thread.
#[pyfunction]
fn call_in<'py>(py: Python<'py>, name: &str, function: Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
    let chosen = ctxalloc::handler::try_handler(name)?;
    let function = function.unbind();
    let call = || ctxalloc::python::attach(|py| function.call0(py));
    ctxalloc::python::scope(py, || ctxalloc::scope(chosen, call))?.map(|answer| answer.into_bound(py))
}

/// Awaits ``function()``, a coroutine function, from a Rust future that runs in the handler ``name`` (None: in the
/// handler of the call), and returns what it returned.
///
/// Awaitable. Cancelling it cancels the coroutine; a coroutine that is cancelled cancels it.
#[pyfunction]
#[pyo3(signature = (function, name = None))]
fn await_python<'py>(py: Python<'py>, function: Py<PyAny>, name: Option<&str>) -> PyResult<Bound<'py, PyAny>> {
    let chosen = match name {
        Some(name) => ctxalloc::handler::try_handler(name)?,
        None => ctxalloc::python::current(py)?,
    };
    let awaiting = async move {
        let answer = ctxalloc::python::attach(|py| ctxalloc::python::into_future(function.bind(py).call0()?))?;
        answer.await
    };
    ctxalloc::python::future_into_py(py, awaiting.with_handler(chosen))
}

/// Makes a Rust buffer of ``n`` bytes in ``request``, a ``ctxalloc.request(reserve_bytes=...)``, and says how many
/// bytes the request holds then.
///
/// Awaitable. The Rust task waits for room in line with Python's tasks and threads: the place in it is taken by the
/// call. ``begun`` is called when the request has begun. Cancelling it leaves the line.
#[pyfunction]
fn work_in<'py>(request: &Bound<'py, PyAny>, n: usize, begun: Py<PyAny>) -> PyResult<Bound<'py, PyAny>> {
    let waits = ctxalloc::python::admit(request)?;
    let terms = request.clone().unbind();
    ctxalloc::python::future_into_py(request.py(), async move {
        let request = waits.await?;
        ctxalloc::python::attach(|py| begun.call0(py).map(drop))?;
        // Work of the request, on tokio's blocking pool.
        let made = request.scope(async move { task::spawn_blocking(move || ctxalloc::Buffer::zeroed(n)).await });
        let buffer = made.await.map_err(failed)??;
        let held = ctxalloc::python::attach(|py| terms.bind(py).getattr("stats")?.getattr("live_bytes")?.extract());
        drop(buffer);
        request.end()?;
        held.map(|bytes: usize| bytes)
    })
}

/// Makes a Rust buffer of ``n`` bytes for the caller and says whose it is and how long. MemoryError if it cannot.
#[pyfunction]
fn buffer_of(py: Python<'_>, n: usize) -> PyResult<(Cow<'static, str>, usize)> {
    let buffer = ctxalloc::python::scope(py, || ctxalloc::Buffer::zeroed(n))??;
    Ok((buffer.handler().name(), buffer.len()))
}

/// ``data`` copied into a Rust buffer in the caller's handler, from there into another, and out again; with the
/// handler's name.
#[pyfunction]
fn copied_buffer(py: Python<'_>, data: &[u8]) -> PyResult<(Vec<u8>, Cow<'static, str>)> {
    let buffer = ctxalloc::python::scope(py, || ctxalloc::Buffer::copy_from_slice(data)?.try_clone())??;
    let mut bytes = vec![0; buffer.len()];
    buffer.copy_to_slice(&mut bytes)?;
    Ok((bytes, buffer.handler().name()))
}

/// Makes and drops ``each`` buffers on each of some threads that know no Python, in the caller's handler; says how
/// many.
#[pyfunction]
fn buffers_on_threads(py: Python<'_>, threads: usize, each: usize) -> PyResult<usize> {
    ctxalloc::python::scope(py, || {
        py.detach(|| {
            let work = move || (0..each).filter(|&n| ctxalloc::Buffer::zeroed(n + 1).is_ok()).count();
            let all: Vec<_> = (0..threads).map(|_| ctxalloc::thread::spawn(work)).collect();
            all.into_iter().map(|thread| thread.join().unwrap_or(0)).sum()
        })
    })
}

/// A Rust buffer that Python owns.
#[pyclass]
struct KeptBuffer(ctxalloc::Buffer);

#[pymethods]
impl KeptBuffer {
    /// ``n`` zero bytes in the caller's handler.
    #[new]
    fn new(py: Python<'_>, n: usize) -> PyResult<Self> {
        Ok(Self(ctxalloc::python::scope(py, || ctxalloc::Buffer::zeroed(n))??))
    }

    /// Makes it ``n`` bytes long, by the handler that made it.
    fn resize(&mut self, n: usize) -> PyResult<()> {
        Ok(self.0.resize(n)?)
    }
}

fn failed(error: tokio::task::JoinError) -> PyErr {
    PyValueError::new_err(format!("a task of the example failed: {error}"))
}

#[pymodule(gil_used = false)]
mod ctxalloc_example {
    #[pymodule_export]
    use super::panics::{panic_here, panic_in_future};
    #[pymodule_export]
    use super::{
        KeptBuffer, array_made_in, await_python, box_blur, buffer_of, buffers_on_threads, call_in, copied_buffer,
        handler_here, handlers_on_the_way, work_in,
    };

    use pyo3::prelude::*;

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        ctxalloc::python::init(module.py())
    }
}
