/* The other file of several.c: it uses what that one imported. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#define CTXALLOC_PYTHON
#define CTXALLOC_UNIQUE_SYMBOL several_ctxalloc_api
#define CTXALLOC_NO_IMPORT
#include <ctxalloc.h>

PyObject *name_there(PyObject *self, PyObject *nothing);
PyObject *name_there(PyObject *self, PyObject *nothing)
{
    (void)self, (void)nothing;
    const char *name = ctxalloc_handler_name(NULL);
    return name == NULL ? NULL : PyUnicode_FromString(name);
}
