"""One queue for both sides: Rust tasks of an extension module, asyncio's tasks and threads wait in one line.

``example.work_in(request, n, begun)`` awaits room in a tokio task, makes a buffer of ``n`` bytes in the request, and
ends it.
"""

import asyncio
import gc
import random
import threading
import time
from typing import Any

import pytest
import subprocesses
from rooms import is_as_new

import ctxalloc
import ctxalloc_example as example

pytestmark = pytest.mark.any_numpy


def wanting(budget: ctxalloc.Budget, size: int, **terms: Any) -> ctxalloc.Request:
    # Strict: a task that is cancelled may leave work behind, whose small blocks would be above the limit else.
    return ctxalloc.request(budget=budget, reserve_bytes=size, root=True, strict=True, **terms)


async def until(condition: Any) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "it never came"
        await asyncio.sleep(0.001)


class Line:
    """Who stands in it, of each kind, and who had room when."""

    def __init__(self, budget: ctxalloc.Budget) -> None:
        self.budget = budget
        self.begun: list[int] = []
        self.inside = 0
        self.threads: list[threading.Thread] = []
        self.awaited: list[Any] = []

    def begin(self, number: int) -> None:
        assert self.budget.reserved_bytes + self.budget.in_use_bytes <= 1000
        self.begun.append(number)

    async def stand(self, kind: str, number: int, size: int) -> None:
        before = self.budget.waiting
        if kind == "tokio":
            own = wanting(self.budget, size)
            self.awaited.append(example.work_in(own, size, lambda: self.begin(number)))
            assert self.budget.waiting == before + 1, "its place is taken by the call"
        elif kind == "asyncio":

            async def work() -> None:
                async with wanting(self.budget, size):
                    self.begin(number)
                    await asyncio.sleep(0)

            self.awaited.append(asyncio.create_task(work()))
        else:

            def work_here() -> None:
                with wanting(self.budget, size):
                    self.begin(number)

            self.threads.append(threading.Thread(target=work_here))
            self.threads[-1].start()
        await until(lambda: self.budget.waiting == before + 1)

    async def served(self) -> None:
        await asyncio.wait_for(asyncio.gather(*self.awaited), 20)
        for thread in self.threads:
            await asyncio.to_thread(thread.join, 20)


KINDS = ("tokio", "asyncio", "a thread")


@pytest.mark.parametrize("seed", range(3))
def test_rust_tasks_python_tasks_and_threads_are_served_in_order(run: Any, seed: int) -> None:
    budget = ctxalloc.Budget(1000, name="b")
    kinds = [*KINDS, *KINDS[::-1], *(random.Random(seed).choice(KINDS) for _ in range(12))]

    async def main() -> None:
        line = Line(budget)
        async with wanting(budget, 1000):
            for number, kind in enumerate(kinds):
                await line.stand(kind, number, 1000)  # one at a time: the order is what they began in
            assert line.begun == []
            listed = ctxalloc.metrics.waiting()
            assert [one.reserve_bytes for one in listed if one.budget_id == budget.id] == [1000] * len(kinds)
        await line.served()
        assert line.begun == list(range(len(kinds)))

    run(main())
    assert is_as_new(budget)


def test_a_small_one_of_either_side_passes_no_large_one_of_the_other(run: Any) -> None:
    budget = ctxalloc.Budget(1000, name="b")

    async def main(*kinds: str) -> None:
        line = Line(budget)
        async with wanting(budget, 500):
            for number, (kind, size) in enumerate(zip(kinds, (950, 100, 100), strict=True)):
                await line.stand(kind, number, size)
            await asyncio.sleep(0.01)
            assert line.begun == []
        await line.served()
        assert line.begun[0] == 0, "the others begin after its end, for both of which there was room"

    run(main("tokio", "asyncio", "a thread"))
    run(main("asyncio", "tokio", "tokio"))
    run(main("a thread", "tokio", "asyncio"))
    assert is_as_new(budget)


