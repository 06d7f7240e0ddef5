"""Copies between host and device, and between devices. A copy is made only where the user asks for one.

Only the elements of the target are written: what is between them may belong to another array. Contiguous bytes are one
copy of SYCL's, long rows are one copy each, and other elements are copied by a kernel of dpnp, if that is installed. A
queue gets only memory that it can reach: that of its context and device, and the host's. Other copies pass through the
host.
"""

import importlib
import math
from collections.abc import Awaitable
from typing import Any, TypeAlias

import numpy as np

from ctxalloc import _native
from ctxalloc.usm._geometry import Found, Host, Placed, check_dtype, geometry, row_strides
from ctxalloc.usm._runtime import UsmKind, native_queue
from ctxalloc.usm._runtime import tensors as _tensors

_Side: TypeAlias = Placed | Host

# If there are few rows, or they are long, one copy for each is faster than a kernel.
_MAX_ROWS = 8
_MIN_ROW_BYTES = 16 << 10
# One copy may read this many times the bytes of the elements, or this many bytes in any case.
_MAX_SPREAD = 2
_SMALL_BYTES = 64 << 10
# Up to this size dpnp copies an ndarray faster than a copy through USM of our own would.
_DPNP_BYTES = 64 << 10


def _found(side: object, what: str) -> Found:
    """Where the elements of the target or the source are."""
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
    """Whether the two share an element. True also if that would take too long to find out."""
    (start, end), (other_start, other_end) = one.span, two.span
    if end <= other_start or other_end <= start:
        return False
    try:
        # It compares addresses and reads nothing. The type stubs allow only two values for max_work.
        return np.shares_memory(geometry(one), geometry(two), max_work=1000)  # type: ignore[arg-type,unused-ignore]
    except np.exceptions.TooHardError:
        return True


def _reaches(queue: Any, side: Found) -> bool:
    """Whether work on a queue may use the elements. Work on the memory of another device may never end."""
    native = native_queue(queue)
    if side.queue is None:
        return native.reaches(side.address)
    if side.queue == queue or native.shares_memory_with(native_queue(side.queue)):
        return True
    return side.kind is UsmKind.HOST and native.kind_of(side.address) == UsmKind.HOST


def _queue_for(to: Found, from_: Found) -> Any:
    """The queue that can make the copy; None if neither reaches both sides."""
    for queue in (to.queue, from_.queue):
        if queue is not None and _reaches(queue, to) and _reaches(queue, from_):
            return queue
    return None


def copy(target: _Side, source: _Side, /) -> None:
    """Copies all elements of ``source`` to ``target`` and waits until they are there. Nothing else is written.

    Each is an ``Array`` or an ndarray; both have the same shape and dtype. The copy comes after all work that was
    submitted to their queues before. TypeError: one is neither. ValueError: shape or dtype differ, or the target is
    read-only. RuntimeError: SYCL refused.
    """
    to, from_ = _both(target, source)
    for queue in {from_.queue, to.queue} - {None}:
        native_queue(queue).wait()
    if to.size > 0:
        _move(to, from_)


def _move(to: Found, from_: Found) -> None:
    """Copies at least one element. Work that was submitted before has ended."""
    queue = _queue_for(to, from_)
    if queue is not None and to.is_contiguous and from_.is_contiguous and not _overlap(to, from_):
        native_queue(queue).copy(to.address, from_.address, to.nbytes)
        return
    if UsmKind.DEVICE not in (to.kind, from_.kind):
        np.copyto(geometry(to), geometry(from_))
        return
    if queue is None or _overlap(to, from_):
        _move_by(_on_host(to.shape, to.dtype), to, from_)
        return
    first, behind = from_.span
    if to.kind is not UsmKind.DEVICE and behind - first <= max(_MAX_SPREAD * to.nbytes, _SMALL_BYTES):
        _read_all(to, from_, queue)
    elif from_.kind is not UsmKind.DEVICE and to.is_dense:
        _write_all(to, from_, queue)
    else:
        _move_parts(to, from_, queue)


def _read_all(to: Found, from_: Found, queue: Any) -> None:
    """To the host: copies all bytes from the first element to the last at once; the host picks the elements."""
    first, behind = from_.span
    there = _on_host((behind - first,), np.dtype(np.uint8))
    native_queue(queue).copy(there.address, first, behind - first)
    np.copyto(geometry(to), geometry(from_._replace(address=there.address + from_.address - first, owner=there.owner)))


def _write_all(to: Found, from_: Found, queue: Any) -> None:
    """From the host: the target's elements have no gaps, so they are written in one copy."""
    first, behind = to.span
    here = _on_host((behind - first,), np.dtype(np.uint8))
    np.copyto(geometry(to._replace(address=here.address + to.address - first, owner=here.owner)), geometry(from_))
    native_queue(queue).copy(first, here.address, behind - first)


def _move_parts(to: Found, from_: Found, queue: Any) -> None:
    """Copies the elements and nothing between them, by rows or by a kernel.

    At least one side is memory of a device, and the sides do not overlap.
    """
    row_bytes, axes = _rows(to, from_)
    native = native_queue(queue)
    are_rows_good = math.prod(count for count, _, _ in axes) <= _MAX_ROWS or row_bytes >= _MIN_ROW_BYTES
    is_stageable = native.has("host") or native.has("shared")
    if are_rows_good or not is_stageable or _tensors() is None:
        device = to if to.kind is UsmKind.DEVICE else from_
        between = None if are_rows_good else _on_host_as(device)
        if between is not None and _rows(device, between)[0] > row_bytes:
            _move_by(between, to, from_)
        else:
            native.copy_rows(to.address, from_.address, row_bytes, axes)
        return
    unfit = [side for side in (to, from_) if side.queue is None and native.kind_of(side.address) == UsmKind.UNKNOWN]
    if unfit and unfit[0] is from_ and to.nbytes <= _DPNP_BYTES and to.dtype.itemsize <= 8:
        _tensor(to, queue)[...] = geometry(from_).view(_tensor_dtype(from_))
    elif unfit:
        _move_by(_in_usm(to, queue), to, from_)
    else:
        _tensor(to, queue)[...] = _tensor(from_, queue)
    native.wait()


