"""`asarray`: an ndarray over memory of others that the host can read, from CUDA's array interface or DLPack."""

from typing import Any

import numpy as np

from ctxalloc import _native
from ctxalloc.cuda._array import CUDA_HOST, CUDA_MANAGED, Array, Host
from ctxalloc.cuda._memory import CudaKind, device_meant
from ctxalloc.cuda._state import _handle_of

_CPU = 1
_KINDS = {0: "i", 1: "u", 2: "f", 5: "c", 6: "b"}


class _Memory:
    """What NumPy makes an ndarray of; it is the ndarray's base, and keeps the memory's owner alive."""

    __slots__ = ("__array_interface__", "_owner")

    def __init__(self, owner: object, interface: dict[str, Any]) -> None:
        self._owner = owner
        self.__array_interface__ = interface


def _over(owner: object, address: int, layout: dict[str, Any], *, readonly: bool, device: int) -> Host:
    """An ndarray over memory that the host can read. BufferError: it cannot."""
    if address and (kind := _native.cuda_kind_of(address, device)) == CudaKind.DEVICE:
        msg = f"the memory at {address:#x} is a device's ({kind}), which the host cannot read; copy it: obj.get()"
        raise BufferError(msg)
    if not address:  # an empty array
        return np.empty(layout["shape"], np.dtype(layout["typestr"]))
    return np.asarray(_Memory(owner, {"version": 3, "data": (address, readonly), **layout}))


def _from_interface(obj: object, interface: dict[str, Any], device: int) -> Host:
    try:
        (address, readonly), version = interface["data"], interface["version"]
        layout = {"shape": tuple(interface["shape"]), "typestr": interface["typestr"]}
    except (KeyError, TypeError, ValueError) as error:
        msg = (
            f"the __cuda_array_interface__ of '{type(obj).__qualname__}' lacks data, version, shape or typestr: {error}"
        )
        raise BufferError(msg) from error
    if interface.get("mask") is not None:
        msg = "the __cuda_array_interface__ has a mask, which an ndarray does not have; ask its maker for the values"
        raise BufferError(msg)
    if interface.get("strides") is not None:
        layout["strides"] = tuple(interface["strides"])
    stream = interface.get("stream") if version >= 3 else None
    if stream == 0:
        msg = "the __cuda_array_interface__ has stream 0, which version 3 forbids; its maker means 1 or 2"
        raise BufferError(msg)
    made = _over(obj, address, layout, readonly=bool(readonly), device=device)
    if stream is not None:
        _native.cuda_wait(_handle_of(stream), device)
    return made


def _from_dlpack(obj: Any, device: int) -> Host:
    kind, number = obj.__dlpack_device__()
    if kind not in (_CPU, CUDA_HOST, CUDA_MANAGED):
        msg = f"the DLPack device is ({int(kind)}, {number}), whose memory the host cannot read; copy it: obj.get()"
        raise BufferError(msg)
    # The host waits for the default stream, on which the producer's work is done then.
    options = {"stream": 1} if kind == CUDA_MANAGED else {}
    try:
        capsule = obj.__dlpack__(max_version=(1, 0), **options)
    except TypeError:  # a producer from before DLPack 1.0
        capsule = obj.__dlpack__(**options)
    address, shape, strides, (code, bits, lanes), _, readonly, owner = _native.usm_from_dlpack(capsule)
    if code not in _KINDS or lanes != 1 or bits % 8 or (code == 6 and bits != 8):
        msg = f"a DLPack type of code {code}, {bits} bits and {lanes} lanes is not one of NumPy's numbers"
        raise BufferError(msg)
    dtype = np.dtype("?" if _KINDS[code] == "b" else f"{_KINDS[code]}{bits // 8}")
    layout: dict[str, Any] = {"shape": tuple(shape), "typestr": dtype.str}
    if strides is not None:
        layout["strides"] = tuple(stride * dtype.itemsize for stride in strides)
    if kind == CUDA_MANAGED:
        _native.cuda_wait(1, device)
    return _over(owner, address, layout, readonly=readonly, device=device)


def asarray(obj: object, /, *, device: int = 0) -> Host:
    """An ndarray over pinned or managed memory of others, without a copy; it keeps ``obj`` alive.

    ``obj`` has ``__cuda_array_interface__`` or ``__dlpack__``: managed arrays of CuPy and Numba, pinned tensors. Waits
    for the stream that the interface names, or for managed memory by DLPack, for the default stream of ``device``.

    BufferError: memory of a device, which the host cannot read (copy it with ``get()``), or a type that NumPy does not
    have. TypeError: neither protocol. RuntimeError: there is no driver, or no such device.
    """
    number = device_meant(device)
    if isinstance(obj, Array):
        return obj.ndarray
    interface = getattr(obj, "__cuda_array_interface__", None)
    if isinstance(interface, dict):
        return _from_interface(obj, interface, number)
    if hasattr(obj, "__dlpack__") and hasattr(obj, "__dlpack_device__"):
        return _from_dlpack(obj, number)
    msg = f"asarray() takes what has __cuda_array_interface__ or __dlpack__, got '{type(obj).__qualname__}'"
    raise TypeError(msg)


asarray.__module__ = "ctxalloc.cuda"
