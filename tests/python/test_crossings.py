"""The four crossings between Python and Rust, by way of the example extension: which handler is seen on each side.

What Rust awaits (the fourth) and cancellation have files of their own; all of them at once are in test_stress.py.
"""

import asyncio
import contextvars
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import patience
import pytest
from built_in import HANDLERS
from crossing import tells

import ctxalloc
import ctxalloc_example as example
from ctxalloc import current, handler_of, set_handler, use

# ---- one: Python calls Rust --------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["default_allocator", "aligned64"])
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


def test_a_panic_in_rust_leaves_the_selection_as_it_was() -> None:
    with use("aligned64"):
        for _ in range(2):
            with pytest.raises(BaseException, match="on purpose") as caught:
                example.panic_here("on purpose")
            assert type(caught.value).__name__ == "PanicException"
            assert current().name == example.handler_here() == "aligned64"


# ---- two: Python awaits a Rust future ----------------------------------------------------------------


@pytest.mark.parametrize("name", ["default_allocator", "aligned64"])
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


@pytest.mark.parametrize("caller", ["default_allocator", "aligned64"])
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
