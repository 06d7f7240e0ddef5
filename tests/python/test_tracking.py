"""Live blocks under ``strategies.Tracked``: none missed, none invented, with who made them and where."""

import asyncio
import ctypes
import gc
import itertools
import sys
import threading
import traceback
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pytest
from numpy_c import struct_in
from subprocesses import says

import ctxalloc
from ctxalloc import tracking
from ctxalloc.strategies import Pool, Tracked

Array = npt.NDArray[np.float64]

FRAMES = ctxalloc.register("test tracked, three frames", Tracked(traceback=3))
TASKS = ctxalloc.register("test tracked, tasks", Tracked(Pool(), tasks=True))


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    yield
    gc.collect()
    assert ctxalloc.handler("tracked").live_blocks() == []


def make(size: int) -> Array:
    return np.ones(size)


def test_live_blocks_are_the_arrays_that_live_the_oldest_first() -> None:
    handler = ctxalloc.handler("tracked")
    with ctxalloc.use(handler):
        arrays = [make(size) for size in range(1, 200)]
    del arrays[10:150]
    blocks = handler.live_blocks()
    assert [block.size_bytes for block in blocks] == [array.nbytes for array in arrays]
    assert [block.address for block in blocks] == [array.ctypes.data for array in arrays]
    assert {block.thread_id for block in blocks} == {threading.get_native_id()}
    assert {block.thread_name for block in blocks} == {threading.current_thread().name}
    assert all(0 <= block.age_seconds < 600 and block.task is None and not block.traceback for block in blocks)
    assert all(old.age_seconds >= new.age_seconds for old, new in itertools.pairwise(blocks))


def test_blocks_of_ended_threads_keep_their_names_when_freed_elsewhere() -> None:
    handler = ctxalloc.handler("tracked")
    kept: list[Array] = []
    made, end = threading.Event(), threading.Event()

    def work() -> None:
        with ctxalloc.use(handler):
            kept.append(make(7))
        made.set()
        assert end.wait(60)

    thread = threading.Thread(target=work, name="a thread with a name of many letters")
    thread.start()
    assert made.wait(60)
    (block,) = handler.live_blocks()
    assert (block.thread_name, block.thread_id) == (thread.name, thread.native_id)
    assert "a thread with a name of many letters" in repr(block)
    end.set()
    thread.join()
    (block,) = handler.live_blocks()
    assert block.thread_id == thread.native_id
    kept.clear()


def test_tracebacks_say_where_an_array_was_made_the_innermost_call_last() -> None:
    def outer() -> Array:
        return make(50)

    with ctxalloc.use(FRAMES):
        array = outer()
    (block,) = FRAMES.live_blocks()
    assert isinstance(block.traceback, traceback.StackSummary)
    names = [frame.name for frame in block.traceback]
    # np.ones is a Python function, and the innermost.
    assert names[-2:] == ["make", "ones"]
    assert names[0].endswith("outer")
    assert len(names) == 3
    assert block.traceback[1].filename == __file__
    assert block.traceback[1].lineno == make.__code__.co_firstlineno + 1
    assert "return np.ones(size)" in "".join(block.traceback.format())
    report = tracking.report(FRAMES.live_blocks())
    assert report.startswith("1 live block, 400 bytes\n  400 bytes in 1 block")
    assert "make (test_tracking.py:" in report
    del array


def test_a_traceback_is_as_deep_as_asked_or_as_there_is() -> None:
    deep = ctxalloc.register("test tracked, many frames", Tracked(traceback=100_000))
    with ctxalloc.use(deep):
        array = make(5)
    (block,) = deep.live_blocks()
    here = traceback.extract_stack()
    # Without np.ones and make, which were there then.
    assert [frame.name.rpartition(".")[2] for frame in block.traceback[:-2]] == [frame.name for frame in here]
    del array


