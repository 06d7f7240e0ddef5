"""NumPy's C side by ctypes, as foreign code would use it: SetHandler, GetHandler, and handlers made by hand.

Nothing here knows ctxalloc. The slots are those of `_ARRAY_API`, the structs those of NEP 49.
"""

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

try:
    from numpy._core import _multiarray_umath, multiarray  # type: ignore[attr-defined]
except ImportError:  # NumPy 1.26
    from numpy.core import _multiarray_umath, multiarray  # type: ignore[no-redef]

CAPSULE_NAME = b"mem_handler"

_get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_get_pointer.restype, _get_pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype, _new_capsule.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]

_api = ctypes.cast(_get_pointer(_multiarray_umath._ARRAY_API, None), ctypes.POINTER(ctypes.c_void_p))
_set = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p)(_api[304])
_get = ctypes.PYFUNCTYPE(ctypes.py_object)(_api[305])

numpys_name: Callable[..., str | None] = multiarray.get_handler_name
numpys_version: Callable[..., int | None] = multiarray.get_handler_version
numpys_default: Any = ctypes.cast(ctypes.c_void_p(_api[306]), ctypes.POINTER(ctypes.py_object))[0]


def set_handler(capsule: object | None) -> Any:
    """`PyDataMem_SetHandler`; None is C's NULL. Returns the old capsule."""
    return _set(None if capsule is None else id(capsule))


def get_handler() -> Any:
    """`PyDataMem_GetHandler`: the capsule in the ContextVar."""
    return _get()


Malloc = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
Calloc = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t)
Realloc = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
Free = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


class Allocator(ctypes.Structure):
    """NEP 49's PyDataMemAllocator."""

    _fields_ = (("ctx", ctypes.c_void_p), ("malloc", Malloc), ("calloc", Calloc), ("realloc", Realloc), ("free", Free))


class HandlerStruct(ctypes.Structure):
    """NEP 49's PyDataMem_Handler."""

    _fields_ = (("name", ctypes.c_char * 127), ("version", ctypes.c_uint8), ("allocator", Allocator))


def struct_in(capsule: object) -> HandlerStruct:
    """The handler struct that a capsule holds."""
    address = _get_pointer(capsule, CAPSULE_NAME)
    return HandlerStruct.from_address(address)


def capsule_around(address: int, name: bytes | None = CAPSULE_NAME) -> Any:
    """A capsule; `name` must live as long."""
    return _new_capsule(address, name, None)


class ForeignHandler:
    """A handler made by hand over the C heap, which counts what it does. Immortal, as NEP 49 wants handlers to be."""

    _immortal: list["ForeignHandler"] = []  # noqa: RUF012

    def __init__(self, name: str | bytes, *, version: int = 1, missing: tuple[str, ...] = ()) -> None:
        libc = ctypes.CDLL(None)
        for function in (libc.malloc, libc.calloc, libc.realloc):
            function.restype = ctypes.c_void_p
        self.calls: list[str] = []
        self.live: dict[int, int] = {}
        self.failing = False

        def malloc(_: int, size: int) -> int | None:
            self.calls.append("malloc")
            return None if self.failing else self._made(libc.malloc(ctypes.c_size_t(size)), size)

        def calloc(_: int, count: int, size: int) -> int | None:
            self.calls.append("calloc")
            made = None if self.failing else libc.calloc(ctypes.c_size_t(count), ctypes.c_size_t(size))
            return self._made(made, count * size)

        def realloc(_: int, block: int | None, size: int) -> int | None:
            self.calls.append("realloc")
            if self.failing:
                return None
            moved = libc.realloc(ctypes.c_void_p(block), ctypes.c_size_t(size))
            self.live.pop(block or 0, None)
            return self._made(moved, size)

        def free(_: int, block: int | None, size: int) -> None:
            self.calls.append("free")
            if block is not None:
                del self.live[block]  # a block of somebody else's would be a KeyError, and that a failure of the test
            libc.free(ctypes.c_void_p(block))

        functions = {
            "malloc": Malloc(malloc),
            "calloc": Calloc(calloc),
            "realloc": Realloc(realloc),
            "free": Free(free),
        }
        self.struct = HandlerStruct(version=version)
        raw = name.encode() if isinstance(name, str) else name
        ctypes.memmove(ctypes.addressof(self.struct), raw, len(raw))
        for function_name, callback in functions.items():
            if function_name not in missing:
                setattr(self.struct.allocator, function_name, callback)
        self.functions = functions
        self.capsule = capsule_around(ctypes.addressof(self.struct))
        self._immortal.append(self)

    def _made(self, block: int | None, size: int) -> int | None:
        if block is not None:
            self.live[block] = size
        return block

    @contextmanager
    def selected(self) -> Iterator[None]:
        """Selected by NumPy's own function, not by ours."""
        old = set_handler(self.capsule)
        try:
            yield
        finally:
            set_handler(old)


def address_of(array: np.ndarray[Any, Any]) -> int:
    """Where an array's bytes start."""
    return int(array.__array_interface__["data"][0])
