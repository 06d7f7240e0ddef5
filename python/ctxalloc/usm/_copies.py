"""Copies between host and device, and from device to device: always asked for, never made behind anybody's back."""

from collections.abc import Awaitable
from typing import TypeAlias

import numpy as np

from ctxalloc.usm._geometry import Found, Host, Placed, check_dtype, geometry
from ctxalloc.usm._runtime import UsmKind, native_queue

_Side: TypeAlias = Placed | Host


def _found(side: object, what: str) -> Found:
    """Where the elements of one side are."""
    if isinstance(side, Placed):
        return side._found
    if not isinstance(side, np.ndarray):
        msg = f"the {what} of a copy is a ctxalloc.usm.Array or a numpy.ndarray, got '{type(side).__qualname__}'"
        raise TypeError(msg)
    item = check_dtype(side.dtype).itemsize
    if any(stride % item for stride in side.strides):
        msg = f"the {what}'s strides {side.strides} are not whole elements of {item} bytes; copy it first"
        raise ValueError(msg)
    return Found(
        side,
        None,
        UsmKind.UNKNOWN,
        side.__array_interface__["data"][0],
        side.shape,
        tuple(stride // item for stride in side.strides),
        side.dtype,
        readonly=not side.flags.writeable,
    )


def _both(target: _Side, source: _Side) -> tuple[Found, Found]:
    to, from_ = _found(target, "target"), _found(source, "source")
    if to.shape != from_.shape or to.dtype != from_.dtype:
        msg = (
            f"cannot copy {from_.dtype} of shape {from_.shape} to {to.dtype} of shape {to.shape}; they must be the same"
        )
        raise ValueError(msg)
    if to.readonly:
        msg = "the target of a copy is read-only"
        raise ValueError(msg)
    return to, from_


def _overlap(one: Found, two: Found) -> bool:
    (start, end), (other_start, other_end) = one.span, two.span
    return start < other_end and other_start < end


def _same_context(to: Found, from_: Found) -> bool:
    """Whether one queue can reach both."""
    if to.queue is None or from_.queue is None or to.queue == from_.queue:
        return True
    return native_queue(to.queue).kind_of(from_.address) == from_.kind


def copy(target: _Side, source: _Side, /) -> None:
    """Copies all elements of ``source`` to ``target`` and waits until they are there.

    Each is an ``Array`` or an ndarray, of the same shape and dtype. It comes after all that was submitted to their
    queues. ValueError: they differ, or the target is read-only. RuntimeError: SYCL refused.
    """
    to, from_ = _both(target, source)
    if to.size == 0:
        return
    if isinstance(source, Placed) and isinstance(target, Placed) and from_.queue != to.queue:
        source._queue.wait()
    on_host = UsmKind.DEVICE not in (to.kind, from_.kind)
    if to.is_contiguous and from_.is_contiguous and not _overlap(to, from_) and _same_context(to, from_):
        _copy_bytes(target, source, to, from_)
    elif on_host:
        for side in (target, source):
            if isinstance(side, Placed):
                side._queue.wait()
        np.copyto(geometry(to), geometry(from_))
    elif from_.kind is UsmKind.DEVICE:
        copy(target, _span(from_)[0])
    else:
        # Into a part of device memory: all from its first byte to its last goes there and back.
        values, span = _span(to)
        np.copyto(values, geometry(from_))
        native_queue(to.queue).copy(to.span[0], span.__array_interface__["data"][0], span.size)


def _copy_bytes(target: _Side, source: _Side, to: Found, from_: Found) -> None:
    """One stretch of bytes to another, by the handler's own copies where the memory is a handler's."""
    size_bytes = to.size * to.dtype.itemsize
    if to.queue is None and from_.queue is None:
        np.copyto(geometry(to), geometry(from_))
    else:
        native_queue(to.queue or from_.queue).copy(to.address, from_.address, size_bytes)


def _span(found: Found) -> tuple[Host, Host]:
    """A view like ``found`` into a copy, on the host, of all bytes from its first to its last; and that copy."""
    first, behind = found.span
    span: Host = np.empty(behind - first, np.uint8)
    start: int = span.__array_interface__["data"][0]
    native_queue(found.queue).copy(start, first, span.size)
    there = found._replace(address=start + found.address - first, owner=span, readonly=False)
    return geometry(there), span


def copy_async(target: _Side, source: _Side, /) -> Awaitable[None]:
    """Begins a copy of all elements of ``source`` to ``target``; await what it returns before you look at them.

    At least one is an ``Array``; both are contiguous, of the same shape and dtype, and do not overlap. The copy comes
    after all that was submitted to the queue and after the copies that were asked for before, on another thread; what
    is submitted meanwhile may come before it. Both arrays are kept until it is over, also where the awaiting task is
    cancelled: the copy itself cannot be.

    ValueError: as said. RuntimeError: no event loop is running, or SYCL refused.
    """
    to, from_ = _both(target, source)
    queue = to.queue or from_.queue
    if queue is None:
        msg = "neither side of the copy is a ctxalloc.usm.Array; numpy.copyto() copies from host to host"
        raise ValueError(msg)
    if not (to.is_contiguous and from_.is_contiguous) or _overlap(to, from_) or not _same_context(to, from_):
        msg = (
            "an asynchronous copy is from one contiguous array to another of the same context that does not overlap it"
        )
        raise ValueError(msg)
    if to.queue is not None and from_.queue is not None and to.queue != from_.queue:
        native_queue(from_.queue).wait()
    size_bytes = to.size * to.dtype.itemsize
    return native_queue(queue).copy_async(to.address, from_.address, size_bytes, (target, source))


for _public in (copy, copy_async):
    _public.__module__ = "ctxalloc.usm"
