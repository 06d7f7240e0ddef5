"""`ctxalloc.set_event_hook`: a Python callable that is called for every block. From C: `test_c_functions.py`."""

import sys
import threading
import weakref
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from numpy_c import ForeignHandler
from subprocesses import run, says

import ctxalloc

Event = tuple[int | None, int | None, int]


@pytest.fixture
def heard() -> Iterator[list[Event]]:
    """What a hook has heard of so far."""
    events: list[Event] = []

    def hook(*event: object) -> None:
        events.append(event)  # type: ignore[arg-type]

    assert ctxalloc.set_event_hook(hook) is None
    yield events
    assert ctxalloc.set_event_hook(None) is hook


@pytest.mark.parametrize("name", ["default_allocator", "pool"])
def test_an_arrays_life_is_heard(heard: list[Event], name: str) -> None:
    with ctxalloc.use(name):
        array = np.empty(5000, dtype=np.uint8)
        first = array.ctypes.data
        array.resize(9000, refcheck=False)
        second = array.ctypes.data
        del array
        np.zeros(7000, dtype=np.uint8)
    assert heard[:3] == [(None, first, 5000), (first, second, 9000), (second, None, 0)]
    assert [event[2] for event in heard[3:]] == [7000, 0]


def test_nothing_is_heard_after_the_hook(heard: list[Event]) -> None:
    hook = ctxalloc.set_event_hook(None)
    np.ones(100)
    assert heard == []
    assert ctxalloc.set_event_hook(hook) is None


def test_a_foreign_handler_that_is_selected_when_the_hook_is_set_is_heard(fresh_name: Callable[[], str]) -> None:
    foreign = ForeignHandler(fresh_name())
    events: list[Event] = []
    with foreign.selected():  # by NumPy: ctxalloc has not seen it
        ctxalloc.set_event_hook(lambda *event: events.append(event))  # type: ignore[arg-type]
        try:
            np.empty(3000, dtype=np.uint8)
        finally:
            ctxalloc.set_event_hook(None)
    assert [size for _, _, size in events] == [3000, 0]


def test_the_hook_may_make_arrays() -> None:
    sums = []
    ctxalloc.set_event_hook(lambda inp, outp, size: sums.append(np.ones(10).sum()))
    try:
        np.empty(1000)
    finally:
        ctxalloc.set_event_hook(None)
    assert sums == [10.0, 10.0]


def test_what_the_hook_raises_is_unraisable_and_the_array_is_there() -> None:
    seen: list[object] = []
    kept, sys.unraisablehook = sys.unraisablehook, lambda info: seen.append((type(info.exc_value), info.object))

    def hook(*event: object) -> None:
        raise LookupError

    ctxalloc.set_event_hook(hook)
    try:
        array = np.empty(10)
    finally:
        ctxalloc.set_event_hook(None)
        sys.unraisablehook = kept
    array[:] = 1
    assert array.sum() == 10
    assert seen == [(LookupError, hook)]


def test_an_exception_on_its_way_is_not_lost() -> None:
    nothing: dict[str, int] = {}
    ctxalloc.set_event_hook(lambda *event: None)
    try:
        with pytest.raises(KeyError, match="missing"):
            _ = (np.empty(1000), nothing["missing"])  # the array dies while the exception is on its way
        with pytest.raises(MemoryError):  # the refusal is heard, and is a MemoryError all the same
            np.empty(2**62, dtype=np.uint8)
    finally:
        ctxalloc.set_event_hook(None)


def test_the_hook_before_comes_back_and_is_let_go(collect: Callable[[], None]) -> None:
    class Hook:
        def __call__(self, *event: object) -> None:
            return None

    first, second = Hook(), Hook()
    gone = weakref.ref(first)
    assert ctxalloc.set_event_hook(first) is None
    assert ctxalloc.set_event_hook(first) is first
    assert ctxalloc.set_event_hook(second) is first
    assert ctxalloc.set_event_hook(first) is second
    assert ctxalloc.set_event_hook(None) is first
    assert ctxalloc.set_event_hook(None) is None
    del first
    collect()
    # Without a GIL a reference stays, on purpose: another thread may be about to call it (decision 0003).
    assert (gone() is None) == getattr(sys, "_is_gil_enabled", lambda: True)()


