//! Which MemoryErrors come from a refusal of the request's budgets; those become a BudgetExceeded.
//!
//! A budget refuses inside of a C function, which can only return NULL. NumPy or other C code then raises a
//! MemoryError, and that error knows nothing of the budget. So it is recognised by what it says of itself:
//!
//! - NumPy's error for a new array has the array's size. It comes from a refusal of that many bytes.
//! - An error without a message is C's (`PyErr_NoMemory`), and one of NumPy's messages names no size. It comes from a
//!   refusal if nothing was allocated in the request since that refusal.
//! - Rust code raises this crate's own error, which names the handler and the size. It comes from a refusal of that
//!   many bytes.
//! - In a whole request any other MemoryError comes from the last refusal. So does the SystemError that CPython raises
//!   where it finds that it failed without an exception: `compile` sets none, and the unwinding of deep recursion
//!   clears the one that there was where it gets no memory for a frame. And the [errors of their own](OWN) by which
//!   libraries say that there was no memory.
//! - An error with any other message was raised by the program, or by another library. It is left as it is.
//!
//! None of its code is run to find that out: `str(error)` of NumPy's is Python code, in which a signal's handler may
//! raise, and nobody could tell that from an error of the text. So classes are compared, and attributes read that are
//! C's. An error of another class, with a `__str__` of its own, was not raised for a refusal.
//!
//! So a program's own `raise MemoryError` without a message, right after a refusal that it handled, becomes a
//! BudgetExceeded too: nothing in the error tells it from C's.

use crate::error::Error;
use crate::python::errors::{BudgetExceeded, RequestEnded, normalized};
use crate::python::imported::module;
use crate::python::interned::intern;
use crate::python::numpy::Numpy;
use crate::python::text::copied;
use crate::strategy::account::Refusal;
use pyo3::exceptions::{PyMemoryError, PySystemError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyInt, PyModule, PyString, PyTuple};

/// NumPy's messages where an array could not grow (`array.resize`, `numpy.fromiter`).
const OF_NUMPY: [&str; 2] = ["cannot allocate memory for array", "cannot allocate array memory"];

/// How CPython's messages end where a function failed without an exception.
const FORGOTTEN: [&str; 2] = ["error return without exception set", "returned NULL without setting an exception"];

/// Errors of their own by which libraries say that there was no memory: the module and the name of the class, and what
/// their message has. Each is proved by a test (`tests/whole/test_limits.py`, `tests/python/test_whole_uploads.py`).
const OWN: &[(&str, &str, &str)] = &[
    ("zlib", "error", "Error -4 "), // Z_MEM_ERROR
    ("pyexpat", "ExpatError", "out of memory"),
    ("xml.etree.ElementTree", "ParseError", "out of memory"),
    // libxml2 got no memory for its report either.
    ("lxml.etree", "XMLSyntaxError", "unknown error"),
    ("pandas.errors", "ParserError", "C error: out of memory"),
    // So it says where `read()` raised an exception that had no value yet, as C's MemoryError.
    ("pandas.errors", "ParserError", "C error: Calling read(nbytes) on source failed"),
    ("cv2", "error", ":Insufficient memory)"),
    ("builtins", "RuntimeError", "DefaultCPUAllocator: "), // PyTorch's
];

/// So end errors of the standard library that say nothing of memory: a BytesIO whose growth is refused is closed, and a
/// ZipFile over it then fails at its end. Only where a MemoryError is among those that they were raised in.
const AFTERWARDS: [&str; 2] = ["I/O operation on closed file", "Can't close the ZIP file while there is"];

/// How many errors are looked through for that.
const MAX_CONTEXTS: usize = 16;

