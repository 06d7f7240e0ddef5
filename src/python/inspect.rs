//! The functions that look up, list, register and adopt handlers, and that tell which one owns an array.

use super::asked::asked;
use super::errors::{text_of, wrong_type};
use super::foreign::{adopt_capsule, handler_in};
use super::handler::PyHandler;
use super::lookup::handler_named;
use super::numpy::Numpy;
use super::strategies::{PyStrategy, class_of_strategies};
use crate::handler::{self as table, Handler};
use crate::python::interned::intern;
use crate::strategy::SharedMemory;
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::PyMemoryView;

/// The handler of the next array that the running context makes: the value of NumPy's own ContextVar.
///
/// A foreign handler, selected by C code, is taken into the table when it is first seen.
#[pyfunction]
pub(super) fn current(py: Python<'_>) -> PyResult<Bound<'_, PyHandler>> {
    PyHandler::of(py, super::bridge::current(py)?)
}

/// The handler with that name.
///
/// UnknownHandlerError (a ValueError): there is none; the message lists the names that there are.
#[pyfunction]
#[pyo3(signature = (name, /))]
pub(super) fn handler<'py>(name: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyHandler>> {
    let py = name.py();
    let name = text_of("handler", "the name of a handler, a str", name)?;
    PyHandler::of(py, handler_named(py, &name)?)
}

/// All handlers, in the order in which they were registered: the built-in ones, NumPy's default, and those that a
/// program added. Handlers of requests are not among them.
#[pyfunction]
pub(super) fn handlers(py: Python<'_>) -> PyResult<Vec<Bound<'_, PyHandler>>> {
    table::handlers().map(|handler| PyHandler::of(py, handler)).collect()
}

/// Registers a strategy under a name, for ever: a handler must outlive every array that it made. So a program registers
/// a few handlers when it starts, not one for each piece of work::
///
///     >>> ctxalloc.register("page", ctxalloc.strategies.Aligned(align=4 * ctxalloc.KiB))
///     <ctxalloc.Handler "page": Aligned(align=4096), version 1>
///
/// RegistrationError (a ValueError): the name is empty, taken, longer than 126 bytes of UTF-8, or has a NUL.
#[pyfunction]
#[pyo3(signature = (name, strategy, /))]
pub(super) fn register<'py>(name: &Bound<'py, PyAny>, strategy: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyHandler>> {
    let text = text_of("register", "the handler's name, a str, before its strategy", name)?;
    let strategy = match strategy.cast::<PyStrategy>() {
        Ok(strategy) => strategy.get().strategy(),
        Err(_) => return Err(no_strategy(&text, strategy)),
    };
    PyHandler::of(name.py(), table::register(&text, strategy)?)
}

fn no_strategy(name: &str, given: &Bound<'_, PyAny>) -> PyErr {
    match class_of_strategies(given) {
        Some(class) => PyTypeError::new_err(format!(
            "register() takes a strategy, and strategies.{class} is the class of them: \
             register({name:?}, strategies.{class}(...))"
        )),
        None => wrong_type("register", "a strategy of ctxalloc.strategies after the name", given),
    }
}

/// Takes a foreign handler into the table: any capsule ``mem_handler`` that ``PyDataMem_SetHandler`` accepts.
///
/// ``name`` is its name in the table, instead of its own. The capsule is kept for ever. Adopting the same capsule
/// again, or another one around the same struct, returns the same Handler.
///
/// TypeError: not a capsule. ValueError: a capsule with another name. RegistrationError (a ValueError): the name is
/// taken or invalid, the struct lacks a function, or it is in the table under another name.
#[pyfunction]
#[pyo3(signature = (capsule, /, *, name = None))]
pub(super) fn adopt<'py>(
    capsule: &Bound<'py, PyAny>,
    name: Option<&Bound<'py, PyAny>>,
) -> PyResult<Bound<'py, PyHandler>> {
    let name = name.map(|name| text_of("adopt", "name=, a str or None", name)).transpose()?;
    PyHandler::of(capsule.py(), adopt_capsule(capsule, name.as_deref())?)
}

/// The handler that owns an array's bytes: its own, or that of the array it is a view of.
///
/// None where no handler does: memory of a mapped file, a buffer, a pickle, or another library. TypeError: not an
/// ndarray::
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
    // A request's handler stays valid meanwhile: `arr` keeps its block, and the block holds the request.
    owner_of(arr)?.map(|handler| PyHandler::of(arr.py(), handler)).transpose()
}

/// [`handler_of`] without the Python object.
pub(super) fn owner_of(arr: &Bound<'_, PyAny>) -> PyResult<Option<Handler>> {
    let numpy = Numpy::get(arr.py())?;
    if !numpy.is_array(arr) {
        return Err(wrong_type("handler_of", "a numpy.ndarray", arr));
    }
    let mut owner = arr.clone();
    loop {
        if numpy.is_array(&owner) {
            if let Some(handler) = handler_of_owner(numpy, &owner)? {
                return Ok(Some(handler));
            }
            owner = numpy.base_of(&owner)?;
        } else if let Ok(view) = owner.cast::<PyMemoryView>() {
            owner = view.getattr(intern!(arr.py(), "obj"))?;
        } else if is_numpys_dummy(&owner)? {
            owner = owner.getattr(intern!(arr.py(), "base"))?;
        } else {
            return Ok(None);
        }
    }
}

/// Whether this object is what links a strided view (`as_strided`, `sliding_window_view`) to its array. It must be
/// NumPy's own class: the `base` of another class with that name could lead in a circle.
fn is_numpys_dummy(object: &Bound<'_, PyAny>) -> PyResult<bool> {
    const NAME: &str = "DummyArray";
    let kind = object.get_type();
    let module = kind.module()?;
    if kind.name()?.to_cow()? != NAME || !module.to_cow()?.starts_with("numpy.lib.") {
        return Ok(false);
    }
    let numpys = object.py().import(module).and_then(|module| module.getattr(NAME));
    Ok(asked(object.py(), numpys)?.is_ok_and(|numpys| numpys.is(&kind)))
}

fn handler_of_owner(numpy: &Numpy, array: &Bound<'_, PyAny>) -> PyResult<Option<Handler>> {
    if numpy.knows_array_handlers() {
        return numpy.capsule_of(array)?.map(|capsule| handler_in(&capsule)).transpose();
    }
    // The array object is not laid out as NumPy's headers say: ask NumPy for the handler's name instead.
    let name: Option<String> =
        numpy.multiarray(array.py()).call_method1(intern!(array.py(), "get_handler_name"), (array,))?.extract()?;
    Ok(name.and_then(|name| table::handler(&name)))
}

/// The file descriptor of the SharedMemory block that an address is in, the offset of the address and the block's size,
/// both in bytes. None for other addresses.
#[pyfunction]
#[pyo3(signature = (address, /))]
pub(super) fn shared_memory_at(address: usize) -> Option<(i32, usize, usize)> {
    SharedMemory::locate(address).map(|found| (found.descriptor, found.offset_bytes, found.size_bytes))
}

/// NumPy's own function of that name: the name of an array's handler, or without an array that of the current one.
///
/// None: the array owns no data. ``handler_of()`` follows views to the array that does.
#[pyfunction]
#[pyo3(signature = (arr = None, /))]
pub(super) fn get_handler_name<'py>(py: Python<'py>, arr: Option<Bound<'py, PyAny>>) -> PyResult<Bound<'py, PyAny>> {
    ask_numpy(py, "get_handler_name", arr)
}

/// NumPy's own function of that name: the version of an array's handler, or without an array that of the current one.
///
/// None: the array owns no data.
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
