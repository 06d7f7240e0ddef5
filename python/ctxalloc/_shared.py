"""Where another process finds the memory of an array that was made under ``strategies.SharedMemory``."""

from typing import Any, NamedTuple

import numpy as np

from ctxalloc import _native


class SharedBlock(NamedTuple):
    """Where another process finds an array: it maps ``size`` bytes of ``fd``, and the array begins ``offset`` bytes in.

    ``fd`` belongs to the memory: it is closed when the last array in it is freed. To keep it longer, duplicate it
    (``os.dup``); sending it over a socket duplicates it too.
    """

    fd: int
    offset: int
    size: int


SharedBlock.__module__ = "ctxalloc"


def shared_memory_of(arr: np.ndarray[Any, Any], /) -> SharedBlock:
    """Where another process finds an array's memory, or a view's.

    ::

        handler = ctxalloc.register("shared", ctxalloc.strategies.SharedMemory())
        with ctxalloc.use(handler):
            a = numpy.arange(1000.0)
        fd, offset, size = ctxalloc.shared_memory_of(a)

    The other process gets the descriptor (``socket.send_fds``, ``subprocess`` with ``pass_fds``,
    ``multiprocessing.reduction.DupFd``) and the numbers, and needs nothing but NumPy::

        b = numpy.ndarray(1000, float, buffer=mmap.mmap(fd, size), offset=offset)

    Each sees what the other writes. Pass ``strides=a.strides`` too where the array is not contiguous.

    ValueError: the array is not in shared memory. TypeError: it is not an ndarray.
    """
    found = _native.shared_memory_at(_address(arr))
    if found is None:
        owner = _native.handler_of(arr)
        place = "memory of no handler" if owner is None else f"the memory of handler '{owner.name}'"
        msg = f"the array is in {place}, not in shared memory; make it under a handler of strategies.SharedMemory()"
        raise ValueError(msg)
    return SharedBlock(*found)


def _address(arr: Any) -> int:
    """Where its data begins. TypeError: not an ndarray."""
    if not issubclass(type(arr), np.ndarray):  # its real type: a mock sets `__class__` as it likes
        msg = f"shared_memory_of() takes a numpy.ndarray, got '{type(arr).__qualname__}'"
        raise TypeError(msg)
    address: int = arr.__array_interface__["data"][0]
    return address
