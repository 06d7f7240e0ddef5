"""Handlers and strategies over CUDA's memory, and what memory an address is in."""

import enum
import threading
from typing import Any, Literal, Self, TypeAlias

import numpy as np

from ctxalloc import _native


class CudaKind(enum.StrEnum):
    """What the driver says of an address."""

    HOST = "host"
    """Pinned memory of the host: copies to and from a device need not block."""
    MANAGED = "managed"
    """Managed memory, which moves between host and device as either accesses it."""
    DEVICE = "device"
    """Memory of a device; the host cannot access it."""
    PAGEABLE = "pageable"
    """Memory that CUDA does not know: a copy from it blocks."""


CudaKind.__module__ = "ctxalloc.cuda"

Kind: TypeAlias = CudaKind | Literal["host", "managed"]

_lock = threading.Lock()
_handlers: dict[tuple[str, int], _native.Handler] = {}


def _kind_meant(kind: object) -> str:
    if isinstance(kind, str) and kind in ("host", "managed"):
        return str(kind)
    msg = f"kind={kind!r} is no kind of CUDA's memory for NumPy; give 'host' or 'managed'"
    raise ValueError(msg)


def device_meant(device: object) -> int:
    """The number of a device. TypeError, ValueError: it is none."""
    if not isinstance(device, int) or isinstance(device, bool):
        msg = f"device={device!r} is no number of a CUDA device; give an int from 0 up"
        raise TypeError(msg)
    if not 0 <= device < 1 << 31:
        msg = f"device={device!r} is no number of a CUDA device; give an int from 0 up"
        raise ValueError(msg)
    return device


def handler(kind: Kind = "host", *, device: int = 0) -> _native.Handler:
    """The handler over pooled memory of a kind, registered for ever when it is first asked for.

    ``cuda_host`` and ``cuda_managed`` are those of device 0; the names of others end with the device's number, such as
    ``cuda_host:1``. Pinned memory serves copies to all devices; ``device`` says whose NUMA node it is on.

    RuntimeError: there is no driver, no device, no such memory, or the driver is older than CUDA 12.5; the message says
    which, and what to do. ValueError: the kind is invalid.
    """
    wanted, number = _kind_meant(kind), device_meant(device)
    found = _handlers.get((wanted, number))
    if found is None:
        with _lock:
            found = _handlers.get((wanted, number))
            if found is None:
                name = f"cuda_{wanted}:{number}" if number else f"cuda_{wanted}"
                found = _handlers[wanted, number] = _native.cuda_register(name, kind=wanted, device=number)
    return found


def register_default(wanted: str) -> None:
    """Registers ``cuda_host`` or ``cuda_managed``, or ``cuda_host:1``, which is that of device 1."""
    name, _, number = wanted.partition(":")
    handler("managed" if name == "cuda_managed" else "host", device=int(number or 0))


def use(kind: Kind = "host", *, device: int = 0) -> _native.Scope:
    """``ctxalloc.use`` for CUDA's memory: NumPy's arrays are allocated in it.

    ::

        with ctxalloc.cuda.use():
            batch = numpy.empty((64, 3, 224, 224), numpy.float32)
        on_device = torch.from_numpy(batch).to("cuda", non_blocking=True)

    It also works with ``async with`` and as a decorator. RuntimeError, ValueError: as for ``handler``.
    """
    return _native.use(handler(kind, device=device))


def address_of(subject: object) -> int:
    """The address of an array's first element, or the address itself. TypeError: neither. ValueError: out of range."""
    address: object = subject
    # NumPy's scalars have an interface too, to a copy that is gone at once: an int of NumPy's is an address.
    names = () if isinstance(subject, np.generic) else ("__cuda_array_interface__", "__array_interface__")
    for name in names:
        interface = getattr(subject, name, None)
        if isinstance(interface, dict):
            data = interface.get("data")
            address = data[0] if isinstance(data, tuple) and data else None
            break
    if not isinstance(address, (int, np.integer)) or isinstance(address, bool):
        msg = f"kind_of() takes an address or an array, got '{type(subject).__qualname__}'"
        raise TypeError(msg)
    if not 0 <= address < 1 << 64:
        msg = f"kind_of() takes an address from 0 up and below 2**64, got {address}"
        raise ValueError(msg)
    return int(address)


def kind_of(subject: object, /, *, device: int = 0) -> CudaKind:
    """The kind of memory at an address (an int) or of an array, according to the driver.

    The driver is asked in the primary context of ``device``, which is made if there is none. In a child of ``fork`` all
    memory is pageable. RuntimeError: there is no driver, or no such device, or the driver does not answer. TypeError:
    neither an int nor an array. ValueError: an int that is no address.
    """
    address, number = address_of(subject), device_meant(device)
    return CudaKind(_native.cuda_kind_of(address, number))


class _OverCuda(_native.Strategy):
    __slots__ = ()
    _NAME = ""

    def __new__(
        cls,
        *wrong: object,
        kind: Kind = "host",
        device: int = 0,
        huge_pages: bool = False,
        near_device: bool = True,
        reuse: Literal["events", "unsafe"] = "events",
        warm_bytes: int | None = None,
        decay_seconds: float | None = None,
    ) -> Self:
        if wrong:
            msg = f"{cls._NAME}() takes its options by name: give kind={wrong[0]!r}, not {wrong[0]!r}"
            raise TypeError(msg)
        options: dict[str, Any] = {
            "kind": _kind_meant(kind),
            "device": device_meant(device),
            "huge_pages": huge_pages,
            "near_device": near_device,
            "reuse": reuse,
            "warm_bytes": warm_bytes,
            "decay_seconds": decay_seconds,
        }
        return super().__new__(cls, cls._NAME, **options)


class Pool(_OverCuda):
    """Pooled memory of CUDA: for ``register``, or as the upstream of ``Budgeted``, ``Tracked`` and others.

    ``kind``: ``"host"`` is pinned, ``"managed"`` moves. ``huge_pages``: ask the kernel for huge pages before pinning,
    which makes pinning faster on most machines and slower where memory is fragmented. ``near_device``: take memory from
    the device's NUMA node while that has some. ``reuse``: with ``"events"`` a freed block is handed out again when the
    work that was queued before is done; with ``"unsafe"`` at once, and you keep each array that a copy still reads
    (``keep``). ``warm_bytes`` and ``decay_seconds``: as for ``strategies.Pool``; without them there is one pool for
    each choice of the other options.

    RuntimeError: there is no driver, no device, or no such memory; or ``reuse="events"`` and the driver is older than
    CUDA 12.5. ValueError: an option is invalid.
    """

    __slots__ = ()
    _NAME = "cuda.Pool"


class Arena(_OverCuda):
    """Memory of its own from such a pool: for one ``ctxalloc.request(strategy=...)``.

    Its options and errors are those of ``Pool``.
    """

    __slots__ = ()
    _NAME = "cuda.Arena"


for _public in (Pool, Arena, handler, kind_of, use):
    _public.__module__ = "ctxalloc.cuda"
