"""`@ctxalloc.use()` on generators and async generators: a context of their own across every `yield`.

What the body selects is seen by the body only and lasts from step to step; what the caller selects stays the
caller's. Everything else is as without the decorator: the parity tests run each body plain and decorated.
"""

import asyncio
import contextlib
import contextvars
import gc
import inspect
import sys
import threading
import weakref
from collections.abc import AsyncGenerator, Callable, Generator, Iterator
from typing import Any

import numpy as np
import pytest
from subprocesses import says

import ctxalloc
from ctxalloc import current, set_handler, use


def name_here() -> str:
    return current().name


@use("aligned64")
def numbers(count: int) -> Generator[tuple[int, str], Any, str]:
    """Counts."""
    for number in range(count):
        yield number, name_here()
    return "done in " + name_here()


@use("aligned64")
async def async_numbers(count: int) -> AsyncGenerator[tuple[int, str], Any]:
    """Counts, later."""
    for number in range(count):
        await asyncio.sleep(0)
        yield number, name_here()


# ---- generators --------------------------------------------------------------------------------------


def test_a_generators_scope_does_not_leak_into_its_caller() -> None:
    seen = []
    for number, inside in numbers(3):
        seen.append((number, inside, name_here()))
        set_handler("system")  # the caller's own, which must survive the next step
    assert seen == [
        (0, "aligned64", "default_allocator"),
        (1, "aligned64", "system"),
        (2, "aligned64", "system"),
    ]
    assert current().name == "system"
    set_handler(None)


def test_a_generator_returns_its_value_and_ends() -> None:
    def delegates() -> Generator[tuple[int, str], None, str]:
        return (yield from numbers(2))

    steps = delegates()
    assert [next(steps), next(steps)] == [(0, "aligned64"), (1, "aligned64")]
    with pytest.raises(StopIteration) as stop:
        next(steps)
    assert stop.value.value == "done in aligned64"
    assert list(steps) == []


def test_what_the_body_selects_lasts_from_step_to_step() -> None:
    @use("aligned64")
    def body() -> Iterator[str]:
        yield name_here()
        token = set_handler("system")
        yield name_here()
        yield name_here()
        ctxalloc.reset(token)
        yield name_here()
        with use(None):
            yield name_here()
        yield name_here()

    steps = body()
    seen = []
    for inside in steps:
        assert current().name == "default_allocator"
        with use("system"):
            seen.append(inside)
    assert seen == ["aligned64", "system", "system", "aligned64", "default_allocator", "aligned64"]


def test_two_generators_of_one_function_do_not_see_each_other() -> None:
    @use("aligned64")
    def body(own: str) -> Iterator[str]:
        set_handler(own)
        while True:
            yield name_here()

    left, right = body("system"), body("default_allocator")
    assert [next(left), next(right), next(left), next(right)] == ["system", "default_allocator"] * 2
    assert current().name == "default_allocator"


def test_arrays_made_in_a_generator_live_in_its_handler() -> None:
    @use("aligned64")
    def chunks() -> Iterator[np.ndarray]:
        for size in (10, 1000):
            yield np.ones(size)

    for chunk in chunks():
        assert ctxalloc.handler_of(chunk) is ctxalloc.handler("aligned64")
        assert ctxalloc.handler_of(chunk + 1) is ctxalloc.handler("default_allocator")


def test_a_generator_may_be_stepped_from_other_threads_and_contexts() -> None:
    steps = numbers(4)
    assert next(steps) == (0, "aligned64")
    assert contextvars.copy_context().run(next, steps) == (1, "aligned64")
    seen: list[Any] = []

    def in_thread() -> None:
        with use("system"):
            seen.append((next(steps), name_here()))

    thread = threading.Thread(target=in_thread)
    thread.start()
    thread.join()
    assert seen == [((2, "aligned64"), "system")]
    assert next(steps) == (3, "aligned64")
    assert next(steps, None) is None
    assert current().name == "default_allocator"


def test_other_context_variables_stay_the_callers() -> None:
    variable = contextvars.ContextVar("variable", default="unset")

    @use("aligned64")
    def body() -> Iterator[str]:
        yield variable.get()
        variable.set("by the body")
        yield variable.get()

    steps = body()
    token = variable.set("by the caller")
    assert next(steps) == "by the caller"
    assert next(steps) == variable.get() == "by the body"  # as PEP 567 leaves it
    variable.reset(token)


