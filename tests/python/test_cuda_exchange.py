"""`cuda.as_cuda` and `cuda.asarray`: CUDA's array interface and DLPack, out and in."""

import copy
import ctypes
import gc
import pickle
import weakref
from typing import Any

import numpy as np
import pytest
from fake_cuda import Fake, fake

from ctxalloc import cuda


@pytest.fixture(autouse=True)
def driver() -> Fake:
    """The driver, as it is at first."""
    fake().settle()
    return fake()


def pinned(*shape: int, kind: Any = "host", dtype: Any = np.float32) -> np.ndarray:
    with cuda.use(kind):
        return np.arange(np.prod(shape)).astype(dtype).reshape(shape).copy()


class Interface:
    """A foreign object with the interface."""

    def __init__(self, array: np.ndarray, **change: Any) -> None:
        self.array = array
        interface = dict(cuda.as_cuda(array).__cuda_array_interface__) | change
        self.__cuda_array_interface__ = {name: value for name, value in interface.items() if value != "absent"}


def test_the_interface_has_version_3() -> None:
    array = pinned(3, 4)
    interface = cuda.as_cuda(array).__cuda_array_interface__
    address = array.__array_interface__["data"][0]
    assert interface == {
        "shape": (3, 4),
        "typestr": "<f4",
        "data": (address, False),
        "version": 3,
        "strides": None,
        "stream": None,
    }
    view = cuda.as_cuda(array)[1:, ::2]
    assert (view.shape, view.__cuda_array_interface__["strides"]) == ((2, 2), (16, 8))
    array.flags.writeable = False
    assert cuda.as_cuda(array).__cuda_array_interface__["data"] == (address, True)
    assert cuda.as_cuda(array)[:0].__cuda_array_interface__["data"][0] == 0, "an empty one has no address"


def test_fields_that_overlap_have_no_interface() -> None:
    dtype = np.dtype({"names": ["a", "b"], "formats": ["<i4", "<i2"], "offsets": [0, 2]})
    over = cuda.as_cuda(pinned(16, dtype="i1").view("V4").view(dtype))
    assert not hasattr(over, "__cuda_array_interface__")
    with pytest.raises(AttributeError, match="cannot describe dtype"):
        _ = over.__cuda_array_interface__
    assert cuda.as_cuda(over.ndarray["b"]).__cuda_array_interface__["typestr"] == "<i2"


def test_an_array_says_what_it_is() -> None:
    array = pinned(3, 4)
    over = cuda.as_cuda(array)
    assert over.ndarray is array
    assert (over.shape, over.strides, over.dtype, over.ndim, over.size, over.nbytes, len(over)) == (
        (3, 4), (16, 4), np.float32, 2, 12, 48, 3,
    )  # fmt: skip
    assert (over.kind, over.device, over.readonly, repr(over)) == (
        "host", 0, False, "<cuda.Array (3, 4) float32 in host memory>",
    )  # fmt: skip
    assert np.asarray(over) is array
    assert over[1, 2].shape == ()
    with pytest.raises(IndexError, match="lists and masks"):
        over[[0, 1]]
    with pytest.raises(TypeError, match="as_cuda"):
        cuda.Array()


def test_dlpack_names_the_memory() -> None:
    for kind, device in (("host", (3, 0)), ("managed", (13, 0))):
        array = pinned(3, 4, kind=kind)
        over = cuda.as_cuda(array)
        assert over.__dlpack_device__() == device
        back = np.from_dlpack(over)
        assert back.__array_interface__["data"][0] == array.__array_interface__["data"][0]
        array[0, 0] = 42
        assert back[0, 0] == 42  # read-only by NumPy 1
        for stream in (None, -1, 1, 2, 77):
            assert "dltensor" in repr(over.__dlpack__(stream=stream))
        assert "dltensor_versioned" in repr(over.__dlpack__(max_version=(1, 0), dl_device=(1, 0)))
        with pytest.raises(ValueError, match="stream=0"):
            over.__dlpack__(stream=0)
        with pytest.raises(BufferError, match=r"not on \(2, 0\)"):
            over.__dlpack__(dl_device=(2, 0))
        with pytest.raises(BufferError, match="no copies"):
            over.__dlpack__(copy=True)
        for wrong in ({"stream": "x"}, {"stream": -2}, {"stream": True}, {"dl_device": 5}, {"max_version": 5}):
            with pytest.raises(TypeError, match=rf"__dlpack__\({next(iter(wrong))}="):
                over.__dlpack__(**wrong)


def test_an_array_is_not_copied_or_pickled_as_pinned() -> None:
    over = cuda.as_cuda(pinned(3))
    for make, text in ((copy.copy, "makes no copies"), (copy.deepcopy, "makes no copies"), (pickle.dumps, "pickled")):
        with pytest.raises(TypeError, match=text):
            make(over)
    with pytest.raises(TypeError, match="pickled"):
        over.__reduce_ex__(2)


