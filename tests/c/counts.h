/* What each test extension tells of its allocator. */
static long calls_without_gil;

static PyObject *counts(PyObject *self, PyObject *nothing)
{
    (void)self, (void)nothing;
    return Py_BuildValue("{s:l,s:l,s:l,s:l}", "alive", counted(&blocks_alive), "wrong_sizes", counted(&wrong_sizes),
                         "not_ours", counted(&not_ours), "without_gil", counted(&calls_without_gil));
}

static PyObject *text_or_none(const char *text)
{
    if (text != NULL) {
        return PyUnicode_FromString(text);
    }
    if (PyErr_Occurred()) {
        return NULL;
    }
    Py_RETURN_NONE;
}

static PyObject *module_of(PyModuleDef *definition)
{
    PyObject *module = PyModule_Create(definition);
    if (module != NULL && ctxalloc_import() < 0) {
        Py_DECREF(module);
        return NULL;
    }
    return module;
}