def test_the_first_step_and_no_earlier_calls_the_body() -> None:
    begun = []

    @use("aligned64")
    def body() -> Iterator[None]:
        begun.append(name_here())
        yield

    steps = body()
    assert begun == []
    next(steps)
    assert begun == ["aligned64"]
    steps.close()  # type: ignore[attr-defined]
    body().close()  # type: ignore[attr-defined]  # never begun: nothing to close
    assert begun == ["aligned64"]


def test_finalizers_of_a_collected_generator_run_in_its_scope(collect: Callable[[], None]) -> None:
    seen = []

    @use("aligned64")
    def body() -> Iterator[None]:
        try:
            yield
        finally:
            seen.append(name_here())

    steps = body()
    next(steps)
    del steps
    collect()
    assert seen == ["aligned64"]
    assert current().name == "default_allocator"


def test_a_contextmanager_function_can_be_decorated() -> None:
    @contextlib.contextmanager
    @use("aligned64")
    def opened() -> Iterator[str]:
        yield name_here()

    with opened() as inside:
        assert (inside, name_here()) == ("aligned64", "default_allocator")


def test_decorated_generators_look_like_themselves() -> None:
    assert inspect.isgeneratorfunction(numbers)
    assert inspect.isgenerator(numbers(1))
    assert inspect.isasyncgenfunction(async_numbers)
    assert inspect.isasyncgen(async_numbers(1))
    assert (numbers.__name__, numbers.__doc__) == ("numbers", "Counts.")
    assert (async_numbers.__name__, async_numbers.__doc__) == ("async_numbers", "Counts, later.")
    assert list(inspect.signature(numbers).parameters) == ["count"]


# Bodies that exercise what a caller can do to a generator. Each script is a list of what the caller does.


def echoes() -> Generator[Any, Any, Any]:
    """Answers what it is sent, and stops at None."""
    got = yield "ready"
    while got is not None:
        got = yield ("echo", got)
    return "returned"


def catches() -> Generator[Any, Any, Any]:
    """Answers the exceptions thrown into it, until a KeyError."""
    while True:
        try:
            yield "waiting"
        except KeyError:
            return "key error"
        except ValueError as error:
            yield ("caught", *error.args)


def swallows_exit() -> Generator[Any, Any, Any]:
    """Returns a value when it is closed."""
    try:
        yield "open"
    except GeneratorExit:
        return "value of close"


def ignores_exit() -> Generator[Any, Any, Any]:
    """Yields when it is closed, which is an error."""
    while True:
        with contextlib.suppress(GeneratorExit):
            yield "still here"


def fails_on_exit() -> Generator[Any, Any, Any]:
    """Raises when it is closed."""
    try:
        yield "open"
    finally:
        raise LookupError("on exit")


def leaks_stop() -> Generator[Any, Any, Any]:
    """Lets a StopIteration out, which PEP 479 turns into a RuntimeError."""
    yield "before"
    raise StopIteration("inside")  # noqa: PLR1708


Step = tuple[str, Any]
SCRIPTS: list[tuple[Callable[[], Generator[Any, Any, Any]], list[Step]]] = [
    (echoes, [("send", None), ("send", 1), ("send", "two"), ("send", None), ("send", None)]),
    (echoes, [("send", 1)]),  # not begun: TypeError
    (echoes, [("throw", KeyError("early")), ("send", None)]),
    (echoes, [("close", None), ("send", None)]),
    (echoes, [("send", None), ("close", None), ("close", None), ("send", None)]),
    (catches, [("send", None), ("throw", ValueError(7)), ("send", None), ("throw", KeyError()), ("send", None)]),
    (catches, [("send", None), ("throw", ValueError), ("throw", ValueError(8)), ("throw", OSError(9, "out"))]),
    (catches, [("send", None), ("throw", StopIteration("thrown"))]),
    (catches, [("send", None), ("throw", KeyboardInterrupt())]),
    (swallows_exit, [("send", None), ("close", None), ("send", None)]),
    (swallows_exit, [("send", None), ("throw", GeneratorExit())]),
    (ignores_exit, [("send", None), ("throw", GeneratorExit()), ("close", None), ("send", None)]),
    (fails_on_exit, [("send", None), ("close", None), ("send", None)]),
    (leaks_stop, [("send", None), ("send", None)]),
]


