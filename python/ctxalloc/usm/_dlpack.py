"""DLPack: devices and type codes. Rust makes and consumes the capsules."""

import math
from typing import Any

import numpy as np

from ctxalloc import _native
from ctxalloc.usm._geometry import MAX_AXES, Found, check_dtype, row_strides
from ctxalloc.usm._interface import refused_as_ours
from ctxalloc.usm._runtime import UsmKind, default_queue, dpctl, known_queues, native_queue

ONEAPI = 14
HOST = (1, 0)
_CODES = {"i": 0, "u": 1, "f": 2, "c": 5, "b": 6}
_KINDS = {code: kind for kind, code in _CODES.items()}


def device_id(queue: Any) -> int:
    """The number of a queue's device: its index in ``dpctl.get_devices()``."""
    number: int = queue.sycl_device.get_device_id()
    return number


def capsule(owner: object, found: Found, device: tuple[int, int], *, is_versioned: bool, is_copied: bool) -> object:
    """A capsule over the elements, which keeps ``owner`` alive."""
    # dpnp expects the data pointer at the lowest address, as in its own arrays.
    first = found.span[0]
    return _native.usm_dlpack(
        owner,
        (first, found.address - first),
        (found.shape, found.strides),
        (_CODES[found.dtype.kind], found.dtype.itemsize * 8),
        device,
        (is_versioned, found.readonly, is_copied),
    )


def consume(obj: Any) -> Found:
    """The elements of a producer's tensor. BufferError: not in USM, or of a type that SYCL does not have."""
    if not hasattr(obj, "__dlpack__"):
        msg = f"from_dlpack() takes what has __dlpack__, got '{type(obj).__qualname__}'"
        raise TypeError(msg)
    try:
        given = obj.__dlpack__(max_version=(1, 0))
    except TypeError:  # a producer from before DLPack 1.0
        given = obj.__dlpack__()
    address, shape, strides, (code, bits, lanes), device, readonly, owner = _native.usm_from_dlpack(given)
    dtype = _dtype(code, bits, lanes)
    if len(shape) > MAX_AXES or math.prod(length or 1 for length in shape) * dtype.itemsize >= 1 << 63:
        msg = f"a DLPack tensor of shape {tuple(shape)} has more axes or bytes than an array can"
        raise BufferError(msg)
    steps = row_strides(tuple(shape)) if strides is None else tuple(strides)
    found = Found(owner, None, UsmKind.UNKNOWN, address, tuple(shape), steps, dtype, readonly)
    first, behind = found.span
    if first < 0 or behind >= 1 << 63 or any(abs(step) * dtype.itemsize >= 1 << 63 for step in steps):
        msg = f"the DLPack tensor's strides {steps} lead from data={address:#x} to {first:#x}..{behind:#x}, no memory"
        raise BufferError(msg)
    for queue in _queues(obj, device, address):
        native = native_queue(queue)
        kind = UsmKind(native.kind_of(first))
        if kind is UsmKind.UNKNOWN:
            continue
        found = found._replace(queue=queue, kind=kind)
        refusal = refused_as_ours(found)
        if refusal is None and native.kind_of(max(first, behind - 1)) != kind:
            refusal = f"describes bytes from {first:#x} to {behind:#x}, the last not in that memory"
        if refusal is not None:
            msg = f"the DLPack tensor {refusal}: shape={tuple(shape)}, strides={steps}"
            raise BufferError(msg)
        return found
    msg = (
        f"the memory on DLPack device {device} is not USM of a queue that is known here; copy it, from the host with "
        "ctxalloc.usm.asarray(numpy.from_dlpack(obj))"
    )
    raise BufferError(msg)


def _dtype(code: int, bits: int, lanes: int) -> np.dtype[Any]:
    """The dtype for a type of DLPack. BufferError: no array has it."""
    try:
        if lanes == 1 and bits % 8 == 0 and (bits == 8 or code != _CODES["b"]):
            return check_dtype(np.dtype("?" if code == _CODES["b"] else f"{_KINDS[code]}{bits // 8}"))
    except (KeyError, TypeError):
        pass
    msg = f"a DLPack type of code {code}, {bits} bits and {lanes} lanes is not one of NumPy's numbers"
    raise BufferError(msg)


def _queues(obj: Any, device: tuple[int, int], address: int) -> list[Any]:
    """The queues that the memory may belong to."""
    sycl = dpctl()
    own = getattr(obj, "sycl_queue", None)
    if isinstance(own, sycl.SyclQueue):
        return [own]
    if device[0] == ONEAPI and device[1] != device_id(default_queue()):
        return [queue for queue in known_queues(address) if device_id(queue) == device[1]]
    return known_queues(address)
