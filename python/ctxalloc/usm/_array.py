"""`Array`: elements in USM, with the SYCL USM Array Interface; and the functions that allocate one."""

import importlib
import math
from types import EllipsisType
from typing import Any, NoReturn, Self, TypeAlias

import numpy as np
import numpy.typing as npt

from ctxalloc import _native
from ctxalloc.usm import _dlpack
from ctxalloc.usm._copies import copy as copy_elements
from ctxalloc.usm._geometry import Found, Host, Placed, check_dtype, found_in, geometry, row_strides
from ctxalloc.usm._runtime import Kind, UsmKind, handler_over, kind_meant, native_queue, queue_meant, tensors
from ctxalloc.usm._shapes import is_index, lengths_meant, reshaped, shape_meant

_Index: TypeAlias = int | slice | EllipsisType | None


class Array(Placed):
    """Elements in USM: a shape and a dtype over memory that a device can use, for dpctl, dpnp and NumPy.

    ``empty``, ``zeros``, ``asarray``, ``export`` and ``from_dlpack`` make one; slices are views. It does not compute:
    ``dpnp.tensor.asarray(array)`` and, if the host can read it, ``numpy.asarray(array)`` are arrays over the same
    memory that do. ``__sycl_usm_array_interface__`` has the fields of the specification, with strides in elements.

    Kernels run asynchronously, so the host waits for the queue before it reads.
    """

    __module__ = "ctxalloc.usm"
    __slots__ = ("_exported",)

    @classmethod
    def _of(cls, found: Found, memory: _native.UsmMemory | None = None) -> Self:
        item = found.dtype.itemsize
        self = cls.__new__(
            cls,
            found.owner,
            native_queue(found.queue),
            str(found.kind),
            (found.address, found.shape, tuple(stride * item for stride in found.strides)),
            (item, np.empty(0, found.dtype).data.format),
            found.readonly,
        )
        self._found = found
        self._memory = memory
        return self

    @property
    def shape(self) -> tuple[int, ...]:
        """The number of elements along each axis."""
        return self._found.shape

    @property
    def strides(self) -> tuple[int, ...]:
        """The distance from one element to the next along each axis, in elements (in NumPy it is in bytes)."""
        return self._found.strides

    @property
    def dtype(self) -> np.dtype[Any]:
        """The type of an element."""
        return self._found.dtype

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of elements."""
        return self._found.size

    @property
    def nbytes(self) -> int:
        """The size of all elements in bytes."""
        return self.size * self.dtype.itemsize

    @property
    def kind(self) -> UsmKind:
        """The kind of memory."""
        return self._found.kind

    @property
    def readonly(self) -> bool:
        """Whether it must not be written to."""
        return self._found.readonly

    @property
    def sycl_queue(self) -> Any:
        """The dpctl.SyclQueue of its memory. dpnp can use arrays together if they are on the same one."""
        # The queue object of dpctl's memory object: dpnp.asarray() copies unless the two are identical.
        return self._dpctl_memory().sycl_queue

    @property
    def handler(self) -> _native.Handler | None:
        """The handler over the pool that its memory comes from.

        None if this package did not allocate the memory, or if its context is your own and has no handler
        (``usm.handler``).
        """
        return None if self._memory is None else handler_over(self._found.queue, self.kind)

    @property
    def usm_type(self) -> str:
        """The kind of memory, under the name that dpctl and dpnp use."""
        return str(self.kind)

    @property
    def sycl_device(self) -> Any:
        """The dpctl.SyclDevice of its queue."""
        return self.sycl_queue.sycl_device

    @property
    def sycl_context(self) -> Any:
        """The dpctl.SyclContext of its queue."""
        return self.sycl_queue.sycl_context

    @property
    def itemsize(self) -> int:
        """The size of an element in bytes."""
        return self.dtype.itemsize

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements follow one another without gaps, in C's order."""
        return self._found.is_contiguous

    @property
    def T(self) -> Self:  # noqa: N802 - NumPy's name
        """A view with the axes in the opposite order."""
        found = self._found
        return self._of(found._replace(shape=found.shape[::-1], strides=found.strides[::-1]), self._memory)

    def __getitem__(self, key: _Index | tuple[_Index, ...], /) -> Self:
        """A view, which may have no axes. IndexError: not an int, a slice, ``...`` or None; or out of range."""
        keys = key if isinstance(key, tuple) else (key,)
        for one in keys:
            if not (one is None or isinstance(one, (slice, EllipsisType)) or is_index(one)):
                msg = f"an index is an int, a slice, ... or None; got '{type(one).__qualname__}'"
                raise IndexError(msg)
        whole = keys if any(one is ... for one in keys) else (*keys, ...)
        found = self._found
        return self._of(found_in(geometry(found)[whole], found), self._memory)

    def __setitem__(self, key: _Index | tuple[_Index, ...], value: object, /) -> None:
        """Writes a value to a part as NumPy would, broadcast to its shape, and waits until it is there.

        Nothing between the elements is written. ValueError: it is read-only, or the shapes do not fit.
        """
        part = self[key]
        if isinstance(value, Array) and (value.shape, value.dtype) == (part.shape, part.dtype):
            copy_elements(part, value)
            return
        values: Host = np.empty(part.shape, part.dtype)
        values[...] = value.asnumpy() if isinstance(value, Array) else value
        copy_elements(part, values)

    def reshape(self, *shape: int | tuple[int, ...]) -> Self:
        """A view with another shape, in C's order; one length may be -1. ValueError: it would have to be a copy."""
        wanted = shape[0] if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape
        found = self._found
        parts = lengths_meant(wanted, found.size)
        if found.is_contiguous:
            return self._of(found._replace(shape=parts, strides=row_strides(parts)), self._memory)
        try:
            view = reshaped(geometry(found), parts)
        except (AttributeError, ValueError) as error:
            msg = (
                f"elements of shape {self.shape} and strides {self.strides} have the shape {parts} only in a copy: "
                "copy_to().reshape(...)"
            )
            raise ValueError(msg) from error
        return self._of(found_in(view, found), self._memory)

    def __eq__(self, other: object) -> bool:
        msg = (
            "== of a ctxalloc.usm.Array: it computes nothing; compare dpnp.asarray(array), or array.asnumpy() (`is` "
            "says whether two are the same object)"
        )
        raise TypeError(msg)

    __hash__ = None  # type: ignore[assignment]  # as for an ndarray

    def __bool__(self) -> bool:
        msg = "the truth of a ctxalloc.usm.Array: it computes nothing; ask array.size, or array.asnumpy()"
        raise TypeError(msg)

    def __reduce__(self) -> NoReturn:
        msg = (
            "a ctxalloc.usm.Array cannot be pickled: its memory is a queue's of this process; pickle array.asnumpy(), "
            "and make it again by ctxalloc.usm.asarray(...)"
        )
        raise TypeError(msg)

    def __copy__(self) -> "Array":
        return self.copy_to()

    def __deepcopy__(self, memo: dict[int, Any], /) -> "Array":
        return self.copy_to()

    def __len__(self) -> int:
        if not self.shape:
            msg = "len() of an array without axes"
            raise TypeError(msg)
        return self.shape[0]

    def __repr__(self) -> str:
        readonly = ", read-only" if self.readonly else ""
        return f"<ctxalloc.usm.Array {self.shape} {self.dtype} in '{self.kind}' USM{readonly}>"

    @property
    def __sycl_usm_array_interface__(self) -> dict[str, Any]:
        found = self._found
        return {
            "shape": found.shape,
            "typestr": found.dtype.str,
            "typedescr": found.dtype.descr,
            "data": (found.address, found.readonly),
            "strides": None if found.is_contiguous else found.strides,
            "offset": 0,
            "version": 1,
            "syclobj": found.queue,
        }

    @property
    def __usm_ndarray__(self) -> Any:
        # dpnp asks a foreign object for this before it copies. It accepts negative strides here, which it refuses
        # elsewhere.
        module = tensors()
        if module is None:
            msg = "__usm_ndarray__ needs dpnp: pip install dpnp"
            raise AttributeError(msg)
        found = self._found
        array = module.usm_ndarray(
            found.shape,
            found.dtype,
            buffer=self._dpctl_memory(),
            strides=found.strides,
            offset=(found.address - found.span[0]) // found.dtype.itemsize,
        )
        if found.readonly:
            array.flags.writable = False
        return array

    def _dpctl_memory(self) -> Any:
        """Dpctl's memory object for the bytes from the first to the last, made once."""
        try:
            return self._exported
        except AttributeError:
            first, behind = self._found.span
            size_bytes = max(behind - first, 1)
            flat = self._found._replace(address=first, shape=(size_bytes,), strides=(1,), dtype=np.dtype(np.uint8))
            self._exported: Any = importlib.import_module("dpctl.memory").as_usm_memory(self._of(flat, self._memory))
            return self._exported

    @property
    def __array_interface__(self) -> dict[str, Any]:
        interface: dict[str, Any] = self._host().__array_interface__
        return interface

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> Host:  # noqa: FBT001 - NumPy's
        view = self._host()
        wanted = view.dtype if dtype is None else np.dtype(dtype)
        if copy or (wanted != view.dtype and copy is None):
            return view.astype(wanted)
        if wanted != view.dtype:
            msg = f"an array of {view.dtype} is one of {wanted} only by a copy, which copy=False forbids"
            raise ValueError(msg)
        return view

    def _host(self) -> Host:
        """An ndarray over the same memory. TypeError: the host cannot read that."""
        # The buffer waits for the queue. Only from Python 3.12 on do the type stubs know that there is one.
        return np.asarray(memoryview(self))  # type: ignore[arg-type,unused-ignore]

    def asnumpy(self) -> Host:
        """A copy on the host, allocated by the current handler."""
        made: Host = np.empty(self.shape, self.dtype)
        copy_elements(made, self)
        return made

    def copy_to(self, *, kind: Kind | None = None, queue: object = None) -> "Array":
        """A copy in memory of another kind or on another queue; by default in its own."""
        made = empty(
            self.shape, self.dtype, kind=kind or self.kind, queue=self._found.queue if queue is None else queue
        )
        copy_elements(made, self)
        return made

    def __dlpack_device__(self) -> tuple[int, int]:
        """(14, id): kDLOneAPI, for every kind. ``__dlpack__(dl_device=(1, 0))`` is for the CPU."""
        return _dlpack.ONEAPI, _dlpack.device_id(self._found.queue)

    def __dlpack__(
        self,
        *,
        stream: object = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> object:
        """A DLPack capsule for its own device, or for the CPU (``dl_device=(1, 0)``).

        BufferError: another device was asked for; or the CPU with ``copy=False``, and the host cannot read the memory.
        """
        own = self.__dlpack_device__()
        wanted = own if dl_device is None else (int(dl_device[0]), int(dl_device[1]))
        if wanted not in (own, _dlpack.HOST):
            msg = f"dl_device={wanted} is not possible; ask for {own} or {_dlpack.HOST} (the CPU)"
            raise BufferError(msg)
        is_versioned = max_version is not None and max_version[0] >= 1
        if wanted == own:
            if stream is not None and stream != self._found.queue:
                self._queue.wait()
            source = self.copy_to() if copy else self
            return _dlpack.capsule(source, source._found, own, is_versioned=is_versioned, is_copied=bool(copy))
        if self.kind is UsmKind.DEVICE and copy is False:
            msg = "USM of the kind 'device' reaches the CPU only by a copy, which copy=False forbids"
            raise BufferError(msg)
        if copy or self.kind is UsmKind.DEVICE:
            made = self.asnumpy()
            item = made.dtype.itemsize
            found = self._found._replace(
                address=made.__array_interface__["data"][0],
                strides=tuple(stride // item for stride in made.strides),
                readonly=False,
            )
            return _dlpack.capsule(made, found, _dlpack.HOST, is_versioned=is_versioned, is_copied=True)
        self._queue.wait()
        return _dlpack.capsule(self, self._found, _dlpack.HOST, is_versioned=is_versioned, is_copied=False)


def _make(shape: object, dtype: npt.DTypeLike, kind: Kind, queue: object, *, zeroed: bool) -> Array:
    wanted, lengths, element = kind_meant(kind), shape_meant(shape), check_dtype(np.dtype(dtype))
    owner = queue_meant(queue)
    size_bytes = math.prod(lengths) * element.itemsize
    if size_bytes >= 1 << 63:
        msg = f"an array of shape {lengths} and {element} has {size_bytes} bytes, which no memory has"
        raise MemoryError(msg)
    memory = _native.UsmMemory(native_queue(owner), str(wanted), size_bytes, zeroed=zeroed)
    found = Found(memory, owner, wanted, memory.address, lengths, row_strides(lengths), element, readonly=False)
    return Array._of(found, memory)


def empty(
    shape: int | tuple[int, ...], dtype: npt.DTypeLike = np.float64, *, kind: Kind = "shared", queue: object = None
) -> Array:
    """A new array whose elements are not initialised.

    ``kind`` is ``"shared"``, ``"host"`` or ``"device"``. ``queue`` is a ``dpctl.SyclQueue``, a filter string, or None
    for the queue that dpctl and dpnp use by default. MemoryError: the device has no room. RuntimeError: there is no
    such device, or it has no such memory. TypeError, ValueError: the dtype, the shape or the kind is invalid.
    """
    return _make(shape, dtype, kind, queue, zeroed=False)


def zeros(
    shape: int | tuple[int, ...], dtype: npt.DTypeLike = np.float64, *, kind: Kind = "shared", queue: object = None
) -> Array:
    """A new array of zeros; otherwise like ``empty``."""
    return _make(shape, dtype, kind, queue, zeroed=True)


for _public in (empty, zeros):
    _public.__module__ = "ctxalloc.usm"
