"""dpctl and its library, loaded when first needed; and the queues and handlers over them."""

import collections
import enum
import importlib
import os
import sys
import threading
import weakref
from pathlib import Path
from typing import Any, Literal, Self, TypeAlias

import numpy as np

from ctxalloc import _native


class UsmKind(enum.StrEnum):
    """Who can access an allocation: the kinds of ``sycl::usm::alloc``."""

    HOST = "host"
    """On the host; devices access it there."""
    DEVICE = "device"
    """On a device; the host cannot access it."""
    SHARED = "shared"
    """Moves between host and device to where it is used."""
    UNKNOWN = "unknown"
    """Not USM, or USM of another context."""


UsmKind.__module__ = "ctxalloc.usm"

Kind: TypeAlias = UsmKind | Literal["host", "device", "shared"]

# A context, a device and a kind: each such place has one handler and one pool.
_Place: TypeAlias = tuple[Any, Any, UsmKind]

_lock = threading.Lock()
_handlers: dict[_Place, _native.Handler] = {}
_places: dict[_native.Handler, tuple[Any, UsmKind]] = {}
# The queue of the handlers and strategies in each context and on each device. Entries stay for ever.
_kept: dict[tuple[Any, Any], tuple[Any, _native.UsmQueue]] = {}

_found: dict[str, Any] = {}
_MAX_RECENT = 16
# The native object of each queue that an array is on; `_recent` keeps those of the last few other queues alive.
_native_queues: "weakref.WeakValueDictionary[Any, _native.UsmQueue]" = weakref.WeakValueDictionary()
_recent: "collections.deque[_native.UsmQueue]" = collections.deque(maxlen=_MAX_RECENT)
_contexts: "collections.OrderedDict[Any, Any]" = collections.OrderedDict()


def _find_opencl() -> None:
    """Tells OpenCL's loader where this environment's CPU runtime is, unless it was told of another.

    The loader reads the variable when it is first used, so this works only before SYCL is first used.
    """
    library = Path(sys.prefix) / "lib" / "libintelocl.so"
    if "OCL_ICD_FILENAMES" not in os.environ and library.exists():
        os.environ["OCL_ICD_FILENAMES"] = str(library)


def is_loaded() -> bool:
    """Whether dpctl has been loaded."""
    return "dpctl" in _found


def dpctl() -> Any:
    """The package dpctl. ImportError names the extra that brings it."""
    if "dpctl" in _found:
        return _found["dpctl"]
    _find_opencl()
    try:
        return _found.setdefault("dpctl", importlib.import_module("dpctl"))
    except ImportError as error:
        msg = "ctxalloc.usm needs dpctl and a SYCL runtime, which are not installed: pip install ctxalloc[usm]"
        raise ImportError(msg, name="dpctl") from error


def tensors() -> Any:
    """The module that has ``usm_ndarray``: dpnp's, or dpctl's before 0.22; None if there is none. Looked for once."""
    if "tensors" not in _found:
        found = None
        for name in ("dpnp.tensor", "dpctl.tensor"):
            try:
                found = importlib.import_module(name)
                break
            except ImportError:
                continue
        _found["tensors"] = found
    return _found["tensors"]


def default_queue() -> Any:
    """The queue that dpctl and dpnp use by default. dpnp can use arrays together if they are on the same queue."""
    if "queue" in _found:
        return _found["queue"]
    sycl = dpctl()
    try:
        device = sycl.SyclDevice()
    except sycl.SyclDeviceCreationError as error:
        msg = (
            "there is no SYCL device: install intel-opencl-rt (pip install ctxalloc[usm]); OCL_ICD_FILENAMES is "
            f"{os.environ.get('OCL_ICD_FILENAMES')!r}, and must be the path of libintelocl.so before SYCL is first used"
        )
        raise RuntimeError(msg) from error
    queue = importlib.import_module("dpctl._sycl_queue_manager").get_device_cached_queue(device)
    return _found.setdefault("queue", queue)


def queue_meant(queue: object) -> Any:
    """The dpctl.SyclQueue that a user means: one, a filter string, or None for the default.

    TypeError: something else. RuntimeError: there is no such device.
    """
    if queue is None:
        return default_queue()
    sycl = dpctl()
    if isinstance(queue, sycl.SyclQueue):
        return queue
    if isinstance(queue, str):
        try:
            return importlib.import_module("dpctl._sycl_queue_manager").get_device_cached_queue(sycl.SyclDevice(queue))
        except (sycl.SyclDeviceCreationError, ValueError) as error:
            names = [device.filter_string for device in sycl.get_devices()]
            msg = f"no SYCL device is named {queue!r}; there are: {', '.join(names) or 'none'}"
            raise RuntimeError(msg) from error
    msg = (
        "queue= takes a dpctl.SyclQueue, a filter string like 'opencl:cpu:0', or None for the default; "
        f"got '{type(queue).__qualname__}'"
    )
    raise TypeError(msg)


