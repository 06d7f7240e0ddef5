"""Handlers that others made: adopted by hand or on sight, reached from Rust, and refused where they are broken.

The foreign handlers are made by ctypes (`numpy_c.py`) and by the package numpy-allocator.
"""

import ctypes
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import subprocesses
from numpy_c import (
    CAPSULE_NAME,
    ForeignHandler,
    capsule_around,
    get_handler,
    numpys_default,
    numpys_name,
)

import ctxalloc
import ctxalloc_example as example
from ctxalloc import adopt, current, handler_of, use


@pytest.fixture
def the_table_is_unchanged() -> Iterator[None]:
    """What is refused must leave no trace."""
    before = ctxalloc.handlers()
    yield
    assert ctxalloc.handlers() == before


def test_an_adopted_handler_is_a_handler_like_any_other(fresh_name: Callable[[], str]) -> None:
    foreign = ForeignHandler(fresh_name())
    name = foreign.struct.name.decode()
    handler = adopt(foreign.capsule)
    assert handler is ctxalloc.handler(name) is ctxalloc.handlers()[-1]
    assert (handler.name, handler.version, handler.alignment) == (name, 1, 1)
    assert handler.capsule is foreign.capsule
    assert repr(handler).startswith(f'<ctxalloc.Handler "{name}": foreign handler at 0x')
    with use(name):
        assert get_handler() is foreign.capsule
        array = np.zeros(1000)
        array.resize(2000, refcheck=False)
        assert handler_of(array) is handler
        assert numpys_name(array) == name
    assert len(foreign.live) == 1
    assert foreign.calls == ["calloc", "realloc"]
    del array
    assert foreign.live == {}
    assert foreign.calls == ["calloc", "realloc", "free"]


COLLECTED = """
import gc
import numpy as np
import ctxalloc
from numpy_c import Free, ForeignHandler

foreign = ForeignHandler("python's")
free, freed, made = foreign.functions["free"], 0, []

def freeing(context, block, size):
    global freed, made
    freed += 1
    with ctxalloc.use("pool"), ctxalloc.request():
        made = [*made[-50:], object(), object()]  # in the place of what is no longer read
    free(context, block, size)

callback = Free(freeing)
foreign.struct.allocator.free = callback
ctxalloc.adopt(foreign.capsule)

class Cycle:
    pass

for threshold in range(1, 12):
    gc.set_threshold(threshold)
    for size in range(1, 300):
        with ctxalloc.use("python's"):
            cycle = Cycle()
            cycle.itself, cycle.array = cycle, np.empty(size)
            del cycle
            with ctxalloc.use("pool"), ctxalloc.request():
                pass
print(gc.isenabled(), freed > 3000)
"""


def test_a_handler_in_python_selects_others_while_garbage_is_collected() -> None:
    """CPython before 3.12 collects while it sets a ContextVar, and reads what a nested `set` has freed."""
    assert subprocesses.says(COLLECTED) == "True True"


def test_the_same_capsule_adopted_twice_is_the_same_handler(fresh_name: Callable[[], str]) -> None:
    foreign = ForeignHandler(fresh_name())
    handler = adopt(foreign.capsule)
    count = len(ctxalloc.handlers())
    assert adopt(foreign.capsule) is handler
    assert adopt(foreign.capsule, name=handler.name) is handler
    assert adopt(capsule_around(ctypes.addressof(foreign.struct))) is handler  # another capsule, the same struct
    assert adopt(handler.capsule) is handler
    assert len(ctxalloc.handlers()) == count
    assert handler.capsule is foreign.capsule


def test_our_own_and_numpys_capsules_are_the_handlers_they_are() -> None:
    for handler in (ctxalloc.handler("system"), ctxalloc.handler("aligned64")):
        assert adopt(handler.capsule) is handler
    assert adopt(numpys_default) is ctxalloc.handler("default_allocator")


def test_a_handler_may_be_adopted_under_another_name(fresh_name: Callable[[], str]) -> None:
    own, alias = fresh_name(), fresh_name()
    foreign = ForeignHandler(own)
    handler = adopt(foreign.capsule, name=alias)
    assert handler is ctxalloc.handler(alias)
    assert handler.name == alias
    with pytest.raises(ctxalloc.UnknownHandlerError):
        ctxalloc.handler(own)
    with use(alias):
        assert current() is handler
        assert ctxalloc.get_handler_name() == own  # NumPy reads the struct, which is not ours to change
        assert handler_of(np.empty(1)) is handler
    assert adopt(foreign.capsule) is handler  # whoever has no wish gets it as it is
    with pytest.raises(ctxalloc.RegistrationError, match=f"in the table already as '{alias}'"):
        adopt(foreign.capsule, name=own)