/// Raises BudgetExceeded from `error` if it comes from one of these refusals, the youngest of which is first.
#[cold]
pub(super) fn raise(py: Python<'_>, error: &Bound<'_, PyAny>, refusals: &[Refusal], is_whole: bool) -> PyResult<()> {
    if refusals.is_empty() {
        return Ok(());
    }
    let is_budgets = error.is_instance(&py.get_type::<BudgetExceeded>())?;
    let is_hidden = is_whole && (is_forgotten(error)? || is_own(error)? || is_afterwards(error)?);
    if is_budgets || !(is_hidden || error.is_instance_of::<PyMemoryError>()) {
        return Ok(());
    }
    let refusal = match Said::by(error)? {
        _ if is_hidden => refusals.first(),
        Said::Size(size_bytes) => refusals.iter().find(|refusal| fits(refusal, size_bytes)),
        // Its objects and native blocks are counted too, so something was nearly always allocated since; and other
        // libraries have messages of their own.
        _ if is_whole => refusals.first(),
        Said::Text(message) if is_of_c(&message) => refusals.iter().find(|refusal| refusal.is_last),
        Said::Text(message) => refusals.iter().find(|refusal| is_of_rust(&message, refusal)),
        Said::Nothing => None,
    };
    let Some(refusal) = refusal else { return Ok(()) };
    Err(caused(py, refusal, error))
}

/// The BudgetExceeded, or RequestEnded, of a refusal. What a signal's handler raises while it is made goes before, and
/// has it as its `__context__`.
fn caused(py: Python<'_>, refusal: &Refusal, error: &Bound<'_, PyAny>) -> PyErr {
    let made = || {
        let refused = normalized(py, PyErr::from(refusal.error.clone()));
        let is_made = refused.is_instance_of::<BudgetExceeded>(py) || refused.is_instance_of::<RequestEnded>(py);
        if is_made {
            refused.set_cause(py, Some(PyErr::from_value(error.clone())));
        }
        (refused, is_made)
    };
    let (first, is_made) = made();
    if is_made {
        return first;
    }
    // Signals may come as fast as their handlers end; the last of them then has no refusal.
    match std::iter::repeat_with(made).take(100).find(|(_, is_made)| *is_made) {
        Some((refused, _)) => raised_during(py, first, refused),
        None => first,
    }
}

/// `error`, with `refused` as its `__context__`.
pub(super) fn raised_during(py: Python<'_>, error: PyErr, refused: PyErr) -> PyErr {
    // A setter of C's, which takes every exception.
    let _ = error.value(py).setattr(intern!(py, "__context__"), refused.into_value(py));
    error
}

/// The same, as a value. None too where the request had ended and refuses what comes late.
#[cold]
pub(super) fn told(
    py: Python<'_>,
    error: &Bound<'_, PyAny>,
    refusals: &[Refusal],
    is_whole: bool,
) -> PyResult<Option<Py<PyAny>>> {
    match raise(py, error, refusals, is_whole) {
        Ok(()) => Ok(None),
        Err(refused) if refused.is_instance_of::<BudgetExceeded>(py) => Ok(Some(refused.into_value(py).into_any())),
        Err(ended) if ended.is_instance_of::<RequestEnded>(py) => Ok(None),
        Err(other) => Err(other),
    }
}

/// Whether this is CPython's error where there should have been another one, and was none.
fn is_forgotten(error: &Bound<'_, PyAny>) -> PyResult<bool> {
    if !error.is_exact_instance_of::<PySystemError>() {
        return Ok(false);
    }
    Ok(Said::of_c(error)?.is_some_and(|text| FORGOTTEN.iter().any(|end| text.ends_with(end))))
}

