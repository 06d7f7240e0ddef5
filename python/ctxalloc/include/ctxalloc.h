/* ctxalloc.h: handlers of array memory, registered once, selected for a thread, a task or a request. C99 and C++.
 *
 * In a program without Python: link libctxalloc (`pkg-config --cflags --libs ctxalloc`), and call.
 *
 * In an extension module of Python: include Python.h, define CTXALLOC_PYTHON, include this, and call ctxalloc_import()
 * in the module's init before anything else. Nothing is linked: the functions come through the capsule
 * `ctxalloc._C_API`. In one file of several say so with CTXALLOC_UNIQUE_SYMBOL (a name of your own, the same in all of
 * them), and in the others also CTXALLOC_NO_IMPORT.
 *
 *     #define CTXALLOC_PYTHON
 *     #include <Python.h>
 *     #include <ctxalloc.h>
 *     ...
 *     if (ctxalloc_import() < 0) return NULL;
 *
 * Failure is an answer: NULL, or -1 where the answer is an int. Nothing has changed then. ctxalloc_error_message() says
 * what failed, with which value, and what to do; in an extension module a Python exception is set as well, if the
 * thread holds the GIL.
 *
 * Handlers are immortal, and so must be every struct and function that you register. A handler is known by the address
 * of its struct, which is the one that NumPy uses: what ctxalloc_register() returns can be put into a capsule
 * "mem_handler" for PyDataMem_SetHandler, and a struct from such a capsule can be registered here.
 *
 * Which functions want what: all may be called from any thread, at the same time. In an extension module those that
 * select or ask for the current handler look at NumPy's ContextVar where the thread holds the GIL, and at the thread's
 * own selection (that of Rust) where it does not. Those that take or give a PyObject need the GIL.
 */
#ifndef CTXALLOC_H
#define CTXALLOC_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The table behind the capsule changes only by getting longer; if ever in another way, this number changes. */
#define CTXALLOC_ABI_VERSION 1

/* ---- structs ------------------------------------------------------------------------------------------------ */

/* NEP 49's PyDataMemAllocator and PyDataMem_Handler, the very types where NumPy's header was included before. All four
 * functions must be there. malloc, calloc and realloc answer NULL when they cannot; realloc leaves the block alone
 * then. free is given a size that is a best guess, and may be given NULL. */
#if defined(NUMPY_CORE_INCLUDE_NUMPY_NDARRAYTYPES_H_)
typedef PyDataMemAllocator ctxalloc_allocator;
typedef PyDataMem_Handler ctxalloc_handler;
#else
typedef struct {
    void *ctx;
    void *(*malloc)(void *ctx, size_t size);
    void *(*calloc)(void *ctx, size_t nelem, size_t elsize);
    void *(*realloc)(void *ctx, void *ptr, size_t new_size);
    void (*free)(void *ctx, void *ptr, size_t size);
} ctxalloc_allocator;

typedef struct {
    char name[127]; /* 1 to 126 bytes of UTF-8, and a NUL */
    uint8_t version; /* 1 */
    ctxalloc_allocator allocator;
} ctxalloc_handler;
#endif

/* Copies size bytes and returns dst; NULL where it failed. ctx is the allocator's. */
typedef void *(ctxalloc_copy_func)(void *ctx, void *dst, const void *src, size_t size);

/* What a handler may have besides. Fill in size_bytes = sizeof(ctxalloc_extras) and zero the rest first. */
typedef struct {
    size_t size_bytes;
    size_t alignment; /* of every block, in bytes, a power of two up to 1 GiB; 0: nothing is promised */
    size_t flags; /* CTXALLOC_ANY_THREAD or 0 */
    /* How bytes get into blocks, out of them, and between two of this handler; NULL: memcpy. */
    ctxalloc_copy_func *host2obj;
    ctxalloc_copy_func *obj2host;
    ctxalloc_copy_func *obj2obj;
} ctxalloc_extras;

/* The functions may be called without the GIL, on any thread, also while the process exits. Without this flag, in a
 * process with Python, the GIL is held for every call. */
#define CTXALLOC_ANY_THREAD 1

