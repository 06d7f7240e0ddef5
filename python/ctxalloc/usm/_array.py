"""`Array`: elements in USM, with the SYCL USM Array Interface, and the functions that make one."""

import importlib
import math
import operator
from types import EllipsisType
from typing import Any, NoReturn, Self, TypeAlias

import numpy as np
import numpy.typing as npt

from ctxalloc import _native
from ctxalloc.usm import _dlpack
from ctxalloc.usm._copies import copy as copy_elements
from ctxalloc.usm._geometry import (
    MAX_AXES,
    Found,
    Host,
    Placed,
    check_dtype,
    found_in,
    geometry,
    is_possible,
    row_strides,
)
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
    def usm_type(self) -> str:
        """The kind of memory, by dpctl's and dpnp's name for it."""
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
        """How many bytes an element has."""
        return self.dtype.itemsize

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

    def __setitem__(self, key: _Index | tuple[_Index, ...], value: object, /) -> None:
        """Writes to a part what NumPy would: an array of it, or what broadcasts to its shape; and waits.

        Nothing is written between the elements. ValueError: read-only, or the shapes do not fit.
        """
        part = self[key]
        if isinstance(value, Array) and (value.shape, value.dtype) == (part.shape, part.dtype):
            copy_elements(part, value)
            return
        values: Host = np.empty(part.shape, part.dtype)
        values[...] = value.asnumpy() if isinstance(value, Array) else value
        copy_elements(part, values)

    def reshape(self, *shape: int | tuple[int, ...]) -> Self:
        """A view of another shape, in C's order; one length may be -1. ValueError: not without a copy."""
        wanted = shape[0] if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape
        found = self._found
        parts = _lengths_meant(wanted, found.size)
        if found.is_contiguous:
            return self._of(found._replace(shape=parts, strides=row_strides(parts)), self._memory)
        try:
            view = _reshaped(geometry(found), parts)
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

    __hash__ = None  # type: ignore[assignment]  # as of an ndarray

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
    if len(parts) > MAX_AXES:
        msg = f"a shape of {len(parts)} axes is too long; NumPy's arrays, and so these, have at most {MAX_AXES}"
        raise ValueError(msg)
    return tuple(int(part) for part in parts)


def _reshaped(view: Host, shape: tuple[int, ...]) -> Host:
    """Never a copy: nobody may read the elements. AttributeError, ValueError: not without one."""
    if np.lib.NumpyVersion(np.__version__) >= "2.1.0":
        return np.reshape(view, shape, copy=False)
    view.shape = shape
    return view


def _lengths_meant(shape: object, size: int) -> tuple[int, ...]:
    """A shape of so many elements, in which one length may be -1."""
    parts = shape if isinstance(shape, (tuple, list)) else (shape,)
    if list(parts).count(-1) == 1:
        rest = _shape_meant(tuple(part for part in parts if part != -1))
        known = math.prod(rest)
        length = size // known if known and size % known == 0 else 0
        parts = tuple(length if part == -1 else part for part in parts)
    lengths = _shape_meant(parts)
    if math.prod(lengths) != size:
        msg = f"{size} elements have no shape {shape}"
        raise ValueError(msg)
    return lengths


def _make(shape: object, dtype: npt.DTypeLike, kind: Kind, queue: object, *, zeroed: bool) -> Array:
    wanted, lengths, element = kind_meant(kind), _shape_meant(shape), check_dtype(np.dtype(dtype))
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
        in_usm = _find(host, None) if is_possible(host.dtype) else None
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
    where_it_is, advice = _told_of(arr, queue)
    msg = f"{where_it_is}; {advice}, or say copy=True"
    raise ValueError(msg)


def _told_of(arr: Host, queue: object) -> tuple[str, str]:
    """Where an ndarray is that cannot be exported, and what to do about it."""
    address: int = arr.__array_interface__["data"][0]
    if any(stride % arr.dtype.itemsize for stride in arr.strides):
        item = arr.dtype.itemsize
        return f"the array's strides are not whole elements of {item} bytes: {arr.strides}", "copy it first"
    there, kind = where(address) if is_loaded() else (None, UsmKind.UNKNOWN)
    if queue is not None and kind is not UsmKind.UNKNOWN:
        there_is = f"the array is in '{kind}' USM of another context than that of queue={queue!r}"
        return there_is, f"give queue={there!r} or none"
    owner = _native.handler_of(arr)
    place = "memory of no handler" if owner is None else f"the memory of handler '{owner.name}'"
    return f"the array is in {place}, not in USM", "make it inside of ctxalloc.usm.use()"


def from_dlpack(obj: object, /) -> Array:
    """An array over the memory of anything with ``__dlpack__``, without a copy.

    BufferError: the memory is not USM; ``asarray(numpy.from_dlpack(obj))`` copies what is on the host.
    """
    return Array._of(_dlpack.consume(obj))


for _public in (empty, zeros, asarray, export, from_dlpack):
    _public.__module__ = "ctxalloc.usm"
