"""Whose memory is this? `handler_of`, through every kind of view, and NumPy's own answers beside it."""

import array as plain_array
import ctypes
import io
import mmap
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from built_in import HANDLERS
from numpy_c import ForeignHandler, numpys_name, numpys_version
from subprocesses import says

import ctxalloc
from ctxalloc import handler_of, use

Array = Any  # NumPy's stubs know fewer buffers than NumPy does


class Sub(np.ndarray):
    """A subclass with an attribute of its own."""

    tag = "sub"


class Misleading(np.ndarray):
    """A subclass that has something else where arrays have their base."""

    base = "not an array"  # type: ignore[assignment]


VIEWS: dict[str, Callable[[Array], Any]] = {
    "the array itself": lambda a: a,
    "a slice": lambda a: a[2:],
    "a step": lambda a: a[::-2],
    "a slice of a slice": lambda a: a[2:][1:3][:0],
    "an ellipsis": lambda a: a[...],
    "a new axis": lambda a: a[None],
    "a reshape": lambda a: a.reshape(4, 2),
    "a transpose": lambda a: a.reshape(4, 2).T,
    "ravel": lambda a: a.reshape(4, 2).ravel(),
    "squeeze": lambda a: a[None, :, None].squeeze(),
    "another dtype": lambda a: a.view(np.uint8),
    "a subclass": lambda a: a.view(Sub),
    "a view of a subclass": lambda a: a.view(Sub)[1:].view(np.ndarray),
    "a misleading subclass": lambda a: a[1:].view(Misleading),
    "a view of a misleading subclass": lambda a: a[1:].view(Misleading)[1:],
    "broadcast": lambda a: np.broadcast_to(a, (3, 8)),
    "a sliding window": lambda a: np.lib.stride_tricks.sliding_window_view(a, 3),
    "as_strided": lambda a: np.lib.stride_tricks.as_strided(a, (2, 2), (8, 8)),
    "the diagonal": lambda a: np.diagonal(a.reshape(4, 2)),
    "the real part": lambda a: a.view(np.complex128).real,
    "a field": lambda a: a.view([("x", "f4"), ("y", "f4")])["y"],
    "a part of split": lambda a: np.split(a, 4)[3],
    "an iterator's item": lambda a: next(iter(a.reshape(4, 2))),
    "asarray of a memoryview": lambda a: np.asarray(memoryview(a)),
    "asarray of a cast memoryview": lambda a: np.asarray(memoryview(a).cast("B").cast("d")),
    "asarray of a sliced memoryview": lambda a: np.asarray(memoryview(memoryview(a)[1:])[1:]),
    "frombuffer": lambda a: np.frombuffer(a),
    "frombuffer of a memoryview": lambda a: np.frombuffer(memoryview(a)[2:]),
    "frombuffer of frombuffer": lambda a: np.frombuffer(np.frombuffer(a)[1:]),
    "frombuffer of a PickleBuffer": lambda a: np.frombuffer(pickle.PickleBuffer(a)),  # type: ignore[call-overload]
    "a masked array": lambda a: np.ma.asarray(a),
    "recarray": lambda a: a.view([("base", "f8")]).view(np.recarray),
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS.keys())
def test_a_view_belongs_to_the_handler_of_its_owner(view: Callable[[Array], Any]) -> None:
    with use("pool") as handler:
        owner = np.arange(8.0)
    with use("aligned64"):
        assert handler_of(view(owner)) is handler


def test_numpys_iterators_and_copies_are_new_arrays() -> None:
    with use("aligned64"):
        owner = np.arange(8.0)
    with use("system") as system:
        copies: list[Array] = [
            owner.copy(), owner[[1, 2]], owner[owner > 3], owner.astype("f4"), owner.flatten(), np.array(owner),
            owner.reshape(4, 2).T.ravel(), owner.repeat(2), owner.take([1]), np.sort(owner),
            np.concatenate([owner, owner]), np.asarray(owner, order="C").astype("f8"),
        ]  # fmt: skip
    assert {handler_of(copy) for copy in copies} == {system}