/* NEP 49's first draft: functions without a context. */
typedef struct {
    char name[128]; /* at most 126 bytes of UTF-8 here too, and a NUL */
    void *(*alloc)(size_t size);
    void *(*zeroed_alloc)(size_t nelems, size_t elsize);
    void (*free)(void *ptr, size_t size);
    void *(*realloc)(void *ptr, size_t size);
} ctxalloc_draft1_handler;

/* Copies size bytes and returns dst; NULL where it failed. */
typedef void *(ctxalloc_draft_copy_func)(void *dst, const void *src, size_t size);

/* The second draft: the same, and three that copy (NULL: memcpy). */
typedef struct {
    char name[128];
    void *(*alloc)(size_t size);
    void *(*zeroed_alloc)(size_t nelems, size_t elsize);
    void (*free)(void *ptr, size_t size);
    void *(*realloc)(void *ptr, size_t size);
    ctxalloc_draft_copy_func *host2obj;
    ctxalloc_draft_copy_func *obj2host;
    ctxalloc_draft_copy_func *obj2obj;
} ctxalloc_draft2_handler;

/* For how many named handlers that are no drafts themselves a draft's set_handler can give a struct back; one more is
 * an error. */
#define CTXALLOC_DRAFT_VIEWS 256

/* Requests get such a struct without a limit to their number. Its functions, which know no context, work for so many
 * requests at a time; for one more they give no memory, and ctxalloc_error_message() says so. */
#define CTXALLOC_DRAFT_REQUESTS 256

/* What PyDataMem_EventHookFunc was in NumPy 1.7 to 1.26. */
typedef void (ctxalloc_event_hook)(void *inp, void *outp, size_t size, void *user_data);

/* How many handlers whose struct is not ctxalloc's own an event hook can hear of. */
#define CTXALLOC_WATCHED_HANDLERS 256

enum ctxalloc_error {
    CTXALLOC_NO_ERROR = 0,
    CTXALLOC_VALUE_ERROR = 1, /* an argument was wrong */
    CTXALLOC_MEMORY_ERROR = 2, /* no memory, a budget's limit, or a request that has ended */
    CTXALLOC_RUNTIME_ERROR = 3, /* anything else */
    CTXALLOC_RAISED = 4 /* a Python exception says it */
};

/* ---- functions ---------------------------------------------------------------------------------------------- */

#ifdef CTXALLOC_PYTHON
#define CTXALLOC_FUNCTION static inline
#else
#define CTXALLOC_FUNCTION extern
#endif

/* The version of the ctxalloc that is there: "0.1.0". */
CTXALLOC_FUNCTION const char *ctxalloc_version(void);

/* What went wrong in this thread's last call: a code of enum ctxalloc_error, and a sentence ("" after a success) that
 * is valid until the next call. */
CTXALLOC_FUNCTION int ctxalloc_error_code(void);
CTXALLOC_FUNCTION const char *ctxalloc_error_message(void);
CTXALLOC_FUNCTION void ctxalloc_clear_error(void);

/* Takes a handler into the table under its own name, for ever; extras may be NULL. Returns the struct. The same struct
 * once more is the same handler, with the extras of the first time.
 * Errors: a NULL, a version other than 1, a missing function, a name that is empty, taken, unterminated or no UTF-8, an
 * alignment that is no power of two, unknown flags. */
CTXALLOC_FUNCTION const ctxalloc_handler *ctxalloc_register(const ctxalloc_handler *handler,
                                                            const ctxalloc_extras *extras);

/* The handler with that name: "system", "aligned64", "pool", "guard", ... The error lists those there are. */
CTXALLOC_FUNCTION const ctxalloc_handler *ctxalloc_find(const char *name);

/* The handler where nothing is selected: NumPy's own default, or "system" without Python. */
CTXALLOC_FUNCTION const ctxalloc_handler *ctxalloc_default_handler(void);

/* Final NEP 49: selects a registered handler (NULL: the default) in the running context, and no other; returns the one
 * before. A context is a thread, or under Python a contextvars.Context: an asyncio task has its own. */
CTXALLOC_FUNCTION const ctxalloc_handler *ctxalloc_set_handler(const ctxalloc_handler *handler);
CTXALLOC_FUNCTION const ctxalloc_handler *ctxalloc_get_handler(void);

