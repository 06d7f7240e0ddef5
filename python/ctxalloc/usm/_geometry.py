"""Where elements are in memory. NumPy does the geometry, on addresses alone: the host may not be able to read them."""

from typing import Any, NamedTuple, TypeAlias

import numpy as np

from ctxalloc import _native
from ctxalloc._described import span
from ctxalloc.usm._runtime import UsmKind

MAX_AXES = 64 if int(np.__version__.split(".")[0]) >= 2 else 32
"""As many axes as NumPy's arrays may have, as NumPy does the geometry."""

Host: TypeAlias = np.ndarray[Any, np.dtype[Any]]


class Found(NamedTuple):
    """Elements in memory: where they are, of what type, and what keeps the memory alive. Strides are in elements."""

    owner: object
    queue: Any
    kind: UsmKind
    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: np.dtype[Any]
    readonly: bool

    @property
    def size(self) -> int:
        """The number of elements."""
        count = 1
        for length in self.shape:
            count *= length
        return count

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements follow one another without gaps, in C's order."""
        expected = 1
        for length, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if length > 1 and stride != expected:
                return self.size == 0
            expected *= length
        return True

    @property
    def nbytes(self) -> int:
        """The size of all elements in bytes."""
        return self.size * self.dtype.itemsize

    @property
    def is_dense(self) -> bool:
        """Whether the elements follow one another without gaps, in any order of the axes, each once."""
        expected = 1
        axes = zip(self.strides, self.shape, strict=True)
        for stride, length in sorted((abs(stride), length) for stride, length in axes if length > 1):
            if stride != expected:
                return False
            expected *= length
        return True

    @property
    def span(self) -> tuple[int, int]:
        """The address of the first byte, and the address after the last."""
        item = self.dtype.itemsize
        return span(self.address, self.shape, tuple(stride * item for stride in self.strides), item)


def row_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides in elements of a contiguous array in C's order."""
    strides: tuple[int, ...] = ()
    count = 1
    for length in reversed(shape):
        strides = (count, *strides)
        count *= max(length, 1)
    return strides


def is_possible(dtype: np.dtype[Any]) -> bool:
    """Whether elements are numbers or bools in native byte order: SYCL's interface knows no others."""
    # C's long double is 80 bits wide on the host, and no device has it.
    is_wide = dtype.kind in "fc" and dtype.itemsize > (16 if dtype.kind == "c" else 8)
    return dtype.kind in "biufc" and dtype.isnative and not dtype.hasobject and not is_wide


def check_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The same dtype. TypeError: USM cannot have elements of it."""
    if not is_possible(dtype):
        msg = (
            f"dtype {dtype} cannot live in a USM array; give bools or numbers in native byte order, floats of at most "
            "64 bits (complex128 for pairs)"
        )
        raise TypeError(msg)
    return dtype


class _Laid:
    """An object with ``__array_interface__`` that keeps the memory alive."""

    def __init__(self, found: Found) -> None:
        self.__array_interface__ = {
            "shape": found.shape,
            "typestr": found.dtype.str,
            "data": (found.address, found.readonly),
            "strides": tuple(stride * found.dtype.itemsize for stride in found.strides),
            "version": 3,
        }
        self.owner = found.owner


def geometry(found: Found) -> Host:
    """An ndarray over the elements. If the host cannot read them, it may be used for its geometry only."""
    return np.asarray(_Laid(found))


def found_in(view: Host, found: Found) -> Found:
    """The elements of ``found`` that a view of its geometry has."""
    item = found.dtype.itemsize
    return found._replace(
        # The address of a view without elements may be past the end of the memory.
        address=found.address if view.size == 0 else view.__array_interface__["data"][0],
        shape=view.shape,
        strides=tuple(stride // item for stride in view.strides),
    )


class Placed(_native.UsmView):
    """The base class of ``Array``, with what copies need of one."""

    __slots__ = ("_found", "_memory")

    _found: Found
    _memory: _native.UsmMemory | None