def test_dlpack_refuses_what_it_cannot_describe() -> None:
    with pytest.raises(BufferError, match="no dtype"):
        cuda.as_cuda(pinned(4, dtype="M8[s]")).__dlpack__()
    with pytest.raises(BufferError, match="no dtype"):
        cuda.as_cuda(pinned(4, dtype=">f4")).__dlpack__()
    fields = pinned(4, dtype=[("a", "i1"), ("b", "f4")])["b"]
    with pytest.raises(BufferError, match="strides in elements"):
        cuda.as_cuda(fields).__dlpack__()


def test_what_kernels_do_not_reach_is_refused(driver: Fake) -> None:
    with pytest.raises(ValueError, match=r"but pageable; make it inside of ctxalloc\.cuda\.use"):
        cuda.as_cuda(np.ones(3))
    with pytest.raises(TypeError, match="got 'list'"):
        cuda.as_cuda([1])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="got 'object'"):
        cuda.as_cuda(np.array([None]))
    driver.set(same_pointers=0)
    try:
        with pytest.raises(ValueError, match="at another address"):
            cuda.as_cuda(pinned(3))
    finally:
        driver.set(same_pointers=1)


def test_memory_lives_as_long_as_whoever_has_it() -> None:
    array = pinned(1000)
    gone = weakref.ref(array)
    capsule = cuda.as_cuda(array).__dlpack__()
    del array
    gc.collect()
    assert gone() is not None
    del capsule
    gc.collect()
    assert gone() is None
    foreign = Interface(pinned(3, 4))
    still = weakref.ref(foreign)
    view = cuda.asarray(foreign)[1]
    del foreign
    gc.collect()
    assert still() is not None
    assert view.tolist() == [4, 5, 6, 7]
    del view
    gc.collect()
    assert still() is None


def test_arrays_of_others_come_in_without_a_copy(driver: Fake) -> None:
    array = pinned(3, 4, kind="managed")
    driver.set(progress=1)
    for _ in range(3):
        driver.copy(array)
    for obj in (Interface(array), Interface(array, stream=77), cuda.as_cuda(array), Interface(array[::2, ::2])):
        made = cuda.asarray(obj)
        assert np.shares_memory(made, array)
        assert made.tolist() == (array[::2, ::2] if made.shape == (2, 2) else array).tolist()
    assert driver.get("running") == 0, "the stream was waited for"
    array.flags.writeable = False
    assert not cuda.asarray(Interface(array)).flags.writeable
    assert cuda.asarray(Interface(array[:0])).shape == (0, 4)


def test_dlpack_of_others_comes_in_without_a_copy(driver: Fake) -> None:
    class Producer:
        def __init__(self, array: np.ndarray, device: tuple[int, int] | None = None) -> None:
            self.over, self.device, self.streams = cuda.as_cuda(array), device, []  # type: ignore[var-annotated]

        def __dlpack_device__(self) -> tuple[int, int]:
            return self.device or self.over.__dlpack_device__()

        def __dlpack__(self, *, stream: Any = None, max_version: Any = None) -> object:
            self.streams.append(stream)
            return self.over.__dlpack__(stream=stream, max_version=max_version)

    for kind, streams in (("host", [None]), ("managed", [1])):
        array = pinned(3, 4, kind=kind)[:, ::2]
        producer = Producer(array)
        made = cuda.asarray(producer)
        assert np.shares_memory(made, array)
        assert made.tolist() == array.tolist()
        assert producer.streams == streams
    with pytest.raises(BufferError, match=r"\(2, 0\), whose memory the host cannot read"):
        cuda.asarray(Producer(pinned(3), (2, 0)))


