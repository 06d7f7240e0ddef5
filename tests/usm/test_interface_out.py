"""Our arrays as others see them: dpctl, dpnp, NumPy, the buffer protocol, DLPack."""

import array as arrays
import gc
import hashlib
import weakref
from collections.abc import Callable

import dpctl
import dpctl.memory
import dpnp
import dpnp.tensor as dpt
import numpy as np
import pytest

import ctxalloc
from ctxalloc import _native, usm

FIELDS = {"shape", "typestr", "typedescr", "data", "strides", "offset", "version", "syclobj"}


def test_every_field_is_right(kind: str) -> None:
    array = usm.zeros((3, 4), np.int32, kind=kind)
    interface = array.__sycl_usm_array_interface__
    assert set(interface) == FIELDS
    assert (interface["shape"], interface["typestr"], interface["typedescr"]) == ((3, 4), "<i4", [("", "<i4")])
    assert interface["data"] == (array.address, False)
    assert interface["strides"] is None
    assert interface["offset"] == 0
    assert interface["version"] == 1
    assert interface["syclobj"] == array.sycl_queue
    part = array[1:, ::-2]
    interface = part.__sycl_usm_array_interface__
    assert (interface["shape"], interface["strides"]) == ((2, 2), (4, -2)), "elements, not bytes"
    assert interface["data"] == (array.address + 4 * (4 + 3), False), "the first element"


@pytest.mark.parametrize("key", [1, -1, slice(1, None), (slice(None), 2), (..., None, 0), (slice(None, None, -1), ...)])
def test_views_are_numpys(key: object) -> None:
    base = np.arange(24).reshape(2, 3, 4)
    ours = usm.asarray(base)[key]
    assert np.array_equal(np.asarray(ours), base[key])
    assert ours.strides == tuple(stride // 8 for stride in base[key].strides)
    assert np.array_equal(usm.asarray(base, kind="device")[key].asnumpy(), base[key])


def test_an_index_that_is_none_is_refused() -> None:
    array = usm.zeros((3, 4), kind="device")
    for key in ([0, 1], True, 1.5, "x", np.array([0]), np.array([0, 1])):
        if isinstance(key, np.ndarray) and key.size == 1:
            continue  # an index of one element counts as an int
        with pytest.raises(IndexError, match="an int, a slice"):
            array[key]
    with pytest.raises(IndexError):
        array[3]


@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (3, 0), (1,), (2, 1, 3)])
def test_no_axes_and_no_elements(shape: tuple[int, ...], kind: str) -> None:
    array = usm.zeros(shape, kind=kind)
    assert array.__sycl_usm_array_interface__["data"][0]
    assert usm.kind_of(array) == kind
    assert dpt.asarray(array).shape == array.asnumpy().shape == shape
    assert usm.zeros(5, kind=kind)[5:].__sycl_usm_array_interface__["data"][0]


def test_dpctl_takes_it_without_a_copy(kind: str) -> None:
    array = usm.zeros((3, 4), kind=kind)
    memory = dpctl.memory.as_usm_memory(array)
    assert memory._pointer == array.address
    assert memory.nbytes == array.nbytes
    assert memory.get_usm_type() == kind
    assert memory.sycl_queue == array.sycl_queue
    assert dpctl.memory.as_usm_memory(array[::-1]).nbytes == array.nbytes


@pytest.mark.parametrize(
    "take",
    [
        dpt.asarray,
        lambda array: dpnp.asarray(array).get_array(),
        lambda array: dpnp.asarray(dpt.asarray(array)).get_array(),
        lambda array: dpnp.ndarray(
            array.shape,
            dtype=array.dtype,
            buffer=dpt.asarray(array),
            strides=tuple(8 * stride for stride in array.strides),
        ).get_array(),
        lambda array: dpnp.from_dlpack(array).get_array(),
    ],
)
def test_dpnp_takes_it_without_a_copy_and_keeps_it_alive(take: Callable[..., dpt.usm_ndarray], kind: str) -> None:
    values = np.arange(12.0).reshape(3, 4)
    array = usm.asarray(values, kind=kind)
    witness = weakref.ref(array._owner)
    for view in (array, array[1:], array[:, ::2]):
        theirs = take(view)
        assert (
            theirs.__sycl_usm_array_interface__["data"][0] + 8 * theirs.__sycl_usm_array_interface__["offset"]
            == view.address
        )
        assert theirs.usm_type == kind
        assert theirs.sycl_queue == array.sycl_queue
        assert np.array_equal(dpt.asnumpy(theirs), view.asnumpy())
    del array, view
    gc.collect()
    assert witness() is not None, "dpnp's array keeps the memory"
    del theirs
    gc.collect()
    assert witness() is None


