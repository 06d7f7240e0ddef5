"""Others' arrays as ours: dpctl's memory, dpnp's arrays, hand-made ones, and every field wrong in every way."""

import gc
import weakref
from typing import Any

import dpctl
import dpctl.memory
import dpnp
import dpnp.tensor as dpt
import numpy as np
import pytest

from ctxalloc import usm


class Exporter:
    """A foreign object: dpctl's memory behind a dict that a test may spoil."""

    def __init__(self, values: np.ndarray, kind: str = "shared", **changed: Any) -> None:
        make = {
            "shared": dpctl.memory.MemoryUSMShared,
            "host": dpctl.memory.MemoryUSMHost,
            "device": dpctl.memory.MemoryUSMDevice,
        }[kind]
        self.memory = make(max(values.nbytes, 1))
        if values.nbytes:
            self.memory.copy_from_host(np.ascontiguousarray(values).view(np.uint8).ravel())
        self.interface: Any = {
            "shape": values.shape,
            "typestr": values.dtype.str,
            "data": (self.memory._pointer, False),
            "strides": None,
            "offset": 0,
            "version": 1,
            "syclobj": self.memory.sycl_queue,
        }
        self.interface.update(changed)
        for gone in [field for field, value in self.interface.items() if value is ...]:
            del self.interface[gone]

    @property
    def __sycl_usm_array_interface__(self) -> Any:
        return self.interface


VALUES = np.arange(12, dtype=np.float32).reshape(3, 4)


def test_what_is_foreign_is_taken_without_a_copy_and_kept(kind: str) -> None:
    exporter = Exporter(VALUES, kind)
    address, witness = exporter.memory._pointer, weakref.ref(exporter)
    array = usm.asarray(exporter)
    assert (array.address, array.kind, array.shape, array.dtype) == (address, kind, (3, 4), np.float32)
    assert array.handler is None
    assert array.sycl_queue == exporter.memory.sycl_queue
    assert np.array_equal(array.asnumpy(), VALUES)
    if kind != "device":
        host = np.asarray(array[1:])
        assert host.ctypes.data == address + 16
        del array
    del exporter
    gc.collect()
    assert witness() is not None
    if kind != "device":
        assert host.sum() == VALUES[1:].sum()
        del host
    else:
        del array
    gc.collect()
    assert witness() is None


def test_dpctls_memory_is_writable_though_it_says_the_opposite(kind: str) -> None:
    make = getattr(dpctl.memory, f"MemoryUSM{kind.capitalize()}")
    memory = make(64)
    assert memory.__sycl_usm_array_interface__["data"][1] is True, "what dpctl means by it is that it is writable"
    array = usm.asarray(memory)
    assert (array.address, array.kind, array.readonly) == (memory._pointer, kind, False)
    usm.copy(array, np.arange(64, dtype=np.uint8))
    assert memory.copy_to_host().tolist() == list(range(64))


@pytest.mark.parametrize(
    "key", [..., slice(1, None), (slice(None), slice(None, None, 2)), (1, 2), slice(None, None, -1)]
)
def test_dpnps_arrays_and_their_views(key: Any, kind: str) -> None:
    theirs = dpnp.asarray(VALUES, usm_type=kind)[key]
    for foreign in (theirs, theirs.get_array()):
        array = usm.asarray(foreign)
        assert array.kind == kind
        assert np.array_equal(array.asnumpy(), VALUES[key])
        interface = foreign.__sycl_usm_array_interface__
        assert array.address == interface["data"][0] + 4 * interface["offset"]
    twice = usm.asarray(dpt.asarray(usm.asarray(theirs)))
    assert twice.address == array.address


def test_read_only_offset_strides_and_byte_orders() -> None:
    exporter = Exporter(VALUES, data=...)
    exporter.interface["data"] = (exporter.memory._pointer, True)
    array = usm.asarray(exporter)
    assert array.readonly
    assert not np.asarray(array).flags.writeable
    part = Exporter(VALUES, shape=(2, 2), strides=(4, -2), offset=6, typestr="|f4")
    assert usm.asarray(part).asnumpy().tolist() == VALUES[1:, 2::-2].tolist()