def test_arrays_made_at_one_place_share_it_and_reports_group_them() -> None:
    with ctxalloc.use(FRAMES):
        many = [make(10) for _ in range(30)]
        one = np.zeros(1000)
    report = tracking.report(FRAMES.live_blocks()).splitlines()
    assert report[0] == "31 live blocks, 10400 bytes"
    assert report[1].startswith("  8000 bytes in 1 block, ")
    assert report[2].startswith("  2400 bytes in 30 blocks, ")
    assert len(report) == 3
    del many, one


def make_while_handling(error: Exception) -> Array:
    """An array, made while an exception is handled, which must be the same one before and after."""
    try:
        raise error
    except ValueError:
        array = np.empty(10)
        handled = sys.exc_info()[1]
    assert handled is error
    return array


def test_capturing_calls_no_python_function_and_disturbs_no_exception() -> None:
    events: list[str] = []
    with ctxalloc.use(FRAMES):
        sys.setprofile(lambda frame, event, arg: events.append(event))
        array = np.empty(10)
        sys.setprofile(None)
        assert FRAMES.live_blocks()[0].traceback
        assert set(events) <= {"c_call", "c_return"}  # of np.empty and setprofile themselves
        array = make_while_handling(error := ValueError("kept"))
        assert error.__traceback__ is not None
    del array


def test_capturing_starts_no_garbage_collection() -> None:
    handler = ctxalloc.register("test tracked, deep frames", Tracked(traceback=50))
    inside = False
    done = 0
    seen: list[bool] = []

    def collecting(phase: str, _info: dict[str, int]) -> None:
        if phase == "start":
            # CPython 3.12 and later put it off to the next instruction: then the block is there.
            seen.append(inside and len(handler.live_blocks()) == done)

    def deep(levels: int) -> Array:
        nonlocal inside, done
        if levels > 0:
            return deep(levels - 1)
        inside = True
        array = np.empty(10)
        inside = False
        done += 1
        return array

    threshold = gc.get_threshold()
    gc.callbacks.append(collecting)
    gc.set_threshold(20)  # the frames that are looked at become more objects than that
    try:
        with ctxalloc.use(handler):
            arrays = [deep(40) for _ in range(10)]
    finally:
        gc.callbacks.remove(collecting)
        gc.set_threshold(*threshold)
    assert all(len(block.traceback) > 40 for block in handler.live_blocks())
    assert True not in seen
    assert gc.isenabled()
    gc.disable()
    try:
        with ctxalloc.use(handler):
            arrays.append(np.empty(11))
        assert not gc.isenabled(), "it was off before"
    finally:
        gc.enable()
    del arrays


def test_without_the_gil_there_is_no_traceback_and_no_task() -> None:
    # ctypes lets the GIL go around a CFUNCTYPE, and keeps it around a PYFUNCTYPE.
    struct = struct_in(FRAMES.capsule)
    ctx, malloc, free = struct.allocator.ctx, struct.allocator.malloc, struct.allocator.free
    with_gil = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)(
        ctypes.cast(malloc, ctypes.c_void_p).value
    )
    stop = threading.Event()

    def hold_the_gil() -> None:
        while not stop.is_set():
            sum(range(100))

    others = [threading.Thread(target=hold_the_gil) for _ in range(2)]
    for other in others:
        other.start()
    blocks = [malloc(ctx, size) for size in range(1, 300)]
    blocks.append(with_gil(ctx, 300))
    stop.set()
    for other in others:
        other.join()
    found = {block.size_bytes: block for block in FRAMES.live_blocks()}
    assert [size for size in range(1, 300) if found[size].traceback] == []
    assert found[300].traceback
    for block in blocks:
        free(ctx, block, 0)