PRODUCERS: dict[str, Callable[[], Array]] = {
    "empty": lambda: np.empty(100),
    "zeros": lambda: np.zeros(100),
    "full": lambda: np.full(100, 7),
    "of zero size": lambda: np.empty(0),
    "of zero size and many axes": lambda: np.zeros((3, 0, 5)),
    "0-d": lambda: np.array(3.0),
    "of objects": lambda: np.array([object(), None, []], dtype=object),
    "of nothing but objects": lambda: np.empty(5, dtype=object),
    "structured": lambda: np.zeros(4, [("x", "i4"), ("y", "O"), ("z", "f8", (2, 2))]),
    "of strings": lambda: np.array(["a", "ü" * 50]),
    "of bytes": lambda: np.array([b"a", b"b" * 50]),
    "of dates": lambda: np.arange("2020-01", "2020-03", dtype="datetime64[D]"),
    "of bools": lambda: np.arange(10) > 4,
    "of float16": lambda: np.ones(3, np.float16),
    "of long doubles": lambda: np.ones(3, np.longdouble),
    "in Fortran's order": lambda: np.zeros((3, 4), order="F"),
    "a sum of ufuncs": lambda: np.arange(1000) * 2.5 + 1 - np.sqrt(np.arange(1000)),
    "a reduction": lambda: np.ones((5, 5)).sum(axis=0),
    "an accumulation": lambda: np.add.accumulate(np.arange(50)),
    "an outer product": lambda: np.multiply.outer(np.arange(5), np.arange(5)),
    "a matrix product": lambda: np.ones((20, 20)) @ np.ones((20, 20)),
    "einsum": lambda: np.einsum("ij,jk->ik", np.ones((3, 3)), np.ones((3, 3))),
    "a decomposition": lambda: np.linalg.inv(np.eye(4)),
    "argsort": lambda: np.argsort(np.arange(100)[::-1]),
    "argpartition": lambda: np.argpartition(np.arange(100)[::-1], 5),
    "unique": lambda: np.unique(np.arange(10) % 3),
    "nonzero": lambda: np.nonzero(np.arange(10) % 3)[0],
    "where": lambda: np.where(np.arange(10) % 2, 1.0, 2.0),
    "a histogram": lambda: np.histogram(np.arange(10.0))[0],
    "from a list": lambda: np.array([[1, 2], [3, 4]]),
    "from an iterator": lambda: np.fromiter(range(1000), int),
    "from text": lambda: np.fromstring("1 2 3", sep=" "),
    "from a function": lambda: np.fromfunction(lambda i, j: i + j, (3, 3)),
    # Protocol 5, the default from CPython 3.14 on, keeps the memory that pickle made.
    "unpickled": lambda: pickle.loads(pickle.dumps(np.arange(5), protocol=4)),
    "loaded": lambda: np.load(saved(np.arange(5))),
    "random": lambda: np.random.default_rng(1).normal(size=100),
    "packed bits": lambda: np.packbits(np.ones(20, bool)),
    "a Fourier transform": lambda: np.fft.rfft(np.ones(16)),
    "padded": lambda: np.pad(np.ones(3), 2),
    "indices": lambda: np.indices((2, 3)),
    "resized": lambda: np.resize(np.arange(3), 10),
    "an out= of its own": lambda: np.add(1, 2, out=np.empty(())),
}


def saved(array: Array) -> io.BytesIO:
    file = io.BytesIO()
    np.save(file, array)
    file.seek(0)
    return file


@pytest.mark.parametrize("produce", PRODUCERS.values(), ids=PRODUCERS.keys())
def test_what_numpy_makes_lives_in_the_current_handler_and_numpy_agrees(produce: Callable[[], Array]) -> None:
    for name in HANDLERS:
        with use(name) as handler:
            array = produce()
        assert handler_of(array) is handler
        owner = array
        while not owner.flags.owndata:
            assert (ctxalloc.get_handler_name(owner), ctxalloc.get_handler_version(owner)) == (None, None)
            assert numpys_name(owner) is None
            assert isinstance(owner.base, np.ndarray)
            owner = owner.base
        assert ctxalloc.get_handler_name(owner) == numpys_name(owner) == name
        assert ctxalloc.get_handler_version(owner) == numpys_version(owner) == 1


