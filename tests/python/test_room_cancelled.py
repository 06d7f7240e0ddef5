"""A wait for room that ends at any of its await points: cancelled, closed or thrown out of, nothing of it is left.

Each test repeats one program for k = 0, 1, 2, ..., and ends the coroutine at its k-th await point, or after the k-th
turn of the loop, until k is beyond its end. A loop's turn also ends between "room came" and the step that takes it.
"""

import asyncio
import functools
import gc
import itertools
import threading
import time
import types
import weakref
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import numpy as np
import pytest
from asgi_calls import answer, http

import ctxalloc
from ctxalloc.asgi import AllocatorMiddleware

pytestmark = pytest.mark.any_numpy

LIMIT = 1000


class World:
    """A budget that somebody holds; the subject, which waits; and one behind it, which has to get its turn."""

    def __init__(self) -> None:
        self.budget = ctxalloc.Budget(LIMIT, name="b")
        self.reached: list[str] = []
        self.ended: list[str] = []
        self.errors: list[BaseException] = []
        """Kept as a reporter of errors does, with the frames of the wait: what leaves the line is not their end."""

    def terms(self, size: int, **more: Any) -> ctxalloc.Request:
        return ctxalloc.request(budget=self.budget, reserve_bytes=size, root=True, **more)


async def some_turns() -> None:
    """More than uvloop makes at a time where it is told to make one."""
    for _ in range(5):
        await asyncio.sleep(0)


async def plain(world: World) -> None:
    async with world.terms(800, name="subject"):
        world.reached.append("in")
        await some_turns()
        world.reached.append("out")


async def decorated(world: World) -> None:
    @world.terms(800, name="subject")
    async def work() -> None:
        world.reached.append("in")
        await some_turns()
        world.reached.append("out")

    await work()


async def generated(world: World) -> None:
    @world.terms(800, name="subject")
    async def work() -> Any:
        world.reached.append("in")
        await some_turns()
        yield
        world.reached.append("out")

    values = work()
    try:
        async for _ in values:
            await asyncio.sleep(0)
    finally:
        await values.aclose()


async def served(world: World) -> None:
    """Under a middleware, which listens to the client meanwhile."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        world.reached.append("in")
        await receive()
        await some_turns()
        await answer(send)
        world.reached.append("out")

    messages = [{"type": "http.request", "body": b"", "more_body": False}]

    async def receive() -> Any:
        if messages:
            return messages.pop()
        return await asyncio.get_running_loop().create_future()

    async def send(message: Any) -> None:
        await asyncio.sleep(0)

    def on_end(scope: Any, report: Any) -> None:
        world.ended.append(report.outcome)

    await AllocatorMiddleware(app, default=world.terms(800, name="subject"), on_end=on_end)(http(), receive, send)


async def inside(world: World) -> None:
    """One that waits for room with another task that does, whose end is its own."""
    async with asyncio.TaskGroup() as group:
        group.create_task(plain(world))


SUBJECTS: dict[str, Callable[[World], Coroutine[Any, Any, None]]] = {
    "async with": plain,
    "a decorated coroutine": decorated,
    "a decorated generator": generated,
    "a middleware": served,
    "a task group": inside,
}


def turn(loop: asyncio.AbstractEventLoop, by: str = "") -> None:
    """One turn of the loop, and a moment for the thread of the queue where that has to come by."""
    loop.call_soon(loop.stop)
    loop.run_forever()
    if by == "the queue":
        time.sleep(0.001)


def new_loop(kind: str) -> asyncio.AbstractEventLoop:
    if kind == "asyncio":
        return asyncio.new_event_loop()
    return pytest.importorskip("uvloop").new_event_loop()


def settle(loop: asyncio.AbstractEventLoop, condition: Callable[[], bool]) -> None:
    """Turns of the loop until it holds: what another thread does takes any number of them."""

    async def wait() -> None:
        for number in itertools.count():
            if condition():
                return
            await asyncio.sleep(0 if number < 100 else 0.001)

    loop.run_until_complete(asyncio.wait_for(wait(), 20))


def is_as_new(world: World) -> bool:
    budget = world.budget
    return (budget.in_use_bytes, budget.reserved_bytes, budget.waiting) == (0, 0, 0)


def check(world: World, loop: asyncio.AbstractEventLoop, behind: "asyncio.Task[None]", before: int) -> None:
    """After the subject's end, whatever it was."""
    settle(loop, behind.done)
    assert behind.exception() is None, "its turn was passed on"
    settle(loop, lambda: is_as_new(world))
    assert [one for one in ctxalloc.metrics.waiting() if one.budget_id == world.budget.id] == []
    assert asyncio.all_tasks(loop) == set()
    assert ctxalloc.current().name == "default"
    assert ctxalloc.current_request() is None
    # Only one of its name may wait: whoever left is not counted any more.
    with world.terms(LIMIT, name="subject", max_waiting=0):
        pass
    # What is settled later keeps the request until then.
    settle(loop, lambda: gc.collect() >= 0 and ctxalloc.metrics.requests().present <= before)


@pytest.fixture(params=["asyncio", "uvloop"])
def loop(request: Any) -> Iterator[asyncio.AbstractEventLoop]:
    made = new_loop(request.param)
    yield made
    made.close()


