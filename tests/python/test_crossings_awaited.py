"""The fourth crossing: a Rust task awaits Python. The others are in `test_crossings.py`."""

import asyncio
import sys
import threading
from collections.abc import Awaitable
from typing import Any

import numpy as np
import pytest
from built_in import HANDLERS
from crossing import tells, witness

import ctxalloc
import ctxalloc_example as example
from ctxalloc import current, handler_of, set_handler, use


@pytest.mark.parametrize("name", ["default_allocator", "pool"])
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
        assert await example.await_python(lambda: example.await_python(tells, "system")) == (
            "system",
            "nobody",
        )

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
