/* An extension of two files, of which this one imports: the other is several_more.c. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#define CTXALLOC_PYTHON
#define CTXALLOC_UNIQUE_SYMBOL several_ctxalloc_api
#include <ctxalloc.h>

PyObject *name_there(PyObject *self, PyObject *nothing);

static PyObject *name_here(PyObject *self, PyObject *nothing)
{
    (void)self, (void)nothing;
    const char *name = ctxalloc_handler_name(NULL);
    return name == NULL ? NULL : PyUnicode_FromString(name);
}

static PyMethodDef methods[] = {
    {"name_here", name_here, METH_NOARGS, NULL},
    {"name_there", name_there, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "several", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit_several(void)
{
    PyObject *module = PyModule_Create(&definition);
    if (module != NULL && ctxalloc_import() < 0) {
        Py_CLEAR(module);
    }
    return module;
}