async def noting(world: World, subject: Coroutine[Any, Any, Any]) -> Any:
    try:
        return await subject
    except BaseException as error:
        world.errors.append(error)
        raise


class Stage:
    """Who holds the room, the subject, and who stands behind it; a turn of the loop each."""

    def __init__(self, world: World, loop: asyncio.AbstractEventLoop, subject: Any, by: str) -> None:
        self.thread: threading.Thread | None = None
        held: list[Any] = []

        async def hold() -> None:
            async with world.terms(600):
                for _ in range(4):
                    await asyncio.sleep(0)

        async def stand_behind() -> None:
            async with world.terms(500):
                pass

        if by == "a task":
            loop.create_task(hold())
        elif by == "a thread":
            has_begun, ends = threading.Event(), threading.Event()

            def hold_here() -> None:
                with world.terms(600):
                    has_begun.set()
                    ends.wait(20)

            self.thread = threading.Thread(target=hold_here)
            self.thread.start()
            assert has_begun.wait(20)
        else:
            with world.terms(0):
                held.append(np.empty(600, np.uint8))
        turn(loop)
        self.task = loop.create_task(noting(world, subject))
        turn(loop)
        self.behind = loop.create_task(stand_behind())

        def let_go() -> None:
            if self.thread is not None:
                ends.set()
                self.thread.join(20)  # it tells the loop itself
            held.clear()  # the thread of the queue does

        loop.call_soon(loop.call_soon, let_go)

    def check(self, world: World, loop: asyncio.AbstractEventLoop, before: int) -> None:
        """After the subject's end, whatever it was."""
        settle(loop, self.behind.done)
        assert self.behind.exception() is None, "its turn was passed on"
        settle(loop, lambda: is_as_new(world))
        assert [one for one in ctxalloc.metrics.waiting() if one.budget_id == world.budget.id] == []
        assert asyncio.all_tasks(loop) == set()
        assert ctxalloc.current_request() is None
        with world.terms(LIMIT):
            pass
        world.errors.clear()
        settle(loop, lambda: gc.collect() >= 0 and len(ctxalloc.metrics.present()) <= before)


@types.coroutine
def ending(steps: Coroutine[Any, Any, None], at: int, end: Callable[[Any], None]) -> Any:
    """Awaits it, and ends it at that await point. Returns whether it came so far."""
    for number in itertools.count():
        try:
            awaited = steps.send(None)
        except StopIteration:
            return False
        if number == at:
            end(steps)
            return True
        yield awaited
    return False


class BoomError(Exception):
    """What nobody expects."""


def throw(world: World, coroutine: Any) -> None:
    """What the timeout of a library may do."""
    with pytest.raises(BoomError) as raised:
        coroutine.throw(BoomError())
    world.errors.append(raised.value)


def close(_: World, coroutine: Any) -> None:
    coroutine.close()


BY = ["a task", "a thread", "the queue"]
MOST = 300


@pytest.mark.parametrize("by", BY)
@pytest.mark.parametrize("subject", SUBJECTS)
def test_one_that_is_cancelled_after_any_turn_leaves_nothing(loop: Any, subject: str, by: str) -> None:
    before = len(ctxalloc.metrics.present())
    ends: set[tuple[str, ...]] = set()
    for turns in range(MOST):
        world = World()
        stage = Stage(world, loop, SUBJECTS[subject](world), by)
        for _ in range(turns):
            turn(loop, by)
        is_over = stage.task.done()
        stage.task.cancel()
        settle(loop, stage.task.done)
        if is_over or not stage.task.cancelled():
            assert stage.task.exception() is None
            assert world.reached == ["in", "out"]
        ends.add((*world.reached, "cancelled" if stage.task.cancelled() else "done"))
        task = weakref.ref(stage.task)
        del stage.task
        stage.check(world, loop, before)
        assert task() is None
        if is_over:
            break
    else:
        pytest.fail("it never came to its end")
    # Before it had room, in the block, and after that. What the thread of the queue does falls between any two turns.
    assert {("cancelled",), ("in", "out", "done")} <= ends
    assert ("in", "cancelled") in ends or by == "the queue"


ENDED = [
    (subject, how)
    for subject in SUBJECTS
    for how in (close, throw)
    # The first awaits its tasks on its way out, which nobody does for it here. And CPython leaves every generator
    # running whose step is closed (`async_gen_asend.close`).
    if subject != "a task group" and (subject, how) != ("a decorated generator", close)
]


@pytest.mark.parametrize("by", BY)
@pytest.mark.parametrize(("subject", "how"), ENDED)
def test_one_that_is_ended_at_any_await_point_leaves_nothing(loop: Any, subject: str, how: Any, by: str) -> None:
    before = len(ctxalloc.metrics.present())
    reached = set()
    for at in range(MOST):
        world = World()
        stage = Stage(world, loop, ending(SUBJECTS[subject](world), at, functools.partial(how, world)), by)
        settle(loop, stage.task.done)
        came = stage.task.result()
        reached.add(tuple(world.reached))
        del stage.task
        stage.check(world, loop, before)
        if not came:
            break
    else:
        pytest.fail("it never came to its end")
    assert {(), ("in",), ("in", "out")} <= reached
