/* What CPython and NumPy take themselves: for `floor.py`, which compiles it.
 *
 * `handler` makes NEP 49 handlers whose functions do next to nothing, `Manager` is a context manager that does the calls
 * to ContextVar that `ctxalloc.request()` needs, and no others. No handler and no request from outside of NumPy and CPython
 * can take less than these.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#define NPY_NO_DEPRECATED_API NPY_1_7_API_VERSION
#define NPY_TARGET_VERSION NPY_1_22_API_VERSION
#include <numpy/arrayobject.h>
#include <stdlib.h>
#include <string.h>

/* ---- handlers ---- */

static void *plain_malloc(void *ctx, size_t size)
{
    (void)ctx;
    return malloc(size);
}

static void *plain_calloc(void *ctx, size_t count, size_t size)
{
    (void)ctx;
    return calloc(count, size);
}

static void *plain_realloc(void *ctx, void *block, size_t size)
{
    (void)ctx;
    return realloc(block, size);
}

static void plain_free(void *ctx, void *block, size_t size)
{
    (void)ctx;
    (void)size;
    free(block);
}

/* Blocks of one size, the last one freed first; their first word is the next one. For one thread. */
struct list {
    void **first;
    size_t size;
};

static void *list_malloc(void *ctx, size_t size)
{
    struct list *list = ctx;
    void **block = list->first;
    if (block == NULL)
        return size <= list->size ? malloc(list->size) : NULL;
    list->first = *block;
    return size <= list->size ? block : NULL;
}

static void *list_calloc(void *ctx, size_t count, size_t size)
{
    void *block = list_malloc(ctx, count * size);
    return block == NULL ? NULL : memset(block, 0, count * size);
}

static void *list_realloc(void *ctx, void *block, size_t size)
{
    struct list *list = ctx;
    if (block == NULL)
        return list_malloc(ctx, size);
    return size <= list->size ? block : NULL;
}

static void list_free(void *ctx, void *block, size_t size)
{
    struct list *list = ctx;
    (void)size;
    if (block == NULL)
        return;
    *(void **)block = list->first;
    list->first = block;
}

/* handler(0): malloc and free. handler(n): a list of blocks of n bytes. Never freed, as NEP 49 has it. */
static PyObject *new_handler(PyObject *module, PyObject *argument)
{
    (void)module;
    size_t size = PyLong_AsSize_t(argument);
    if (size == (size_t)-1 && PyErr_Occurred())
        return NULL;
    PyDataMem_Handler *handler = calloc(1, sizeof *handler);
    struct list *list = calloc(1, sizeof *list);
    if (handler == NULL || list == NULL)
        return PyErr_NoMemory();
    list->size = size;
    strcpy(handler->name, size == 0 ? "floor: malloc" : "floor: a list");
    handler->version = 1;
    if (size == 0)
        handler->allocator = (PyDataMemAllocator){NULL, plain_malloc, plain_calloc, plain_realloc, plain_free};
    else
        handler->allocator = (PyDataMemAllocator){list, list_malloc, list_calloc, list_realloc, list_free};
    return PyCapsule_New(handler, "mem_handler", NULL);
}

/* Selects a handler, or NumPy's default by None; returns the one before. */
static PyObject *select_handler(PyObject *module, PyObject *capsule)
{
    (void)module;
    return PyDataMem_SetHandler(capsule == Py_None ? NULL : capsule);
}

/* ---- the context manager ---- */

/* NumPy's ContextVar, and a capsule around its default handler that is not its default one. */
static PyObject *variable, *constant;

struct manager {
    PyObject_HEAD
    PyObject *token;
    char with_capsule;
};

static void let_go(PyObject *capsule)
{
    (void)PyCapsule_GetContext(capsule);
}

/* A request has a capsule of its own, whose end lets go of it. */
static PyObject *new_capsule(PyObject *module, PyObject *nothing)
{
    (void)module, (void)nothing;
    PyObject *capsule = PyCapsule_New(PyCapsule_GetPointer(constant, "mem_handler"), "mem_handler", let_go);
    if (capsule != NULL)
        PyCapsule_SetContext(capsule, constant);
    return capsule;
}

