"""A handler by cffi: C functions and a NEP 49 struct that cffi makes, registered through `ctxalloc.h`.

cffi releases the GIL around each call, so a function that needs it acquires it again (`register_it` below). Needs cffi
and a C compiler (`cc`, or `$CC`). It prints::

    <ctxalloc.Handler "pages, by cffi": foreign handler, version 1>
    its blocks are aligned to 4096 bytes: True
    in the scope: 2 blocks alive
    a hook in Python heard: made 8000 bytes, freed a block
    afterwards: 0 blocks alive
"""

import contextlib
import importlib.util
import os
import re
import subprocess
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

import cffi
import numpy as np

import ctxalloc

STRUCTS = """
typedef struct {
    void *ctx;
    void *(*malloc)(void *ctx, size_t size);
    void *(*calloc)(void *ctx, size_t nelem, size_t elsize);
    void *(*realloc)(void *ctx, void *ptr, size_t new_size);
    void (*free)(void *ctx, void *ptr, size_t size);
} ctxalloc_allocator;
typedef struct { char name[127]; uint8_t version; ctxalloc_allocator allocator; } ctxalloc_handler;
"""

FUNCTIONS = """
extern long alive;
void *page_malloc(void *ctx, size_t size);
void *page_calloc(void *ctx, size_t nelem, size_t elsize);
void *page_realloc(void *ctx, void *ptr, size_t new_size);
void page_free(void *ctx, void *ptr, size_t size);
int register_it(const ctxalloc_handler *handler);
"""

SOURCE = """
#include <stdlib.h>
#include <string.h>
#include <malloc.h>
#define CTXALLOC_PYTHON
#include <ctxalloc.h>

long alive;

void *page_malloc(void *ctx, size_t size)
{
    (void)ctx;
    void *block = aligned_alloc(4096, (size + 4095) / 4096 * 4096);
    __atomic_fetch_add(&alive, block != NULL, __ATOMIC_SEQ_CST);
    return block;
}

void *page_calloc(void *ctx, size_t nelem, size_t elsize)
{
    void *block = page_malloc(ctx, nelem * elsize);
    return block == NULL ? NULL : memset(block, 0, nelem * elsize);
}

void page_free(void *ctx, void *ptr, size_t size)
{
    (void)ctx, (void)size;
    __atomic_fetch_sub(&alive, ptr != NULL, __ATOMIC_SEQ_CST);
    free(ptr);
}

/* realloc() would keep no page's alignment. */
void *page_realloc(void *ctx, void *ptr, size_t new_size)
{
    void *moved = page_malloc(ctx, new_size);
    if (moved != NULL && ptr != NULL) {
        size_t had = malloc_usable_size(ptr);
        memcpy(moved, ptr, had < new_size ? had : new_size);
        page_free(ctx, ptr, had);
    }
    return moved;
}

int register_it(const ctxalloc_handler *handler)
{
    PyGILState_STATE state = PyGILState_Ensure();
    ctxalloc_extras extras = {sizeof extras, 4096, CTXALLOC_ANY_THREAD, NULL, NULL, NULL};
    int done = ctxalloc_import() == 0 && ctxalloc_register(handler, &extras) != NULL;
    if (!done) {
        PyErr_Print();
    }
    PyGILState_Release(state);
    return done;
}
"""


def compiled() -> Any:
    """Have cffi write the module, compile and import it; a project has its build system do so."""
    builder = cffi.FFI()
    builder.cdef(STRUCTS + FUNCTIONS)
    builder.set_source("cffi_pages", SOURCE)
    with tempfile.TemporaryDirectory() as folder:
        in_c, library = Path(folder, "cffi_pages.c"), Path(folder, "cffi_pages.so")
        with contextlib.redirect_stdout(None):
            builder.emit_c_code(str(in_c))
        includes = [f"-I{path}" for path in (sysconfig.get_path("include"), ctxalloc.get_include())]
        compiler = os.environ.get("CC", "cc")
        subprocess.run([compiler, "-shared", "-fPIC", "-O2", *includes, "-o", library, in_c], check=True)
        spec = importlib.util.spec_from_file_location("cffi_pages", library)
        assert spec
        assert spec.loader
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module


PAGES = compiled()
# A handler lives for ever, and so must its struct: it is a module global.
STRUCT = PAGES.ffi.new("ctxalloc_handler *")
STRUCT.name = b"pages, by cffi"
STRUCT.version = 1
for function in ("malloc", "calloc", "realloc", "free"):
    setattr(STRUCT.allocator, function, PAGES.ffi.addressof(PAGES.lib, f"page_{function}"))


def main() -> None:
    assert PAGES.lib.register_it(STRUCT)
    handler = ctxalloc.handler("pages, by cffi")
    print(re.sub(r" at 0x[0-9a-f]+", "", repr(handler)))  # without the address of the struct

    heard: list[str] = []

    def hook(inp: int | None, outp: int | None, size: int) -> None:
        heard.append(f"made {size} bytes" if inp is None else "resized a block" if outp else "freed a block")

    with ctxalloc.use(handler):
        one, other = np.ones(1000), np.arange(100)
        print(f"its blocks are aligned to 4096 bytes: {one.ctypes.data % 4096 == other.ctypes.data % 4096 == 0}")
        print(f"in the scope: {PAGES.lib.alive} blocks alive")
        ctxalloc.set_event_hook(hook)
        np.empty(1000)
        ctxalloc.set_event_hook(None)
    print(f"a hook in Python heard: {', '.join(heard)}")
    del one, other
    print(f"afterwards: {PAGES.lib.alive} blocks alive")


if __name__ == "__main__":
    main()