/* A handler's name, version (-1: error), and what its blocks are aligned to in bytes (0: error). NULL: the current
 * handler's. The name is the table's, by which ctxalloc_find() finds this handler; the one in its struct may be
 * another, where it was adopted under a name of its own. */
CTXALLOC_FUNCTION const char *ctxalloc_handler_name(const ctxalloc_handler *handler);
CTXALLOC_FUNCTION int ctxalloc_handler_version(const ctxalloc_handler *handler);
CTXALLOC_FUNCTION size_t ctxalloc_handler_alignment(const ctxalloc_handler *handler);

/* NEP 49's drafts: selects a struct's handler, which enters the table the first time, under its name, or where that is
 * taken under name@address: two libraries may carry the same allocator. NULL resets. Returns the struct
 * of the handler before, NULL if that was the default, and NULL on an error: then ctxalloc_error_code() is not 0. A
 * handler that is no draft of this form is given back as a struct of ctxalloc's own, which selects that handler again.
 * A request's is borrowed: it is good while the request is selected, has not ended, or has a block; given back later it
 * is an error, or another request's.
 * Functions are called with the GIL where there is Python. */
CTXALLOC_FUNCTION const ctxalloc_draft1_handler *ctxalloc_draft1_set_handler(const ctxalloc_draft1_handler *handler);
CTXALLOC_FUNCTION const ctxalloc_draft2_handler *ctxalloc_draft2_set_handler(const ctxalloc_draft2_handler *handler);

/* The name of the handler that an object's bytes live in: of an array (PyObject *) with Python, of a block of
 * ctxalloc_new() without. NULL: the current one's. NULL without an error: the array's bytes are in no handler. */
CTXALLOC_FUNCTION const char *ctxalloc_draft1_get_handler_name(void *object);
CTXALLOC_FUNCTION const char *ctxalloc_draft2_get_handler_name(void *object);

/* Has hook called for every block that any handler makes, resizes or frees, in NumPy's arrays and elsewhere; NULL
 * ends it. Returns the hook before, and stores its user_data in *old_data unless old_data is NULL.
 *     a block was made:           hook(NULL, block or NULL, size, user_data)
 *     a block was resized:        hook(old block, block or NULL, size, user_data)
 *     a block is about to be freed: hook(block, NULL, 0, user_data)
 * The order is that of the addresses: the call for a block's end returns before the first call for the next block at
 * its address. So a free is reported before it is done; a resize when it is done, and what another thread does at the
 * address that it left is reported after it, by the thread that resized.
 * It is called for a foreign handler once ctxalloc has seen that one: it was adopted or registered, was selected when
 * the hook was set, or its name or an array of it was asked for.
 * free(NULL) is no event, and neither is NumPy's scratch memory, which no handler makes (docs/coverage.md lists it).
 * With Python the GIL is held. The hook may allocate: what it does itself is not reported. It must stay callable for
 * ever. */
CTXALLOC_FUNCTION ctxalloc_event_hook *ctxalloc_set_event_hook(ctxalloc_event_hook *hook, void *user_data,
                                                               void **old_data);

/* Blocks by their address alone, as PyDataMem_NEW, NEW_ZEROED, RENEW and FREE: made in the current handler, resized and
 * freed by their own, whatever is current then. tracemalloc counts them (domain ctxalloc.tracemalloc_domain).
 * renew(NULL) is new; free(NULL) does nothing. An address that no block starts at is an error, and nothing happens. */
CTXALLOC_FUNCTION void *ctxalloc_new(size_t size);
CTXALLOC_FUNCTION void *ctxalloc_new_zeroed(size_t nelems, size_t elsize);
CTXALLOC_FUNCTION void *ctxalloc_renew(void *block, size_t size);
CTXALLOC_FUNCTION int ctxalloc_free(void *block);

/* The handler of a block of ctxalloc_new(). */
CTXALLOC_FUNCTION const ctxalloc_handler *ctxalloc_block_handler(void *block);

/* Copies from the host into a block of ctxalloc_new(), from one to the host, from one to another: by the handler's own
 * copy functions where it has some. The pointer may be inside of the block; past its end is an error. */
