"""Who holds one that waits for room: its turn, which its loop holds until the wait or the loop is over.

A loop refers to its tasks weakly. One that waits for a lock or a future of somebody else's is held by that.
"""

import asyncio
import gc
import sys
import threading
import weakref
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest
from asgi_calls import answer, http
from rooms import is_as_new, until, until_soon, wanting

import ctxalloc
from ctxalloc.asgi import AllocatorMiddleware

pytestmark = pytest.mark.any_numpy

Said = list[Any]


async def entering(budget: ctxalloc.Budget, said: Said, **terms: Any) -> None:
    try:
        async with wanting(budget, 600, **terms):
            said.append("in")
    except ctxalloc.NoRoom as error:
        said.append(error.reason)


async def decorated(budget: ctxalloc.Budget, said: Said) -> None:
    @wanting(budget, 600)
    async def work() -> None:
        said.append("in")

    await work()


async def generated(budget: ctxalloc.Budget, said: Said) -> None:
    @wanting(budget, 600)
    async def work() -> Any:
        yield "in"

    said.extend([value async for value in work()])


async def grouped(budget: ctxalloc.Budget, said: Said) -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(entering(budget, said))


async def hurried(budget: ctxalloc.Budget, said: Said) -> None:
    async with asyncio.timeout(20):
        await entering(budget, said)


async def served(budget: ctxalloc.Budget, said: Said) -> None:
    """Under a middleware, which listens to a client that says nothing more."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await answer(send)
        said.append("in")

    async def receive() -> Any:
        return await asyncio.Event().wait()

    async def send(message: Any) -> None: ...

    terms = ctxalloc.request(budget=budget, reserve_bytes=600)
    await AllocatorMiddleware(app, default=terms)(http(), receive, send)


WAYS: dict[str, Callable[[ctxalloc.Budget, Said], Coroutine[Any, Any, None]]] = {
    "async with": entering,
    "a decorated coroutine": decorated,
    "a decorated generator": generated,
    "a task group": grouped,
    "a timeout": hurried,
    "a middleware": served,
}


@pytest.fixture(params=["asyncio", "uvloop", "eager tasks"])
def loop(request: Any) -> Iterator[asyncio.AbstractEventLoop]:
    made = asyncio.new_event_loop()
    if request.param == "uvloop":
        made.close()
        made = pytest.importorskip("uvloop").new_event_loop()
    elif request.param == "eager tasks":
        if sys.version_info < (3, 12):
            made.close()
            pytest.skip("CPython 3.12 has them")
        made.set_task_factory(asyncio.eager_task_factory)
    yield made
    made.close()


def dropped(count: int, make: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Tasks that nobody refers to."""
    for _ in range(count):
        asyncio.get_running_loop().create_task(make())


async def settled(budget: ctxalloc.Budget, waiting: int) -> None:
    """So many wait, and the loop has no step to make that would hold them."""
    await until_soon(lambda: budget.waiting == waiting)
    for _ in range(10):
        await asyncio.sleep(0)


def collect() -> None:
    """What a task of a cycle held goes only after it."""
    for _ in range(3):
        gc.collect()


@pytest.mark.parametrize("way", WAYS)
def test_a_task_that_nobody_refers_to_gets_its_turn(loop: asyncio.AbstractEventLoop, way: str) -> None:
    budget, said = ctxalloc.Budget(1000, name="b"), []

    async def main() -> None:
        async with wanting(budget, 600):
            dropped(5, lambda: WAYS[way](budget, said))
            await settled(budget, 5)
            collect()
            assert budget.waiting == 5
        await until_soon(lambda: len(said) == 5)

    loop.run_until_complete(main())
    assert said == ["in"] * 5
    assert is_as_new(budget)


def test_a_task_that_nobody_refers_to_is_refused_when_its_time_is_over(loop: asyncio.AbstractEventLoop) -> None:
    budget, said = ctxalloc.Budget(1000, name="b"), []

    async def main() -> None:
        async with wanting(budget, 600):
            dropped(3, lambda: entering(budget, said, timeout=0.5))
            await settled(budget, 3)
            collect()
            async with asyncio.timeout(20):
                while len(said) < 3:  # noqa: ASYNC110 - another thread says so
                    await asyncio.sleep(0.001)

    loop.run_until_complete(main())
    assert said == ["timed out"] * 3
    assert is_as_new(budget)


