// The header is C++ too: compiled with every warning, in both of its ways (with -DCTXALLOC_PYTHON or without).
#ifdef CTXALLOC_PYTHON
#include <Python.h>
#endif
#include <ctxalloc.h>

static void *forward(void *, size_t size) { return ctxalloc_new(size); }

int use_all_of_it();
int use_all_of_it()
{
    ctxalloc_extras extras = ctxalloc_extras();
    extras.size_bytes = sizeof extras;
    extras.flags = CTXALLOC_ANY_THREAD;
    ctxalloc_handler handler = ctxalloc_handler();
    handler.version = 1;
    handler.allocator.malloc = forward;
    const ctxalloc_handler *registered = ctxalloc_register(&handler, &extras);
    return registered == nullptr ? ctxalloc_error_code() : ctxalloc_handler_version(registered);
}