CTXALLOC_FUNCTION int ctxalloc_copy_in(void *dst_in_block, const void *src, size_t size);
CTXALLOC_FUNCTION int ctxalloc_copy_out(void *dst, const void *src_in_block, size_t size);
CTXALLOC_FUNCTION int ctxalloc_copy(void *dst_in_block, const void *src_in_block, size_t size);

#ifdef CTXALLOC_PYTHON
/* Finds the installed package's functions. -1 and an ImportError where it is not installed, or too old for this
 * header. An exception that is pending stays where it succeeds, and is the __context__ of its own where it fails. */
CTXALLOC_FUNCTION int ctxalloc_import(void);

/* The handler in which an array's bytes live, by way of its base if it is a view. NULL without an error: in none. */
CTXALLOC_FUNCTION const ctxalloc_handler *ctxalloc_handler_of(PyObject *array);

/* A new reference to a handler's capsule "mem_handler", for PyDataMem_SetHandler. */
CTXALLOC_FUNCTION PyObject *ctxalloc_capsule(const ctxalloc_handler *handler);

/* The handler in a capsule "mem_handler", taken into the table under name, or under its own where name is NULL; an
 * error where that is taken. */
CTXALLOC_FUNCTION const ctxalloc_handler *ctxalloc_adopt(PyObject *capsule, const char *name);
#endif

/* What NumPy took out in 2.0, under its old names; in place of NumPy 1.x's own, whose header has to be included before
 * this one. */
#ifdef CTXALLOC_NUMPY_NAMES
#if !defined(NUMPY_CORE_INCLUDE_NUMPY_NDARRAYTYPES_H_) || NPY_ABI_VERSION >= 0x02000000
typedef ctxalloc_event_hook PyDataMem_EventHookFunc;
#endif
#undef PyDataMem_SetEventHook
#define PyDataMem_SetEventHook ctxalloc_set_event_hook
#endif

/* ---- how an extension module reaches them --------------------------------------------------------------------- */

#ifdef CTXALLOC_PYTHON

/* Append-only. */
typedef struct {
    uint32_t abi_version;
    uint32_t size_bytes;
    const char *version;
    int (*error_code)(void);
    const char *(*error_message)(void);
    void (*clear_error)(void);
    const ctxalloc_handler *(*register_handler)(const ctxalloc_handler *, const ctxalloc_extras *);
    const ctxalloc_handler *(*find)(const char *);
    const ctxalloc_handler *(*default_handler)(void);
    const ctxalloc_handler *(*set_handler)(const ctxalloc_handler *);
    const ctxalloc_handler *(*get_handler)(void);
    const char *(*handler_name)(const ctxalloc_handler *);
    int (*handler_version)(const ctxalloc_handler *);
    size_t (*handler_alignment)(const ctxalloc_handler *);
    const ctxalloc_draft1_handler *(*draft1_set_handler)(const ctxalloc_draft1_handler *);
    const char *(*draft1_get_handler_name)(void *);
    const ctxalloc_draft2_handler *(*draft2_set_handler)(const ctxalloc_draft2_handler *);
    const char *(*draft2_get_handler_name)(void *);
    ctxalloc_event_hook *(*set_event_hook)(ctxalloc_event_hook *, void *, void **);
    void *(*new_block)(size_t);
    void *(*new_zeroed)(size_t, size_t);
    void *(*renew)(void *, size_t);
    int (*free_block)(void *);
    const ctxalloc_handler *(*block_handler)(void *);
    int (*copy_in)(void *, const void *, size_t);
    int (*copy_out)(void *, const void *, size_t);
    int (*copy)(void *, const void *, size_t);
    void (*raise)(void);
    const ctxalloc_handler *(*handler_of)(PyObject *);
    PyObject *(*capsule)(const ctxalloc_handler *);
    const ctxalloc_handler *(*adopt)(PyObject *, const char *);
} ctxalloc_api;

#ifdef CTXALLOC_UNIQUE_SYMBOL
#define ctxalloc_api_ CTXALLOC_UNIQUE_SYMBOL
#ifdef CTXALLOC_NO_IMPORT
extern const ctxalloc_api *ctxalloc_api_;
#else
const ctxalloc_api *ctxalloc_api_ = NULL;
#endif
#else
static const ctxalloc_api *ctxalloc_api_ = NULL;
#endif

