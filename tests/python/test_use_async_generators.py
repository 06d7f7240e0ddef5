"""`@ctxalloc.use()` on async generators: a context of their own across every `await` and `yield`.

As for generators (`test_use_generators.py`), with the loop's part: it closes them, from whatever task.
"""

import asyncio
import contextlib
import inspect
from collections.abc import AsyncGenerator, Callable
from typing import Any

import pytest
from subprocesses import says
from test_use_generators import warnings_off

from ctxalloc import current, use


def name_here() -> str:
    return current().name


@use("aligned64")
async def async_numbers(count: int) -> AsyncGenerator[tuple[int, str], Any]:
    """Counts, later."""
    for number in range(count):
        await asyncio.sleep(0)
        yield number, name_here()


Step = tuple[str, Any]


def test_an_async_generator_may_be_stepped_from_many_tasks() -> None:
    async def main() -> None:
        steps = async_numbers(4)
        assert await anext(steps) == (0, "aligned64")

        async def step() -> tuple[Any, str]:
            async with use("system"):
                return await anext(steps), name_here()

        assert await asyncio.create_task(step()) == ((1, "aligned64"), "system")
        async with asyncio.timeout(60):
            assert await asyncio.wait_for(step(), 60) == ((2, "aligned64"), "system")
        await asyncio.create_task(steps.aclose())
        assert [number async for number in steps] == []

    asyncio.run(main())


def test_the_end_of_the_loop_closes_an_async_generator_once_in_its_scope() -> None:
    # asyncio closes all generators it knows at once; had it known the body too, one would have found the other
    # running, and said so through the loop's exception handler.
    seen: list[str] = []
    complaints: list[dict[str, Any]] = []

    @use("aligned64")
    async def body() -> AsyncGenerator[int, None]:
        try:
            yield 1
            yield 2
        finally:
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            seen.append(name_here())

    async def main() -> AsyncGenerator[int, None]:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
        steps = body()
        assert await anext(steps) == 1
        return steps

    kept = asyncio.run(main())
    assert complaints == []
    assert seen == ["aligned64"]
    assert kept is not None


def test_a_collected_async_generator_is_closed_by_the_loop_in_its_scope(collect: Callable[[], None]) -> None:
    async def main() -> None:
        closed = asyncio.Event()
        seen: list[str] = []

        @use("aligned64")
        async def body() -> AsyncGenerator[int, None]:
            try:
                yield 1
            finally:
                await asyncio.sleep(0)
                seen.append(name_here())
                closed.set()

        async for _ in body():
            break
        collect()
        await closed.wait()
        assert seen == ["aligned64"]

    asyncio.run(main())


def test_cancellation_while_a_body_awaits_reaches_it_in_its_scope() -> None:
    seen: list[str] = []

    @use("aligned64")
    async def body(waiting: asyncio.Event) -> AsyncGenerator[int, None]:
        try:
            waiting.set()
            await asyncio.Event().wait()
            yield 1
        except asyncio.CancelledError:
            seen.append(name_here())
            raise

    async def main() -> None:
        waiting = asyncio.Event()

        async def consume() -> None:
            try:
                async for _ in body(waiting):
                    pass
            finally:
                seen.append(name_here())

        task = asyncio.create_task(consume())
        await waiting.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert seen == ["aligned64", "default_allocator"]


def test_decorated_async_generators_look_like_themselves() -> None:
    assert inspect.isasyncgenfunction(async_numbers)
    assert inspect.isasyncgen(async_numbers(1))
    assert (async_numbers.__name__, async_numbers.__doc__) == ("async_numbers", "Counts, later.")


async def async_echoes() -> AsyncGenerator[Any, Any]:
    got = yield "ready"
    while got is not None:
        await asyncio.sleep(0)
        got = yield ("echo", got)


async def async_catches() -> AsyncGenerator[Any, Any]:
    while True:
        try:
            yield "waiting"
        except KeyError:
            await asyncio.sleep(0)
            return
        except ValueError as error:
            yield ("caught", *error.args)


async def async_ignores_exit() -> AsyncGenerator[Any, Any]:
    while True:
        with contextlib.suppress(GeneratorExit):
            yield "still here"