def test_a_rust_task_that_is_cancelled_leaves_the_line_to_python(run: Any) -> None:
    budget, present = ctxalloc.Budget(1000, name="b"), len(ctxalloc.metrics.present())

    async def main(turns: int) -> bool:
        line = Line(budget)
        async with wanting(budget, 500):
            own = wanting(budget, 800)
            large = example.work_in(own, 800, lambda: line.begin(0))
            await line.stand("asyncio", 1, 300)
            for _ in range(turns):
                await asyncio.sleep(0)
            assert line.begun == []
            large.cancel()
            await line.served()
            assert (line.begun, budget.reserved_bytes) == ([1], 500)
        with pytest.raises(asyncio.CancelledError):
            await large
        await until(lambda: budget.waiting == 0)
        return True

    async def late(turns: int) -> bool:
        """Room comes, and it is cancelled some turns after that: perhaps it is done by then."""
        line = Line(budget)
        async with wanting(budget, 500):
            large = example.work_in(wanting(budget, 800), 800, lambda: line.begin(0))
            await line.stand("tokio", 1, 700)
        for _ in range(turns):
            await asyncio.sleep(0)
        large.cancel()
        await asyncio.wait((large,))
        await line.served()
        await until(lambda: is_as_new(budget))
        return large.cancelled()

    for turns in range(4):
        assert run(main(turns))
    for turns in range(40):
        run(late(turns))
    assert is_as_new(budget)
    # The thread that runs the last future lets go of it in a moment.
    run(until(lambda: gc.collect() >= 0 and len(ctxalloc.metrics.present()) <= present))


def test_a_rust_task_hears_why_there_is_no_room(run: Any) -> None:
    budget = ctxalloc.Budget(1000, name="b")

    def nobody() -> None:
        pytest.fail("there was no room")

    async def main() -> None:
        with pytest.raises(ctxalloc.NoRoom) as never:
            example.work_in(wanting(budget, 1001), 1, nobody)
        assert never.value.reason == "never fits"
        async with wanting(budget, 600):
            with pytest.raises(ctxalloc.NoRoom) as late:
                await example.work_in(wanting(budget, 500, timeout=0.01), 1, nobody)
            assert late.value.reason == "timed out"
            assert budget.waiting == 0
        own = wanting(budget, 600)
        assert await example.work_in(own, 700, lambda: None) == 700, "beyond its reservation, while there is room"
        with pytest.raises(RuntimeError, match="was entered and left before"):
            example.work_in(own, 1, nobody)
        with pytest.raises(MemoryError):
            await example.work_in(wanting(budget, 600), 1001, lambda: None)
        assert await example.work_in(ctxalloc.request(budget=budget), 300, lambda: None) == 300, "without one"
        inner = ctxalloc.request(reserve_bytes=400)
        async with wanting(budget, 900):
            assert await example.work_in(inner, 400, lambda: None) == 400, "from the one around it"
            assert budget.reserved_bytes == 900

    run(main())
    for wrong in (None, "request", budget):
        with pytest.raises(TypeError, match=r"give a ctxalloc\.Request"):
            example.work_in(wrong, 1, nobody)  # type: ignore[arg-type]
    waits = wanting(budget, 1)
    with pytest.raises(RuntimeError):
        example.work_in(waits, 1, nobody)  # no event loop
    assert is_as_new(budget)


def test_a_process_ends_with_rust_tasks_in_line() -> None:
    printed = subprocesses.says(
        """
import asyncio, sys, time
import ctxalloc, ctxalloc_example

budget = ctxalloc.Budget(1000, name="b")
def wanting(size):
    return ctxalloc.request(budget=budget, reserve_bytes=size, root=True)
holder = wanting(600)
holder.__enter__()

async def main():
    sys.left = [ctxalloc_example.work_in(wanting(800), 1, lambda: print("had room")) for _ in range(5)]
    await asyncio.sleep(0.01)
    assert budget.waiting == 5

class Late:
    def __del__(self, sleep=time.sleep, holder=holder):
        holder.__exit__(None, None, None)
        sleep(0.1)

loop = asyncio.new_event_loop()
loop.run_until_complete(main())
sys.late = Late()
print("over")
"""
    )
    assert printed == "over"