def test_another_threads_collection_and_end_leave_it_its_turn(loop: asyncio.AbstractEventLoop) -> None:
    budget, said = ctxalloc.Budget(1000, name="b"), []
    has_begun = threading.Event()

    def hold() -> None:
        with wanting(budget, 600):
            has_begun.set()
            until(lambda: budget.waiting == 3)
            collect()

    async def main() -> None:
        dropped(3, lambda: entering(budget, said))
        async with asyncio.timeout(20):
            while len(said) < 3:  # noqa: ASYNC110 - another thread ends
                await asyncio.sleep(0.001)

    thread = threading.Thread(target=hold)
    thread.start()
    assert has_begun.wait(20)
    loop.run_until_complete(main())
    thread.join(20)
    assert is_as_new(budget)


def test_waiters_of_two_loops_in_turn_are_held_by_their_own(loop: asyncio.AbstractEventLoop) -> None:
    budget, said = ctxalloc.Budget(1000, name="b"), []
    other = asyncio.new_event_loop()

    async def wait() -> None:
        dropped(1, lambda: entering(budget, said))
        await asyncio.sleep(0)

    with wanting(budget, 600):
        for _ in range(3):
            loop.run_until_complete(wait())
            other.run_until_complete(wait())
        assert budget.waiting == 6
        other.close()
        collect()
        assert budget.waiting == 3, "those of the closed loop have left"
    loop.run_until_complete(until_soon(lambda: len(said) == 3))
    assert said == ["in"] * 3
    assert is_as_new(budget)


@pytest.mark.parametrize("end", ["served", "cancelled", "refused", "closed"])
def test_one_whose_wait_is_over_is_not_held(loop: asyncio.AbstractEventLoop, end: str) -> None:
    budget, said = ctxalloc.Budget(1000, name="b"), []
    gone = []

    async def main() -> None:
        first = wanting(budget, 600)
        await first.__aenter__()
        # One more, so that the loop has somebody to hold.
        dropped(1, lambda: entering(budget, said))
        task = asyncio.create_task(entering(budget, said, timeout=0.5 if end == "refused" else None))
        gone.append(weakref.ref(task))
        await settled(budget, 2)
        if end == "cancelled":
            task.cancel()
        if end in ("cancelled", "refused"):
            await asyncio.wait([task])
            assert budget.waiting == 1
        await first.__aexit__(None, None, None)
        if end == "served":
            await asyncio.wait([task])

    if end == "closed":

        async def wait() -> None:
            dropped(1, lambda: entering(budget, said))
            gone.extend(map(weakref.ref, asyncio.all_tasks() - {asyncio.current_task()}))
            await asyncio.sleep(0)

        with wanting(budget, 600):
            loop.run_until_complete(wait())
            for one in gone:
                one()._log_destroy_pending = False  # type: ignore[union-attr]
            loop.close()
            collect()
            assert budget.waiting == 0
    else:
        loop.run_until_complete(main())
        loop.run_until_complete(until_soon(lambda: budget.waiting == 0))
    collect()
    assert [one() for one in gone] == [None]
    loop.close()
    assert is_as_new(budget)


def test_a_loop_that_nobody_refers_to_goes_with_its_waiters() -> None:
    """It is not closed. uvloop's own are never freed then."""
    budget, said = ctxalloc.Budget(1000, name="b"), []

    def leave() -> "weakref.ref[asyncio.AbstractEventLoop]":
        loop = asyncio.new_event_loop()

        async def wait() -> None:
            dropped(2, lambda: entering(budget, said))
            for one in asyncio.all_tasks():
                one._log_destroy_pending = False  # type: ignore[attr-defined]
            await asyncio.sleep(0)

        loop.run_until_complete(wait())
        return weakref.ref(loop)

    with wanting(budget, 600):
        gone = leave()
        with pytest.warns(ResourceWarning, match="unclosed event loop"):
            collect()
        assert gone() is None
        assert budget.waiting == 0
    assert said == []
    assert is_as_new(budget)