async def async_cleans_up() -> AsyncGenerator[Any, Any]:
    try:
        yield "open"
    finally:
        await asyncio.sleep(0)


async def async_fails_on_exit() -> AsyncGenerator[Any, Any]:
    try:
        yield "open"
    finally:
        raise LookupError("on exit")


async def async_leaks_stop() -> AsyncGenerator[Any, Any]:
    yield "before"
    raise StopAsyncIteration("inside")


ASYNC_SCRIPTS: list[tuple[Callable[[], AsyncGenerator[Any, Any]], list[Step]]] = [
    (async_echoes, [("asend", None), ("asend", 1), ("asend", "two"), ("asend", None), ("asend", None)]),
    (async_echoes, [("asend", 1)]),
    (async_echoes, [("athrow", KeyError("early")), ("asend", None)]),
    (async_echoes, [("aclose", None), ("asend", None)]),
    (async_echoes, [("asend", None), ("aclose", None), ("aclose", None), ("asend", None)]),
    (async_catches, [("asend", None), ("athrow", ValueError(7)), ("asend", None), ("athrow", KeyError())]),
    (async_catches, [("asend", None), ("athrow", ValueError(8)), ("athrow", OSError(9, "out")), ("asend", None)]),
    (async_catches, [("asend", None), ("athrow", StopAsyncIteration("thrown"))]),
    (async_catches, [("asend", None), ("athrow", asyncio.CancelledError())]),
    (async_cleans_up, [("asend", None), ("aclose", None), ("asend", None)]),
    (async_cleans_up, [("asend", None), ("athrow", GeneratorExit())]),
    (async_ignores_exit, [("asend", None), ("aclose", None)]),
    (async_fails_on_exit, [("asend", None), ("aclose", None), ("asend", None)]),
    (async_leaks_stop, [("asend", None), ("asend", None)]),
]


async def play_async(steps: AsyncGenerator[Any, Any], script: list[Step]) -> list[Any]:
    seen: list[Any] = []
    for action, argument in script:
        arguments = () if action == "aclose" else (argument,)
        try:
            seen.append(("gave", await getattr(steps, action)(*arguments)))
        except BaseException as error:  # noqa: BLE001  # CancelledError is among them
            seen.append((type(error), error.args, repr(error.__cause__)))
        assert current().name == "default_allocator"
    return seen


@pytest.mark.parametrize(("body", "script"), ASYNC_SCRIPTS)
def test_asend_athrow_and_aclose_do_what_the_plain_generator_does(
    body: Callable[[], AsyncGenerator[Any, Any]], script: list[Step]
) -> None:
    with warnings_off():
        decorated = asyncio.run(play_async(use("aligned64")(body)(), script))
        assert decorated == asyncio.run(play_async(body(), script))


def test_an_async_generator_outside_of_any_loop_works_by_hand() -> None:
    @use("aligned64")
    async def body() -> AsyncGenerator[str, None]:
        yield name_here()

    steps = body()
    with pytest.raises(StopIteration) as stop:
        steps.__anext__().__await__().__next__()
    assert stop.value.value == "aligned64"
    assert current().name == "default_allocator"
    with pytest.raises(StopIteration):
        steps.aclose().__await__().__next__()


def test_a_storm_of_interrupts_leaves_the_thread_its_hooks_for_generators() -> None:
    program = """
import signal, sys
import ctxalloc
first = lambda agen: None
last = lambda agen: None
@ctxalloc.use("pool")
async def numbers():
    yield 1
armed = False
def interrupt(*_):
    global armed
    if armed:
        armed = False
        raise KeyboardInterrupt
sys.unraisablehook = lambda _: None
signal.signal(signal.SIGALRM, interrupt)
signal.setitimer(signal.ITIMER_REAL, 1e-4, 1e-4)
lost = interrupted = 0
while interrupted < 1000:
    try:
        sys.set_asyncgen_hooks(first, last)
        armed = True
        for _ in range(100):
            try:
                numbers().asend(None).send(None)
            except StopIteration:
                pass
        armed = False
    except KeyboardInterrupt:
        interrupted += 1
        lost += sys.get_asyncgen_hooks() != (first, last)
signal.setitimer(signal.ITIMER_REAL, 0)
print(lost)
"""
    assert says(program, "-W", "ignore") == "0"