@pytest.mark.usefixtures("the_table_is_unchanged")
def test_a_missing_function_is_refused_by_name() -> None:
    foreign = ForeignHandler("lacks realloc", missing=("realloc",))
    with pytest.raises(ctxalloc.RegistrationError, match="'lacks realloc' has no realloc function; NEP 49"):
        adopt(foreign.capsule)
    with foreign.selected():  # NumPy takes it, and would crash on it
        with pytest.raises(ctxalloc.RegistrationError, match="has no realloc function"):
            current()
        with pytest.raises(ctxalloc.RegistrationError, match="has no realloc function"):
            example.handler_here()


# Alive as long as capsules with these names are.
OTHER_NAME, NO_NAME = b"other", None


@pytest.mark.parametrize(
    ("subject", "error", "words"),
    [
        (None, TypeError, "a PyCapsule named 'mem_handler' .* not an object of type 'NoneType'"),
        ("system", TypeError, "type 'str'"),
        (ctxalloc.handler("system"), TypeError, "type 'Handler'"),
        (3, TypeError, "type 'int'"),
        (capsule_around(1, OTHER_NAME), ValueError, "named 'mem_handler' .* this one has the name \"other\""),
        (capsule_around(1, NO_NAME), ValueError, "this one has no name"),
    ],
    ids=["None", "str", "Handler", "int", "another name", "no name"],
)
@pytest.mark.usefixtures("the_table_is_unchanged")
def test_what_is_no_handlers_capsule_is_refused(subject: object, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        adopt(subject)


@pytest.mark.usefixtures("the_table_is_unchanged")
def test_adopt_takes_one_capsule_and_one_keyword() -> None:
    foreign = ForeignHandler("adopted by no call")
    calls: list[Callable[[], object]] = [
        lambda: adopt(),  # type: ignore[call-arg]
        lambda: adopt(capsule=foreign.capsule),  # type: ignore[call-arg]
        lambda: adopt(foreign.capsule, "name"),  # type: ignore[call-arg]
        lambda: adopt(foreign.capsule, name=3),  # type: ignore[arg-type]
    ]
    for call in calls:
        with pytest.raises(TypeError):
            call()


# ---- on sight ----------------------------------------------------------------------------------------


def test_current_adopts_what_foreign_code_selected(fresh_name: Callable[[], str]) -> None:
    foreign = ForeignHandler(fresh_name())
    name = foreign.struct.name.decode()
    with foreign.selected():
        handler = current()
    assert (handler.name, handler.capsule) == (name, foreign.capsule)
    assert ctxalloc.handler(name) is handler is adopt(foreign.capsule)


def test_handler_of_adopts_what_made_the_array(fresh_name: Callable[[], str]) -> None:
    foreign = ForeignHandler(fresh_name())
    with foreign.selected():
        array = np.empty(10)
    before = ctxalloc.handlers()
    handler = handler_of(array[2:])
    assert handler is not None
    assert ctxalloc.handlers() == [*before, handler]
    assert handler.capsule is foreign.capsule


def test_rust_adopts_what_it_finds_selected(fresh_name: Callable[[], str]) -> None:
    name = fresh_name()
    foreign = ForeignHandler(name)
    with foreign.selected():
        assert example.handler_here() == name
    assert ctxalloc.handler(name).capsule is foreign.capsule


def test_on_sight_a_name_that_is_taken_or_unreadable_is_replaced() -> None:
    for name, start in [
        (b"system", "system@0x"),
        (b"\xff", "foreign@0x"),
        (b"", "foreign@0x"),
        (b"n" * 127, "foreign@0x"),
    ]:
        foreign = ForeignHandler(name)
        with foreign.selected():
            handler = current()
            assert current() is handler
        assert handler.name == f"{start}{ctypes.addressof(foreign.struct):x}"
        assert ctxalloc.handler(handler.name) is handler


def test_on_sight_a_long_name_that_is_taken_is_cut_between_characters(fresh_name: Callable[[], str]) -> None:
    name = "ö" * 63
    first, second = ForeignHandler(name), ForeignHandler(name)
    with first.selected():
        assert current().name == name
    with second.selected():
        handler = current()
    assert handler.capsule is second.capsule
    assert len(handler.name.encode()) <= 126
    assert handler.name.startswith("ö" * 40)
    assert handler.name.endswith(f"@{ctypes.addressof(second.struct):#x}")


def test_many_threads_that_see_a_handler_first_see_one_handler(fresh_name: Callable[[], str]) -> None:
    for _ in range(10):
        foreign = ForeignHandler(fresh_name())
        barrier = threading.Barrier(8)
        seen: list[ctxalloc.Handler] = []

        def look(own: ForeignHandler = foreign, gate: threading.Barrier = barrier) -> None:
            with own.selected():
                gate.wait()
                seen.append(current())  # noqa: B023

        threads = [threading.Thread(target=look) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(seen) == 8
        assert set(seen) == {adopt(foreign.capsule)}


def test_an_adopted_capsule_lives_for_ever(fresh_name: Callable[[], str]) -> None:
    # Its destructor may free the struct, which the table refers to.
    destroyed: list[int] = []
    destructor = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(destroyed.append)
    keep.append(destructor)
    new_capsule = ctypes.pythonapi.PyCapsule_New
    for adopts in (True, False):
        foreign = ForeignHandler(fresh_name())
        capsule = new_capsule(ctypes.addressof(foreign.struct), CAPSULE_NAME, destructor)
        if adopts:
            adopt(capsule)
        del capsule
        gc.collect()
        assert len(destroyed) == (0 if adopts else 1)


keep: list[Any] = []


# ---- Rust under a foreign handler --------------------------------------------------------------------


def test_a_foreign_handlers_refusal_is_a_memory_error(fresh_name: Callable[[], str]) -> None:
    foreign = ForeignHandler(fresh_name())
    handler = adopt(foreign.capsule)
    foreign.failing = True
    with use(handler):
        with pytest.raises(MemoryError, match=f"'{handler.name}' could not allocate 1000 bytes"):
            example.buffer_of(1000)
        with pytest.raises(MemoryError):
            np.empty(1000)
    foreign.failing = False
    with use(handler):
        assert example.buffer_of(1000) == (handler.name, 1000)


# ---- numpy-allocator ---------------------------------------------------------------------------------


def test_handlers_of_the_package_numpy_allocator_are_handlers_too() -> None:
    # In a process of its own: it has classes for handlers, and callbacks that must not outlive the interpreter.
    printed = subprocesses.says(
        """
import gc
from ctypes import CDLL, c_void_p, c_size_t
import numpy as np
import numpy_allocator
import ctxalloc, ctxalloc_example

libc = CDLL(None)
libc.malloc.restype = libc.calloc.restype = libc.realloc.restype = c_void_p
calls = []

class counting(metaclass=numpy_allocator.type):
    def _calloc_(nelem, elsize):
        calls.append('calloc')
        return libc.calloc(c_size_t(nelem), c_size_t(elsize))
    def _free_(ptr, size):
        calls.append('free')
        libc.free(c_void_p(ptr))
    def _malloc_(size):
        calls.append('malloc')
        return libc.malloc(c_size_t(size))
    def _realloc_(ptr, new_size):
        calls.append('realloc')
        return libc.realloc(c_void_p(ptr), c_size_t(new_size))

with counting:
    handler = ctxalloc.current()
    array = np.ones(10)
    assert handler.name == ctxalloc.get_handler_name() == 'counting', handler
    assert ctxalloc.handler_of(array[3:]) is handler
    with ctxalloc.use('aligned64'):
        assert ctxalloc.current().name == 'aligned64'
    assert ctxalloc.current() is handler
assert ctxalloc.current().name == 'default_allocator'
with ctxalloc.use('counting'):
    calls.clear()
    assert ctxalloc_example.buffer_of(100) == ('counting', 100)
    assert calls == ['calloc', 'free'], calls
calls.clear()
del array
assert calls == ['free'], calls
print('ok')
"""
    )
    assert printed == "ok"


def test_foreign_handlers_of_the_tests_are_alive() -> None:
    # ForeignHandler keeps itself alive; a collected callback would crash, not fail.
    foreign = ForeignHandler("alive")
    alive = weakref.ref(foreign)
    del foreign
    gc.collect()
    assert alive() is not None