def test_every_form_of_syclobj() -> None:
    queue = dpctl.SyclQueue()

    class HasCapsule:
        def _get_capsule(self) -> object:
            return queue._get_capsule()

    for syclobj in (
        queue,
        queue.sycl_context,
        queue._get_capsule(),
        queue.sycl_context._get_capsule(),
        HasCapsule(),
        queue.sycl_device.filter_string,
    ):
        array = usm.asarray(Exporter(VALUES, syclobj=syclobj))
        assert array.sycl_queue.sycl_context == queue.sycl_context
        assert np.array_equal(array.asnumpy(), VALUES)


def test_without_data_the_buffer_is_taken() -> None:
    class InBuffer(bytearray):
        interface: Any

        @property
        def __sycl_usm_array_interface__(self) -> Any:
            return self.interface

    owner = InBuffer(VALUES.tobytes())
    owner.interface = {"shape": (2, 4), "typestr": "<f4", "version": 1, "syclobj": dpctl.SyclQueue(), "offset": 4}
    copied = usm.asarray(owner)
    assert copied.kind == "shared"
    assert np.array_equal(copied.asnumpy(), VALUES[1:])
    with pytest.raises(ValueError, match="copy=False forbids"):
        usm.asarray(owner, copy=False)
    owner.interface["offset"] = 5
    with pytest.raises(ValueError, match="bytes 20 to 52 of the object's buffer, which has 48"):
        usm.asarray(owner)

    class InUsm:
        """Its memory is USM, and has a buffer."""

        def __new__(cls) -> Any:
            memory = dpctl.memory.MemoryUSMShared(48)
            memory.copy_from_host(VALUES.view(np.uint8).ravel())
            return np.asarray(memory).view(Sub)

    class Sub(np.ndarray):
        @property
        def __sycl_usm_array_interface__(self) -> Any:
            return {"shape": (3, 4), "typestr": "<f4", "version": 1, "syclobj": dpctl.SyclQueue()}

    there = InUsm()
    array = usm.asarray(there, copy=False)
    assert (array.kind, array.address) == ("shared", there.ctypes.data)
    with pytest.raises(ValueError, match="no contiguous buffer"):
        usm.asarray(Exporter(VALUES, data=...))


WRONG = [
    ("version", value) for value in (0, 2, "1", 1.0, True, None, ...)
] + [
    ("shape", value) for value in (3, "34", (3, -4), (3, 4.0), (True, 4), None, ..., [[3]], (1,) * 65)
] + [
    ("typestr", value)
    for value in ("", "f", ">f4", "|O", "<U4", "|V4", "<M8[s]", 4, None, ..., "nonsense", "<f3", np.float32, b"<f4")
] + [
    ("typedescr", value) for value in ("<f4", [("", "<f8")], 3, [3], (("", "<f4"),))
] + [
    ("data", value)
    for value in (0, (0,), (0, False, 1), ("0", False), (1.5, False), (0, 0), (0, None), (-1, False), (1 << 63, False))
] + [
    ("data", (0, False)), ("data", (64, False)), ("data", [0, False]),
] + [
    ("strides", value)
    for value in (4, (4,), (4, 1, 1), (4.0, 1), "41", (True, 1), (None, 1), (16, 4), (-4, 1), (1 << 62, 1))
] + [
    ("offset", value) for value in (None, "0", 0.0, True, 1 << 30, -(1 << 30), 1 << 70)
] + [
    ("syclobj", value) for value in (None, ..., 3, "gpu:9", "", object(), dpctl.SyclDevice, b"cpu")
]  # fmt: skip