static PyObject *enter(PyObject *self, PyObject *nothing)
{
    struct manager *manager = (struct manager *)self;
    (void)nothing;
    PyObject *value = manager->with_capsule ? new_capsule(NULL, NULL) : Py_NewRef(constant);
    if (value == NULL)
        return NULL;
    manager->token = PyContextVar_Set(variable, value);
    Py_DECREF(value);
    return manager->token == NULL ? NULL : Py_NewRef(self);
}

static PyObject *leave(PyObject *self, PyObject *const *arguments, Py_ssize_t count)
{
    struct manager *manager = (struct manager *)self;
    (void)arguments;
    (void)count;
    int failed = PyContextVar_Reset(variable, manager->token);
    Py_CLEAR(manager->token);
    if (failed)
        return NULL;
    Py_RETURN_NONE;
}

/* The token refers to its Context, which may refer to whoever has this. */
static int traverse(PyObject *self, visitproc visit, void *arg)
{
    Py_VISIT(((struct manager *)self)->token);
    return 0;
}

static void dealloc(PyObject *self)
{
    PyObject_GC_UnTrack(self);
    Py_XDECREF(((struct manager *)self)->token);
    PyObject_GC_Del(self);
}

static PyMethodDef manager_methods[] = {
    {"__enter__", enter, METH_NOARGS, NULL},
    {"__exit__", (PyCFunction)(void (*)(void))leave, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};

static PyTypeObject manager_type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "_floor.Manager",
    .tp_basicsize = sizeof(struct manager),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_methods = manager_methods,
    .tp_traverse = traverse,
    .tp_dealloc = dealloc,
};

static PyObject *new_manager(int with_capsule)
{
    struct manager *manager = PyObject_GC_New(struct manager, &manager_type);
    if (manager == NULL)
        return NULL;
    manager->token = NULL;
    manager->with_capsule = (char)with_capsule;
    PyObject_GC_Track(manager);
    return (PyObject *)manager;
}

/* Takes what `request` takes, and looks at nothing. */
static PyObject *manager(PyObject *module, PyObject *const *arguments, Py_ssize_t count, PyObject *names)
{
    (void)module, (void)arguments, (void)count, (void)names;
    return new_manager(0);
}

static PyObject *manager_with_capsule(PyObject *module, PyObject *const *arguments, Py_ssize_t count, PyObject *names)
{
    (void)module, (void)arguments, (void)count, (void)names;
    return new_manager(1);
}

/* ---- the middleware ---- */

/* What a call of the middleware returns: awaiting it awaits the application's coroutine between a set and a reset. */
struct exchange {
    PyObject_HEAD
    PyObject *arguments[4]; /* the application, scope, receive, send */
    PyObject *coroutine, *token;
};

static PySendResult exchange_send(PyObject *self, PyObject *value, PyObject **result)
{
    struct exchange *exchange = (struct exchange *)self;
    if (exchange->coroutine == NULL) {
        PyObject *capsule = new_capsule(NULL, NULL);
        exchange->token = capsule == NULL ? NULL : PyContextVar_Set(variable, capsule);
        Py_XDECREF(capsule);
        if (exchange->token != NULL)
            exchange->coroutine = PyObject_Vectorcall(exchange->arguments[0], exchange->arguments + 1, 3, NULL);
        if (exchange->coroutine == NULL) {
            *result = NULL;
            return PYGEN_ERROR;
        }
    }
    PySendResult how = PyIter_Send(exchange->coroutine, value, result);
    if (how == PYGEN_RETURN && PyContextVar_Reset(variable, exchange->token) != 0) {
        Py_CLEAR(*result);
        return PYGEN_ERROR;
    }
    return how;
}

static PyObject *exchange_next(PyObject *self)
{
    PyObject *result;
    PySendResult how = exchange_send(self, Py_None, &result);
    if (how != PYGEN_RETURN)
        return result;
    if (result != Py_None)
        PyErr_SetObject(PyExc_StopIteration, result);
    Py_DECREF(result);
    return NULL;
}

static int exchange_traverse(PyObject *self, visitproc visit, void *arg)
{
    struct exchange *exchange = (struct exchange *)self;
    for (int at = 0; at < 4; at++)
        Py_VISIT(exchange->arguments[at]);
    Py_VISIT(exchange->coroutine);
    Py_VISIT(exchange->token);
    return 0;
}