static inline int ctxalloc_find_api_(void) {
    const ctxalloc_api *api = (const ctxalloc_api *)PyCapsule_Import("ctxalloc._C_API", 0);
    if (api == NULL) {
        return -1;
    }
    if (api->abi_version != CTXALLOC_ABI_VERSION) {
        PyErr_Format(PyExc_ImportError,
                     "this module was built with the header of another ctxalloc (C interface %d, installed is %d); "
                     "rebuild it",
                     CTXALLOC_ABI_VERSION, (int)api->abi_version);
        return -1;
    }
    if (api->size_bytes < sizeof(ctxalloc_api)) {
        PyErr_Format(PyExc_ImportError,
                     "the installed ctxalloc %s is older than the header this module was built with; "
                     "install a newer one",
                     api->version);
        return -1;
    }
    ctxalloc_api_ = api;
    return 0;
}

/* Importing runs Python code, which needs the pending exception out of the way. */
static inline int ctxalloc_import(void) {
    PyObject *kind, *value, *traceback;
    PyErr_Fetch(&kind, &value, &traceback);
    int answer = ctxalloc_find_api_();
    if (answer == 0) {
        PyErr_Restore(kind, value, traceback);
        return answer;
    }
    if (kind != NULL) {
        PyObject *own_kind, *own_value, *own_traceback;
        PyErr_Fetch(&own_kind, &own_value, &own_traceback);
        PyErr_NormalizeException(&kind, &value, &traceback);
        PyErr_NormalizeException(&own_kind, &own_value, &own_traceback);
        if (traceback != NULL) {
            PyException_SetTraceback(value, traceback);
        }
        PyException_SetContext(own_value, value); /* takes over the reference */
        PyErr_Restore(own_kind, own_value, own_traceback);
        Py_DECREF(kind);
        Py_XDECREF(traceback);
    }
    return answer;
}

/* Whether there is a table; an exception where there is none. */
static inline int ctxalloc_ready_(void) {
    if (ctxalloc_api_ == NULL) {
        PyGILState_STATE state = PyGILState_Ensure();
        PyErr_SetString(PyExc_RuntimeError,
                        "call ctxalloc_import() in the module's init before any other function of ctxalloc.h");
        PyGILState_Release(state);
        return 0;
    }
    return 1;
}

/* Sets the exception of an error, if there was one. */
static inline void ctxalloc_raise_(void) {
    if (ctxalloc_api_->error_code() != CTXALLOC_NO_ERROR) {
        ctxalloc_api_->raise();
    }
}

/* The body of a function that answers `failure` where it fails. */
#define CTXALLOC_CALL_(kind, failure, call)                                                                         \
    kind ctxalloc_answer_ = (failure);                                                                              \
    if (ctxalloc_ready_()) {                                                                                        \
        ctxalloc_answer_ = ctxalloc_api_->call;                                                                     \
        if (ctxalloc_answer_ == (failure)) {                                                                        \
            ctxalloc_raise_();                                                                                      \
        }                                                                                                           \
    }                                                                                                               \
    return ctxalloc_answer_

