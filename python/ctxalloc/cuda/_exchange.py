"""`asarray`: an ndarray over memory of others that the host can read, from CUDA's array interface or DLPack.

What others say is not believed: a field that is invalid is an error that names it, and the driver is asked for the
first and the last byte.
"""

import math
from typing import Any

import numpy as np

from ctxalloc import _native
from ctxalloc._described import is_int, span
from ctxalloc.cuda._array import CUDA_HOST, CUDA_MANAGED, Array, Host, is_pair
from ctxalloc.cuda._memory import CudaKind, device_meant
from ctxalloc.cuda._state import _handle_of

_CPU = 1
_KINDS = {0: "i", 1: "u", 2: "f", 5: "c", 6: "b"}
_MAX_VERSION = 3
_MAX_BYTES = 1 << 63


class _Memory:
    """What NumPy makes an ndarray of; it is the ndarray's base, and keeps the memory's owner alive."""

    __slots__ = ("__array_interface__", "_owner")

    def __init__(self, owner: object, interface: dict[str, Any]) -> None:
        self._owner = owner
        self.__array_interface__ = interface


def _over(
    owner: object,
    memory: tuple[int, bool],
    layout: tuple[tuple[int, ...], tuple[int, ...] | None, np.dtype[Any]],
    device: int,
) -> Host:
    """An ndarray over an address, read-only or not: its shape, strides in bytes and dtype. BufferError: it is none."""
    (address, readonly), (shape, strides, dtype) = memory, layout
    said = f"shape={shape}, strides={strides} in bytes, {dtype.itemsize} bytes an element"
    if math.prod(length or 1 for length in shape) * dtype.itemsize >= _MAX_BYTES:
        msg = f"an array of 2**63 bytes and more is described: {said}"
        raise BufferError(msg)
    if strides is not None and any(abs(stride) >= _MAX_BYTES for stride in strides):
        msg = f"strides of 2**63 bytes and more are described: {said}"
        raise BufferError(msg)
    try:
        empty = np.empty((*shape[:-1], 0) if shape else (), dtype)  # NumPy's limit of axes
    except ValueError as error:
        msg = f"NumPy has no array of {len(shape)} axes: {error}"
        raise BufferError(msg) from error
    if not all(shape):
        return np.empty(shape, dtype)
    if strides is None:
        strides = tuple(math.prod(shape[axis + 1 :]) * dtype.itemsize for axis in range(len(shape)))
    first, behind = span(address, shape, strides, dtype.itemsize)
    if address == 0 or first <= 0 or behind >= _MAX_BYTES:
        msg = f"bytes from {first:#x} to {behind:#x} are described, where no memory is (data={address:#x}): {said}"
        raise BufferError(msg)
    _check_memory(first, behind, said, device)
    interface = {
        "version": 3,
        "data": (address, readonly),
        "shape": shape,
        "strides": strides,
        "typestr": f"|V{dtype.itemsize}",
    }
    made: Host = np.asarray(_Memory(owner, interface)).view(empty.dtype)
    return made


def _check_memory(first: int, behind: int, said: str, device: int) -> None:
    """BufferError: the first or the last byte is not in memory that the driver knows, and the host can read."""
    kind = CudaKind(_native.cuda_kind_of(first, device))
    if kind is CudaKind.DEVICE:
        msg = f"the memory at {first:#x} is a device's, which the host cannot read; copy it: obj.get()"
        raise BufferError(msg)
    if kind is CudaKind.PAGEABLE:
        msg = (
            f"the memory at {first:#x} is pageable: the driver does not know it (nor any in a child of fork); use "
            "numpy.asarray(), or copy it inside of ctxalloc.cuda.use()"
        )
        raise BufferError(msg)
    last = CudaKind(_native.cuda_kind_of(behind - 1, device))
    if last is not kind:
        msg = (
            f"bytes from {first:#x} to {behind:#x} are described, of which the first is in {kind} memory and the last "
            f"in {last} memory: {said}"
        )
        raise BufferError(msg)


def _wrong(field: str, value: object, wanted: str) -> BufferError:
    return BufferError(f"__cuda_array_interface__[{field!r}] is {value!r}; it must be {wanted}")


def _ints(field: str, value: object, wanted: str) -> tuple[int, ...]:
    if not isinstance(value, (tuple, list)) or not all(map(is_int, value)):
        raise _wrong(field, value, wanted)
    return tuple(map(int, value))


def _dtype(interface: dict[str, Any]) -> np.dtype[Any]:
    """The type of an element: of ``typestr``, and for a structure of ``descr``."""
    typestr, descr = interface["typestr"], interface.get("descr")
    wanted = "a type string like '<f8', of numbers and not of objects"
    if not isinstance(typestr, str):
        raise _wrong("typestr", typestr, wanted)
    try:
        dtype = np.dtype(typestr)
    except (TypeError, ValueError, SyntaxError) as error:
        raise _wrong("typestr", typestr, wanted) from error
    if dtype.hasobject or dtype.kind not in "biufcmMSUV" or dtype.subdtype is not None or dtype.itemsize == 0:
        raise _wrong("typestr", typestr, wanted)
    if descr is None or dtype.kind != "V":
        return dtype
    wanted = f"None or a list of tuples that describe {dtype.itemsize} bytes, without objects, as numpy's descr"
    try:
        found: np.dtype[Any] = np.lib.format.descr_to_dtype(descr) if isinstance(descr, list) else np.dtype(object)
    except (TypeError, ValueError, LookupError, ArithmeticError, SyntaxError) as error:
        raise _wrong("descr", descr, wanted) from error
    if found.hasobject or found.itemsize != dtype.itemsize:
        raise _wrong("descr", descr, wanted)
    return found


