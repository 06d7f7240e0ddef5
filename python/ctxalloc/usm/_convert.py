"""Arrays over memory that already exists: that of an ndarray, or of another library."""

import numpy as np
import numpy.typing as npt

from ctxalloc import _native
from ctxalloc.usm import _dlpack
from ctxalloc.usm._array import Array, empty
from ctxalloc.usm._copies import copy as copy_elements
from ctxalloc.usm._geometry import Found, Host, check_dtype, geometry, is_possible
from ctxalloc.usm._interface import consume
from ctxalloc.usm._runtime import Kind, UsmKind, is_loaded, kind_meant, native_queue, place_of, queue_meant, where


def asarray(
    obj: object,
    /,
    dtype: npt.DTypeLike | None = None,
    *,
    kind: Kind | None = None,
    queue: object = None,
    copy: bool | None = None,
) -> Array:
    """An array over ``obj``'s memory if that is USM of the given kind and queue; else a copy in such memory.

    ``obj`` may be an ``Array``, anything with ``__sycl_usm_array_interface__`` (dpctl's memory, dpnp's arrays), an
    ndarray that was made under a handler over USM, or whatever ``numpy.asarray`` takes. ``copy=True`` always copies,
    ``copy=False`` never does: ValueError if it would have to.
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
        msg = f"'{type(obj).__qualname__}' is not in such USM, and can be only as a copy, which copy=False forbids"
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
    """Where in USM an ndarray is; None if it is not in USM."""
    address: int = arr.__array_interface__["data"][0]
    place = place_of(_native.handler_of(arr)) if queue is None else None
    if place is not None:
        owner, kind = place
    else:
        # SYCL is not loaded only to learn that an array is not in its memory.
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
    """An ``Array`` over the memory of an ndarray that is in USM. The ``Array`` keeps the ndarray alive.

    dpctl and dpnp copy an ndarray even if it is in USM; they use an ``Array`` without a copy. ``copy=True`` copies an
    ndarray that is not in USM, which is a ValueError without it. TypeError: not an ndarray, or not of numbers or bools.
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
    where_it_is, advice = _why_not(arr, queue)
    msg = f"{where_it_is}; {advice}, or say copy=True"
    raise ValueError(msg)


def _why_not(arr: Host, queue: object) -> tuple[str, str]:
    """Where an ndarray is that cannot be exported, and what the user can do about it."""
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
    """An array over the memory of any object with ``__dlpack__``, without a copy.

    BufferError: the memory is not USM, or its elements are not numbers or bools; ``asarray(numpy.from_dlpack(obj))``
    copies an array of the host. TypeError: the object has no ``__dlpack__``.
    """
    return Array._of(_dlpack.consume(obj))


for _public in (asarray, export, from_dlpack):
    _public.__module__ = "ctxalloc.usm"
