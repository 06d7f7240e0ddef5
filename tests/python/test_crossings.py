"""The four crossings between Python and Rust, by way of the example extension: which handler is seen on each side.

Cancellation has a file of its own. What is awaited here ends by itself.
"""

import asyncio
import contextvars
import sys
import threading
import weakref
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import patience
import pytest
import uvloop
from built_in import HANDLERS

import ctxalloc
import ctxalloc_example as example
from ctxalloc import current, handler_of, set_handler, use

witness = contextvars.ContextVar("witness", default="nobody")


@pytest.fixture(params=[pytest.param(None, id="asyncio"), pytest.param(uvloop.new_event_loop, id="uvloop")])
def run(request: pytest.FixtureRequest) -> Callable[[Awaitable[Any]], Any]:
    """`asyncio.run` on each kind of event loop."""

    def run(main: Any) -> Any:
        with asyncio.Runner(loop_factory=request.param) as runner:
            return runner.run(patiently(main))

    async def patiently(main: Awaitable[Any]) -> Any:
        async with asyncio.timeout(patience.SECONDS):
            return await main

    return run


# ---- one: Python calls Rust --------------------------------------------------------------------------


@pytest.mark.parametrize("name", HANDLERS)
def test_a_rust_function_sees_its_callers_handler(name: str) -> None:
    with use(name):
        assert example.handler_here() == name
        assert example.buffer_of(1000) == (name, 1000)
        seen: list[str] = []
        thread = threading.Thread(target=lambda: seen.append(example.handler_here()))
        thread.start()
        thread.join()
    assert example.handler_here() == "default_allocator"
    if not getattr(sys.flags, "thread_inherit_context", False):
        assert seen == ["default_allocator"]


def test_a_rust_function_sees_each_tasks_own_handler() -> None:
    async def task(name: str, gate: asyncio.Barrier) -> None:
        set_handler(name)
        for _ in range(10):
            await gate.wait()
            assert example.handler_here() == name
        assert await asyncio.to_thread(example.handler_here) == name

    async def main() -> None:
        gate = asyncio.Barrier(len(HANDLERS))
        await asyncio.gather(*(task(name, gate) for name in HANDLERS))

    asyncio.run(main())


def test_a_panic_in_rust_leaves_the_selection_as_it_was() -> None:
    with use("aligned64"):
        for _ in range(2):
            with pytest.raises(BaseException, match="on purpose") as caught:
                example.panic_here("on purpose")
            assert type(caught.value).__name__ == "PanicException"
            assert current().name == example.handler_here() == "aligned64"


# ---- two: Python awaits a Rust future ----------------------------------------------------------------


@pytest.mark.parametrize("name", HANDLERS)
def test_a_rust_future_sees_the_handler_of_the_call_on_every_thread(name: str, run: Any) -> None:
    async def main() -> set[str]:
        with use(name):
            future = example.handlers_on_the_way(20)
        set_handler("system" if name == "aligned64" else "aligned64")  # too late to matter
        seen = await future
        assert len(seen) == 61
        assert {handler for handler, _ in seen} == {name}
        return {thread for _, thread in seen}

    assert len(run(main())) > 1  # it was on several threads


def test_many_rust_futures_under_many_handlers_do_not_mix(run: Any, fresh_handler: Callable[[], Any]) -> None:
    names = [*HANDLERS, *(fresh_handler().name for _ in range(8))]

    async def request(name: str) -> None:
        async with use(name) as handler:
            futures = [example.handlers_on_the_way(3) for _ in range(4)]
            for seen in await asyncio.gather(*futures):
                assert {own for own, _ in seen} == {name}
            assert current() is handler

    async def main() -> None:
        await asyncio.gather(*(request(names[n % len(names)]) for n in range(120)))

    run(main())


def test_the_output_of_a_future_becomes_python_in_its_handler(run: Any) -> None:
    image = np.arange(48, dtype=np.uint8).reshape(4, 4, 3)

    async def main() -> None:
        for name in HANDLERS:
            with use(name) as handler:
                future = example.box_blur(image, 1)
            blurred = await future
            assert handler_of(blurred) is handler
            assert (blurred.shape, blurred.dtype) == (image.shape, image.dtype)
            assert abs(int(blurred.mean()) - int(image.mean())) <= 2

    run(main())