@pytest.mark.parametrize(("field", "value"), WRONG)
def test_a_field_that_is_wrong_is_named(field: str, value: Any) -> None:
    exporter = Exporter(np.zeros((3000, 4000), np.float32)[:3, :4], **{field: value})
    if field in ("strides", "offset"):
        exporter = Exporter(np.zeros(1 << 12, np.float32), shape=(1 << 6, 1 << 6), **{field: value})
    if field == "strides" and value in ((16, 4), (-4, 1)):
        # Bytes instead of elements, or backwards: further than the memory reaches. Other memory of the kind may lie
        # there, and then nobody sees it; so the last byte is put where nothing can be.
        exporter.interface["strides"] = tuple(part << 40 for part in value)
    with pytest.raises((ValueError, TypeError), match=rf"'?{field}|describes bytes|__sycl_usm_array_interface__"):
        usm.asarray(exporter)


def test_an_interface_that_is_no_dict() -> None:
    exporter = Exporter(VALUES)
    for interface in (None, 3, [], "x"):
        exporter.interface = interface
        with pytest.raises(TypeError, match="it must be a dict"):
            usm.asarray(exporter)


def test_a_capsule_that_was_used_is_refused() -> None:
    capsule = dpctl.SyclQueue()._get_capsule()
    dpctl.SyclQueue(capsule)
    with pytest.raises(ValueError, match=r"'syclobj'.*a capsule of one that was not used"):
        usm.asarray(Exporter(VALUES, syclobj=capsule))


def test_memory_of_the_host_is_no_usm() -> None:
    exporter = Exporter(VALUES)
    exporter.interface["data"] = (VALUES.ctypes.data, False)
    with pytest.raises(ValueError, match="must be the address of USM in the context of 'syclobj'"):
        usm.asarray(exporter)


def test_asarray_copies_only_where_it_must() -> None:
    shared = usm.asarray([1, 2, 3])
    assert usm.asarray(shared) is shared
    assert usm.asarray(shared, kind="shared", queue=shared.sycl_queue, dtype=shared.dtype) is shared
    for changed in ({"kind": "device"}, {"dtype": float}, {"copy": True}, {"queue": dpctl.SyclQueue()}):
        other = usm.asarray(shared, **changed)
        assert other.address != shared.address
        assert other.asnumpy().tolist() == [1, 2, 3]
        if "copy" not in changed:
            with pytest.raises(ValueError, match="copy=False forbids"):
                usm.asarray(shared, copy=False, **changed)
    with usm.use():
        array = np.arange(3)
    assert usm.asarray(array).address == array.ctypes.data
    assert usm.asarray(array, kind="host").kind == "host"
    assert usm.asarray(5).shape == ()
    assert usm.asarray([[1.5]]).dtype == float
    with pytest.raises(TypeError, match="cannot live in a USM array"):
        usm.asarray(["text"])


def test_dlpack_of_others_is_taken_without_a_copy(kind: str) -> None:
    theirs = dpnp.asarray(VALUES, usm_type=kind)
    array = usm.from_dlpack(theirs[:, ::2])
    assert array.kind == kind
    assert np.array_equal(array.asnumpy(), VALUES[:, ::2])
    assert array.address == theirs.get_array()._pointer
    del theirs
    gc.collect()
    assert np.array_equal(array.asnumpy(), VALUES[:, ::2])
    with pytest.raises(BufferError, match="not USM of a queue that is known here"):
        usm.from_dlpack(VALUES)
    with pytest.raises(TypeError, match="got 'int'"):
        usm.from_dlpack(3)
    with usm.use():
        host = np.arange(5)
    assert usm.from_dlpack(host).address == host.ctypes.data


def test_what_is_no_capsule_or_was_consumed_is_refused() -> None:
    class Liar:
        def __dlpack__(self, **_: object) -> object:
            return self.given

    liar = Liar()
    array = usm.zeros(3)
    used = array.__dlpack__()
    liar.given = used
    usm.from_dlpack(liar)
    for given in (used, None, 3, dpctl.SyclQueue()._get_capsule()):
        liar.given = given
        with pytest.raises(ValueError, match="is no capsule 'dltensor'"):
            usm.from_dlpack(liar)
    assert "used_dltensor" in repr(used)
