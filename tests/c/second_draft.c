/* The second draft's interface: copy functions besides, the event hook, and NEW, FREE, RENEW. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#define CTXALLOC_PYTHON
#define CTXALLOC_NUMPY_NAMES
#include <ctxalloc.h>

#include "headed.h"
#include "counts.h"

static long copies[3]; /* bytes by host2obj, obj2host, obj2obj */
static long fail_copies;

static void *copied(int which, void *dst, const void *src, size_t size)
{
    if (counted(&fail_copies)) {
        return NULL;
    }
    count(&copies[which], (long)size);
    return memcpy(dst, src, size);
}

static void *host2obj(void *dst, const void *src, size_t size) { return copied(0, dst, src, size); }
static void *obj2host(void *dst, const void *src, size_t size) { return copied(1, dst, src, size); }
static void *obj2obj(void *dst, const void *src, size_t size) { return copied(2, dst, src, size); }

static ctxalloc_draft2_handler device = {
    "headed, second draft", headed_alloc, headed_zeroed, headed_free, headed_realloc, host2obj, obj2host, obj2obj,
};

static const ctxalloc_draft2_handler *previous;

static PyObject *set(PyObject *self, PyObject *on)
{
    (void)self;
    const ctxalloc_draft2_handler *old = ctxalloc_draft2_set_handler(PyObject_IsTrue(on) ? &device : previous);
    if (old == NULL && PyErr_Occurred()) {
        return NULL;
    }
    if (PyObject_IsTrue(on)) {
        previous = old;
    }
    return text_or_none(old == NULL ? NULL : old->name);
}

static PyObject *name_of(PyObject *self, PyObject *array)
{
    (void)self;
    return text_or_none(ctxalloc_draft2_get_handler_name(array == Py_None ? NULL : array));
}

static PyObject *copied_bytes(PyObject *self, PyObject *nothing)
{
    (void)self, (void)nothing;
    return Py_BuildValue("lll", counted(&copies[0]), counted(&copies[1]), counted(&copies[2]));
}

static PyObject *fail(PyObject *self, PyObject *on)
{
    (void)self;
    __atomic_store_n(&fail_copies, PyObject_IsTrue(on), __ATOMIC_SEQ_CST);
    Py_RETURN_NONE;
}

/* A text into a block, from there into another one, and out again. */
static PyObject *there_and_back(PyObject *self, PyObject *text)
{
    (void)self;
    char *bytes;
    Py_ssize_t length;
    if (PyBytes_AsStringAndSize(text, &bytes, &length) < 0) {
        return NULL;
    }
    PyObject *answer = PyBytes_FromStringAndSize(NULL, length);
    void *first = ctxalloc_new((size_t)length + 8);
    void *second = ctxalloc_new_zeroed(1, (size_t)length);
    if (answer == NULL || first == NULL || second == NULL ||
        ctxalloc_copy_in((char *)first + 8, bytes, (size_t)length) < 0 ||
        ctxalloc_copy(second, (char *)first + 8, (size_t)length) < 0 ||
        ctxalloc_copy_out(PyBytes_AS_STRING(answer), second, (size_t)length) < 0) {
        Py_CLEAR(answer);
    }
    PyObject *kind, *value, *traceback;
    PyErr_Fetch(&kind, &value, &traceback);
    ctxalloc_free(first);
    ctxalloc_free(second);
    PyErr_Restore(kind, value, traceback);
    return answer;
}

/* ---- the event hook, under NumPy's old names ---- */

static long events[4]; /* new, renew, free, inside of the hook */
static long event_bytes;
static int hook_allocates;

static void hook(void *inp, void *outp, size_t size, void *user_data)
{
    count(&events[inp == NULL ? 0 : outp != NULL ? 1 : 2], 1);
    count(&event_bytes, (long)size);
    if (!PyGILState_Check()) {
        count(&calls_without_gil, 1);
    }
    if (user_data != (void *)&events) {
        count(&not_ours, 1);
    }
    if (hook_allocates) {
        void *block = ctxalloc_new(64);
        if (block != NULL && ctxalloc_free(block) == 0) {
            count(&events[3], 1);
        }
    }
}

static PyObject *set_hook(PyObject *self, PyObject *allocates)
{
    (void)self;
    void *old_data = &device;
    hook_allocates = PyObject_IsTrue(allocates);
    memset(events, 0, sizeof events);
    event_bytes = 0;
    PyDataMem_EventHookFunc *old = PyDataMem_SetEventHook(hook, &events, &old_data);
    return Py_BuildValue("OO", old == hook ? Py_True : Py_False, old_data == (void *)&events ? Py_True : Py_False);
}

static PyObject *end_hook(PyObject *self, PyObject *nothing)
{
    (void)self, (void)nothing;
    PyDataMem_EventHookFunc *old = PyDataMem_SetEventHook(NULL, NULL, NULL);
    return PyBool_FromLong(old == hook);
}

static PyObject *events_so_far(PyObject *self, PyObject *nothing)
{
    (void)self, (void)nothing;
    return Py_BuildValue("{s:l,s:l,s:l,s:l,s:l}", "new", counted(&events[0]), "renew", counted(&events[1]), "free",
                         counted(&events[2]), "inside", counted(&events[3]), "bytes", counted(&event_bytes));
}

static PyMethodDef methods[] = {
    {"set", set, METH_O, NULL},
    {"name_of", name_of, METH_O, NULL},
    {"copied_bytes", copied_bytes, METH_NOARGS, NULL},
    {"fail", fail, METH_O, NULL},
    {"there_and_back", there_and_back, METH_O, NULL},
    {"set_hook", set_hook, METH_O, NULL},
    {"end_hook", end_hook, METH_NOARGS, NULL},
    {"events", events_so_far, METH_NOARGS, NULL},
    {"counts", counts, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "second_draft", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit_second_draft(void) { return module_of(&definition); }