def outcome_of(step: Callable[[], Any]) -> Any:
    try:
        return ("gave", step())
    except BaseException as error:  # noqa: BLE001  # KeyboardInterrupt is among them
        chain = [repr(link) for link in (error.__cause__, error.__context__)]
        return (type(error), error.args, chain)


def play(steps: Generator[Any, Any, Any], script: list[Step]) -> list[Any]:
    seen = []
    for action, argument in script:
        arguments = () if action == "close" else (argument,)
        seen.append(outcome_of(lambda: getattr(steps, action)(*arguments)))  # noqa: B023
        assert current().name == "default_allocator"
    return seen


@pytest.mark.parametrize(("body", "script"), SCRIPTS)
def test_send_throw_and_close_do_what_the_plain_generator_does(
    body: Callable[[], Generator[Any, Any, Any]], script: list[Step]
) -> None:
    with warnings_off():
        assert play(use("aligned64")(body)(), script) == play(body(), script)


@contextlib.contextmanager
def warnings_off() -> Iterator[None]:
    """A generator that ignores its end complains when it is collected, decorated or not."""
    heard, sys.unraisablehook = sys.unraisablehook, lambda _: None
    try:
        yield
        gc.collect()
    finally:
        sys.unraisablehook = heard


@pytest.mark.parametrize("decorate", [lambda body: body, use("aligned64")], ids=["plain", "decorated"])
def test_an_exception_thrown_in_leaves_no_cycle_behind(decorate: Callable[[Any], Any]) -> None:
    # Traceback -> the wrapper's frame -> what it was about to throw -> traceback. A plain generator has none.
    def body() -> Iterator[None]:
        yield

    def throws() -> weakref.ref[Traced]:
        steps = decorate(body)()
        next(steps)
        thrown = Traced("thrown")
        remembered = weakref.ref(thrown)
        with contextlib.suppress(Traced):
            steps.throw(thrown)
        del steps, thrown  # this frame is in the traceback too
        return remembered

    gc.collect()
    gc.disable()
    try:
        assert throws()() is None
    finally:
        gc.enable()


class Traced(Exception):  # noqa: N818
    """An exception that can be watched."""


# ---- async generators --------------------------------------------------------------------------------


def test_an_async_generators_scope_does_not_leak_into_its_caller() -> None:
    async def main() -> None:
        seen = []
        async for number, inside in async_numbers(3):
            seen.append((number, inside, name_here()))
            set_handler("system")
        assert seen == [
            (0, "aligned64", "default_allocator"),
            (1, "aligned64", "system"),
            (2, "aligned64", "system"),
        ]

    asyncio.run(main())
    assert current().name == "default_allocator"


def test_what_an_async_body_selects_lasts_across_awaits_and_yields() -> None:
    @use("aligned64")
    async def body() -> AsyncGenerator[str, None]:
        yield name_here()
        token = set_handler("system")
        await asyncio.sleep(0)
        yield name_here()
        await asyncio.sleep(0)
        yield name_here()
        ctxalloc.reset(token)
        async with use(None):
            yield name_here()
        yield name_here()

    async def main() -> None:
        seen = []
        async for inside in body():
            assert current().name == "default_allocator"
            seen.append(inside)
        assert seen == ["aligned64", "system", "system", "default_allocator", "aligned64"]

    asyncio.run(main())


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


def test_tasks_started_by_an_async_body_inherit_its_selection() -> None:
    @use("aligned64")
    async def body() -> AsyncGenerator[Any, None]:
        async def child() -> str:
            return name_here()

        yield await asyncio.create_task(child())
        yield await asyncio.to_thread(name_here)

    async def main() -> None:
        assert [name async for name in body()] == ["aligned64", "aligned64"]

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


def test_breaking_out_under_aclosing_closes_at_once() -> None:
    seen: list[str] = []

    @use("aligned64")
    async def body() -> AsyncGenerator[int, None]:
        try:
            yield 1
        finally:
            await asyncio.sleep(0)
            seen.append(name_here())

    async def main() -> None:
        async with contextlib.aclosing(body()) as steps:
            async for _ in steps:
                break
        assert seen == ["aligned64"]
        assert current().name == "default_allocator"

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
