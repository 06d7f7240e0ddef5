/* The first draft's interface: a struct without a context, SetHandler that gives the old one back, GetHandlerName. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#define CTXALLOC_PYTHON
#include <ctxalloc.h>

#include "headed.h"
#include "counts.h"

static void *draft_alloc(size_t size)
{
    if (!PyGILState_Check()) {
        count(&calls_without_gil, 1);
    }
    return headed_alloc(size);
}

static void *draft_zeroed(size_t nelems, size_t elsize)
{
    if (!PyGILState_Check()) {
        count(&calls_without_gil, 1);
    }
    return headed_zeroed(nelems, elsize);
}

static ctxalloc_draft1_handler secret = {"headed, first draft", draft_alloc, draft_zeroed, headed_free, headed_realloc};
static ctxalloc_draft1_handler other = {
    "headed, first draft, too", draft_alloc, draft_zeroed, headed_free, headed_realloc,
};

static const ctxalloc_draft1_handler *previous[16];
static int depth;

/* Selects one of the two, or nothing; answers the name of the one before, None for the default. */
static PyObject *push(PyObject *self, PyObject *which)
{
    (void)self;
    long number = PyLong_AsLong(which);
    if (number < 0 || depth == 16) {
        return PyErr_Occurred() ? NULL : PyErr_Format(PyExc_ValueError, "no such handler, or too deep");
    }
    const ctxalloc_draft1_handler *wanted = number == 0 ? NULL : number == 1 ? &secret : &other;
    const ctxalloc_draft1_handler *old = ctxalloc_draft1_set_handler(wanted);
    if (old == NULL && PyErr_Occurred()) {
        return NULL;
    }
    previous[depth++] = old;
    return text_or_none(old == NULL ? NULL : old->name);
}

/* Selects what the last push found. */
static PyObject *pop(PyObject *self, PyObject *nothing)
{
    (void)self, (void)nothing;
    if (depth == 0) {
        return PyErr_Format(PyExc_ValueError, "nothing was pushed");
    }
    const ctxalloc_draft1_handler *old = ctxalloc_draft1_set_handler(previous[--depth]);
    return text_or_none(old == NULL ? NULL : old->name);
}

/* Allocates by the struct that the last push found, as draft code may, and frees. Answers whether it could. */
static PyObject *use_previous(PyObject *self, PyObject *nothing)
{
    (void)self, (void)nothing;
    const ctxalloc_draft1_handler *old = depth == 0 ? NULL : previous[depth - 1];
    if (old == NULL) {
        Py_RETURN_NONE;
    }
    char *block = (char *)old->alloc(100);
    char *zeros = (char *)old->zeroed_alloc(10, 10);
    int good = block != NULL && zeros != NULL;
    for (int i = 0; good && i < 100; i++) {
        good = zeros[i] == 0;
    }
    if (block != NULL) {
        memset(block, 7, 100);
        block = (char *)old->realloc(block, 10000);
        good = good && block != NULL && block[99] == 7;
        old->free(block, 10000);
    }
    old->free(zeros, 100);
    return PyBool_FromLong(good);
}

static PyObject *name_of(PyObject *self, PyObject *array)
{
    (void)self;
    return text_or_none(ctxalloc_draft1_get_handler_name(array == Py_None ? NULL : array));
}

/* Selects one of the two for good: in this thread or task. */
static PyObject *select_one(PyObject *self, PyObject *which)
{
    (void)self;
    const ctxalloc_draft1_handler *old = ctxalloc_draft1_set_handler(PyLong_AsLong(which) == 1 ? &secret : &other);
    return text_or_none(old == NULL ? NULL : old->name);
}

static PyMethodDef methods[] = {
    {"select", select_one, METH_O, NULL},
    {"push", push, METH_O, NULL},
    {"pop", pop, METH_NOARGS, NULL},
    {"use_previous", use_previous, METH_NOARGS, NULL},
    {"name_of", name_of, METH_O, NULL},
    {"counts", counts, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "first_draft", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit_first_draft(void) { return module_of(&definition); }