def test_awaiting_does_not_change_the_awaiters_selection(run: Any) -> None:
    async def main() -> None:
        for name in HANDLERS:
            token = set_handler(name)
            await example.array_made_in("aligned64", 10)
            await example.await_python(coroutine_that_selects, "system")
            assert current().name == name
            ctxalloc.reset(token)

    async def coroutine_that_selects() -> None:
        set_handler("aligned64")

    run(main())


def test_a_rust_future_needs_a_running_loop() -> None:
    with pytest.raises(RuntimeError, match="no running event loop"):
        example.handlers_on_the_way(1)


def test_errors_of_a_rust_future_reach_whoever_awaits(run: Any) -> None:
    async def main() -> None:
        with pytest.raises(ctxalloc.UnknownHandlerError, match="no handler is named 'nobody'"):
            example.array_made_in("nobody", 1)
        with pytest.raises(TypeError, match="a picture is a uint8 array"):
            example.box_blur([1, 2], 1)  # type: ignore[arg-type]
        with use("aligned64"):
            with pytest.raises(MemoryError):
                await example.array_made_in("system", 1 << 60)
            assert current().name == "aligned64"

    run(main())


def test_a_panic_in_a_future_is_an_exception_and_the_runtime_goes_on(run: Any) -> None:
    async def main() -> None:
        with use("aligned64"):
            for _ in range(3):
                with pytest.raises(ctxalloc.RustPanic, match="a Rust future panicked: on purpose"):
                    await example.panic_in_future("on purpose")
                assert current().name == "aligned64"
            assert {name for name, _ in await example.handlers_on_the_way(2)} == {"aligned64"}

    run(main())


def test_a_rust_future_may_be_awaited_by_another_task_and_by_many(run: Any) -> None:
    async def main() -> None:
        with use("aligned64"):
            future = example.handlers_on_the_way(5)

        async def awaits() -> Any:
            set_handler("system")
            return await future

        for seen in await asyncio.gather(awaits(), awaits(), asyncio.shield(future)):
            assert {name for name, _ in seen} == {"aligned64"}

    run(main())


def test_an_unawaited_future_of_a_closed_loop_ends_in_silence(capfd: pytest.CaptureFixture[str], run: Any) -> None:
    async def leaves() -> list[Any]:
        return [example.handlers_on_the_way(20), example.array_made_in("aligned64", 10)]

    for _ in range(10):
        assert len(run(leaves())) == 2

    async def settles() -> None:  # what was given to the runtime before has been answered by then, or nearly
        await asyncio.gather(*(example.handlers_on_the_way(30) for _ in range(20)))

    run(settles())
    assert capfd.readouterr() == ("", "")


# ---- three: a Rust task attaches to Python -----------------------------------------------------------


@pytest.mark.parametrize("caller", HANDLERS)
def test_arrays_made_by_an_attached_task_live_in_the_tasks_handler(caller: str, run: Any) -> None:
    async def main() -> None:
        async with use(caller):
            arrays = await asyncio.gather(*(example.array_made_in(name, 100) for name in HANDLERS * 10))
            owners = [handler_of(array) for array in arrays]
            assert [owner.name for owner in owners if owner] == list(HANDLERS) * 10
            assert current().name == caller

    run(main())


def test_an_attached_task_leaves_nothing_selected_on_its_thread(run: Any) -> None:
    # The same workers serve others afterwards, under their own handlers.
    async def main() -> None:
        for _ in range(30):
            names = [*HANDLERS, *reversed(HANDLERS)]
            arrays = await asyncio.gather(*(example.array_made_in(name, 8) for name in names))
            assert [handler_of(array) for array in arrays] == [ctxalloc.handler(name) for name in names]
            assert {name for name, _ in await example.handlers_on_the_way(2)} == {"default_allocator"}

    run(main())


def test_rust_that_calls_back_into_python_selects_for_that_call_only() -> None:
    def inside() -> tuple[str, str, Any]:
        seen = (current().name, example.handler_here(), handler_of(np.ones(10)))
        set_handler("system")  # ends with the call
        return seen

    def fails() -> None:
        set_handler("system")
        raise KeyError(current().name)

    def deeper() -> list[str]:
        return [current().name, *example.call_in("system", lambda: [current().name]), current().name]

    for caller in HANDLERS:
        with use(caller):
            for name in HANDLERS:
                assert example.call_in(name, inside) == (name, name, ctxalloc.handler(name))
                assert current().name == caller
                with pytest.raises(KeyError, match="system"):
                    example.call_in(name, fails)
                assert current().name == example.handler_here() == caller
            assert example.call_in("aligned64", deeper) == ["aligned64", "system", "aligned64"]
            assert current().name == caller