def test_negative_strides_reach_dpnp_by_usm_ndarray() -> None:
    array = usm.asarray(np.arange(12.0).reshape(3, 4))
    view = array[::-1, ::-2]
    assert np.array_equal(dpt.asnumpy(dpt.asarray(view)), np.arange(12.0).reshape(3, 4)[::-1, ::-2])


def test_arithmetic_reductions_and_mixing_on_one_queue(shared: Callable[..., np.ndarray]) -> None:
    ours, theirs = dpnp.asarray(usm.export(shared())), dpnp.ones((3, 4))
    assert float((ours + theirs).sum()) == 66 + 12
    assert dpnp.asnumpy(ours.max(axis=0)).tolist() == [8, 9, 10, 11]
    two = dpnp.asarray(usm.zeros((3, 4), kind="device"))
    assert float((two + ours).sum()) == 66, "two of ours"


def test_a_kernel_in_place_is_seen_by_numpy_after_a_wait(shared: Callable[..., np.ndarray]) -> None:
    array = shared((1000,))
    theirs = dpt.asarray(usm.export(array))
    theirs += 1
    theirs.sycl_queue.wait()
    assert array[0] == 1
    assert array.sum() == 1000 * 999 / 2 + 1000


def test_what_the_host_reads_waits_for_the_queue() -> None:
    array = usm.zeros(1 << 22, np.float32)
    theirs = dpt.asarray(array)
    for _ in range(10):
        theirs += 1
    assert np.asarray(array)[-1] == 10
    for _ in range(10):
        theirs += 1
    assert memoryview(array)[-1] == 20
    for _ in range(10):
        theirs += 1
    assert array.asnumpy()[-1] == 30


def test_a_plain_ndarray_is_exported_without_a_copy_and_kept(shared: Callable[..., np.ndarray]) -> None:
    array = shared()
    exported = usm.export(array[:, 1:])
    assert exported.address == array[:, 1:].ctypes.data
    assert not exported.readonly
    witness = weakref.ref(array)
    del array
    assert witness() is not None
    assert np.asarray(exported).tolist() == [[1, 2, 3], [5, 6, 7], [9, 10, 11]]
    del exported
    assert witness() is None


def test_what_is_not_in_usm_is_an_error_or_a_copy_by_choice(shared: Callable[..., np.ndarray]) -> None:
    array = np.arange(6)
    with pytest.raises(ValueError, match="in the memory of handler 'default_allocator', not in USM"):
        usm.export(array)
    copy = usm.export(array, copy=True)
    assert usm.kind_of(copy) == "shared"
    assert copy.asnumpy().tolist() == list(range(6))
    with pytest.raises(ValueError, match="memory of no handler"):
        usm.export(np.frombuffer(b"12345678"))
    with pytest.raises(TypeError, match="got 'list'"):
        usm.export([1, 2])
    with usm.use():
        record = np.zeros(4, "i4,i1")
    with pytest.raises(ValueError, match="strides are not whole elements"):
        usm.export(record["f0"])
    with pytest.raises(TypeError, match="cannot live in a USM array"):
        usm.export(record)
    for dtype in (object, "U3", ">f8", "M8[s]"):
        with pytest.raises(TypeError, match="cannot live in a USM array"):
            usm.empty(3, dtype)


def test_read_only_stays_so(shared: Callable[..., np.ndarray]) -> None:
    array = shared()
    array.flags.writeable = False
    exported = usm.export(array)
    assert exported.__sycl_usm_array_interface__["data"] == (array.ctypes.data, True)
    assert not np.asarray(exported).flags.writeable
    assert memoryview(exported).readonly
    assert not dpt.asarray(exported).flags.writable
    with pytest.raises(ValueError, match="read-only"):
        usm.copy(exported, np.zeros((3, 4)))
    with pytest.raises(BufferError, match="read-only"):
        exported.__dlpack__()
    assert not np.from_dlpack(exported, device="cpu").flags.writeable


def test_the_buffer_protocol_of_what_the_host_reads() -> None:
    for kind in ("host", "shared"):
        array = usm.asarray(np.arange(6, dtype=np.int32).reshape(2, 3), kind=kind)
        view = memoryview(array)
        assert (view.shape, view.strides, view.format, view.itemsize) == ((2, 3), (12, 4), "i", 4)
        assert bytes(array) == np.arange(6, dtype=np.int32).tobytes() == bytes(bytearray(array))
        assert arrays.array("i", view.cast("B").cast("i")).tolist() == list(range(6))
        view[1, 2] = 77
        assert np.asarray(array)[1, 2] == 77
        part = array[:, ::-1]
        assert memoryview(part).strides == (12, -4)
        assert memoryview(part).tolist() == [[2, 1, 0], [77, 4, 3]]
        assert memoryview(array.T).f_contiguous
        with pytest.raises(BufferError, match="not contiguous"):
            hashlib.sha256(part)  # which wants plain bytes


