"""The driver, its devices, and what waits for them."""

import contextlib
import operator
from typing import Any, Self

import numpy as np

from ctxalloc import _native
from ctxalloc.cuda._memory import device_meant


def info() -> dict[str, Any]:
    """How it stands with CUDA, for people and for reports. Loads the driver if there is one; makes no context.

    ``state`` is ``"ready"``, ``"no driver"``, ``"stub library"``, ``"driver too old"``, ``"no device"``, ``"driver
    mismatch"``, ``"forked"``, ``"context lost"`` (a kernel crashed, and nothing works until the process begins anew) or
    ``"failed"``, and ``error`` says more. ``safe_reuse``: whether the driver can tell when all streams are done
    (CUDA 12.5). ``mapped_bytes``: what all pools have pinned or allocated; ``refused_registrations``: how often the
    driver would not pin a mapping. ``waiting_bytes``: freed blocks that a device may still read, at most
    ``quarantine_bytes``; ``stuck_bytes``: those that are never handed out again, because their event failed. ``kept``:
    what ``keep`` holds. ``last_failure``: the last call of the driver that failed.
    """
    known = _native.cuda_info()
    count = known.pop("device_count")
    known["devices"] = [_native.cuda_device(number) for number in range(count)] if known["state"] == "ready" else []
    return known


def is_available() -> bool:
    """Whether there is a driver with a device that this process can use."""
    return bool(_native.cuda_info()["state"] == "ready")


def device(number: int = 0, /) -> dict[str, Any]:
    """What a device is and can do: ``name``, ``numa_node`` (None: unknown) and what its attributes say of memory.

    ``reads_pageable_memory`` and ``uses_host_page_tables`` (Grace): it reads any memory of the host, and pinning gains
    less. RuntimeError: there is no driver, or no such device.
    """
    return _native.cuda_device(device_meant(number))


def _by_protocol(stream: object, protocol: Any) -> object:
    """What ``__cuda_stream__`` returns: a version, which is 0, and the CUstream."""
    pair = protocol() if callable(protocol) else protocol
    if not isinstance(pair, tuple) or len(pair) != 2 or pair[0] != 0:
        msg = f"__cuda_stream__ of stream={stream!r} is {pair!r}; it must be a tuple (0, the number of the CUstream)"
        raise TypeError(msg)
    return pair[1]


def _handle_of(stream: object) -> int:
    """The CUstream of a stream of CuPy, PyTorch, Numba or cuda.core, or the number itself."""
    protocol = getattr(stream, "__cuda_stream__", None)
    found: object = stream
    if protocol is not None:
        found = _by_protocol(stream, protocol)
    elif not isinstance(stream, int):
        for name in ("cuda_stream", "ptr", "handle"):  # PyTorch, CuPy, Numba
            if hasattr(stream, name):
                found = getattr(stream, name)
                found = getattr(found, "value", found) or 0  # a ctypes pointer, NULL for the default stream
                break
    try:
        handle = None if isinstance(found, (bool, np.ndarray)) else operator.index(found)  # type: ignore[arg-type]
    except TypeError:
        handle = None
    if handle is None:
        msg = (
            f"stream={stream!r} is no stream; give one of CuPy, PyTorch, Numba or cuda.core, the number of a CUstream, "
            "or 1 for the default stream"
        )
        raise TypeError(msg)
    if not 0 <= handle < 1 << 64:
        msg = f"stream={stream!r} is no stream: the number of a CUstream is from 0 up"
        raise ValueError(msg)
    return handle


def _device_of(stream: object) -> int:
    """The number of a stream's device, where the stream says; else 0."""
    number = getattr(stream, "device_id", None)  # CuPy, where -1 is the current device
    if number is None:
        number = getattr(getattr(stream, "device", None), "index", None)  # PyTorch
    return number if isinstance(number, int) and number > 0 else 0


def _has_memory(subject: object) -> bool:
    """Whether it is an array of any library, or has a buffer."""
    names = ("__array_interface__", "__cuda_array_interface__", "__dlpack__", "__array__")
    if any(hasattr(type(subject), name) or hasattr(subject, name) for name in names):
        return True
    try:
        memoryview(subject).release()  # type: ignore[arg-type]  # whether it has one is the question
    except TypeError:
        return False
    return True


def keep(*arrays: object, stream: object, device: int | None = None) -> None:
    """Keeps arrays alive until the work that was queued on ``stream`` so far is done.

    ::

        on_device = torch.from_numpy(batch).to("cuda", non_blocking=True)
        ctxalloc.cuda.keep(batch, stream=torch.cuda.current_stream())

    For memory with ``reuse="unsafe"``, for a driver before CUDA 12.5, and for streams of a context that is not the
    device's primary one. What is done is let go by the next ``keep``, ``info`` or ``settle``. ``stream``: one of CuPy,
    PyTorch, Numba or cuda.core, the number of a ``CUstream`` (1: the default stream). ``device``: its device, if the
    stream does not say.

    RuntimeError: the stream is another device's or captures a graph, or there is no device. TypeError: no stream, no
    array, or something that is none.
    """
    if not arrays:
        msg = f"keep(stream={stream!r}) has no array to keep: give keep(array, ..., stream=)"
        raise TypeError(msg)
    for array in arrays:
        if not _has_memory(array):
            msg = f"keep() takes arrays, one by one, got '{type(array).__qualname__}': give keep(array, ..., stream=)"
            raise TypeError(msg)
    number = _device_of(stream) if device is None else device_meant(device)
    _native.cuda_keep(arrays, _handle_of(stream), number)


class _Capturing(_native.CudaCapture, contextlib.ContextDecorator):
    """What ``capturing`` returns. Its two steps are native, and what is not ended ends with the object."""

    def _recreate_cm(self) -> Self:
        return type(self)()


def capturing() -> contextlib.AbstractContextManager[None]:
    """Announces that a CUDA graph is captured, on any stream and thread, until the block is left.

    ::

        with ctxalloc.cuda.capturing(), torch.cuda.graph(graph):
            ...

    An event that ctxalloc recorded meanwhile would invalidate the capture, so none is, and what is freed waits until
    the end. The graph reads its arrays each time that it is launched: hold them as long as the graph. It may be used
    again after its block, and as a decorator. RuntimeError: it is entered already.
    """
    return _Capturing()


def settle() -> int:
    """Gives freed blocks back to their pools if the devices are done with them; returns how many bytes.

    Also lets go of what ``keep`` holds and is done. It happens by itself when memory is allocated. Does not wait.
    """
    return _native.cuda_settle()


def configure(*, quarantine_bytes: int) -> None:
    """How many bytes of freed blocks may wait for the devices; by default an eighth of the machine's memory.

    An allocation beyond that waits for the devices, at most a second, and is then a MemoryError. ValueError: less than
    one byte.
    """
    given: object = quarantine_bytes
    if not isinstance(given, int) or isinstance(given, bool):
        msg = f"configure(quarantine_bytes={quarantine_bytes!r}): give a number of bytes, an int from 1 up"
        raise TypeError(msg)
    if not 1 <= quarantine_bytes < 1 << 64:
        msg = f"configure(quarantine_bytes={quarantine_bytes!r}): give a number of bytes, an int from 1 up"
        raise ValueError(msg)
    _native.cuda_configure(quarantine_bytes)


for _public in (capturing, configure, device, info, is_available, keep, settle):
    _public.__module__ = "ctxalloc.cuda"