static void exchange_dealloc(PyObject *self)
{
    struct exchange *exchange = (struct exchange *)self;
    PyObject_GC_UnTrack(self);
    for (int at = 0; at < 4; at++)
        Py_DECREF(exchange->arguments[at]);
    Py_XDECREF(exchange->coroutine);
    Py_XDECREF(exchange->token);
    PyObject_GC_Del(self);
}

static PyAsyncMethods exchange_async = {.am_await = PyObject_SelfIter, .am_send = exchange_send};

static PyTypeObject exchange_type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "_floor.Exchange",
    .tp_basicsize = sizeof(struct exchange),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_as_async = &exchange_async,
    .tp_iter = PyObject_SelfIter,
    .tp_iternext = exchange_next,
    .tp_traverse = exchange_traverse,
    .tp_dealloc = exchange_dealloc,
};

/* exchange(app, scope, receive, send): an ASGI application that passes everything on. It neither looks at the messages
 * nor knows when the response is complete, and an error leaves the Context as it is. */
static PyObject *exchange(PyObject *module, PyObject *const *arguments, Py_ssize_t count)
{
    (void)module;
    if (count != 4) {
        PyErr_SetString(PyExc_TypeError, "exchange(app, scope, receive, send)");
        return NULL;
    }
    struct exchange *exchange = PyObject_GC_New(struct exchange, &exchange_type);
    if (exchange == NULL)
        return NULL;
    for (int at = 0; at < 4; at++)
        exchange->arguments[at] = Py_NewRef(arguments[at]);
    exchange->coroutine = exchange->token = NULL;
    PyObject_GC_Track(exchange);
    return (PyObject *)exchange;
}

/* What callgrind counts: `--toggle-collect=counted`. */
PyObject *counted(PyObject *module, PyObject *const *arguments, Py_ssize_t count) __attribute__((noinline));
PyObject *counted(PyObject *module, PyObject *const *arguments, Py_ssize_t count)
{
    (void)module;
    return PyObject_Vectorcall(arguments[0], arguments + 1, (size_t)count - 1, NULL);
}

/* ---- the module ---- */

/* NumPy's variable is in a copy of the Context in which a handler was set. */
static PyObject *numpys_variable(PyObject *module, PyObject *nothing)
{
    (void)module, (void)nothing;
    PyObject *old = PyDataMem_SetHandler(constant), *context = PyContext_CopyCurrent(), *key = NULL;
    PyObject *pairs = context == NULL ? NULL : PyMapping_Items(context);
    for (Py_ssize_t at = 0; pairs != NULL && at < PyList_GET_SIZE(pairs); at++) {
        PyObject *pair = PyList_GET_ITEM(pairs, at);
        if (PyTuple_GET_ITEM(pair, 1) == constant)
            key = Py_NewRef(PyTuple_GET_ITEM(pair, 0));
    }
    Py_XDECREF(old == NULL ? NULL : PyDataMem_SetHandler(old));
    Py_XDECREF(old);
    Py_XDECREF(pairs);
    Py_XDECREF(context);
    if (key == NULL && !PyErr_Occurred())
        PyErr_SetString(PyExc_RuntimeError, "NumPy's ContextVar was not found");
    return key;
}

static PyMethodDef functions[] = {
    {"handler", new_handler, METH_O, NULL},
    {"select", select_handler, METH_O, NULL},
    {"manager", (PyCFunction)(void (*)(void))manager, METH_FASTCALL | METH_KEYWORDS, NULL},
    {"manager_with_capsule", (PyCFunction)(void (*)(void))manager_with_capsule, METH_FASTCALL | METH_KEYWORDS, NULL},
    {"exchange", (PyCFunction)(void (*)(void))exchange, METH_FASTCALL, NULL},
    {"capsule", new_capsule, METH_NOARGS, NULL},
    {"numpys_variable", numpys_variable, METH_NOARGS, NULL},
    {"counted", (PyCFunction)(void (*)(void))counted, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, .m_name = "_floor", .m_size = -1, .m_methods = functions};

PyMODINIT_FUNC PyInit__floor(void)
{
    import_array();
    if (PyType_Ready(&manager_type) < 0 || PyType_Ready(&exchange_type) < 0)
        return NULL;
    constant = PyCapsule_New(PyCapsule_GetPointer(PyDataMem_DefaultHandler, "mem_handler"), "mem_handler", NULL);
    variable = constant == NULL ? NULL : numpys_variable(NULL, NULL);
    return variable == NULL ? NULL : PyModule_Create(&definition);
}