@pytest.mark.parametrize("kind", ["host", "shared"])
def test_a_buffer_keeps_the_memory(kind: str) -> None:
    array = usm.zeros(100, kind=kind)
    live = _native.UsmMemory.live()
    view, host = memoryview(array), np.asarray(array)
    del array
    view[3], host[4] = 3, 4
    assert (host[3], view[4], _native.UsmMemory.live()) == (3, 4, live)
    del view, host
    gc.collect()
    assert _native.UsmMemory.live() == live - 1


@pytest.mark.parametrize(
    "read",
    [memoryview, bytes, bytearray, np.asarray, np.array, np.frombuffer, lambda array: array.__array_interface__],
)
def test_a_device_has_no_buffer_and_says_so(read: Callable[..., object]) -> None:
    with pytest.raises(TypeError, match="'device' cannot be read by the host"):
        read(usm.zeros(10, kind="device"))


def test_numpys_own_ways_in() -> None:
    array = usm.asarray(np.arange(6))
    assert np.asarray(array).ctypes.data == array.address == array.__array_interface__["data"][0]
    assert np.array(array).ctypes.data != array.address
    assert np.asarray(array, dtype=float).dtype == float
    assert array.__array__(copy=True).ctypes.data != array.address
    with pytest.raises(ValueError, match="copy=False forbids"):
        array.__array__(float, copy=False)


def test_dlpack_to_numpy_is_the_host_and_to_dpnp_the_device(kind: str) -> None:
    array = usm.asarray(np.arange(12, dtype=np.int16).reshape(3, 4), kind=kind)
    assert array.__dlpack_device__() == (14, 0) == dpnp.ones(1).__dlpack_device__()
    there = dpnp.from_dlpack(array[:, ::2])
    assert there.get_array().usm_type == kind
    assert dpnp.asnumpy(there).tolist() == [[0, 2], [4, 6], [8, 10]]
    if kind == "device":
        with pytest.raises(BufferError, match="copy=False forbids"):
            array.__dlpack__(dl_device=(1, 0), copy=False)
        assert np.from_dlpack(array, device="cpu").tolist() == array.asnumpy().tolist()
    else:
        host = np.from_dlpack(array, device="cpu")
        assert host.ctypes.data == array.address
        assert np.from_dlpack(array[::-1], device="cpu").ctypes.data == array[::-1].address
        assert np.from_dlpack(array, device="cpu", copy=True).ctypes.data != array.address
    with pytest.raises(BufferError, match=r"dl_device=\(2, 0\) is not possible"):
        array.__dlpack__(dl_device=(2, 0))


def test_a_capsule_that_nobody_consumes_leaks_nothing(kind: str) -> None:
    array = usm.zeros(100, kind=kind)
    witness = weakref.ref(array._owner)
    for version in (None, (0, 8), (1, 0)):
        capsule = array.__dlpack__(max_version=version)
        assert ("versioned" in repr(capsule)) == (version == (1, 0))
        del capsule
    consumed = usm.from_dlpack(array)
    capsule = array.__dlpack__()
    del array
    assert witness() is not None
    del consumed
    assert witness() is not None, "the capsule keeps it"
    del capsule
    assert witness() is None


@pytest.mark.parametrize("dtype", ["?", "i1", "u2", "i4", "u8", "f2", "f4", "f8", "c8", "c16"])
def test_dtypes_go_through_dlpack(dtype: str) -> None:
    values = np.arange(6).astype(dtype)
    array = usm.asarray(values)
    assert np.array_equal(np.from_dlpack(array, device="cpu"), values)
    back = usm.from_dlpack(array)
    assert back.dtype == values.dtype
    assert back.address == array.address


def test_the_handler_knows_who_made_it(kind: str) -> None:
    array = usm.zeros(3, kind=kind)
    assert array.handler is ctxalloc.handler(f"usm_{kind}")
    assert repr(array) == f"<ctxalloc.usm.Array (3,) float64 in '{kind}' USM>"
    assert len(array) == 3
    assert array.T.shape == (3,)
    with pytest.raises(TypeError):
        len(array[0])
    for shape in (-1, (2, -1), 1.5, "x", (1, None)):
        with pytest.raises(ValueError, match="is no shape"):
            usm.empty(shape)
    with pytest.raises(MemoryError):
        usm.empty(1 << 50, kind=kind)
    with pytest.raises(MemoryError):
        usm.empty((1 << 40, 1 << 40), kind=kind)