def _from_interface(obj: object, interface: dict[str, Any], device: int) -> Host:
    missing = [field for field in ("shape", "typestr", "data", "version") if field not in interface]
    if missing:
        msg = f"the __cuda_array_interface__ of '{type(obj).__qualname__}' lacks {', '.join(missing)}"
        raise BufferError(msg)
    version = interface["version"]
    if not is_int(version) or not 0 <= version <= _MAX_VERSION:
        raise _wrong("version", version, f"an int from 0 to {_MAX_VERSION}, the versions that there are")
    if interface.get("mask") is not None:
        msg = "the __cuda_array_interface__ has a mask, which an ndarray does not have; ask its maker for the values"
        raise BufferError(msg)
    shape = _ints("shape", interface["shape"], "a tuple of ints from 0 up")
    if any(length < 0 for length in shape):
        raise _wrong("shape", interface["shape"], "a tuple of ints from 0 up")
    strides = None
    if interface.get("strides") is not None:
        strides = _ints("strides", interface["strides"], "None or a tuple of ints, in bytes")
        if len(strides) != len(shape):
            raise _wrong("strides", interface["strides"], f"None or a tuple of {len(shape)} ints, as the shape has")
    data = interface["data"]
    wanted = "a tuple of an address (an int from 0 up) and whether it is read-only (a bool)"
    if not isinstance(data, (tuple, list)) or len(data) != 2 or not is_int(data[0]) or data[0] < 0:
        raise _wrong("data", data, wanted)
    if not isinstance(data[1], (bool, np.bool_)):
        raise _wrong("data", data, wanted)
    stream = interface.get("stream") if version >= _MAX_VERSION else None
    if stream == 0:
        msg = "the __cuda_array_interface__ has stream 0, which version 3 forbids; its maker means 1 or 2"
        raise BufferError(msg)
    if stream is not None and not is_int(stream):
        raise _wrong("stream", stream, "None, 1, 2, or the number of a CUstream")
    made = _over(obj, (int(data[0]), bool(data[1])), (shape, strides, _dtype(interface)), device)
    if stream is not None:
        _native.cuda_wait(_handle_of(stream), device)
    return made


def _from_dlpack(obj: Any, device: int) -> Host:
    said = obj.__dlpack_device__()
    if not is_pair(said):
        msg = f"__dlpack_device__() of '{type(obj).__qualname__}' is {said!r}; it must be a tuple of two ints"
        raise BufferError(msg)
    kind, number = map(int, said)
    if kind not in (_CPU, CUDA_HOST, CUDA_MANAGED):
        msg = f"the DLPack device is ({kind}, {number}), whose memory the host cannot read; copy it: obj.get()"
        raise BufferError(msg)
    # The host waits for the default stream, on which the producer's work is done then.
    options = {"stream": 1} if kind == CUDA_MANAGED else {}
    try:
        capsule = obj.__dlpack__(max_version=(1, 0), **options)
    except TypeError:  # a producer from before DLPack 1.0
        capsule = obj.__dlpack__(**options)
    address, shape, strides, (code, bits, lanes), found, readonly, owner = _native.usm_from_dlpack(capsule)
    # PyTorch says CUDAHost for a pinned tensor, whose capsule says CPU.
    if found != (kind, number) and not {found[0], kind} <= {_CPU, CUDA_HOST}:
        msg = (
            f"__dlpack_device__() is ({kind}, {number}), and the tensor's own device is {found}; report it to its maker"
        )
        raise BufferError(msg)
    if code not in _KINDS or lanes != 1 or bits % 8 or not bits or (code == 6 and bits != 8):
        msg = f"a DLPack type of code {code}, {bits} bits and {lanes} lanes is not one of NumPy's numbers"
        raise BufferError(msg)
    try:
        dtype = np.dtype("?" if _KINDS[code] == "b" else f"{_KINDS[code]}{bits // 8}")
    except TypeError as error:
        msg = f"a DLPack type of code {code}, {bits} bits and {lanes} lanes is not one of NumPy's numbers"
        raise BufferError(msg) from error
    in_bytes = None if strides is None else tuple(stride * dtype.itemsize for stride in strides)
    if kind == CUDA_MANAGED:
        _native.cuda_wait(1, device)
    return _over(owner, (address, readonly), (tuple(shape), in_bytes, dtype), device)


def asarray(obj: object, /, *, device: int = 0) -> Host:
    """An ndarray over pinned or managed memory of others, without a copy; it keeps ``obj`` alive.

    ``obj`` has ``__cuda_array_interface__`` or ``__dlpack__``: managed arrays of CuPy and Numba, pinned tensors. Waits
    for the stream that the interface names, or for managed memory by DLPack, for the default stream of ``device``.

    BufferError: memory of a device, which the host cannot read (copy it with ``get()``), or pageable memory; elements
    whose first and last byte are not in such memory; a type that NumPy does not have, or of objects; a field that is
    invalid. TypeError: neither protocol. RuntimeError: there is no driver, or no such device.
    """
    number = device_meant(device)
    if isinstance(obj, Array):
        return obj.ndarray
    interface = getattr(obj, "__cuda_array_interface__", None)
    if isinstance(interface, dict):
        return _from_interface(obj, interface, number)
    if callable(getattr(obj, "__dlpack__", None)) and callable(getattr(obj, "__dlpack_device__", None)):
        return _from_dlpack(obj, number)
    if interface is not None:
        msg = f"__cuda_array_interface__ is '{type(interface).__qualname__}'; it must be a dict"
        raise BufferError(msg)
    msg = f"asarray() takes what has __cuda_array_interface__ or __dlpack__, got '{type(obj).__qualname__}'"
    raise TypeError(msg)


asarray.__module__ = "ctxalloc.cuda"
