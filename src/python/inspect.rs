//! Questions: which handler is current, which one owns this array, which ones are there.

use super::foreign::{adopt_capsule, handler_in};
use super::handler::PyHandler;
use super::numpy::Numpy;
use super::strategies::PyStrategy;
use super::usm;
use crate::handler::{Handler, handler as handler_named, handlers as all, register as enter, unknown};
use crate::strategy::SharedMemory;
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::PyMemoryView;

/// The handler that the next array of the running context will live in: what NumPy's own ContextVar holds.
///
/// A foreign handler, which C code selected, is taken into the table when it is first seen.
#[pyfunction]
pub(super) fn current(py: Python<'_>) -> PyResult<Bound<'_, PyHandler>> {
    PyHandler::of(py, super::bridge::current(py)?)
}

/// The handler with that name.
///
/// UnknownHandlerError (a ValueError) lists the names there are.
#[pyfunction]
#[pyo3(signature = (name, /))]
pub(super) fn handler<'py>(py: Python<'py>, name: &str) -> PyResult<Bound<'py, PyHandler>> {
    PyHandler::of(py, usm::handler_named(py, name)?.ok_or_else(|| unknown(name))?)
}

/// All handlers, in the order in which they were registered: the built-in ones, NumPy's default, and what came since;
/// not those of requests.
#[pyfunction]
pub(super) fn handlers(py: Python<'_>) -> PyResult<Vec<Bound<'_, PyHandler>>> {
    all().map(|handler| PyHandler::of(py, handler)).collect()
}

/// Registers a strategy under a name, for ever: handlers must outlive every array that they made. So a program
/// registers a few when it starts, and not one for each piece of work::
///
///     >>> ctxalloc.register("page", ctxalloc.strategies.Aligned(align=4 * ctxalloc.KiB))
///     <ctxalloc.Handler "page": Aligned(align=4096), version 1>
///
/// RegistrationError (a ValueError): the name is empty, taken, longer than 126 bytes of UTF-8, or has a NUL.
#[pyfunction]
#[pyo3(signature = (name, strategy, /))]
pub(super) fn register<'py>(
    py: Python<'py>,
    name: &str,
    strategy: &Bound<'py, PyStrategy>,
) -> PyResult<Bound<'py, PyHandler>> {
    PyHandler::of(py, enter(name, strategy.get().strategy())?)
}

/// Takes a foreign handler into the table: any capsule ``mem_handler`` that ``PyDataMem_SetHandler`` would take.
///
/// ``name`` is its name in the table, instead of its own. The capsule is kept for ever. The same capsule, or another
/// one around the same struct, is the same Handler.
///
/// TypeError: no capsule. ValueError: a capsule of another name. RegistrationError (a ValueError): the name is taken or
/// impossible, the struct lacks a function, or it is in the table under another name.
#[pyfunction]
#[pyo3(signature = (capsule, /, *, name = None))]
pub(super) fn adopt<'py>(capsule: &Bound<'py, PyAny>, name: Option<&str>) -> PyResult<Bound<'py, PyHandler>> {
    PyHandler::of(capsule.py(), adopt_capsule(capsule, name)?)
}

/// The handler that owns an array's bytes: its own, or that of the array it is a view of.
///
/// None where no handler does: memory from a file map, a buffer, a pickle, or another library. TypeError: no ndarray::
///
///     >>> with ctxalloc.use("aligned64"):
///     ...     array = numpy.ones((10, 10))
///     >>> ctxalloc.handler_of(array[2:5].T).name
///     'aligned64'
///     >>> ctxalloc.handler_of(numpy.frombuffer(b"12345678")) is None
///     True
#[pyfunction]
#[pyo3(signature = (arr, /))]
pub(super) fn handler_of<'py>(arr: &Bound<'py, PyAny>) -> PyResult<Option<Bound<'py, PyHandler>>> {
    // While `arr` is here its block is, and holds its request.
    owner_of(arr)?.map(|handler| PyHandler::of(arr.py(), handler)).transpose()
}

/// [`handler_of`], without an object for it.
pub(super) fn owner_of(arr: &Bound<'_, PyAny>) -> PyResult<Option<Handler>> {
    let numpy = Numpy::get(arr.py())?;
    if !numpy.is_array(arr)? {
        let kind = arr.get_type().qualname()?;
        return Err(PyTypeError::new_err(format!("handler_of() takes a numpy.ndarray, got '{kind}'")));
    }
    let mut owner = arr.clone();
    loop {
        if numpy.is_array(&owner)? {
            if let Some(handler) = handler_of_owner(numpy, &owner)? {
                return Ok(Some(handler));
            }
            owner = numpy.base_of(&owner)?;
        } else if let Ok(view) = owner.cast::<PyMemoryView>() {
            owner = view.getattr("obj")?;
        } else if is_numpys_dummy(&owner)? {
            owner = owner.getattr("base")?;
        } else {
            return Ok(None);
        }
    }
}

/// Whether this is what stands between an array and its strided view (`as_strided`, `sliding_window_view`).
fn is_numpys_dummy(object: &Bound<'_, PyAny>) -> PyResult<bool> {
    let kind = object.get_type();
    Ok(kind.name()?.to_cow()? == "DummyArray" && kind.module()?.to_cow()?.starts_with("numpy.lib."))
}

fn handler_of_owner(numpy: &Numpy, array: &Bound<'_, PyAny>) -> PyResult<Option<Handler>> {
    if numpy.knows_array_handlers() {
        return numpy.capsule_of(array)?.map(|capsule| handler_in(&capsule)).transpose();
    }
    // An array object laid out in another way than NumPy's headers say: by the name that NumPy itself tells.
    let name: Option<String> = numpy.multiarray(array.py()).call_method1("get_handler_name", (array,))?.extract()?;
    Ok(name.and_then(|name| handler_named(&name)))
}

/// The descriptor, offset and size of the SharedMemory block in which an address lies; None for other addresses.
#[pyfunction]
#[pyo3(signature = (address, /))]
pub(super) fn shared_memory_at(address: usize) -> Option<(i32, usize, usize)> {
    SharedMemory::locate(address).map(|found| (found.descriptor, found.offset_bytes, found.size_bytes))
}

/// NumPy's name for the handler of an array, or of the next array where None is given. None: the array owns no data.
///
/// NumPy's own function of that name. ``handler_of()`` follows views to the array that owns the data.
#[pyfunction]
#[pyo3(signature = (arr = None, /))]
pub(super) fn get_handler_name<'py>(py: Python<'py>, arr: Option<Bound<'py, PyAny>>) -> PyResult<Bound<'py, PyAny>> {
    ask_numpy(py, "get_handler_name", arr)
}

/// NumPy's version of the handler of an array, or of the next array where None is given. None: it owns no data.
///
/// NumPy's own function of that name.
#[pyfunction]
#[pyo3(signature = (arr = None, /))]
pub(super) fn get_handler_version<'py>(py: Python<'py>, arr: Option<Bound<'py, PyAny>>) -> PyResult<Bound<'py, PyAny>> {
    ask_numpy(py, "get_handler_version", arr)
}

fn ask_numpy<'py>(py: Python<'py>, function: &str, arr: Option<Bound<'py, PyAny>>) -> PyResult<Bound<'py, PyAny>> {
    let multiarray = Numpy::get(py)?.multiarray(py);
    match arr {
        Some(arr) => multiarray.call_method1(function, (arr,)),
        None => multiarray.call_method0(function),
    }
}