static inline const char *ctxalloc_version(void) { return ctxalloc_ready_() ? ctxalloc_api_->version : NULL; }
static inline int ctxalloc_error_code(void) {
    return ctxalloc_api_ != NULL ? ctxalloc_api_->error_code() : (int)CTXALLOC_RUNTIME_ERROR;
}
static inline const char *ctxalloc_error_message(void) {
    return ctxalloc_api_ != NULL ? ctxalloc_api_->error_message() : "ctxalloc_import() was not called, or failed";
}
static inline void ctxalloc_clear_error(void) {
    if (ctxalloc_api_ != NULL) {
        ctxalloc_api_->clear_error();
    }
}
static inline const ctxalloc_handler *ctxalloc_register(const ctxalloc_handler *handler,
                                                        const ctxalloc_extras *extras) {
    CTXALLOC_CALL_(const ctxalloc_handler *, NULL, register_handler(handler, extras));
}
static inline const ctxalloc_handler *ctxalloc_find(const char *name) {
    CTXALLOC_CALL_(const ctxalloc_handler *, NULL, find(name));
}
static inline const ctxalloc_handler *ctxalloc_default_handler(void) {
    CTXALLOC_CALL_(const ctxalloc_handler *, NULL, default_handler());
}
static inline const ctxalloc_handler *ctxalloc_set_handler(const ctxalloc_handler *handler) {
    CTXALLOC_CALL_(const ctxalloc_handler *, NULL, set_handler(handler));
}
static inline const ctxalloc_handler *ctxalloc_get_handler(void) {
    CTXALLOC_CALL_(const ctxalloc_handler *, NULL, get_handler());
}
static inline const char *ctxalloc_handler_name(const ctxalloc_handler *handler) {
    CTXALLOC_CALL_(const char *, NULL, handler_name(handler));
}
static inline int ctxalloc_handler_version(const ctxalloc_handler *handler) {
    CTXALLOC_CALL_(int, -1, handler_version(handler));
}
static inline size_t ctxalloc_handler_alignment(const ctxalloc_handler *handler) {
    CTXALLOC_CALL_(size_t, 0, handler_alignment(handler));
}
static inline const ctxalloc_draft1_handler *ctxalloc_draft1_set_handler(const ctxalloc_draft1_handler *handler) {
    CTXALLOC_CALL_(const ctxalloc_draft1_handler *, NULL, draft1_set_handler(handler));
}
static inline const char *ctxalloc_draft1_get_handler_name(void *object) {
    CTXALLOC_CALL_(const char *, NULL, draft1_get_handler_name(object));
}
static inline const ctxalloc_draft2_handler *ctxalloc_draft2_set_handler(const ctxalloc_draft2_handler *handler) {
    CTXALLOC_CALL_(const ctxalloc_draft2_handler *, NULL, draft2_set_handler(handler));
}
static inline const char *ctxalloc_draft2_get_handler_name(void *object) {
    CTXALLOC_CALL_(const char *, NULL, draft2_get_handler_name(object));
}
static inline ctxalloc_event_hook *ctxalloc_set_event_hook(ctxalloc_event_hook *hook, void *user_data,
                                                           void **old_data) {
    CTXALLOC_CALL_(ctxalloc_event_hook *, NULL, set_event_hook(hook, user_data, old_data));
}
static inline void *ctxalloc_new(size_t size) { CTXALLOC_CALL_(void *, NULL, new_block(size)); }
static inline void *ctxalloc_new_zeroed(size_t nelems, size_t elsize) {
    CTXALLOC_CALL_(void *, NULL, new_zeroed(nelems, elsize));
}
static inline void *ctxalloc_renew(void *block, size_t size) { CTXALLOC_CALL_(void *, NULL, renew(block, size)); }
static inline int ctxalloc_free(void *block) { CTXALLOC_CALL_(int, -1, free_block(block)); }
static inline const ctxalloc_handler *ctxalloc_block_handler(void *block) {
    CTXALLOC_CALL_(const ctxalloc_handler *, NULL, block_handler(block));
}
static inline int ctxalloc_copy_in(void *dst_in_block, const void *src, size_t size) {
    CTXALLOC_CALL_(int, -1, copy_in(dst_in_block, src, size));
}
static inline int ctxalloc_copy_out(void *dst, const void *src_in_block, size_t size) {
    CTXALLOC_CALL_(int, -1, copy_out(dst, src_in_block, size));
}
static inline int ctxalloc_copy(void *dst_in_block, const void *src_in_block, size_t size) {
    CTXALLOC_CALL_(int, -1, copy(dst_in_block, src_in_block, size));
}
static inline const ctxalloc_handler *ctxalloc_handler_of(PyObject *array) {
    CTXALLOC_CALL_(const ctxalloc_handler *, NULL, handler_of(array));
}
static inline PyObject *ctxalloc_capsule(const ctxalloc_handler *handler) {
    CTXALLOC_CALL_(PyObject *, NULL, capsule(handler));
}
static inline const ctxalloc_handler *ctxalloc_adopt(PyObject *capsule, const char *name) {
    CTXALLOC_CALL_(const ctxalloc_handler *, NULL, adopt(capsule, name));
}

#undef CTXALLOC_CALL_

#endif /* CTXALLOC_PYTHON */

#ifdef __cplusplus
}
#endif

#endif /* CTXALLOC_H */