def _move_by(between: Found, to: Found, from_: Found) -> None:
    """Copies through contiguous memory elsewhere."""
    _move(between, from_)
    _move(to, between)


def _rows(to: Found, from_: Found) -> tuple[int, list[tuple[int, int, int]]]:
    """The bytes that are contiguous on both sides; for each other axis its length and its steps in bytes."""
    item = to.dtype.itemsize
    axes = [
        (length, there * item, here * item)
        for length, there, here in zip(to.shape, to.strides, from_.strides, strict=True)
        if length > 1
    ]
    # Sorted as in the target's memory, so that contiguous bytes are found in any order and direction of the axes.
    axes.sort(key=lambda axis: -abs(axis[1]))
    row_bytes = item
    while axes and axes[-1][1] == axes[-1][2] == row_bytes:
        row_bytes *= axes.pop()[0]
    return row_bytes, axes


def _on_host(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Found:
    """Contiguous memory on the host, not in USM, whichever handler is selected."""
    with _native.use("default_allocator"):
        made: Host = np.empty(shape, dtype)
    return _found(made, "target")


def _on_host_as(like: Found) -> Found:
    """Memory on the host for elements in the order in which ``like`` has them, so that rows are as long as possible."""
    order = sorted(range(len(like.shape)), key=lambda axis: -abs(like.strides[axis]))
    made = _on_host(tuple(like.shape[axis] for axis in order), like.dtype)
    strides = dict(zip(order, made.strides, strict=True))
    return made._replace(shape=like.shape, strides=tuple(strides[axis] for axis in range(len(order))))


def _in_usm(like: Found, queue: Any) -> Found:
    """Contiguous memory that a queue's kernels can use, and the host too if the device has such memory."""
    native = native_queue(queue)
    kind = next(kind for kind in (UsmKind.HOST, UsmKind.SHARED, UsmKind.DEVICE) if native.has(kind))
    memory = _native.UsmMemory(native, str(kind), like.nbytes, zeroed=False, charged=False)
    return Found(memory, queue, kind, memory.address, like.shape, row_strides(like.shape), like.dtype, readonly=False)


class _Bytes:
    """An object with the interface of plain bytes that keeps their memory alive."""

    def __init__(self, found: Found, queue: Any) -> None:
        first, behind = found.span
        self.__sycl_usm_array_interface__ = {
            "shape": (behind - first,),
            "typestr": "|u1",
            "data": (first, False),
            "strides": None,
            "version": 1,
            "syclobj": queue,
        }
        self.owner = found.owner


def _tensor(found: Found, queue: Any) -> Any:
    """Dpnp's array over the elements, as unsigned ints, which any device can copy."""
    dtype = _tensor_dtype(found)
    shape = _tensor_shape(found)
    strides = found.strides if len(shape) == len(found.shape) else (*(2 * stride for stride in found.strides), 1)
    return _tensors().usm_ndarray(
        shape,
        dtype,
        buffer=importlib.import_module("dpctl.memory").as_usm_memory(_Bytes(found, queue)),
        strides=strides,
        offset=(found.address - found.span[0]) // dtype.itemsize,
    )


def _tensor_dtype(found: Found) -> np.dtype[Any]:
    return np.dtype(f"u{min(found.dtype.itemsize, 8)}")


def _tensor_shape(found: Found) -> tuple[int, ...]:
    """One axis more for elements of 16 bytes, which are two such ints."""
    return found.shape if found.dtype.itemsize <= 8 else (*found.shape, 2)


def copy_async(target: _Side, source: _Side, /) -> Awaitable[None]:
    """Begins to copy all elements of ``source`` to ``target``; await the result before you read or write either.

    At least one is an ``Array``; both are contiguous, of the same shape and dtype, and do not overlap. The copy runs on
    another thread, after all work that was submitted to the queue before, and after earlier asynchronous copies. Work
    that is submitted meanwhile may run before it. Both arrays are kept alive until it ends, even if the awaiting task
    is cancelled: the copy itself cannot be cancelled.

    ValueError: the arrays are not as described, or no queue reaches both. RuntimeError: no event loop is running, or
    SYCL refused.
    """
    to, from_ = _both(target, source)
    if to.queue is None and from_.queue is None:
        msg = "neither side of the copy is a ctxalloc.usm.Array; numpy.copyto() copies from host to host"
        raise ValueError(msg)
    queue = _queue_for(to, from_)
    if not (to.is_contiguous and from_.is_contiguous) or _overlap(to, from_) or queue is None:
        msg = (
            "an asynchronous copy is from one contiguous array to another of the same context and device that does not "
            "overlap it; copy() takes any"
        )
        raise ValueError(msg)
    other = from_.queue if queue == to.queue else to.queue
    if other is not None and other != queue:
        native_queue(other).wait()
    size_bytes = to.nbytes
    return native_queue(queue).copy_async(to.address, from_.address, size_bytes, (target, source))


for _public in (copy, copy_async):
    _public.__module__ = "ctxalloc.usm"
