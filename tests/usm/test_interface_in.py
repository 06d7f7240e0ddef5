"""Others' arrays as ours: dpctl's memory, dpnp's arrays, hand-made ones, and every field wrong in every way."""

import ctypes
import gc
import random
import re
import subprocess
import sys
import weakref
from typing import Any

import dpctl
import dpctl.memory
import dpnp
import dpnp.tensor as dpt
import numpy as np
import pytest
from queues import apart, two_parts

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

    class InUsm(np.ndarray):
        """Its buffer is USM."""

        @property
        def __sycl_usm_array_interface__(self) -> Any:
            return {"shape": (3, 4), "typestr": "<f4", "version": 1, "syclobj": dpctl.SyclQueue()}

    memory = dpctl.memory.MemoryUSMShared(48)
    memory.copy_from_host(VALUES.view(np.uint8).ravel())
    there = np.asarray(memory).view(InUsm)
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
    with pytest.raises((ValueError, TypeError), match=rf"'{field}'|{field}="):
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


class Dict:
    """An interface over memory that it does not keep."""

    def __init__(self, interface: dict[str, Any]) -> None:
        self.__sycl_usm_array_interface__ = interface


def test_a_block_of_ours_that_is_too_short_is_told(kind: str) -> None:
    array = usm.zeros(10, np.uint8, kind=kind)
    interface = array.__sycl_usm_array_interface__
    assert usm.asarray(Dict(interface)).address == array.address
    with pytest.raises(ValueError, match=r"describes 11 bytes from .* ends after 10: shape=\(11,\)"):
        usm.asarray(Dict(interface | {"shape": (11,)}))
    with pytest.raises(ValueError, match=r"describes 9 bytes from .* ends after 8.*offset=2"):
        usm.asarray(Dict(interface | {"shape": (9,), "offset": 2}))


def test_a_freed_block_of_ours_is_told_where_no_handler_has_the_pool() -> None:
    program = """if True:
        import numpy as np
        from ctxalloc import usm
        class Dict: pass
        for kind in ("host", "shared", "device"):
            keep = usm.zeros(10, np.uint8, kind=kind)
            array = usm.zeros(10, np.uint8, kind=kind)
            foreign = Dict()
            foreign.__sycl_usm_array_interface__ = array.__sycl_usm_array_interface__
            assert usm.asarray(foreign).shape == (10,)
            del array
            try:
                usm.asarray(foreign)
            except ValueError as error:
                assert "a block of ctxalloc.usm was freed; keep its array" in str(error), error
            else:
                raise SystemExit(1)
    """
    subprocess.run([sys.executable, "-c", program], check=True, timeout=100)


def test_memory_of_another_part_of_the_device_is_told() -> None:
    one, two = two_parts()
    array = usm.zeros(10, kind="device", queue=one)
    with pytest.raises(ValueError, match="has memory of another device at"):
        usm.asarray(Dict(array.__sycl_usm_array_interface__ | {"syclobj": two}))


def _odd(rng: random.Random) -> Any:
    return rng.choice(
        [
            None, True, False, 0, 1, -1, 7, 63, 64, 1 << 31, 1 << 62, (1 << 63) - 1, 1 << 63, 1 << 64, 1 << 200,
            -(1 << 63), 0.0, 1.5, float("nan"), float("inf"), "", "<f4", "|b1", "|u1", "<i8", "f4", "<f16", "<c32",
            "<f3", "V4", "|S0", "<f" + "9" * 30, "opencl:cpu:0", "gpu:9", "\0", "cpu" * 1000, b"<f4", (), (0,), (1,),
            (3, 4), (1 << 40, 1 << 40), (0, 1 << 62), (-1,), (1,) * 65, (1,) * 64, [3], [[3]], {}, {"a": 1}, set(),
            object(), np.int64(3), np.float32(1), np.array([3, 4]), np.bool_(True), np.dtype("f4"), [("", "<f4")],
            [("x", "<f4", (2,))], [()], [("a", [("b", "<f4")])], [(("t", "n"), "<f4")], (0, False), (None, False),
            (1 << 63, True), (True, True), dpctl.SyclDevice(), apart(), Exporter, NotImplemented, ..., slice(None),
            "typestr", range(3), iter(()),
        ]
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(20))
def test_random_dicts_are_taken_or_name_the_key_and_the_value(seed: int) -> None:
    rng = random.Random(seed)
    fields = ["shape", "typestr", "typedescr", "data", "strides", "offset", "version", "syclobj"]
    texts: list[str] = []
    for _ in range(150):
        exporter = Exporter(VALUES, rng.choice(["host", "shared"]))
        first = exporter.memory._pointer
        for field in rng.sample(fields, rng.choice([1, 1, 1, 2, 3])):
            near = (first + rng.choice([0, 4, 44, 48, -4, 1 << 40, -(1 << 40)]), rng.choice([True, False]))
            if rng.random() < 0.1:
                exporter.interface.pop(field, None)
            else:
                exporter.interface[field] = near if field == "data" and rng.random() < 0.5 else _odd(rng)
        for take in (usm.asarray, usm.kind_of):
            # Nothing else than these is raised: kind_of() may be given a queue that is none.
            refusals = (ValueError, TypeError) if take is usm.asarray else (ValueError, TypeError, RuntimeError)
            try:
                taken = take(exporter)
            except refusals as error:
                if take is usm.asarray:
                    texts.append(str(error))
            else:
                if isinstance(taken, usm.Array) and taken.nbytes <= 48:
                    taken.asnumpy()
    names = re.compile("|".join(rf"'{field}'|{field}=" for field in fields))
    assert [text for text in texts if names.search(text) is None] == []
    assert texts