def test_what_is_no_array_is_told() -> None:
    array = pinned(3)
    place = array.__array_interface__["data"][0]
    for change, text in (
        ({"typestr": "absent"}, "lacks typestr"),
        ({"version": "absent"}, "lacks version"),
        ({"mask": 1}, "has a mask"),
        ({"stream": 0}, "stream 0"),
        ({"stream": "x"}, r"\['stream'\] is 'x'"),
        ({"version": "3"}, r"\['version'\] is '3'"),
        ({"version": None}, r"\['version'\] is None"),
        ({"version": -1}, r"\['version'\] is -1; it must be an int from 0 to 3"),
        ({"version": 4}, r"\['version'\] is 4"),
        ({"typestr": "|O"}, r"\['typestr'\] is '\|O'; .* not of objects"),
        ({"typestr": "|O8"}, "not of objects"),
        ({"typestr": "f4,O"}, "not of objects"),
        ({"typestr": "<f3"}, r"\['typestr'\] is '<f3'"),
        ({"typestr": 4}, r"\['typestr'\] is 4"),
        ({"typestr": "|V0"}, r"\['typestr'\] is '\|V0'"),
        ({"typestr": "|V8", "descr": [("a", "|O")]}, r"\['descr'\] is .*without objects"),
        ({"typestr": "|V4", "descr": [("a", "<f8")]}, r"\['descr'\] is .*describe 4 bytes"),
        ({"typestr": "|V4", "descr": "f4"}, r"\['descr'\] is 'f4'"),
        ({"shape": 3}, r"\['shape'\] is 3"),
        ({"shape": (-1,)}, r"\['shape'\] is \(-1,\)"),
        ({"shape": (1.5,)}, r"\['shape'\] is"),
        ({"shape": (1,) * 65}, "65 axes"),
        ({"strides": (4, 4)}, r"\['strides'\] is \(4, 4\); it must be None or a tuple of 1 ints"),
        ({"data": 5}, r"\['data'\] is 5"),
        ({"data": (None, False)}, r"\['data'\] is \(None, False\)"),
        ({"data": (-8, False)}, r"\['data'\] is"),
        ({"data": (place, "no")}, r"\['data'\] is"),
        ({"data": (0, False)}, "where no memory is"),
        ({"data": (1 << 64, False)}, "where no memory is"),
        ({"shape": (1 << 40, 1 << 40)}, "2\\*\\*63 bytes and more"),
        ({"shape": (1 << 62,)}, "2\\*\\*63 bytes and more"),
        ({"shape": (1 << 40,)}, "the last in pageable memory"),
        ({"shape": (2,), "strides": (1 << 63,)}, "strides of 2"),
        ({"shape": (3,), "strides": (1 << 62,)}, "where no memory is"),
        ({"shape": (3,), "strides": (-(1 << 62),)}, "where no memory is"),
        ({"shape": (2,), "strides": (1 << 40,)}, "the last in pageable memory"),
        ({"shape": (2,), "strides": (-(1 << 40),)}, "pageable"),
        ({"data": (np.ones(3).__array_interface__["data"][0], False)}, "is pageable: .*numpy.asarray"),
    ):
        with pytest.raises(BufferError, match=text):
            cuda.asarray(Interface(array, **change))
    with pytest.raises(TypeError, match="got 'int'"):
        cuda.asarray(3)
    with pytest.raises(BufferError, match="is 'str'; it must be a dict"):
        cuda.asarray(type("Odd", (), {"__cuda_array_interface__": "x"})())
    with pytest.raises(BufferError, match="is pageable"):
        cuda.asarray(np.ones(3))


def test_structures_come_back_with_their_fields() -> None:
    for dtype in ([("a", "i1"), ("b", "<f4", (2,))], np.dtype([("a", "i1"), ("b", "f8")], align=True)):
        array = pinned(4, dtype=dtype)
        for given in (array, array[::2]):
            made = cuda.asarray(Interface(given))
            assert made.dtype == array.dtype
            assert made.dtype.names == ("a", "b")
            assert made["b"].tolist() == given["b"].tolist()
            assert np.shares_memory(made, array)
    assert cuda.asarray(Interface(pinned(4, dtype="M8[s]"))).dtype == "M8[s]"


class Tensor(ctypes.Structure):
    """A ``DLManagedTensor`` of dlpack.h."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    )


class Wrong:
    """A producer whose tensor and device are what is given."""

    def __init__(self, data: int, device: object = (3, 0), **change: Any) -> None:
        self.device = device
        shape, strides = change.pop("shape", 3), change.pop("strides", 1)
        self.numbers = (ctypes.c_int64 * 1)(shape), (ctypes.c_int64 * 1)(strides)
        fields = {"device_type": 3, "ndim": 1, "code": 2, "bits": 32, "lanes": 1} | change
        self.tensor = Tensor(data=data, shape=self.numbers[0], strides=self.numbers[1], **fields)

    def __dlpack_device__(self) -> object:
        return self.device

    def __dlpack__(self, **_: object) -> object:
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
        return new(ctypes.addressof(self.tensor), b"dltensor", None)


def test_a_tensor_that_describes_no_such_memory_is_told() -> None:
    array = pinned(3)
    place = array.__array_interface__["data"][0]
    assert cuda.asarray(Wrong(place)).tolist() == [0, 1, 2]
    assert cuda.asarray(Wrong(place, device_type=1)).tolist() == [0, 1, 2], "as PyTorch's pinned tensors"
    for producer, text in (
        (Wrong(0), "where no memory is"),
        (Wrong(place, byte_offset=1 << 63), "where no memory is"),
        (Wrong(place, byte_offset=1 << 40), "is pageable"),
        (Wrong(place, shape=1 << 40), "the last in pageable memory"),
        (Wrong(place, shape=1 << 62), "bytes and more"),
        (Wrong(place, strides=1 << 62), "bytes and more"),
        (Wrong(place, strides=1 << 59), "pageable"),
        (Wrong(place, bits=24), "not one of NumPy's"),
        (Wrong(place, bits=0), "not one of NumPy's"),
        (Wrong(place, device_type=2), r"is \(3, 0\), and the tensor's own device is \(2, 0\)"),
        (Wrong(place, (13, 0)), r"is \(13, 0\), and the tensor's own device is \(3, 0\)"),
        (Wrong(place, 5), "__dlpack_device__.* is 5; it must be a tuple of two ints"),
        (Wrong(place, ("a", 0)), "must be a tuple of two ints"),
    ):
        with pytest.raises(BufferError, match=text):
            cuda.asarray(producer)