@pytest.mark.parametrize("hook", [3, "hook", object()])
def test_what_cannot_be_called_is_refused_and_changes_nothing(hook: object, heard: list[Event]) -> None:
    with pytest.raises(TypeError, match=r"an event hook is a callable\(inp, outp, size\) or None"):
        ctxalloc.set_event_hook(hook)
    np.empty(100)
    assert len(heard) == 2


def test_threads_are_heard_while_hooks_come_and_go() -> None:
    over = threading.Event()
    wrong: list[Event] = []

    def hook(inp: int | None, outp: int | None, size: int) -> None:
        if (inp is None) != (size > 0):
            wrong.append((inp, outp, size))

    def work() -> None:
        while not over.is_set():
            for name in ("default_allocator", "pool", "system"):
                with ctxalloc.use(name):
                    np.ones(500)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(300):
        assert ctxalloc.set_event_hook(hook) is None
        assert ctxalloc.set_event_hook(None) is hook
    over.set()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_handler_in_read_only_memory_is_warned_of() -> None:
    program = """
import ctypes, mmap, warnings
import numpy as np, ctxalloc
from ctypes import pythonapi as api
struct = bytearray(168)
own = ctxalloc.handler("system").capsule
api.PyCapsule_GetPointer.restype = ctypes.c_void_p
api.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
api.PyCapsule_New.restype = ctypes.py_object
api.PyCapsule_New.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
text = bytearray(ctypes.string_at(api.PyCapsule_GetPointer(own, b"mem_handler"), 168))
text[:10] = b"read-only\\0"
page = mmap.mmap(-1, 4096)
page.write(bytes(text))
address = ctypes.addressof(ctypes.c_char.from_buffer(page))
assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(address), 4096, 1) == 0
ctxalloc.adopt(api.PyCapsule_New(address, b"mem_handler", None))
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    ctxalloc.set_event_hook(lambda *event: None)
print([type(w.message).__name__ for w in caught], "read-only" in str(caught[0].message))
with ctxalloc.use("read-only"):
    print(np.ones(3).sum())
ctxalloc.set_event_hook(None)
"""
    assert says(program) == "['RuntimeWarning'] True\n3.0"


def test_a_hook_that_is_there_at_exit_does_no_harm() -> None:
    program = """
import numpy as np, ctxalloc
kept = [np.ones(1000)]
with ctxalloc.use("pool"):
    kept.append(np.ones(1000))
count = 0
def hook(*event):
    global count
    count += 1
ctxalloc.set_event_hook(hook)
class AtTheEnd:
    def __del__(self, np=np):
        np.ones(10)
last = AtTheEnd()
kept.append(kept)
np.empty(5)
print(count)
"""
    assert says(program) == "2"


def test_a_hook_that_panics_in_rust_takes_nothing_down() -> None:
    program = """
import sys
import numpy as np, ctxalloc, ctxalloc_example
sys.stderr = None
ctxalloc.set_event_hook(lambda *event: ctxalloc_example.panic_here("in the hook"))
array = np.empty(1000)
del array
ctxalloc.set_event_hook(None)
print(np.ones(1000).sum())
"""
    outcome = run(program)
    assert (outcome.code, outcome.out.strip()) == (0, "1000.0"), outcome


def test_a_fork_keeps_the_hook() -> None:
    program = """
import os, sys
import numpy as np, ctxalloc
events = []
ctxalloc.set_event_hook(lambda *event: events.append(event))
child = os.fork()
np.empty(1000)
heard = len(events)
if child == 0:
    os._exit(heard)
print(heard, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    assert says(program) == "2 2"