def _capsule(rng: random.Random, address: int, kept: list[Any]) -> Any:
    """A tensor of 6 float32 that may be spoiled, in a capsule of one kind or the other."""

    def spoiled(value: Any, *others: Any) -> Any:
        return rng.choice(others) if rng.random() < 0.12 else value

    class Tensor(ctypes.Structure):
        _fields_ = [
            ("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32),
            ("ndim", ctypes.c_int32), ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16),
            ("shape", ctypes.c_void_p), ("strides", ctypes.c_void_p), ("byte_offset", ctypes.c_uint64),
        ]  # fmt: skip

    class Plain(ctypes.Structure):
        _fields_ = [("tensor", Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]

    class Versioned(ctypes.Structure):
        _fields_ = [
            ("major", ctypes.c_uint32), ("minor", ctypes.c_uint32), ("context", ctypes.c_void_p),
            ("deleter", ctypes.c_void_p), ("flags", ctypes.c_uint64), ("tensor", Tensor),
        ]  # fmt: skip

    huge = (1 << 62, 1 << 40, -1, -(1 << 63), (1 << 63) - 1, 0, 7)
    lengths = [spoiled(length, *huge) for length in (2, 3)] + [1] * 98
    steps = [spoiled(step, *huge) for step in (3, 1)] + [1] * 98
    shape, strides = ((ctypes.c_int64 * 100)(*numbers) for numbers in (lengths, steps))
    kept += [shape, strides]
    tensor = Tensor(
        spoiled(address, None, 0, 1, address + 4, address + (1 << 40), (1 << 64) - 1),
        spoiled(14, 1, 2, -1, 1 << 30),
        spoiled(0, 1, -1, 99),
        spoiled(2, 0, 1, 3, 64, 65, -1, -(1 << 31), (1 << 31) - 1),
        spoiled(2, 0, 1, 3, 5, 6, 7, 255),
        spoiled(32, 0, 1, 7, 8, 16, 24, 64, 128, 255),
        spoiled(1, 0, 2, 65535),
        spoiled(ctypes.addressof(shape), None),
        spoiled(ctypes.addressof(strides), None),
        spoiled(0, 4, 24, 1 << 40, (1 << 64) - 1),
    )
    if rng.random() < 0.5:
        managed: Any = Plain(tensor, None, None)
        name = b"dltensor"
    else:
        managed = Versioned(
            spoiled(1, 0, 2, 1 << 31), spoiled(0, 9), None, None, spoiled(0, 1, 2, (1 << 64) - 1), tensor
        )
        name = b"dltensor_versioned"
    kept += [managed, name]
    make = ctypes.pythonapi.PyCapsule_New
    make.restype, make.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    return make(ctypes.addressof(managed), name, None)


@pytest.mark.parametrize("seed", range(10))
def test_random_dlpack_tensors_are_taken_or_refused(seed: int) -> None:
    rng = random.Random(seed)
    array = usm.zeros(6, np.float32)
    kept: list[Any] = []  # the capsules have no deleters

    class Producer:
        def __dlpack__(self, **_: object) -> Any:
            return _capsule(rng, array.address, kept)

    outcomes = set()
    for _ in range(300):
        try:
            taken = usm.from_dlpack(Producer())
        except BufferError as error:
            outcomes.add("refused" if "DLPack" in str(error) else str(error))
        else:
            assert usm.kind_of(taken.address) == "shared"
            is_inside = array.address <= taken.address < array.address + 24
            assert taken.nbytes <= 24 or 0 in taken.strides or not is_inside
            if taken.nbytes <= 24:
                taken.asnumpy()
            outcomes.add("taken")
    assert outcomes == {"refused", "taken"}
