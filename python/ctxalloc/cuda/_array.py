"""`Array`: an ndarray's elements as CUDA's libraries take them, without a copy."""

from typing import Any, NoReturn, Self

import numpy as np

from ctxalloc import _native
from ctxalloc._described import is_int, span
from ctxalloc.cuda._memory import CudaKind, device_meant

CUDA_HOST, CUDA_MANAGED = 3, 13
_CPU = (1, 0)
_CODES = {"i": 0, "u": 1, "f": 2, "c": 5, "b": 6}
_FIRST_VERSION = (1, 0)

Host = np.ndarray[Any, np.dtype[Any]]


class Array:
    """The elements of an ndarray in pinned or managed memory, for kernels and libraries of CUDA. It computes nothing.

    ``as_cuda`` makes one; slices are views. ``cupy.asarray(array)`` and ``numba.cuda.as_cuda_array(array)`` take its
    ``__cuda_array_interface__`` (version 3), and kernels then read the host's memory by way of the bus, or move
    managed memory to the device. DLPack says CUDAHost or CUDAManaged. Both keep the ndarray alive.

    What the host writes is there at once. Before the host reads what a kernel wrote, wait for the kernel's stream.
    """

    __module__ = "ctxalloc.cuda"
    __slots__ = ("_array", "_device", "_kind")

    _array: Host
    _device: int
    _kind: CudaKind

    def __init__(self) -> None:
        msg = "a cuda.Array is made by ctxalloc.cuda.as_cuda(array)"
        raise TypeError(msg)

    @classmethod
    def _over(cls, array: Host, kind: CudaKind, device: int) -> Self:
        self = cls.__new__(cls)
        self._array, self._kind, self._device = array, kind, device
        return self

    @property
    def ndarray(self) -> Host:
        """The ndarray over the same memory."""
        return self._array

    @property
    def kind(self) -> CudaKind:
        """The kind of memory."""
        return self._kind

    @property
    def device(self) -> int:
        """The number of the device that it was pinned or allocated on."""
        return self._device

    @property
    def shape(self) -> tuple[int, ...]:
        """The number of elements along each axis."""
        shape: tuple[int, ...] = self._array.shape
        return shape

    @property
    def strides(self) -> tuple[int, ...]:
        """The bytes from one element to the next along each axis."""
        return self._array.strides

    @property
    def dtype(self) -> np.dtype[Any]:
        """The type of an element."""
        return self._array.dtype

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return self._array.ndim

    @property
    def size(self) -> int:
        """The number of elements."""
        return self._array.size

    @property
    def nbytes(self) -> int:
        """The size of all elements in bytes."""
        return self._array.nbytes

    @property
    def readonly(self) -> bool:
        """Whether it must not be written to."""
        return not self._array.flags.writeable

    def __len__(self) -> int:
        return len(self._array)

    def __getitem__(self, key: Any, /) -> "Array":
        """A view: ints, slices, ``...`` and None. IndexError, TypeError: a list or a mask, which would be a copy."""
        view: Any = self._array[key if isinstance(key, tuple) else (key,)]
        if not isinstance(view, np.ndarray):
            view = self._array[(*(key if isinstance(key, tuple) else (key,)), ...)]
        if view.size and not np.shares_memory(view, self._array):
            msg = f"a cuda.Array has no view at [{key!r}]: lists and masks make copies; index .ndarray instead"
            raise IndexError(msg)
        return Array._over(view, self._kind, self._device)

    def __reduce__(self) -> NoReturn:
        msg = (
            "a cuda.Array cannot be pickled: its memory is pinned in this process; pickle array.ndarray, and make it "
            "again inside of ctxalloc.cuda.use()"
        )
        raise TypeError(msg)

    def __copy__(self) -> NoReturn:
        msg = (
            "a cuda.Array makes no copies: array[:] is a view, and as_cuda(array.ndarray.copy()) inside of "
            "ctxalloc.cuda.use() a copy in pinned memory"
        )
        raise TypeError(msg)

    def __deepcopy__(self, memo: dict[int, Any], /) -> NoReturn:
        self.__copy__()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Host:  # noqa: FBT001 - NumPy's protocol
        if copy:
            return np.array(self._array, dtype=dtype)
        same = self._array if dtype is None else self._array.astype(dtype, copy=False)
        if copy is False and same is not self._array:
            msg = f"a cuda.Array of {self.dtype} cannot be had as {same.dtype} without a copy"
            raise ValueError(msg)
        return same

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """The CUDA Array Interface, version 3. No stream: there is nothing to wait for."""
        array = self._array
        if array.dtype.hasobject:  # `as_cuda` refuses them, a view of fields too
            msg = f"the CUDA array interface has no dtype {array.dtype}"
            raise AttributeError(msg)
        interface: dict[str, Any] = {
            "shape": array.shape,
            "typestr": array.dtype.str,
            "data": (array.__array_interface__["data"][0] if array.size else 0, self.readonly),
            "version": 3,
            "strides": None if array.flags.c_contiguous else array.strides,
            "stream": None,
        }
        if array.dtype.names is not None:
            try:
                interface["descr"] = array.dtype.descr
            except ValueError as error:  # fields that overlap or are out of order
                msg = f"the CUDA array interface cannot describe dtype {array.dtype}: {error}"
                raise AttributeError(msg) from error
        return interface

    def __dlpack_device__(self) -> tuple[int, int]:
        """DLPack's device: ``(3, 0)`` for pinned memory, ``(13, number)`` for managed memory."""
        return (CUDA_MANAGED, self._device) if self._kind is CudaKind.MANAGED else (CUDA_HOST, 0)

    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> object:
        """A DLPack capsule over the same memory, which keeps the ndarray alive.

        ``stream`` is the consumer's; nothing has to be waited for. BufferError: a dtype that DLPack does not have,
        strides that are no multiple of the element, a copy, or another device than the memory's or the host (1, 0).
        ValueError: stream 0, which the protocol forbids. TypeError: an argument that the protocol does not have.
        """
        if stream is not None and (not is_int(stream) or stream < -1):
            msg = f"__dlpack__(stream={stream!r}): give None, -1, 1, 2, or the number of a CUstream"
            raise TypeError(msg)
        for name, pair in (("max_version", max_version), ("dl_device", dl_device)):
            if pair is not None and not is_pair(pair):
                msg = f"__dlpack__({name}={pair!r}): give None or a tuple of two ints"
                raise TypeError(msg)
        if stream == 0 and stream is not None:
            msg = "__dlpack__(stream=0) is ambiguous: give 1 for the legacy default stream, 2 for this thread's"
            raise ValueError(msg)
        device = self.__dlpack_device__()
        if dl_device is not None and tuple(dl_device) not in (device, _CPU):
            msg = f"the memory is on DLPack device {device}, and not on {tuple(dl_device)}; copy it there"
            raise BufferError(msg)
        if copy:
            msg = "a cuda.Array makes no copies; give copy=None, and copy at the consumer"
            raise BufferError(msg)
        array, item = self._array, self._array.dtype.itemsize
        if array.dtype.kind not in _CODES or not array.dtype.isnative:
            msg = f"DLPack has no dtype {array.dtype}; use array.astype() first"
            raise BufferError(msg)
        if any(stride % item for stride in array.strides):
            msg = f"DLPack counts strides in elements, and {array.strides} bytes are no multiples of {item}; copy it"
            raise BufferError(msg)
        return _native.usm_dlpack(
            array,
            (array.__array_interface__["data"][0], 0),
            (array.shape, [stride // item for stride in array.strides]),
            (_CODES[array.dtype.kind], item * 8),
            device if dl_device is None else (int(dl_device[0]), int(dl_device[1])),
            (max_version is not None and max_version >= _FIRST_VERSION, self.readonly, False),
        )

    def __repr__(self) -> str:
        return f"<cuda.Array {self.shape} {self.dtype} in {self._kind} memory>"


def is_pair(value: object) -> bool:
    """Whether it is a tuple (or list) of two ints."""
    return isinstance(value, (tuple, list)) and len(value) == 2 and all(map(is_int, value))


def as_cuda(array: Host, /, *, device: int = 0) -> Array:
    """An ndarray in pinned or managed memory as CUDA's libraries take it, without a copy.

    ValueError: the array is in pageable memory, or kernels of ``device`` do not reach pinned memory at the host's
    addresses; make it inside of ``ctxalloc.cuda.use()``, or copy it to the device. TypeError: no ndarray, or one of
    objects. RuntimeError: there is no driver, or no such device.
    """
    number = device_meant(device)
    subject: object = array
    if not isinstance(subject, np.ndarray) or subject.dtype.hasobject:
        kind_text = subject.dtype if isinstance(subject, np.ndarray) else type(subject).__qualname__
        msg = f"as_cuda() takes an ndarray of numbers, got '{kind_text}'"
        raise TypeError(msg)
    low, behind = span(int(array.__array_interface__["data"][0]), array.shape, array.strides, array.itemsize)
    kinds = {CudaKind(_native.cuda_kind_of(low, number)), CudaKind(_native.cuda_kind_of(max(low, behind - 1), number))}
    kind = kinds.pop()
    if kinds or kind not in (CudaKind.HOST, CudaKind.MANAGED):
        msg = (
            f"the array at {low:#x} is not in pinned or managed memory, but {kind}; make it inside of "
            "ctxalloc.cuda.use(), or copy it to the device"
        )
        raise ValueError(msg)
    reached, owner = _native.cuda_address(low, number)
    if kind is CudaKind.HOST and reached != low:
        msg = (
            f"kernels of CUDA device {number} reach the array at {low:#x} at another address, so it can only be copied "
            "to the device"
        )
        raise ValueError(msg)
    return Array._over(array, kind, owner or 0)  # noqa: SLF001 - its maker


as_cuda.__module__ = "ctxalloc.cuda"