def test_memory_that_no_handler_made_has_no_handler(tmp_path: Path) -> None:
    class Interface:
        def __init__(self) -> None:
            self.memory = (ctypes.c_double * 4)()
            self.__array_interface__ = {
                "version": 3, "shape": (4,), "typestr": "<f8", "data": (ctypes.addressof(self.memory), False),
            }  # fmt: skip

    path = tmp_path / "map"
    path.write_bytes(bytes(80))
    with use("aligned64"), path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
        mapping: Array = np.memmap(path, dtype="f8", mode="r+")
        from_mmap = np.frombuffer(mapped)
        others: list[Array] = [
            mapping, mapping[2:], np.asarray(mapping), from_mmap[1:],
            np.frombuffer(bytes(16)), np.frombuffer(bytearray(16)), np.asarray(memoryview(bytes(16))),
            np.asarray(plain_array.array("d", [1, 2])), np.ctypeslib.as_array((ctypes.c_int * 3)()),
            np.ndarray((2,), buffer=bytearray(16)), np.asarray(Interface()), np.from_dlpack(np.arange(3)),
            pickle.loads(pickle.dumps(np.arange(3), protocol=5)),
        ]  # fmt: skip
        for other in others:
            assert handler_of(other) is None
            assert handler_of(other[1:]) is None
            assert ctxalloc.get_handler_name(other) is None
            assert handler_of(other.copy()) is ctxalloc.handler("aligned64")
        del others[:], other, from_mmap
        mapping = np.empty(0)


@pytest.mark.parametrize(
    "subject", [None, 3, [1, 2], "array", np.float64(3), np.ndarray, memoryview(b"x"), np.dtype("f8")]
)
def test_what_is_no_array_is_a_type_error(subject: Any) -> None:
    with pytest.raises(TypeError, match=r"handler_of\(\) takes a numpy.ndarray, got '\w+'"):
        handler_of(subject)


def test_handler_of_takes_one_positional_argument() -> None:
    array = np.ones(1)
    with pytest.raises(TypeError):
        handler_of()  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        handler_of(arr=array)  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        handler_of(array, array)  # type: ignore[call-arg]


def test_an_object_that_only_claims_to_be_an_array_is_read_as_what_it_is() -> None:
    program = """
import unittest.mock
import numpy as np, ctxalloc

class Liar:
    __class__ = property(lambda self: np.ndarray)

for liar in (Liar(), unittest.mock.NonCallableMock(spec=np.ndarray), unittest.mock.MagicMock(spec=np.ndarray)):
    assert isinstance(liar, np.ndarray)
    for function in (ctxalloc.handler_of, ctxalloc.shared_memory_of):
        try:
            function(liar)
        except TypeError as error:
            assert "takes a numpy.ndarray, got '" in str(error), error
        else:
            raise AssertionError(function)
print("no crash")
"""
    assert says(program) == "no crash"


def test_a_class_that_is_only_called_as_numpys_dummy_leads_nowhere() -> None:
    class DummyArray:
        """As what stands behind `as_strided`, but its base is itself."""

        def __init__(self, array: np.ndarray[Any, Any]) -> None:
            self.__array_interface__ = array.__array_interface__
            self.base = self

    DummyArray.__module__ = "numpy.lib.stride_tricks"
    array = np.arange(3)
    assert handler_of(np.asarray(DummyArray(array))) is None


def test_numpys_questions_are_passed_on_with_numpys_answers() -> None:
    pairs: list[tuple[Callable[..., Any], Callable[..., Any]]] = [
        (ctxalloc.get_handler_name, numpys_name),
        (ctxalloc.get_handler_version, numpys_version),
    ]
    for ours, numpys in pairs:
        for name in HANDLERS:
            with use(name):
                array = np.ones(3)
                assert ours() == ours(None) == numpys() == ours(array) == numpys(array)
        for wrong in (3, "array", [1]):
            with pytest.raises(ValueError, match="ndarray") as theirs:
                numpys(wrong)
            with pytest.raises(ValueError, match="ndarray") as mine:
                ours(wrong)
            assert str(mine.value) == str(theirs.value)
        with pytest.raises(TypeError):
            ours(arr=np.ones(1))


def test_an_array_that_changed_its_memory_changed_its_handler() -> None:
    with use("aligned64") as aligned:
        array = np.arange(5)
    assert handler_of(array) is aligned
    state: Any = np.arange(7).__reduce__()[2]
    with use("system") as system:
        array.__setstate__(state)
    assert handler_of(array) is system
    assert array.tolist() == list(range(7))


def test_an_array_of_a_foreign_handler_names_it(fresh_name: Callable[[], str]) -> None:
    foreign = ForeignHandler(fresh_name())
    with foreign.selected():
        arrays = [np.ones(10), np.ones((2, 2)).T]
    names = {handler.name for handler in map(handler_of, arrays) if handler}
    assert names == {foreign.struct.name.decode()}
