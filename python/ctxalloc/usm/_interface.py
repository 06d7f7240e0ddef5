"""Reads the SYCL USM Array Interface of other objects. A field that is invalid is an error that names it.

Strides and offset count elements, as in dpctl and dpnp (the specification says bytes).
"""

import importlib
import math
import re
from typing import Any

import numpy as np

from ctxalloc._described import is_int
from ctxalloc.usm._geometry import MAX_AXES, Found, check_dtype, row_strides
from ctxalloc.usm._runtime import UsmKind, dpctl, native_queue, queue_in, queue_meant


def _wrong(field: str, value: object, wanted: str) -> ValueError:
    return ValueError(f"__sycl_usm_array_interface__[{field!r}] is {value!r}; it must be {wanted}")


def _ints(field: str, value: object, wanted: str) -> tuple[int, ...]:
    if not isinstance(value, (tuple, list)) or not all(is_int(part) for part in value):
        raise _wrong(field, value, wanted)
    return tuple(int(part) for part in value)


def _dtype(interface: dict[str, Any]) -> np.dtype[Any]:
    typestr = interface["typestr"]
    wanted = "a type string like '<f8': a bool or a number, in native byte order"
    if not isinstance(typestr, str) or re.fullmatch(r"[<>=|][a-zA-Z]\d+", typestr) is None:
        raise _wrong("typestr", typestr, wanted)
    try:
        # dpnp writes '|' even where the byte order matters, and means the native one.
        dtype = check_dtype(np.dtype(typestr.removeprefix("|")))
    except TypeError as error:
        raise _wrong("typestr", typestr, wanted) from error
    described = interface.get("typedescr")
    if described is not None:
        try:
            fits = isinstance(described, list) and np.dtype(described).itemsize == dtype.itemsize
        except (TypeError, ValueError, LookupError, ArithmeticError, SyntaxError) as error:
            raise _wrong("typedescr", described, "None or a list of tuples, as numpy's descr") from error
        if not fits:
            raise _wrong("typedescr", described, f"None or a list of tuples that describe {dtype.itemsize} bytes")
    return dtype


def queue_of(syclobj: object) -> Any:
    """The queue that ``syclobj`` means: it is one, a context, a capsule of either, has one, or is a filter string."""
    sycl = dpctl()
    if isinstance(syclobj, sycl.SyclQueue):
        return syclobj
    if isinstance(syclobj, sycl.SyclContext):
        return queue_in(syclobj)
    if isinstance(syclobj, str):
        try:
            return queue_meant(syclobj)
        except RuntimeError as error:
            raise _wrong("syclobj", syclobj, "the filter string of a device that is there") from error
    if type(syclobj).__name__ == "PyCapsule":
        for make in (sycl.SyclQueue, lambda capsule: queue_of(sycl.SyclContext(capsule))):
            try:
                return make(syclobj)
            except (TypeError, ValueError, sycl.SyclQueueCreationError, sycl.SyclContextCreationError):
                continue
    elif hasattr(syclobj, "_get_capsule"):
        return queue_of(syclobj._get_capsule())
    wanted = "a dpctl.SyclQueue, a dpctl.SyclContext, a capsule of one that was not used, or a filter string"
    raise _wrong("syclobj", syclobj, wanted)


