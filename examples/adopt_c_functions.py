"""A handler from C functions that somebody else wrote: ctypes puts them into NEP 49's struct, and ctxalloc adopts it.

The C side is `adopt_c_functions.c` beside this file; the program needs a C compiler (`cc`, or `$CC`). It prints::

    <ctxalloc.Handler "some C pool": foreign handler, version 1>
    in the scope: 2 blocks alive, the array lives in some C pool
    Rust uses it too: ('some C pool', 4096)
    afterwards: 1 block alive, the next array lives in default_allocator
    at the end: 0 blocks alive
"""

import ctypes
import os
import re
import subprocess
import tempfile
from pathlib import Path

import numpy as np

import ctxalloc
import ctxalloc_example as rust


class Allocator(ctypes.Structure):
    """NEP 49's PyDataMemAllocator. The functions are kept as addresses: ctypes does not call them, NumPy does."""

    _fields_ = tuple((field, ctypes.c_void_p) for field in ("ctx", "malloc", "calloc", "realloc", "free"))


class HandlerStruct(ctypes.Structure):
    """NEP 49's PyDataMem_Handler."""

    _fields_ = (("name", ctypes.c_char * 127), ("version", ctypes.c_uint8), ("allocator", Allocator))


def compiled() -> ctypes.CDLL:
    """Compile and load the C side."""
    source = Path(__file__).with_suffix(".c")
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder, "pool.so")
        compiler = os.environ.get("CC", "cc")
        subprocess.run([compiler, "-shared", "-fPIC", "-O2", "-o", str(library), str(source)], check=True)
        return ctypes.CDLL(str(library))  # stays loaded without its file


LIBRARY = compiled()
BLOCKS_ALIVE = ctypes.c_size_t(0)  # struct pool
# A handler lives for ever, and so must everything that it consists of: with ctypes, module globals.
STRUCT = HandlerStruct(
    name=b"some C pool",
    version=1,
    allocator=Allocator(
        ctypes.addressof(BLOCKS_ALIVE),
        *(
            ctypes.cast(getattr(LIBRARY, f"pool_{name}"), ctypes.c_void_p)
            for name in ("malloc", "calloc", "realloc", "free")
        ),
    ),
)


def blocks() -> str:
    """Say how many blocks of the C pool are alive."""
    alive = BLOCKS_ALIVE.value
    return f"{alive} {'block' if alive == 1 else 'blocks'} alive"


def main() -> None:
    new_capsule = ctypes.pythonapi.PyCapsule_New
    new_capsule.restype = ctypes.py_object
    new_capsule.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    capsule = new_capsule(ctypes.addressof(STRUCT), b"mem_handler", None)

    handler = ctxalloc.adopt(capsule)
    print(re.sub(r" at 0x[0-9a-f]+", "", repr(handler)))  # without the address of the struct
    assert handler is ctxalloc.handler("some C pool")
    assert handler.alignment == 1, "nothing is known of a foreign handler's alignment"

    with ctxalloc.use(handler):
        array = np.ones(1000)
        gone_soon = np.zeros(10)
        assert ctxalloc.handler_of(array) is handler
        print(f"in the scope: {blocks()}, the array lives in {ctxalloc.get_handler_name(array)}")
        print(f"Rust uses it too: {rust.buffer_of(4096)}")
    del gone_soon
    print(f"afterwards: {blocks()}, the next array lives in {ctxalloc.get_handler_name(np.ones(1000))}")
    del array
    print(f"at the end: {blocks()}")


if __name__ == "__main__":
    main()
