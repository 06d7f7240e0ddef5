/* NEP 49's final interface by an extension that knows NumPy and ctxalloc.h, and nothing of Rust. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#define NPY_NO_DEPRECATED_API NPY_1_22_API_VERSION
#define NPY_TARGET_VERSION NPY_1_22_API_VERSION
#include <numpy/arrayobject.h>
#define CTXALLOC_PYTHON
#include <ctxalloc.h>

#include "headed.h"
#include "counts.h"

static char own; /* what its functions are given */

static void seen(void *ctx)
{
    if (ctx != &own) {
        count(&not_ours, 1);
    }
    if (!PyGILState_Check()) {
        count(&calls_without_gil, 1);
    }
}

static void *final_malloc(void *ctx, size_t size) { return seen(ctx), headed_alloc(size); }
static void *final_calloc(void *ctx, size_t nelem, size_t elsize) { return seen(ctx), headed_zeroed(nelem, elsize); }
static void *final_realloc(void *ctx, void *ptr, size_t size) { return seen(ctx), headed_realloc(ptr, size); }
static void final_free(void *ctx, void *ptr, size_t size)
{
    seen(ctx);
    headed_free(ptr, size);
}

/* NumPy's own type: ctxalloc takes it as it is. */
static PyDataMem_Handler handler = {
    "headed, final", 1, {&own, final_malloc, final_calloc, final_realloc, final_free},
};

static PyObject *name_of_answer(const PyDataMem_Handler *answer)
{
    return answer == NULL ? text_or_none(NULL) : PyUnicode_FromString(answer->name);
}

static PyObject *register_it(PyObject *self, PyObject *nothing)
{
    (void)self, (void)nothing;
    return name_of_answer(ctxalloc_register(&handler, NULL));
}

/* By ctxalloc; answers the name of the one before. */
static PyObject *select_by_ctxalloc(PyObject *self, PyObject *name)
{
    (void)self;
    if (name == Py_None) {
        return name_of_answer(ctxalloc_set_handler(NULL));
    }
    const char *text = PyUnicode_AsUTF8(name);
    const ctxalloc_handler *wanted = text == NULL ? NULL : ctxalloc_find(text);
    return wanted == NULL ? NULL : name_of_answer(ctxalloc_set_handler(wanted));
}

/* By NumPy, with a capsule that ctxalloc made (or, for the handler above, one made here): answers the old capsule. */
static PyObject *select_by_numpy(PyObject *self, PyObject *arguments)
{
    (void)self;
    const char *name;
    int by_hand;
    if (!PyArg_ParseTuple(arguments, "sp", &name, &by_hand)) {
        return NULL;
    }
    const ctxalloc_handler *wanted = ctxalloc_find(name);
    if (wanted == NULL) {
        return NULL;
    }
    PyObject *capsule =
        by_hand ? PyCapsule_New((void *)wanted, "mem_handler", NULL) : ctxalloc_capsule(wanted);
    if (capsule == NULL) {
        return NULL;
    }
    PyObject *old = PyDataMem_SetHandler(capsule);
    Py_DECREF(capsule);
    return old;
}

static PyObject *restore_by_numpy(PyObject *self, PyObject *capsule)
{
    (void)self;
    return PyDataMem_SetHandler(capsule == Py_None ? NULL : capsule);
}

static PyObject *current(PyObject *self, PyObject *nothing)
{
    (void)self, (void)nothing;
    const ctxalloc_handler *now = ctxalloc_get_handler();
    if (now == NULL) {
        return NULL;
    }
    return Py_BuildValue("siK", ctxalloc_handler_name(NULL), ctxalloc_handler_version(NULL),
                         (unsigned long long)ctxalloc_handler_alignment(now));
}

static PyObject *handler_of(PyObject *self, PyObject *array)
{
    (void)self;
    return name_of_answer(ctxalloc_handler_of(array));
}

static PyObject *adopt(PyObject *self, PyObject *arguments)
{
    (void)self;
    PyObject *capsule;
    const char *name;
    if (!PyArg_ParseTuple(arguments, "Oz", &capsule, &name)) {
        return NULL;
    }
    const ctxalloc_handler *adopted = ctxalloc_adopt(capsule, name);
    return adopted == NULL ? NULL : name_of_answer(adopted);
}

static PyObject *new_array(PyObject *self, PyObject *size)
{
    (void)self;
    npy_intp length = PyLong_AsSsize_t(size);
    if (length < 0) {
        return NULL;
    }
    return PyArray_ZEROS(1, &length, NPY_DOUBLE, 0);
}

/* A call in the middle of another failure: KeyError is set before it. Answers NULL, with what is set after it. */
static PyObject *while_raising(PyObject *self, PyObject *arguments)
{
    (void)self;
    const char *what;
    PyObject *object = NULL;
    if (!PyArg_ParseTuple(arguments, "s|O", &what, &object)) {
        return NULL;
    }
    PyErr_SetString(PyExc_KeyError, "the first");
    if (strcmp(what, "find nobody") == 0) {
        ctxalloc_find("nobody");
    } else if (strcmp(what, "find") == 0) {
        ctxalloc_find("pool");
    } else if (strcmp(what, "register nothing") == 0) {
        ctxalloc_register(NULL, NULL);
    } else if (strcmp(what, "adopt") == 0) {
        ctxalloc_adopt(object, NULL);
    } else if (strcmp(what, "handler_of") == 0) {
        ctxalloc_handler_of(object);
    } else if (strcmp(what, "select") == 0) {
        ctxalloc_set_handler(ctxalloc_set_handler(ctxalloc_find("pool")));
    } else if (strcmp(what, "capsule") == 0) {
        Py_XDECREF(ctxalloc_capsule(ctxalloc_find("pool")));
    } else if (strcmp(what, "blocks") == 0) {
        ctxalloc_free(ctxalloc_renew(ctxalloc_new(10), 20));
    } else if (strcmp(what, "free") == 0) {
        ctxalloc_free((void *)what);
    } else if (strcmp(what, "new") == 0) {
        ctxalloc_new(SIZE_MAX / 2 + 1);
    }
    return NULL;
}

static PyMethodDef methods[] = {
    {"while_raising", while_raising, METH_VARARGS, NULL},
    {"register", register_it, METH_NOARGS, NULL},
    {"select_by_ctxalloc", select_by_ctxalloc, METH_O, NULL},
    {"select_by_numpy", select_by_numpy, METH_VARARGS, NULL},
    {"restore_by_numpy", restore_by_numpy, METH_O, NULL},
    {"current", current, METH_NOARGS, NULL},
    {"handler_of", handler_of, METH_O, NULL},
    {"adopt", adopt, METH_VARARGS, NULL},
    {"new_array", new_array, METH_O, NULL},
    {"counts", counts, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "final_nep49", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit_final_nep49(void)
{
    import_array();
    return module_of(&definition);
}
