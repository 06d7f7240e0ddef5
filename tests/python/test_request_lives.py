"""What outlives a request, and where it is freed: tasks, threads, Rust futures, forked processes, interpreter exit."""

import asyncio
import contextvars
import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import patience
import pytest
import subprocesses

import ctxalloc
import ctxalloc_example as example
from ctxalloc import current, handler_of, request
from ctxalloc.strategies import Tracked

FORK_IN_PEACE = ("-W", "ignore:This process:DeprecationWarning")


def held() -> int:
    """How many requests there are, ended or not."""
    gc.collect()
    return ctxalloc.request_metrics().present


def test_a_request_is_there_until_its_last_array_is_gone() -> None:
    before = held()
    with request() as scope:
        arrays = [np.full(1000, number) for number in range(100)]
        name = scope.handler.name
    assert held() == before + 1
    while arrays:
        assert arrays[-1].sum() == 1000 * (len(arrays) - 1)
        handler = handler_of(arrays[-1])
        assert handler is not None
        assert handler.name == name
        del handler
        arrays.pop()
    assert held() == before


@pytest.mark.parametrize("how", ["context", "handler", "capsule", "scope", "token", "adopted"])
def test_whoever_has_the_handler_keeps_the_request(how: str) -> None:
    before = held()
    keeper: object
    with request() as scope:
        name = scope.handler.name
        if how == "context":
            keeper = contextvars.copy_context()
        elif how == "handler":
            keeper = scope.handler
        elif how == "capsule":
            keeper = scope.handler.capsule
        elif how == "scope":
            keeper = ctxalloc.use(scope.handler)
        elif how == "token":
            keeper = ctxalloc.set_handler("pool")
            ctxalloc.set_handler(scope.handler)
        else:
            keeper = ctxalloc.adopt(scope.handler.capsule)
            assert keeper == scope.handler
    with request() as other:
        assert other.handler.name != name
    assert held() == before + 1
    del keeper
    assert held() == before


def test_handlers_that_were_looked_up_are_let_go() -> None:
    before = held()
    for _ in range(3):
        with request() as scope:
            assert scope.handler == current()
            with ctxalloc.use(scope.handler):
                array = np.ones(10)
            ctxalloc.reset(ctxalloc.set_handler(scope.handler))
            ctxalloc.adopt(current().capsule)
        del array
    assert held() == before


def test_a_task_outlives_its_request() -> None:
    async def main() -> None:
        go = asyncio.Event()

        async def works_on(mine: npt.NDArray[Any]) -> npt.NDArray[Any]:
            own = current()
            await go.wait()
            assert current() == own
            return mine + np.ones(1000)  # after the end of the request

        before = held()
        async with request(name="gone") as scope:
            task = asyncio.create_task(works_on(np.ones(1000)))
            await asyncio.sleep(0)
        assert scope.escaped is not None
        assert scope.escaped.count == 1
        async with request() as other:
            assert other.stats.live_blocks == 0
            go.set()
            answer = await task
            assert answer.sum() == 2000
            assert other.stats.live_blocks == 0
        assert scope.stats.live_bytes == answer.nbytes  # charged to it though it is over
        assert held() == before + 1  # for the task's answer and its context
        del task, answer
        await asyncio.sleep(0)  # the event loop has the task in its hands until its next round
        assert held() == before

    asyncio.run(main())


def test_rust_sees_the_request_and_is_charged_to_it() -> None:
    with request(limit_bytes=10_000) as scope:
        assert example.handler_here() == scope.handler.name
        assert example.buffer_of(4096) == (scope.handler.name, 4096)
        assert scope.stats.count == 1
    with pytest.raises(ctxalloc.BudgetExceeded) as raised, request(limit_bytes=10_000):
        example.buffer_of(10_001)
    assert (raised.value.requested_bytes, raised.value.in_use_bytes) == (10_001, 0)


def test_a_rust_future_carries_the_request_and_makes_its_arrays_there() -> None:
    async def main() -> None:
        before = held()
        async with request() as scope:
            image = np.ones((50, 50), np.uint8)
            seen = await example.handlers_on_the_way(3)
            assert {name for name, _ in seen} == {scope.handler.name}
            blurred = await example.box_blur(image, 1)
            assert handler_of(blurred) == scope.handler
            elsewhere = await example.array_made_in("pool", 10)
            assert handler_of(elsewhere) == ctxalloc.handler("pool")
            name = await example.await_python(named)
            assert name == scope.handler.name
        del image, blurred
        await settled(before)

    async def named() -> str:
        return current().name

    async def settled(before: int) -> None:
        # tokio drops a finished task, and with it its context, on a thread of its own.
        for _ in patience.attempts():
            if held() == before:
                return
            await asyncio.sleep(0.001)
        raise AssertionError("a request is held for ever")

    # Many times: it depended on which thread came last.
    for _ in range(50):
        asyncio.run(main())