/// Whether this is one of the [errors of their own](OWN).
fn is_own(error: &Bound<'_, PyAny>) -> PyResult<bool> {
    let (py, class) = (error.py(), error.get_type());
    let is_of = |from: &str, name: &str| -> PyResult<bool> {
        let found = module(py, &PyString::new(py, from)).and_then(|found| found.cast_into::<PyModule>().ok());
        let found = found.map(|found| found.dict().get_item(name)).transpose()?.flatten();
        Ok(found.is_some_and(|found| class.is(&found)))
    };
    for &(from, name, said) in OWN {
        if is_of(from, name)? && Said::of_c(error)?.is_some_and(|text| text.contains(said)) {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Whether this is one of the errors that come [afterwards](AFTERWARDS).
fn is_afterwards(error: &Bound<'_, PyAny>) -> PyResult<bool> {
    let py = error.py();
    let is_said = |text: String| AFTERWARDS.iter().any(|said| text.starts_with(said));
    if !error.is_exact_instance_of::<PyValueError>() || !Said::of_c(error)?.is_some_and(is_said) {
        return Ok(false);
    }
    let mut error = error.clone();
    for _ in 0..MAX_CONTEXTS {
        // A getter of C's: the class is C's own, and so is each that is looked at for it.
        error = error.getattr(intern!(py, "__context__"))?;
        if error.is_exact_instance_of::<PyMemoryError>() {
            return Ok(true);
        }
        if !error.is_exact_instance_of::<PyValueError>() {
            return Ok(false);
        }
    }
    Ok(false)
}

/// What an error says of itself, read without running any Python code.
enum Said {
    /// The size in bytes of the array that NumPy could not make.
    Size(usize),
    /// The message of a plain MemoryError.
    Text(String),
    Nothing,
}

impl Said {
    fn by(error: &Bound<'_, PyAny>) -> PyResult<Self> {
        let py = error.py();
        let is_plain = error.is_exact_instance_of::<PyMemoryError>();
        if !is_plain && !Numpy::get(py)?.is_array_memory_error(error) {
            return Ok(Self::Nothing);
        }
        // A getter of C's, which neither class hides.
        let args = error.getattr(intern!(py, "args"))?;
        let Ok(args) = args.cast_exact::<PyTuple>() else { return Ok(Self::Nothing) };
        Ok(if is_plain { Self::message(args) } else { Self::size(args) }.unwrap_or(Self::Nothing))
    }

    /// The message of an error whose `args` are a getter of C's.
    fn of_c(error: &Bound<'_, PyAny>) -> PyResult<Option<String>> {
        let args = error.getattr(intern!(error.py(), "args"))?;
        let said = args.cast_exact::<PyTuple>().ok().and_then(Self::message);
        Ok(if let Some(Self::Text(text)) = said { Some(text) } else { None })
    }

    /// Of `MemoryError()` and `MemoryError(text)`.
    fn message(args: &Bound<'_, PyTuple>) -> Option<Self> {
        match args.len() {
            0 => Some(Self::Text(String::new())),
            1 => Some(Self::Text(copied(args.get_item(0).ok()?.cast_exact::<PyString>().ok()?))),
            _ => None,
        }
    }

    /// Of `_ArrayMemoryError(shape, dtype)`.
    fn size(args: &Bound<'_, PyTuple>) -> Option<Self> {
        let (shape, dtype) = (args.get_item(0).ok()?, args.get_item(1).ok()?);
        let extent = |extent: Bound<'_, PyAny>| extent.cast_exact::<PyInt>().ok()?.extract::<usize>().ok();
        let itemsize = extent(dtype.getattr(intern!(args.py(), "itemsize")).ok()?)?;
        let mut extents = shape.cast_exact::<PyTuple>().ok()?.iter();
        extents.try_fold(itemsize, |size, next| size.checked_mul(extent(next)?)).map(Self::Size)
    }
}

/// Whether `PyErr_NoMemory` raised the error, or NumPy with one of its messages.
fn is_of_c(message: &str) -> bool {
    message.is_empty() || OF_NUMPY.contains(&message)
}

/// Whether Rust code raised the error for this refusal: it is the text of [`Error::OutOfMemory`] with that size.
fn is_of_rust(message: &str, refusal: &Refusal) -> bool {
    const BEFORE_THE_NAME: &str = "handler '";
    let Some(requested_bytes) = requested_bytes(refusal) else { return false };
    let text = Error::OutOfMemory { handler: "".into(), requested_bytes }.to_string();
    let ending = text.strip_prefix(BEFORE_THE_NAME);
    message.starts_with(BEFORE_THE_NAME) && ending.is_some_and(|ending| message.ends_with(ending))
}

/// Whether an array of that size was refused here.
fn fits(refusal: &Refusal, size_bytes: usize) -> bool {
    // An array without elements takes a byte or more.
    requested_bytes(refusal).is_some_and(|requested_bytes| size_bytes == requested_bytes || size_bytes == 0)
}

fn requested_bytes(refusal: &Refusal) -> Option<usize> {
    match refusal.error {
        Error::BudgetExceeded { requested_bytes, .. } | Error::RequestEnded { requested_bytes, .. } => {
            Some(requested_bytes)
        }
        _ => None,
    }
}
