/* An extension that forgot ctxalloc_import(), until it is told. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#define CTXALLOC_PYTHON
#include <ctxalloc.h>

static PyObject *none_or_raised(int failed)
{
    if (failed && PyErr_Occurred()) {
        return NULL;
    }
    Py_RETURN_NONE;
}

#define CALL(name, failed)                                     \
    static PyObject *name(PyObject *self, PyObject *nothing)   \
    {                                                          \
        (void)self, (void)nothing;                             \
        return none_or_raised(failed);                         \
    }

CALL(get, ctxalloc_get_handler() == NULL)
CALL(new, ctxalloc_new(10) == NULL)
CALL(free_, ctxalloc_free(NULL) < 0)
CALL(find, ctxalloc_find("pool") == NULL)
CALL(hook, ctxalloc_set_event_hook(NULL, NULL, NULL) == NULL)
CALL(draft, ctxalloc_draft1_set_handler(NULL) == NULL)
CALL(do_import, ctxalloc_import() < 0)

/* ctxalloc_import() in the middle of another failure, as in a cleanup. Answers NULL, with what is set after it. */
static PyObject *import_while_raising(PyObject *self, PyObject *nothing)
{
    (void)self, (void)nothing;
    PyErr_SetString(PyExc_KeyError, "the first");
    ctxalloc_import();
    return NULL;
}

static PyObject *version(PyObject *self, PyObject *nothing)
{
    (void)self, (void)nothing;
    const char *text = ctxalloc_version();
    return text == NULL ? NULL : PyUnicode_FromString(text);
}

static PyObject *message(PyObject *self, PyObject *nothing)
{
    (void)self, (void)nothing;
    return ctxalloc_error_code() ? PyUnicode_FromString(ctxalloc_error_message()) : NULL;
}

static PyMethodDef methods[] = {
    {"get", get, METH_NOARGS, NULL},         {"new", new, METH_NOARGS, NULL},
    {"free", free_, METH_NOARGS, NULL},      {"find", find, METH_NOARGS, NULL},
    {"hook", hook, METH_NOARGS, NULL},       {"draft", draft, METH_NOARGS, NULL},
    {"version", version, METH_NOARGS, NULL}, {"message", message, METH_NOARGS, NULL},
    {"do_import", do_import, METH_NOARGS, NULL},
    {"import_while_raising", import_while_raising, METH_NOARGS, NULL}, {NULL, NULL, 0, NULL},
};

static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "not_imported", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit_not_imported(void) { return PyModule_Create(&definition); }
