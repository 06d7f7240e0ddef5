//! `ctxalloc.Scope` and `ctxalloc.use` for Python: a type made by hand with CPython's C API.
//!
//! Entering and leaving a scope is the hot path of the Python binding. As a `#[pyclass]` half of its time went into
//! making, calling and freeing the object (docs/decisions/0011-scope-by-hand.md). What a scope does is in `scope.rs`;
//! the entry points are here, and each turns errors and panics into exceptions.
//!
//! pyo3 does not know that this thread is attached while Python calls these functions, so it would delay the release of
//! a `Py` that is dropped in them. No `with` block drops one, and `raise` makes pyo3 know.
//!
//! Python calls each entry point attached, with borrowed references to its arguments, and the method descriptors have
//! checked that `object` is a Scope. That is what the `# Safety` sections below state, and the proofs refer to.
#![allow(unsafe_code, reason = "a type from CPython's C API")]

use super::entry_points::{answer, borrowed, function_of, method};
use super::lookup::handler_meant;
use super::scope::Scope;
use super::step::{Step, Work};
use crate::sync::Made;
use pyo3::exceptions::PyTypeError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyString, PyTuple, PyType};
use std::ffi::{CStr, c_int, c_void};
use std::mem::offset_of;
use std::ptr::{self, NonNull, null_mut};
use std::sync::atomic::{AtomicPtr, Ordering};

/// The Python object.
#[repr(C)]
struct Object {
    head: ffi::PyObject,
    scope: Scope,
}

/// The memory of the last Scope that was freed, for the next one: most programs use one at a time, again and again.
static SPARE: AtomicPtr<ffi::PyObject> = AtomicPtr::new(null_mut());

static TYPE: Made<Py<PyType>> = Made::new();

/// Adds `Scope` and `use` to the module.
pub(super) fn add_to(module: &Bound<'_, PyModule>) -> PyResult<()> {
    let py = module.py();
    let made = new_type(py)?;
    let kind = TYPE.get_or_make(|| made);
    module.add("Scope", kind.clone_ref(py))?;
    let function =
        function_of(module, method(c"use", ffi::METH_O, ffi::PyMethodDefPointer { PyCFunction: use_ }, USE_DOC))?;
    module.add("use", function)
}

/// The scope in a Scope.
fn scope_in<'a>(object: &'a Bound<'_, PyAny>) -> &'a Scope {
    debug_assert!(TYPE.get().is_some_and(|kind| object.is_exact_instance(kind.bind(object.py()))));
    // SAFETY: the methods below and their steps pass Scopes only; the object is borrowed for as long as the reference.
    unsafe { scope_at(object.as_ptr()) }
}

/// # Safety
/// - `object` is a Scope that lives for `'a`.
#[inline]
unsafe fn scope_at<'a>(object: *mut ffi::PyObject) -> &'a Scope {
    // SAFETY: a Scope is an `Object`, which `new_object` initialised before anybody saw it, and only shared references
    // to its scope exist until it is freed.
    unsafe { &(*object.cast::<Object>()).scope }
}

const TYPE_DOC: &CStr = c"A handler selected for a block or a function: what ``ctxalloc.use()`` makes.

It may be entered again after it was left. RuntimeError: it is entered already. ValueError on leaving: this is not
the Context that entered it; nothing changes, and it may still be left in its own.";

const USE_DOC: &CStr = c"use(handler, /)
--

Selects a handler for a ``with`` or ``async with`` block, or as a decorator for a function, a coroutine function,
a generator or an async generator.