def test_a_rust_future_outlives_its_request() -> None:
    async def main() -> None:
        async with request() as scope:
            name = scope.handler.name
            future = example.handlers_on_the_way(20)
            array = asyncio.ensure_future(example.box_blur(np.zeros((50, 50), np.uint8), 2))
        assert {seen for seen, _ in await future} == {name}
        answer = await array
        handler = handler_of(answer)
        assert handler is not None
        assert handler.name == name
        with request() as other:
            assert other.handler.name != name

    asyncio.run(main())


def test_a_tracked_request_lists_its_blocks_and_not_those_of_a_later_one() -> None:
    strategy = Tracked()
    with request(strategy=strategy) as first:
        kept = np.ones(10)
    with request(strategy=Tracked()) as second:
        np.ones(20)
    assert first.escaped is not None
    assert first.escaped.blocks is not None
    assert [block.size_bytes for block in first.escaped.blocks] == [80]
    assert second.escaped is not None
    assert second.escaped.count == 0
    del kept


def test_parent_and_child_both_go_on_after_a_fork_inside_a_request() -> None:
    printed = subprocesses.says(
        """
import contextvars, os, threading, ctxalloc, numpy as np
stop = threading.Event()
def busy():
    while not stop.is_set():
        with ctxalloc.request():
            np.ones(1000)
threads = [threading.Thread(target=busy) for _ in range(3)]
for thread in threads: thread.start()
tenant = ctxalloc.Budget(10_000_000, name="tenant")
for _ in range(20):
    with ctxalloc.request(budget=tenant, limit_bytes=1_000_000) as scope:
        kept = np.ones(1000)
        child = os.fork()
        more = np.ones(1000) + kept
        assert scope.stats.live_bytes == 16_000, scope.stats
        try:
            np.ones(1_000_000)
        except MemoryError:
            pass
        else:
            raise AssertionError("no limit")
        with ctxalloc.request() as inner:
            np.ones(10)
            assert ctxalloc.current() == inner.handler
    assert (scope.escaped.count, tenant.in_use_bytes) == (2, 16_000)
    del more
    kept.resize(2000, refcheck=False)
    kept = None
    assert tenant.in_use_bytes == 0
    for _ in range(100):
        with ctxalloc.request():
            np.ones(1000)
    if child == 0:
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
stop.set()
for thread in threads: thread.join()
print("both")
""",
        *FORK_IN_PEACE,
    )
    assert printed == "both"


def test_an_interpreter_exits_quietly_with_what_escaped_and_what_is_open() -> None:
    printed = subprocesses.says(
        """
import asyncio, contextvars, sys, threading, ctxalloc, numpy as np
import ctxalloc_example as example
arrays = []
for strategy in (None, ctxalloc.strategies.Tracked(traceback=3)):
    with ctxalloc.request(strategy=strategy) as scope:
        arrays += [np.ones(size) for size in (1, 100, 100_000)]
        arrays.append(np.array([arrays, None], dtype=object))
        context = contextvars.copy_context()
        handler = scope.handler
cycle = []
cycle.append((cycle, arrays[0], scope))
sys.modules["holds an array"] = arrays[1]
class Late:
    def __init__(self): self.array = np.ones(1000)
    def __del__(self): self.array.resize(2000, refcheck=False); self.array = None
hold = threading.Event()
def worker():
    with ctxalloc.request():
        local = np.ones(1000)
        hold.wait()
threading.Thread(target=worker, daemon=True).start()
async def main():
    async with ctxalloc.request():
        return await example.box_blur(np.zeros((50, 50), np.uint8), 2)
arrays.append(asyncio.run(main()))
@ctxalloc.request()
def steps():
    with ctxalloc.request():
        yield np.ones(10)
generator = steps()
next(generator)
open_ = ctxalloc.request(); open_.__enter__()
late = Late()
print("ends")
"""
    )
    assert printed == "ends"


def test_memory_around_an_escape_goes_back() -> None:
    printed = subprocesses.says(
        """
import os, ctxalloc, numpy as np
from resident import rss
MIB = 1 << 20
with ctxalloc.request():
    np.ones(10)
before = rss()
with ctxalloc.request() as scope:
    arrays = [np.ones(10_000) for _ in range(800)]  # 80 KB each
assert scope.escaped.count == 800 and rss() - before > 60 * MIB
kept = arrays[400]
arrays.clear()
ctxalloc.handler("pool").trim()
assert rss() - before < 10 * MIB, (rss() - before) / MIB
assert kept.sum() == 10_000
print("given back")
"""
    )
    assert printed == "given back"


def test_releasing_the_last_array_in_a_finalizer_of_the_collector(collect: Callable[[], None]) -> None:
    before = held()
    with request():
        cycle: list[object] = [np.ones(1000)]
        cycle.append(cycle)
    del cycle
    collect()
    assert held() == before