def test_tasks_are_named_each_by_its_own() -> None:
    async def work(size: int) -> Array:
        await asyncio.sleep(0)
        with ctxalloc.use(TASKS):
            return make(size)

    async def main() -> list[Array]:
        tasks = [asyncio.create_task(work(size), name=f"task of {size}") for size in (1, 2, 3)]
        return await asyncio.gather(*tasks)

    arrays = asyncio.run(main())
    with ctxalloc.use(TASKS):
        arrays.append(make(4))
    assert [(block.size_bytes // 8, block.task) for block in TASKS.live_blocks()] == [
        (1, "task of 1"),
        (2, "task of 2"),
        (3, "task of 3"),
        (4, None),
    ]
    assert 'task "task of 2"' in repr(TASKS.live_blocks()[1])
    del arrays


def test_a_task_of_another_type_is_not_asked_for_its_name() -> None:
    asked: list[str] = []

    class Own(asyncio.Task):  # type: ignore[type-arg]
        def get_name(self) -> str:
            asked.append("get_name")
            return "own"

    async def work() -> Array:
        with ctxalloc.use(TASKS):
            return make(1)

    async def main() -> Array:
        asyncio.get_running_loop().set_task_factory(
            lambda loop, coroutine, **options: Own(coroutine, loop=loop, **options)  # type: ignore[arg-type]
        )
        return await asyncio.create_task(work())

    array = asyncio.run(main())
    assert TASKS.live_blocks()[0].task is None
    assert asked == []
    del array


def test_a_leak_check_lists_what_was_made_inside_and_is_left() -> None:
    kept = {}
    with ctxalloc.use("tracked"):
        kept["before"] = make(1)
    with tracking.LeakCheck() as leaks:
        assert ctxalloc.current().name == "tracked" == leaks.handler.name
        kept["inside"] = make(2)
        gone = make(3)
        cycle: list[object] = [make(4)]
        cycle.append(cycle)
        assert [block.size_bytes for block in leaks.blocks()] == [16, 24, 32]
        del gone, cycle
    assert ctxalloc.current().name == "default_allocator"
    with ctxalloc.use("tracked"):
        kept["after"] = make(5)
    assert [block.size_bytes for block in leaks.blocks()] == [16]
    assert leaks.report().startswith("1 live block, 16 bytes")
    kept.clear()
    assert leaks.blocks() == []


def test_who_does_not_track_says_so() -> None:
    with pytest.raises(ValueError, match="handler 'pool' does not track its blocks; use 'tracked'"):
        ctxalloc.handler("pool").live_blocks()
    with pytest.raises(ValueError, match="'default_allocator' does not track"):
        tracking.LeakCheck(handler="default_allocator")


@pytest.mark.parametrize("name", ["tracked", "test tracked, three frames", "test tracked, tasks"])
def test_many_threads_at_once_lose_nothing_under(name: str) -> None:
    handler = ctxalloc.handler(name)
    kept: list[list[Array]] = []

    def work(number: int) -> None:
        mine = []
        with ctxalloc.use(handler):
            for round_ in range(500):
                array = make(number + 1)
                if round_ % 10 == 0:
                    mine.append(array)
        kept.append(mine)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        handler.live_blocks()
    for thread in threads:
        thread.join()
    addresses = sorted(array.ctypes.data for mine in kept for array in mine)
    assert sorted(block.address for block in handler.live_blocks()) == addresses
    kept.clear()
    assert handler.live_blocks() == []


AT_THE_END = """
import atexit, ctxalloc, numpy as np, threading

ctxalloc.set_handler(ctxalloc.register("t", ctxalloc.strategies.Tracked(traceback=10, tasks=True)))

class Late:
    def __init__(self):
        self.array = np.ones(1000)
    def __del__(self):
        np.ones(10) + self.array[:10]

keep = [Late() for _ in range(10)]
atexit.register(lambda: keep.append(Late()))
thread = threading.Thread(target=lambda: keep.append(np.ones(5)))
thread.start()
thread.join()
print("made")
"""


def test_arrays_that_live_to_the_end_of_the_interpreter_do_no_harm() -> None:
    assert says(AT_THE_END) == "made"
