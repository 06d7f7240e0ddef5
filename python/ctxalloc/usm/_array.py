"""`Array`: elements in USM, with the SYCL USM Array Interface, and the functions that make one."""

import importlib
import operator
from types import EllipsisType
from typing import Any, Self, TypeAlias

import numpy as np
import numpy.typing as npt

from ctxalloc import _native
from ctxalloc.usm import _dlpack
from ctxalloc.usm._copies import copy as copy_elements
from ctxalloc.usm._geometry import Found, Host, Placed, check_dtype, found_in, geometry
from ctxalloc.usm._interface import consume
from ctxalloc.usm._runtime import (
    Kind,
    UsmKind,
    handler_over,
    is_loaded,
    kind_meant,
    native_queue,
    place_of,
    queue_meant,
    where,
)

_Index: TypeAlias = int | slice | EllipsisType | None


class Array(Placed):
    """Elements in USM: a shape and a dtype over memory that a device can use, for dpctl, dpnp, and NumPy.

    Made by ``empty``, ``zeros``, ``asarray``, ``export`` and ``from_dlpack``; slices are views. It computes nothing:
    ``dpnp.tensor.asarray(array)`` and, where the host can read it, ``numpy.asarray(array)`` are arrays over the same
    memory that do. ``__sycl_usm_array_interface__`` has the fields of the document, strides in elements.

    What the host reads waits for the queue first: kernels run on their own time.
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
        """How many elements along each axis."""
        return self._found.shape

    @property
    def strides(self) -> tuple[int, ...]:
        """From one element to the next along each axis, in elements (NumPy counts bytes)."""
        return self._found.strides

    @property
    def dtype(self) -> np.dtype[Any]:
        """What an element is."""
        return self._found.dtype

    @property
    def ndim(self) -> int:
        """How many axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """How many elements."""
        return self._found.size

    @property
    def nbytes(self) -> int:
        """How many bytes the elements have."""
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
        """The dpctl.SyclQueue of its memory: arrays on the same one can be mixed."""
        # The object that dpctl's memory has: dpnp.asarray() copies unless the two are identical.
        return self._dpctl_memory().sycl_queue

    @property
    def handler(self) -> _native.Handler | None:
        """The handler over the pool that its memory is from.

        None where the memory is not this package's, and in a context of your own that has no handler (``usm.handler``).
        """
        return None if self._memory is None else handler_over(self._found.queue, self.kind)

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements lie one behind the other, in C's order."""
        return self._found.is_contiguous

    @property
    def T(self) -> Self:  # noqa: N802 - NumPy's name
        """A view with the axes in the opposite order."""
        found = self._found
        return self._of(found._replace(shape=found.shape[::-1], strides=found.strides[::-1]), self._memory)

    def __getitem__(self, key: _Index | tuple[_Index, ...], /) -> Self:
        """A view, of no axes too. IndexError: other than ints, slices, ``...`` and None; out of range."""
        keys = key if isinstance(key, tuple) else (key,)
        for one in keys:
            if not (one is None or isinstance(one, (slice, EllipsisType)) or _is_index(one)):
                msg = f"an index is an int, a slice, ... or None; got '{type(one).__qualname__}'"
                raise IndexError(msg)
        whole = keys if any(one is ... for one in keys) else (*keys, ...)
        found = self._found
        return self._of(found_in(geometry(found)[whole], found), self._memory)

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
        # What dpnp asks a foreign object for before it would copy; with negative strides too, which it refuses
        # elsewhere.
        found = self._found
        array = _tensors().usm_ndarray(
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
        """Dpctl's object for the bytes from the first to the last, made once."""
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
        """An ndarray over the same memory. TypeError: the host cannot read it."""
        # Which waits for the queue. From Python 3.12 on the types say that it has a buffer.
        return np.asarray(memoryview(self))  # type: ignore[arg-type,unused-ignore]

    def asnumpy(self) -> Host:
        """A copy on the host, made in the current handler."""
        made: Host = np.empty(self.shape, self.dtype)
        copy_elements(made, self)
        return made

    def copy_to(self, *, kind: Kind | None = None, queue: object = None) -> "Array":
        """A copy in memory of a kind on a queue: its own unless you say otherwise."""
        made = empty(
            self.shape, self.dtype, kind=kind or self.kind, queue=self._found.queue if queue is None else queue
        )
        copy_elements(made, self)
        return made

    def __dlpack_device__(self) -> tuple[int, int]:
        """(14, id): kDLOneAPI, whatever the kind; ask ``__dlpack__`` for ``dl_device=(1, 0)`` to have the host's."""
        return _dlpack.ONEAPI, _dlpack.device_id(self._found.queue)

    def __dlpack__(
        self,
        *,
        stream: object = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> object:
        """A DLPack capsule for its own device, or for the CPU (``dl_device=(1, 0)``) where the host can read it.

        BufferError: for another device; for the CPU without a copy where the host cannot read it.
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


def _tensors() -> Any:
    """The module of usm_ndarray: dpnp's, or dpctl's before 0.22. AttributeError: there is none."""
    for name in ("dpnp.tensor", "dpctl.tensor"):
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
    msg = "__usm_ndarray__ needs dpnp: pip install dpnp"
    raise AttributeError(msg)


def _is_index(one: object) -> bool:
    if isinstance(one, (bool, np.bool_)):
        return False
    try:
        operator.index(one)  # type: ignore[arg-type]  # whether it can is the question
    except TypeError:
        return False
    return True


def _shape_meant(shape: object) -> tuple[int, ...]:
    parts = shape if isinstance(shape, (tuple, list)) else (shape,)
    if not all(_is_index(part) and int(part) >= 0 for part in parts):
        msg = f"shape={shape!r} is no shape; give an int from 0 up, or a tuple of them"
        raise ValueError(msg)
    return tuple(int(part) for part in parts)


def _make(shape: object, dtype: npt.DTypeLike, kind: Kind, queue: object, *, zeroed: bool) -> Array:
    wanted, lengths, element = kind_meant(kind), _shape_meant(shape), check_dtype(np.dtype(dtype))
    owner = queue_meant(queue)
    strides: list[int] = []
    count = 1
    for length in reversed(lengths):
        strides.append(count)
        count *= max(length, 1)
    size_bytes = 0 if 0 in lengths else count * element.itemsize
    if size_bytes >= 1 << 63:
        msg = f"an array of shape {lengths} and {element} has {size_bytes} bytes, which no memory has"
        raise MemoryError(msg)
    memory = _native.UsmMemory(native_queue(owner), str(wanted), size_bytes, zeroed=zeroed)
    found = Found(memory, owner, wanted, memory.address, lengths, tuple(reversed(strides)), element, readonly=False)
    return Array._of(found, memory)


def empty(
    shape: int | tuple[int, ...], dtype: npt.DTypeLike = np.float64, *, kind: Kind = "shared", queue: object = None
) -> Array:
    """A new array whose elements are what was there before.

    ``kind`` is ``"shared"``, ``"host"`` or ``"device"``; ``queue`` a ``dpctl.SyclQueue``, a filter string, or None
    for the one that dpctl and dpnp use by default. MemoryError: the device has no room. RuntimeError: no such
    device, or none with such memory. ValueError: a shape, kind or dtype that cannot be.
    """
    return _make(shape, dtype, kind, queue, zeroed=False)


def zeros(
    shape: int | tuple[int, ...], dtype: npt.DTypeLike = np.float64, *, kind: Kind = "shared", queue: object = None
) -> Array:
    """A new array of zeros; else as ``empty``."""
    return _make(shape, dtype, kind, queue, zeroed=True)


def asarray(
    obj: object,
    /,
    dtype: npt.DTypeLike | None = None,
    *,
    kind: Kind | None = None,
    queue: object = None,
    copy: bool | None = None,
) -> Array:
    """An array over ``obj``'s memory where that is USM of the kind and queue that are asked for, else a copy there.

    ``obj`` may be an ``Array``, anything with ``__sycl_usm_array_interface__`` (dpctl's memory, dpnp's arrays), an
    ndarray that was made under a handler over USM, or whatever ``numpy.asarray`` takes. ``copy=True`` always copies,
    ``copy=False`` never: ValueError where it would have to.
    """
    wanted_kind = None if kind is None else kind_meant(kind)
    wanted_queue = None if queue is None else queue_meant(queue)
    wanted_dtype = None if dtype is None else check_dtype(np.dtype(dtype))
    source: Array | Host
    if isinstance(obj, Array):
        source = obj
    elif hasattr(obj, "__sycl_usm_array_interface__"):
        found = consume(obj)
        source = Array._of(found) if found.kind is not UsmKind.UNKNOWN else geometry(found)
    else:
        host: Host = np.asarray(obj)
        in_usm = None if host.dtype.kind not in "biufc" else _find(host, None)
        source = host if in_usm is None else Array._of(in_usm)
    fits = (
        isinstance(source, Array)
        and wanted_kind in (None, source.kind)
        and wanted_queue in (None, source._found.queue)
        and (wanted_dtype is None or wanted_dtype == source.dtype)
    )
    if fits and not copy and isinstance(source, Array):
        return source
    if copy is False:
        msg = f"'{type(obj).__qualname__}' is not in such USM, and gets there only by a copy, which copy=False forbids"
        raise ValueError(msg)
    if isinstance(source, Array) and (wanted_dtype is None or wanted_dtype == source.dtype):
        return source.copy_to(kind=wanted_kind, queue=wanted_queue)
    values = source.asnumpy() if isinstance(source, Array) else source
    element = check_dtype(values.dtype) if wanted_dtype is None else wanted_dtype
    if wanted_queue is None and isinstance(source, Array):
        wanted_queue = source._found.queue
    default_kind = source.kind if isinstance(source, Array) else UsmKind.SHARED
    made = empty(values.shape, element, kind=wanted_kind or default_kind, queue=wanted_queue)
    copy_elements(made, values.astype(element, copy=False))
    return made


def _find(arr: Host, queue: object) -> Found | None:
    """Where in USM an ndarray lies; None where it does not."""
    address: int = arr.__array_interface__["data"][0]
    place = place_of(_native.handler_of(arr)) if queue is None else None
    if place is not None:
        owner, kind = place
    else:
        # Nothing of SYCL is loaded only to hear that an array is not in its memory.
        if queue is None and not is_loaded():
            return None
        if queue is None:
            owner, kind = where(address)
        else:
            owner = queue_meant(queue)
            kind = UsmKind(native_queue(owner).kind_of(address))
    item = arr.dtype.itemsize
    if kind is UsmKind.UNKNOWN or any(stride % item for stride in arr.strides):
        return None
    strides = tuple(stride // item for stride in arr.strides)
    return Found(arr, owner, kind, address, arr.shape, strides, arr.dtype, readonly=not arr.flags.writeable)


def export(arr: object, /, *, queue: object = None, copy: bool = False) -> Array:
    """An ndarray that lives in USM, as an ``Array`` over the same memory, which it keeps.

    dpctl and dpnp copy a plain ndarray, whatever its memory; this they take as it is. ``copy=True`` copies one that
    is not in USM; else that is a ValueError. TypeError: no ndarray, or its elements are no numbers.
    """
    if not isinstance(arr, np.ndarray):
        msg = f"export() takes a numpy.ndarray, got '{type(arr).__qualname__}'; asarray() takes anything"
        raise TypeError(msg)
    check_dtype(arr.dtype)
    found = _find(arr, queue)
    if found is not None:
        return Array._of(found)
    if copy:
        return asarray(arr, queue=queue, copy=True)
    owner = _native.handler_of(arr)
    place = "memory of no handler" if owner is None else f"the memory of handler '{owner.name}'"
    msg = (
        f"the array is in {place}, not in USM (or its strides are not whole elements); make it inside of "
        "ctxalloc.usm.use(), or say copy=True"
    )
    raise ValueError(msg)


def from_dlpack(obj: object, /) -> Array:
    """An array over the memory of anything with ``__dlpack__``, without a copy.

    BufferError: the memory is not USM; ``asarray(numpy.from_dlpack(obj))`` copies what is on the host.
    """
    return Array._of(_dlpack.consume(obj))


for _public in (empty, zeros, asarray, export, from_dlpack):
    _public.__module__ = "ctxalloc.usm"
