# cython: language_level=3
"""A handler in Cython, from ctxalloc.h and the C library alone. Each block has a header of 64 bytes in front of it."""

from libc.stdlib cimport calloc, free, malloc, realloc
from libc.string cimport strcpy

cdef extern from *:
    """
    #define CTXALLOC_PYTHON
    """

cdef extern from "ctxalloc.h":
    ctypedef struct ctxalloc_allocator:
        void *ctx
        void *(*malloc)(void *ctx, size_t size) noexcept
        void *(*calloc)(void *ctx, size_t nelem, size_t elsize) noexcept
        void *(*realloc)(void *ctx, void *ptr, size_t new_size) noexcept
        void (*free)(void *ctx, void *ptr, size_t size) noexcept
    ctypedef struct ctxalloc_handler:
        char name[127]
        unsigned char version
        ctxalloc_allocator allocator
    ctypedef struct ctxalloc_extras:
        pass
    int ctxalloc_import() except -1
    const ctxalloc_handler *ctxalloc_register(const ctxalloc_handler *, const ctxalloc_extras *) except NULL
    const ctxalloc_handler *ctxalloc_set_handler(const ctxalloc_handler *) except NULL

cdef size_t HEAD = 64
cdef long alive = 0


cdef void *counted(void *real) noexcept nogil:
    global alive
    if real == NULL:
        return NULL
    alive += 1
    return <char *>real + HEAD


cdef void *line_malloc(void *ctx, size_t size) noexcept:
    return counted(malloc(size + HEAD))


cdef void *line_calloc(void *ctx, size_t nelem, size_t elsize) noexcept:
    return counted(calloc(1, nelem * elsize + HEAD))


cdef void *line_realloc(void *ctx, void *ptr, size_t new_size) noexcept:
    if ptr == NULL:
        return line_malloc(ctx, new_size)
    cdef char *real = <char *>realloc(<char *>ptr - HEAD, new_size + HEAD)
    return NULL if real == NULL else real + HEAD


cdef void line_free(void *ctx, void *ptr, size_t size) noexcept:
    global alive
    if ptr != NULL:
        alive -= 1
        free(<char *>ptr - HEAD)


# A handler lives for ever, and so must these: they are the module's.
cdef ctxalloc_handler handler
strcpy(handler.name, "lines, by Cython")
handler.version = 1
handler.allocator.malloc = line_malloc
handler.allocator.calloc = line_calloc
handler.allocator.realloc = line_realloc
handler.allocator.free = line_free

# Without flags: ctxalloc holds the GIL at each call, so `alive` needs no lock.
ctxalloc_import()
ctxalloc_register(&handler, NULL)


def select():
    """Selects it in the running context."""
    ctxalloc_set_handler(&handler)


def blocks_alive():
    """How many of its blocks are alive."""
    return alive