# ---- four: a Rust task awaits Python -----------------------------------------------------------------


async def tells() -> tuple[str, str]:
    await asyncio.sleep(0)
    return current().name, witness.get()


@pytest.mark.parametrize("name", HANDLERS)
def test_an_awaited_coroutine_has_the_tasks_handler_and_callers_context(name: str, run: Any) -> None:
    async def main() -> None:
        set_handler("aligned64")
        witness.set("the caller")
        assert await example.await_python(tells, name) == (name, "the caller")
        assert await example.await_python(tells) == ("aligned64", "the caller")
        assert (current().name, witness.get()) == ("aligned64", "the caller")

    run(main())


def test_what_an_awaited_coroutine_sets_does_not_come_back(run: Any) -> None:
    async def sets() -> str:
        set_handler("system")
        witness.set("the coroutine")
        await asyncio.sleep(0)
        return current().name

    async def main() -> None:
        witness.set("the caller")
        assert await example.await_python(sets, "aligned64") == "system"
        assert (current().name, witness.get()) == ("default_allocator", "the caller")

    run(main())


def test_an_awaited_coroutine_runs_on_the_loops_thread_as_a_task(run: Any) -> None:
    async def where() -> tuple[Any, Any, int]:
        return asyncio.current_task(), asyncio.get_running_loop(), threading.get_ident()

    async def main() -> None:
        task, loop, thread = await example.await_python(where, "aligned64")
        assert task is not asyncio.current_task()
        assert loop is asyncio.get_running_loop()
        assert thread == threading.get_ident()

    run(main())


def test_arrays_are_results_of_awaited_coroutines(run: Any) -> None:
    async def makes() -> np.ndarray:
        await asyncio.sleep(0)
        return np.ones(100)

    async def main() -> None:
        for name in HANDLERS:
            array = await example.await_python(makes, name)
            assert handler_of(array) is ctxalloc.handler(name)
            assert array.sum() == 100

    run(main())


@pytest.mark.parametrize("error", [KeyError("mine"), ExceptionGroup("many", [ValueError(1)]), OSError(2, "no such")])
def test_exceptions_of_a_coroutine_pass_through_rust_unchanged(error: Exception, run: Any) -> None:
    async def raises() -> None:
        await asyncio.sleep(0)
        raise error

    async def main() -> None:
        with pytest.raises(type(error)) as caught:
            await example.await_python(raises)
        assert caught.value is error
        frames = [entry.name for entry in caught.traceback]
        assert "raises" in frames
        assert current().name == "default_allocator"

    run(main())
    error.__traceback__ = None


def test_a_function_that_raises_before_there_is_a_coroutine_is_heard(run: Any) -> None:
    def broken() -> Awaitable[None]:
        raise KeyError("at once")

    def no_awaitable() -> int:
        return 3

    def stops() -> Awaitable[None]:
        raise StopIteration("a value")

    async def main() -> None:
        with pytest.raises(KeyError, match="at once"):
            await example.await_python(broken)
        with pytest.raises(TypeError):
            await example.await_python(no_awaitable)  # type: ignore[arg-type]
        # No future may fail with StopIteration; asyncio refuses it, and whoever waits must hear something.
        with pytest.raises(RuntimeError, match="StopIteration"):
            await asyncio.wait_for(example.await_python(stops), 60)

    run(main())


def test_tasks_futures_and_other_awaitables_are_awaited_too(run: Any) -> None:
    class Awaited:
        def __await__(self) -> Any:
            yield from asyncio.sleep(0).__await__()
            return current().name

    async def main() -> None:
        loop = asyncio.get_running_loop()
        future = loop.create_future()
        loop.call_soon(future.set_result, "of the future")
        assert await example.await_python(lambda: future) == "of the future"
        with use("aligned64"):
            task = asyncio.create_task(tells())
        # A task has its Context already; only its result passes through.
        assert await example.await_python(lambda: task, "system") == ("aligned64", "nobody")
        assert await example.await_python(Awaited, "aligned64") == "aligned64"
        assert await example.await_python(lambda: example.await_python(tells, "system")) == ("system", "nobody")

    run(main())