def native_queue(queue: Any) -> _native.UsmQueue:
    """The native object for a dpctl.SyclQueue; both share the SYCL queue."""
    native = _native_queues.get(queue)
    if native is None:
        library = Path(dpctl().__file__).parent / "libDPCTLSyclInterface.so"
        made = _native.UsmQueue(str(library), queue.addressof_ref(), keep=_is_own_context(queue))
        with _lock:
            native = _native_queues.setdefault(queue, made)
            _recent.append(native)
    return native


def _is_own_context(queue: Any) -> bool:
    """Whether a queue's context is its device's own. SYCL keeps that for ever, so a pool may be made in it."""
    return _is_own(queue.sycl_context, queue.sycl_device)


def _is_own(context: Any, device: Any) -> bool:
    try:
        return device.parent_device is None and bool(device.sycl_platform.default_context == context)
    except RuntimeError:  # SYCL can be configured to have no such contexts
        return False


def queue_in(context: Any) -> Any:
    """A queue in a dpctl.SyclContext, on its first device. The queues of the last few contexts are remembered."""
    known = _contexts.get(context)
    if known is None:
        device = context.get_devices()[0]
        cached = importlib.import_module("dpctl._sycl_queue_manager").get_device_cached_queue
        # The queue that dpctl and dpnp use for this device, if there is one, so that arrays can be used together.
        known = cached(device) if _is_own(context, device) else dpctl().SyclQueue(context, device)
        with _lock:
            known = _contexts.setdefault(context, known)
            if len(_contexts) > _MAX_RECENT:
                _contexts.popitem(last=False)
    return known


def kind_meant(kind: object) -> UsmKind:
    """The kind that a user means. ValueError: none that can be allocated."""
    if isinstance(kind, str) and kind in ("host", "device", "shared"):
        return UsmKind(kind)
    msg = f"kind={kind!r} is no kind of USM to allocate; give 'host', 'device' or 'shared'"
    raise ValueError(msg)


def handler(queue: object = None, kind: Kind = "shared") -> _native.Handler:
    """The handler over pooled USM of a kind in a queue's context, registered for ever when it is first asked for.

    Queues with the same context and device have the same handler. ``usm_shared``, ``usm_host`` and ``usm_device`` are
    those of the default queue; the names of others end with a number, such as ``usm_shared:1``. RuntimeError: there is
    no such device, or it has no such memory. ValueError: the kind is invalid.
    """
    owner, wanted = queue_meant(queue), kind_meant(kind)
    found = _handlers.get((owner.sycl_context, owner.sycl_device, wanted))
    if found is None:
        number, owner, native = keep(owner)
        place = (owner.sycl_context, owner.sycl_device, wanted)
        with _lock:
            found = _handlers.get(place)
            if found is None:
                found = native.register(f"usm_{wanted}:{number}" if number else f"usm_{wanted}", wanted)
                _handlers[place] = found
                _places[found] = (owner, wanted)
    return found


def handler_over(queue: Any, kind: UsmKind) -> _native.Handler | None:
    """The handler over the memory of arrays on a queue; None if its context is the user's own, and has none."""
    if _is_own_context(queue):
        return handler(queue, kind)
    return _handlers.get((queue.sycl_context, queue.sycl_device, kind))


def keep(queue: Any) -> tuple[int, Any, _native.UsmQueue]:
    """Remembers a context and a device for ever, for a handler or a strategy.

    Returns their number (0 is the default queue's), the queue that represents them, and its native object.
    """
    sides = [(one, native_queue(one)) for one in (default_queue(), queue)]
    with _lock:
        for one, native in sides:
            _kept.setdefault((one.sycl_context, one.sycl_device), (one, native))
        place = (queue.sycl_context, queue.sycl_device)
        return list(_kept).index(place), *_kept[place]


def register_defaults(wanted: str) -> None:
    """Registers those of ``usm_shared``, ``usm_host`` and ``usm_device`` that the default queue's device has.

    RuntimeError: it does not have the one that is wanted.
    """
    queue = default_queue()
    native = native_queue(queue)
    for kind in (UsmKind.SHARED, UsmKind.HOST, UsmKind.DEVICE):
        if native.has(kind) or wanted == f"usm_{kind}":
            handler(queue, kind)