``handler`` is a Handler, the name of one, or None for NumPy's default. ``as`` binds the Handler. Arrays that are made
inside belong to it for as long as they live; tasks that are started inside, and ``asyncio.to_thread``, inherit it::

    >>> with ctxalloc.use(\"aligned64\") as handler:
    ...     array = numpy.ones(10)
    >>> ctxalloc.handler_of(array) is handler
    True
    >>> @ctxalloc.use(\"aligned64\")
    ... async def request():
    ...     return await asyncio.to_thread(numpy.ones, 10)
    >>> ctxalloc.handler_of(asyncio.run(request())) is handler
    True

UnknownHandlerError (a ValueError): no handler has that name. TypeError: something else was given.
``help(ctxalloc.Scope)`` says what happens where a scope is entered twice, or left in another task or thread.";

fn new_type(py: Python<'_>) -> PyResult<Py<PyType>> {
    use ffi::PyMethodDefPointer as Pointer;
    let methods = Box::leak(Box::new([
        method(c"__enter__", ffi::METH_NOARGS, Pointer { PyCFunction: enter }, c"__enter__($self, /)\n--\n\n"),
        method(c"__exit__", ffi::METH_FASTCALL, Pointer { PyCFunctionFast: exit }, LEAVING_DOC[0]),
        method(c"__aenter__", ffi::METH_NOARGS, Pointer { PyCFunction: aenter }, c"__aenter__($self, /)\n--\n\n"),
        method(c"__aexit__", ffi::METH_FASTCALL, Pointer { PyCFunctionFast: aexit }, LEAVING_DOC[1]),
        ffi::PyMethodDef::zeroed(),
    ]));
    let attributes = Box::leak(Box::new([
        ffi::PyGetSetDef {
            name: c"handler".as_ptr(),
            get: Some(handler),
            doc: c"The handler it selects.".as_ptr(),
            ..Default::default()
        },
        ffi::PyGetSetDef::default(),
    ]));
    let mut slots = [
        slot(ffi::Py_tp_doc, TYPE_DOC.as_ptr().cast_mut().cast()),
        slot(ffi::Py_tp_methods, methods.as_mut_ptr().cast()),
        slot(ffi::Py_tp_getset, attributes.as_mut_ptr().cast()),
        slot(ffi::Py_tp_call, call as ffi::ternaryfunc as *mut c_void),
        slot(ffi::Py_tp_repr, repr as ffi::reprfunc as *mut c_void),
        slot(ffi::Py_tp_traverse, traverse as ffi::traverseproc as *mut c_void),
        slot(ffi::Py_tp_dealloc, dealloc as ffi::destructor as *mut c_void),
        slot(0, null_mut()),
    ];
    let flags = ffi::Py_TPFLAGS_DEFAULT
        | ffi::Py_TPFLAGS_HAVE_GC
        | ffi::Py_TPFLAGS_IMMUTABLETYPE
        | ffi::Py_TPFLAGS_DISALLOW_INSTANTIATION;
    let mut spec = ffi::PyType_Spec {
        name: c"ctxalloc.Scope".as_ptr(),
        basicsize: size_of::<Object>() as c_int,
        itemsize: 0,
        flags: flags as _,
        slots: slots.as_mut_ptr(),
    };
    // SAFETY: attached, and the spec is complete. The type keeps pointers to the methods and attributes, which live for
    // ever, and copies the rest. It is a new reference, or NULL with an exception set.
    let kind = unsafe { Bound::from_owned_ptr_or_err(py, ffi::PyType_FromSpec(&raw mut spec)) }?;
    Ok(kind.cast_into::<PyType>()?.unbind())
}

/// These have only the signatures, which `inspect` reads.
const LEAVING_DOC: [&CStr; 2] =
    [c"__exit__($self, kind, error, traceback, /)\n--\n\n", c"__aexit__($self, kind, error, traceback, /)\n--\n\n"];

const fn slot(number: c_int, value: *mut c_void) -> ffi::PyType_Slot {
    ffi::PyType_Slot { slot: number, pfunc: value }
}

/// A new Scope.
#[inline]
fn new_object(py: Python<'_>, scope: Scope) -> PyResult<*mut ffi::PyObject> {
    let kind = TYPE.get().expect("made together with `use`");
    let object = match NonNull::new(SPARE.swap(null_mut(), Ordering::AcqRel)) {
        // SAFETY: the memory of a Scope that was freed, which the exchange made ours alone; it is large enough for
        // another one.
        Some(spare) => unsafe { ffi::PyObject_Init(spare.as_ptr(), kind.as_ptr().cast()) }.cast(),
        // SAFETY: attached; the type has a fixed size, and its instances are tracked by the collector.
        None => unsafe { ffi::PyObject_GC_New::<Object>(kind.as_ptr().cast()) },
    };
    if object.is_null() {
        return Err(PyErr::fetch(py));
    }
    // SAFETY: the object is as large as an `Object`, and nobody else has seen it: its scope is written for the first
    // time. Then it is complete, so the collector may call `traverse` on it.
    unsafe {
        object.byte_add(offset_of!(Object, scope)).cast::<Scope>().write(scope);
        ffi::PyObject_GC_Track(object.cast());
    }
    Ok(object.cast())
}

/// # Safety
/// - attached; `object` is a Scope without references, which nobody uses afterwards.
unsafe extern "C" fn dealloc(object: *mut ffi::PyObject) {
    // SAFETY: `new_object` made the object with `PyObject_GC_New`, tracked it and wrote its scope. First the collector
    // forgets it, so `traverse` never sees it without its scope. Its type is read while the object has its head; each
    // instance of a heap type owns a reference to it, which is dropped last. The memory is kept for the next Scope, or
    // else freed.
    unsafe {
        ffi::PyObject_GC_UnTrack(object.cast());
        ptr::drop_in_place(object.byte_add(offset_of!(Object, scope)).cast::<Scope>());
        let kind = ffi::Py_TYPE(object);
        if SPARE.compare_exchange(null_mut(), object, Ordering::AcqRel, Ordering::Relaxed).is_err() {
            ffi::PyObject_GC_Del(object.cast());
        }
        ffi::Py_DECREF(kind.cast());
    }
}

/// Visits the token, which refers to its Context, which may refer to whoever holds this scope.
///
/// # Safety
/// - attached; `object` is a Scope; `visit` and `argument` are the collector's.
unsafe extern "C" fn traverse(object: *mut ffi::PyObject, visit: ffi::visitproc, argument: *mut c_void) -> c_int {
    // SAFETY: a Scope, which is complete while it is tracked. No other thread enters or leaves it while the collector
    // runs.
    let (kind, token) = unsafe { (ffi::Py_TYPE(object).cast(), scope_at(object).token()) };
    for referred in [Some(kind), token].into_iter().flatten() {
        // SAFETY: `visit` takes its own argument and an object that this one owns a reference to.
        let stop = unsafe { visit(referred, argument) };
        if stop != 0 {
            return stop;
        }
    }
    0
}

/// # Safety
/// - attached; `subject` is an object, borrowed for the call.
unsafe extern "C" fn use_(_module: *mut ffi::PyObject, subject: *mut ffi::PyObject) -> *mut ffi::PyObject {
    // SAFETY: attached, and `subject` is an object that is borrowed for this call, by contract.
    let subject = unsafe { Bound::ref_from_ptr(Python::assume_attached(), &subject) };
    answer(|| new_object(subject.py(), Scope::new(handler_meant(subject)?)))
}

/// # Safety
/// - attached; `object` is a Scope, borrowed for the call.
unsafe extern "C" fn enter(object: *mut ffi::PyObject, _: *mut ffi::PyObject) -> *mut ffi::PyObject {
    // SAFETY: attached, and `object` is a Scope that is borrowed for this call, by contract.
    let (py, scope) = unsafe { (Python::assume_attached(), scope_at(object)) };
    answer(|| Ok(scope.enter(py)?.into_ptr()))
}

/// # Safety
/// - attached; `object` is a Scope, borrowed for the call.
unsafe extern "C" fn exit(
    object: *mut ffi::PyObject,
    _arguments: *mut *mut ffi::PyObject,
    count: ffi::Py_ssize_t,
) -> *mut ffi::PyObject {
    // SAFETY: attached, and `object` is a Scope that is borrowed for this call, by contract.
    let (py, scope) = unsafe { (Python::assume_attached(), scope_at(object)) };
    answer(|| {
        check_count("__exit__", count)?;
        scope.exit(py)?;
        Ok(py.None().into_ptr())
    })
}

/// # Safety
/// - attached; `object` is a Scope, borrowed for the call.
unsafe extern "C" fn aenter(object: *mut ffi::PyObject, _: *mut ffi::PyObject) -> *mut ffi::PyObject {
    // SAFETY: attached, and `object` is borrowed for this call, by contract.
    let object = unsafe { borrowed(object) };
    answer(|| step(&object, |scope, _| Ok(Some(scope_in(scope).enter(scope.py())?.into_any().unbind()))))
}

/// # Safety
/// - attached; `object` is a Scope, borrowed for the call.
unsafe extern "C" fn aexit(
    object: *mut ffi::PyObject,
    _arguments: *mut *mut ffi::PyObject,
    count: ffi::Py_ssize_t,
) -> *mut ffi::PyObject {
    // SAFETY: attached, and `object` is borrowed for this call, by contract.
    let object = unsafe { borrowed(object) };
    answer(|| {
        check_count("__aexit__", count)?;
        step(&object, |scope, _| scope_in(scope).exit(scope.py()).map(|()| None))
    })
}

fn step(object: &Bound<'_, PyAny>, work: Work) -> PyResult<*mut ffi::PyObject> {
    Ok(Step::object(object.py(), object.clone().unbind(), None, work)?.into_any().into_ptr())
}

/// Decorates a function: each call runs in this scope. Works for coroutine functions and (async) generators too.
///
/// # Safety
/// - attached; `object` is a Scope, `arguments` a tuple, `options` a dict or NULL; all are borrowed for the call.
unsafe extern "C" fn call(
    object: *mut ffi::PyObject,
    arguments: *mut ffi::PyObject,
    options: *mut ffi::PyObject,
) -> *mut ffi::PyObject {
    // SAFETY: attached, and all three are borrowed for this call, by contract; only `options` may be NULL.
    let (py, object, arguments, options) = unsafe {
        let py = Python::assume_attached();
        (py, borrowed(object), borrowed(arguments), Bound::from_borrowed_ptr_or_opt(py, options))
    };
    answer(|| {
        let arguments = arguments.cast::<PyTuple>()?;
        let named = options.map_or(Ok(0), |options| options.len())?;
        if (arguments.len(), named) != (1, 0) {
            return Err(PyTypeError::new_err(format!(
                "@ctxalloc.use(...) decorates one function, given by position; got {} arguments, {named} of them named",
                arguments.len() + named
            )));
        }
        let decorate = py.import("ctxalloc._decorate")?.getattr("in_scope")?;
        Ok(decorate.call1((scope_in(&object).handler(py)?, arguments.get_item(0)?))?.into_ptr())
    })
}

/// # Safety
/// - attached; `object` is a Scope, borrowed for the call.
unsafe extern "C" fn repr(object: *mut ffi::PyObject) -> *mut ffi::PyObject {
    // SAFETY: attached, and `object` is borrowed for this call, by contract.
    let object = unsafe { borrowed(object) };
    answer(|| Ok(PyString::new(object.py(), &scope_in(&object).text()).into_ptr()))
}

/// # Safety
/// - attached; `object` is a Scope, borrowed for the call.
unsafe extern "C" fn handler(object: *mut ffi::PyObject, _closure: *mut c_void) -> *mut ffi::PyObject {
    // SAFETY: attached, and `object` is borrowed for this call, by contract.
    let object = unsafe { borrowed(object) };
    answer(|| Ok(scope_in(&object).handler(object.py())?.into_ptr()))
}

fn check_count(method: &str, count: ffi::Py_ssize_t) -> PyResult<()> {
    if count == 3 {
        return Ok(());
    }
    Err(PyTypeError::new_err(format!("Scope.{method}() takes kind, error and traceback, 3 arguments; got {count}")))
}