def test_python_and_rust_may_await_each_other_through_many_floors(run: Any) -> None:
    async def floor(depth: int) -> list[str]:
        own = HANDLERS[depth % len(HANDLERS)]
        assert current().name == own
        set_handler(HANDLERS[(depth + 1) % len(HANDLERS)])  # seen below, not above
        if depth == 12:
            return [example.handler_here()]
        return [own, *await example.await_python(lambda: floor(depth + 1))]

    async def main() -> None:
        seen = await example.await_python(lambda: floor(0), HANDLERS[0])
        assert seen == [HANDLERS[depth % len(HANDLERS)] for depth in [*range(12), 13]]
        assert current().name == "default_allocator"

    run(main())


@pytest.mark.skipif(sys.version_info < (3, 12), reason="eager tasks are new in Python 3.12")
def test_eager_tasks_run_in_the_tasks_handler_too() -> None:
    seen: list[str] = []

    async def eager() -> str:
        seen.append(current().name)  # the eager step
        await asyncio.sleep(0)
        return current().name

    async def at_once() -> str:
        return current().name

    async def main() -> None:
        asyncio.get_running_loop().set_task_factory(asyncio.eager_task_factory)  # type: ignore[attr-defined,unused-ignore]
        assert await example.await_python(eager, "aligned64") == "aligned64"
        assert await example.await_python(at_once, "system") == "system"
        assert seen == ["aligned64"]
        assert current().name == "default_allocator"

    asyncio.run(main())  # uvloop 0.23 does not know the factory of CPython 3.13.0


def test_a_custom_task_factory_is_asked(run: Any) -> None:
    made: list[Any] = []

    def factory(loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> asyncio.Task[Any]:
        made.append(coroutine.__name__)
        return asyncio.Task(coroutine, loop=loop, **options)

    async def main() -> None:
        asyncio.get_running_loop().set_task_factory(factory)
        assert await example.await_python(tells, "aligned64") == ("aligned64", "nobody")
        assert made == ["tells"]

    run(main())


def test_a_task_factory_that_refuses_is_heard_and_its_coroutine_ended(run: Any) -> None:
    def refuses(loop: Any, coroutine: Any, **options: Any) -> Any:
        raise LookupError("no tasks today")

    async def main() -> None:
        asyncio.get_running_loop().set_task_factory(refuses)
        try:
            with pytest.raises(LookupError, match="no tasks today"):
                await example.await_python(tells)
        finally:
            asyncio.get_running_loop().set_task_factory(None)

    run(main())


def test_many_tasks_cross_in_all_directions_at_once(run: Any) -> None:
    async def request(number: int) -> None:
        name = HANDLERS[number % len(HANDLERS)]
        other = HANDLERS[(number + 1) % len(HANDLERS)]
        async with use(name) as handler:
            made, found, way = await asyncio.gather(
                example.array_made_in(other, 10), example.await_python(tells), example.handlers_on_the_way(1)
            )
            assert handler_of(made) is ctxalloc.handler(other)
            assert found == (name, "nobody")
            assert {own for own, _ in way} == {name}
            assert await asyncio.to_thread(example.handler_here) == name
            assert current() is handler

    async def main() -> None:
        await asyncio.gather(*(request(number) for number in range(200)))

    run(main())


# ---- leaks -------------------------------------------------------------------------------------------


class Remembered:
    """Put into a ContextVar: it dies with the last Context that holds it."""


def test_finished_crossings_let_their_contexts_go(collect: Callable[[], None]) -> None:
    held: contextvars.ContextVar[Remembered] = contextvars.ContextVar("held")
    alive: list[weakref.ref[Remembered]] = []

    async def request(name: str) -> None:
        value = Remembered()
        alive.append(weakref.ref(value))
        held.set(value)
        del value
        async with use(name):
            await example.await_python(tells)
            await example.array_made_in("system", 10)
            await example.handlers_on_the_way(1)
            with pytest.raises(KeyError):
                await example.await_python(fails)

    async def fails() -> None:
        raise KeyError

    async def main() -> None:
        await asyncio.gather(*(asyncio.create_task(request(name)) for name in HANDLERS * 5))

    asyncio.run(main())
    assert len(alive) == 5 * len(HANDLERS)
    for _ in patience.attempts():  # a worker lets a finished task go a little after its answer is out
        asyncio.run(drain())
        collect()
        if not any(reference() for reference in alive):
            break
    assert [reference for reference in alive if reference() is not None] == []


async def drain() -> None:
    """Keeps the runtime's workers busy, so that they get past what they did before."""
    await asyncio.gather(*(example.handlers_on_the_way(10) for _ in range(20)))