def place_of(owner: _native.Handler | None) -> tuple[Any, UsmKind] | None:
    """The queue and kind of a handler over USM; None for any other handler."""
    return None if owner is None else _places.get(owner)


def known_queues(address: int) -> list[Any]:
    """One queue for each context and device that an address may belong to, the default queue first.

    Contexts of handlers and strategies are among them only if this package allocated the memory: there may be many.
    """
    default = default_queue()
    known = {(default.sycl_context, default.sycl_device): default}
    if native_queue(default).locate(address) is not None:
        known |= {place: queue for place, (queue, _) in _kept.items()}
    for queue in list(_native_queues.keys()):
        known.setdefault((queue.sycl_context, queue.sycl_device), queue)
    return list(known.values())


def where(address: int) -> tuple[Any, UsmKind]:
    """The queue and kind of the memory at an address, among all known queues; (None, UNKNOWN) if it is not USM."""
    found: tuple[Any, UsmKind] = (None, UsmKind.UNKNOWN)
    for queue in known_queues(address):
        native = native_queue(queue)
        kind = UsmKind(native.kind_of(address))
        if kind is not UsmKind.UNKNOWN:
            if native.reaches(address):
                return queue, kind
            found = (queue, kind)  # the context is right, the device may be another one
    return found


def use(*, queue: object = None, kind: Kind = "shared") -> _native.Scope:
    """``ctxalloc.use`` for USM: NumPy's arrays are allocated in it, for the device of a queue.

    ::

        with ctxalloc.usm.use(kind="host"):
            a = numpy.zeros(1000)

    ``queue`` is a ``dpctl.SyclQueue``, a filter string, or None for the one that dpctl and dpnp use by default. It also
    works with ``async with`` and as a decorator. ValueError: ``kind="device"``, which the host cannot access.
    """
    return _native.use(handler(queue, kind))


def kind_of(subject: object, /, *, queue: object = None) -> UsmKind:
    """The kind of memory at an address (an int) or of an array, according to SYCL.

    SYCL is asked about the context of ``queue``. Without one that is the context of the array; for an address and for
    an ndarray, it is those of the default queue, of all arrays, and of the last few queues that were used here.
    TypeError: neither an int nor an object with memory.
    """
    address: object = subject
    if isinstance(subject, _native.UsmView):
        address = subject.address
        queue = getattr(subject, "sycl_queue", None) if queue is None else queue
    elif isinstance(subject, np.ndarray):
        address = subject.__array_interface__["data"][0]
    elif hasattr(subject, "__sycl_usm_array_interface__"):
        interface = subject.__sycl_usm_array_interface__
        data = interface.get("data") if isinstance(interface, dict) else None
        address = data[0] if isinstance(data, (tuple, list)) and data else None
        queue = getattr(subject, "sycl_queue", None) if queue is None else queue
    if not isinstance(address, int) or isinstance(address, bool):
        msg = f"kind_of() takes an address or an array, got '{type(subject).__qualname__}'"
        raise TypeError(msg)
    if not 0 <= address < 1 << 64:
        return UsmKind.UNKNOWN
    if queue is not None:
        return UsmKind(native_queue(queue_meant(queue)).kind_of(address))
    located = native_queue(default_queue()).locate(address)
    return UsmKind(located[0]) if located is not None else where(address)[1]


class Pool(_native.Strategy):
    """Pooled USM of a kind on a queue: for ``register``, or as the upstream of ``Budgeted``, ``Tracked`` and others.

    There is one pool for each context, device and kind. RuntimeError: the device has no such memory, or the kind is
    'device', which strategies cannot use. ValueError: the kind is invalid.
    """

    __slots__ = ()

    def __new__(cls, *, queue: object = None, kind: Kind = "shared") -> Self:
        """See the class."""
        return super().__new__(cls, "Usm", queue=keep(queue_meant(queue))[2], kind=str(kind_meant(kind)))


class Arena(_native.Strategy):
    """Memory of its own from the pool of a queue and kind: for one ``ctxalloc.request(strategy=...)``.

    RuntimeError, ValueError: as for ``Pool``.
    """

    __slots__ = ()

    def __new__(cls, *, queue: object = None, kind: Kind = "shared") -> Self:
        """See the class."""
        return super().__new__(cls, "UsmArena", queue=keep(queue_meant(queue))[2], kind=str(kind_meant(kind)))


for _public in (Pool, Arena, handler, kind_of, use):
    _public.__module__ = "ctxalloc.usm"