def consume(obj: Any) -> Found:
    """The elements that an object's interface describes, checked. They keep the object alive.

    The kind is UNKNOWN only if there is no ``data``, and the object's buffer is memory of the host. ValueError and
    TypeError name the field that is invalid.
    """
    interface = obj.__sycl_usm_array_interface__
    if not isinstance(interface, dict):
        msg = f"__sycl_usm_array_interface__ is '{type(interface).__qualname__}'; it must be a dict"
        raise TypeError(msg)
    missing = [field for field in ("shape", "typestr", "version", "syclobj") if field not in interface]
    if missing:
        msg = f"__sycl_usm_array_interface__ has no {', '.join(map(repr, missing))}"
        raise ValueError(msg)
    version = interface["version"]
    if not is_int(version) or version != 1:
        raise _wrong("version", version, "1, the only version there is")
    shape = _ints("shape", interface["shape"], "a tuple of ints from 0 up")
    if any(length < 0 for length in shape) or len(shape) > MAX_AXES:
        raise _wrong("shape", interface["shape"], f"a tuple of at most {MAX_AXES} ints from 0 up")
    dtype = _dtype(interface)
    if math.prod(length or 1 for length in shape) * dtype.itemsize >= 1 << 63:
        raise _wrong("shape", interface["shape"], "of fewer bytes than 2**63")
    offset = interface.get("offset", 0)
    if offset is None or not is_int(offset):
        raise _wrong("offset", offset, "an int, in elements")
    given = interface.get("strides")
    if given is None:
        strides = row_strides(shape)
    else:
        strides = _ints("strides", given, "None or a tuple of ints, in elements")
        if any(abs(stride) * dtype.itemsize >= 1 << 63 for stride in strides):
            raise _wrong("strides", given, "of fewer bytes than 2**63")
        if len(strides) != len(shape):
            raise _wrong("strides", given, f"None or a tuple of {len(shape)} ints, as the shape has")
    queue = queue_of(interface["syclobj"])
    found = Found(obj, queue, UsmKind.UNKNOWN, 0, shape, strides, dtype, readonly=False)
    if interface.get("data") is None:
        return _in_buffer(found, int(offset))
    data = interface["data"]
    wanted = "a tuple of an address (an int) and whether it is read-only (a bool)"
    if (
        not isinstance(data, tuple)
        or len(data) != 2
        or not is_int(data[0])
        or not isinstance(data[1], (bool, np.bool_))
    ):
        raise _wrong("data", data, wanted)
    if not 0 <= data[0] < 1 << 63:
        raise _wrong("data", data, wanted)
    # dpctl's own memory objects say True, and can be written to all the same.
    readonly = bool(data[1]) and not isinstance(obj, importlib.import_module("dpctl.memory")._memory._Memory)
    return _check_usm(
        found._replace(address=int(data[0]) + int(offset) * dtype.itemsize, readonly=readonly), int(offset)
    )


def _check_usm(found: Found, offset: int) -> Found:
    """Adds the kind of the memory. ValueError: some of it is not USM of the queue's context, or is not allocated."""
    said = f"shape={found.shape}, strides={found.strides}, offset={offset} in elements of {found.dtype.itemsize} bytes"
    native = native_queue(found.queue)
    first, behind = found.span
    if first < 0 or behind >= 1 << 63:
        msg = f"__sycl_usm_array_interface__ describes bytes from {first:#x} to {behind:#x}, where no memory is: {said}"
        raise ValueError(msg)
    kind = UsmKind(native.kind_of(first))
    if kind is UsmKind.UNKNOWN:
        raise _wrong("data", f"{first:#x}", f"the address of USM in the context of 'syclobj': {said}")
    last = behind - 1 if behind > first else first
    if native.kind_of(last) != kind:
        msg = (
            f"__sycl_usm_array_interface__ describes bytes from {first:#x} to {behind:#x}, the last not in "
            f"that memory: {said} (strides and offset count elements, not bytes)"
        )
        raise ValueError(msg)
    refusal = refused_as_ours(found)
    if refusal is not None:
        msg = f"__sycl_usm_array_interface__ {refusal}: {said}"
        raise ValueError(msg)
    return found._replace(kind=kind)


def refused_as_ours(found: Found) -> str | None:
    """Why the elements cannot be in memory of this package (freed, too short, another device's); None if they can.

    SYCL knows only whole allocations, of which a pool makes many blocks. In a pool under handlers or strategies it is
    not known which blocks are free and how long they are.
    """
    native = native_queue(found.queue)
    first, behind = found.span
    located = native.locate(first)
    if located is None:
        return None
    if not native.reaches(first):
        return f"has memory of another device at {first:#x} than that of its queue"
    room = located[1]
    if room == 0 and behind > first:
        return f"has the address {first:#x}, where a block of ctxalloc.usm was freed; keep its array"
    if room is not None and behind - first > room:
        return f"describes {behind - first} bytes from {first:#x} on, and the block there ends after {room}"
    return None


def _in_buffer(found: Found, offset: int) -> Found:
    """Without ``data`` the elements are in the object's buffer (PEP 3118), as the specification says."""
    try:
        view = memoryview(found.owner)  # type: ignore[arg-type]  # whether it has one is the question
        flat = np.frombuffer(view.cast("B") if view.nbytes else b"", np.uint8)
    except (TypeError, BufferError) as error:
        msg = "__sycl_usm_array_interface__ has no 'data', and the object has no contiguous buffer to take instead"
        raise ValueError(msg) from error
    start: int = flat.__array_interface__["data"][0]
    placed = found._replace(address=start + offset * found.dtype.itemsize, owner=flat, readonly=view.readonly)
    first, behind = placed.span
    if not start <= first <= behind <= start + flat.size:
        msg = (
            f"__sycl_usm_array_interface__ describes bytes {first - start} to {behind - start} of the object's buffer, "
            f"which has {flat.size}"
        )
        raise ValueError(msg)
    kind = UsmKind(native_queue(found.queue).kind_of(first))
    return placed._replace(kind=kind)
