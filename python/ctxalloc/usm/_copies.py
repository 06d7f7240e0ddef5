"""Copies between host and device, and from device to device: always asked for, never made behind anybody's back.

Only the elements that are meant are written, for what lies between them may be somebody else's. Bytes in one stretch go
by one copy of SYCL's, long rows by one each, other elements by a kernel of dpnp's where that is installed. A queue is
given only memory that it reaches: that of its context and device, and the host's. All else goes by way of the host.
"""

import importlib
import math
from collections.abc import Awaitable
from typing import Any, TypeAlias

import numpy as np

from ctxalloc import _native
from ctxalloc.usm._geometry import Found, Host, Placed, check_dtype, geometry, row_strides
from ctxalloc.usm._runtime import UsmKind, native_queue

_Side: TypeAlias = Placed | Host

# Few rows, or long ones, are better copied one by one than by a kernel.
_MAX_ROWS = 8
_MIN_ROW_BYTES = 16 << 10
# One copy may read so many times the bytes that are meant, or so few that it does not matter.
_MAX_SPREAD = 2
_SMALL_BYTES = 64 << 10
# Up to here dpnp itself copies an ndarray faster than by way of USM of our own.
_DPNP_BYTES = 64 << 10

_found_tensors: list[Any] = []


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
    """Whether an element of one is also an element of the other; or that is hard to tell."""
    (start, end), (other_start, other_end) = one.span, two.span
    if end <= other_start or other_end <= start:
        return False
    try:
        # By address: nothing is read. The types know of two amounts of work only.
        return np.shares_memory(geometry(one), geometry(two), max_work=1000)  # type: ignore[arg-type,unused-ignore]
    except np.exceptions.TooHardError:
        return True


def _reaches(queue: Any, side: Found) -> bool:
    """Whether work on a queue may use the elements. Another device's memory would never let it end."""
    native = native_queue(queue)
    if side.queue is None:
        return native.reaches(side.address)
    if side.queue == queue or native.shares_memory_with(native_queue(side.queue)):
        return True
    return side.kind is UsmKind.HOST and native.kind_of(side.address) == UsmKind.HOST


def _queue_for(to: Found, from_: Found) -> Any:
    """The queue that a copy goes by; None where there is none that reaches both."""
    for queue in (to.queue, from_.queue):
        if queue is not None and _reaches(queue, to) and _reaches(queue, from_):
            return queue
    return None


def copy(target: _Side, source: _Side, /) -> None:
    """Copies all elements of ``source`` to ``target`` and waits until they are there. Nothing else is written.

    Each is an ``Array`` or an ndarray, of the same shape and dtype. It comes after all that was submitted to their
    queues. ValueError: they differ, or the target is read-only. RuntimeError: SYCL refused.
    """
    to, from_ = _both(target, source)
    for queue in {from_.queue, to.queue} - {None}:
        native_queue(queue).wait()
    if to.size > 0:
        _move(to, from_)


def _move(to: Found, from_: Found) -> None:
    """One to the other, at least one element; what was submitted before is over."""
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
    """To the host: all bytes from the first to the last in one copy, of which the host takes what is meant."""
    first, behind = from_.span
    there = _on_host((behind - first,), np.dtype(np.uint8))
    native_queue(queue).copy(there.address, first, behind - first)
    np.copyto(geometry(to), geometry(from_._replace(address=there.address + from_.address - first, owner=there.owner)))


def _write_all(to: Found, from_: Found, queue: Any) -> None:
    """From the host: elements that lie one behind the other, in whatever order, in one copy."""
    first, behind = to.span
    here = _on_host((behind - first,), np.dtype(np.uint8))
    np.copyto(geometry(to._replace(address=here.address + to.address - first, owner=here.owner)), geometry(from_))
    native_queue(queue).copy(first, here.address, behind - first)


def _move_parts(to: Found, from_: Found, queue: Any) -> None:
    """What is meant and nothing between, by rows or by a kernel. At least one side is a device's; they are apart."""
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
    """The same by way of elements in one stretch, elsewhere."""
    _move(between, from_)
    _move(to, between)


def _rows(to: Found, from_: Found) -> tuple[int, list[tuple[int, int, int]]]:
    """The bytes in one stretch on both sides; for each other axis how many there are, and the steps in bytes."""
    item = to.dtype.itemsize
    axes = [
        (length, there * item, here * item)
        for length, there, here in zip(to.shape, to.strides, from_.strides, strict=True)
        if length > 1
    ]
    # In the order of the target's memory: what is one stretch there is found whatever the axes' order, and reversals.
    axes.sort(key=lambda axis: -abs(axis[1]))
    row_bytes = item
    while axes and axes[-1][1] == axes[-1][2] == row_bytes:
        row_bytes *= axes.pop()[0]
    return row_bytes, axes


def _on_host(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Found:
    """Room on the host, in one stretch; not in USM, whatever handler is selected."""
    with _native.use("default_allocator"):
        made: Host = np.empty(shape, dtype)
    return _found(made, "target")


def _on_host_as(like: Found) -> Found:
    """Room on the host for elements in the order in which those lie, so that rows are as long as can be."""
    order = sorted(range(len(like.shape)), key=lambda axis: -abs(like.strides[axis]))
    made = _on_host(tuple(like.shape[axis] for axis in order), like.dtype)
    strides = dict(zip(order, made.strides, strict=True))
    return made._replace(shape=like.shape, strides=tuple(strides[axis] for axis in range(len(order))))


def _in_usm(like: Found, queue: Any) -> Found:
    """Room that a queue's kernels and, where the device has such memory, the host use; in one stretch."""
    native = native_queue(queue)
    kind = next(kind for kind in (UsmKind.HOST, UsmKind.SHARED, UsmKind.DEVICE) if native.has(kind))
    memory = _native.UsmMemory(native, str(kind), like.nbytes, zeroed=False, charged=False)
    return Found(memory, queue, kind, memory.address, like.shape, row_strides(like.shape), like.dtype, readonly=False)


class _Bytes:
    """An interface of plain bytes, and what keeps them alive."""

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
    """Dpnp's array over the elements, as unsigned numbers: any device can copy those."""
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
    """One axis more for elements of two such numbers."""
    return found.shape if found.dtype.itemsize <= 8 else (*found.shape, 2)


def _tensors() -> Any:
    """The module of usm_ndarray: dpnp's, or dpctl's before 0.22; None where there is none. Looked for once."""
    if not _found_tensors:
        for name in ("dpnp.tensor", "dpctl.tensor"):
            try:
                _found_tensors.append(importlib.import_module(name))
                break
            except ImportError:
                continue
        else:
            _found_tensors.append(None)
    return _found_tensors[0]


def copy_async(target: _Side, source: _Side, /) -> Awaitable[None]:
    """Begins a copy of all elements of ``source`` to ``target``; await what it returns before you look at them.

    At least one is an ``Array``; both are contiguous, of the same shape and dtype, and do not overlap. The copy comes
    after all that was submitted to the queue and after the copies that were asked for before, on another thread; what
    is submitted meanwhile may come before it. Both arrays are kept until it is over, also where the awaiting task is
    cancelled: the copy itself cannot be.

    ValueError: as said, and where no queue reaches both. RuntimeError: no event loop is running, or SYCL refused.
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
