"""The driver, its devices, and what waits for them."""

import contextlib
from collections.abc import Iterator
from typing import Any

from ctxalloc import _native
from ctxalloc.cuda._memory import device_meant


def info() -> dict[str, Any]:
    """How it stands with CUDA, for people and for reports. Loads the driver if there is one; makes no context.

    ``state`` is ``"ready"``, ``"no driver"``, ``"stub library"``, ``"no device"``, ``"driver mismatch"``, ``"forked"``
    or ``"failed"``, and ``error`` says more. ``safe_reuse``: whether the driver can tell when all streams are done
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


def _handle_of(stream: object) -> int:
    """The CUstream of a stream of CuPy, PyTorch, Numba or cuda.core, or the number itself."""
    protocol = getattr(stream, "__cuda_stream__", None)
    found: object = stream
    if protocol is not None:
        found = (protocol() if callable(protocol) else protocol)[1]
    elif not isinstance(stream, int):
        for name in ("cuda_stream", "ptr", "handle"):  # PyTorch, CuPy, Numba
            if hasattr(stream, name):
                found = getattr(stream, name)
                found = getattr(found, "value", found) or 0  # a ctypes pointer, NULL for the default stream
                break
    if isinstance(found, bool) or not hasattr(found, "__index__"):
        msg = (
            f"stream={stream!r} is no stream; give one of CuPy, PyTorch, Numba or cuda.core, the number of a CUstream, "
            "or 1 for the default stream"
        )
        raise TypeError(msg)
    handle = int(found)
    if not 0 <= handle < 1 << 64:
        msg = f"stream={stream!r} is no stream: the number of a CUstream is from 0 up"
        raise ValueError(msg)
    return int(handle)


def _device_of(stream: object) -> int:
    """The number of a stream's device, where the stream says; else 0."""
    number = getattr(stream, "device_id", None)  # CuPy, where -1 is the current device
    if number is None:
        number = getattr(getattr(stream, "device", None), "index", None)  # PyTorch
    return number if isinstance(number, int) and number > 0 else 0


def keep(*arrays: object, stream: object, device: int | None = None) -> None:
    """Keeps arrays alive until the work that was queued on ``stream`` so far is done.

    ::

        on_device = torch.from_numpy(batch).to("cuda", non_blocking=True)
        ctxalloc.cuda.keep(batch, stream=torch.cuda.current_stream())

    For memory with ``reuse="unsafe"``, for a driver before CUDA 12.5, and for streams of a context that is not the
    device's primary one. What is done is let go by the next ``keep``, ``info`` or ``settle``. ``stream``: one of CuPy,
    PyTorch, Numba or cuda.core, the number of a ``CUstream`` (1: the default stream). ``device``: its device, if the
    stream does not say.

    RuntimeError: the stream is another device's or captures a graph, or there is no device. TypeError: no stream.
    """
    number = _device_of(stream) if device is None else device_meant(device)
    _native.cuda_keep(arrays, _handle_of(stream), number)


@contextlib.contextmanager
def capturing() -> Iterator[None]:
    """Announces that a CUDA graph is captured, on any stream and thread, until the block is left.

    ::

        with ctxalloc.cuda.capturing(), torch.cuda.graph(graph):
            ...

    An event that ctxalloc recorded meanwhile would invalidate the capture, so none is, and what is freed waits until
    the end. The graph reads its arrays each time that it is launched: hold them as long as the graph.
    """
    _native.cuda_capture(True)  # noqa: FBT003 - it begins
    try:
        yield
    finally:
        _native.cuda_capture(False)  # noqa: FBT003 - it ends


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
