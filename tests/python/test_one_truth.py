"""NumPy's ContextVar is the only truth: who selects by other means is seen here, and the other way round.

In every kind of Context that Python makes; what threads and tasks of their own see, the random programs of
`tests/oracle` compare with a plain ContextVar.
"""

import asyncio
import contextvars
import functools
import sys
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import numpy as np
import pytest
from numpy_c import ForeignHandler, get_handler, numpys_default, numpys_name, numpys_version
from numpy_c import set_handler as numpys_set_handler

import ctxalloc
from ctxalloc import current, set_handler, use

HANDLERS = ["default_allocator", "aligned64"]

# A plain ContextVar beside NumPy's: wherever it goes, the selection must go too.
witness = contextvars.ContextVar("witness", default="default_allocator")


def select(name: str) -> None:
    set_handler(name)
    witness.set(name)


def seen_here() -> tuple[str, str]:
    """What ctxalloc and the plain ContextVar say; NumPy's own word must be ctxalloc's."""
    assert numpys_name() == current().name
    assert get_handler() is current().capsule
    array = np.empty(1)
    assert (numpys_name(array), ctxalloc.handler_of(array)) == (current().name, current())
    return current().name, witness.get()


async def seen_in_coroutine() -> tuple[str, str]:
    await asyncio.sleep(0)
    return seen_here()


# ---- NumPy's own functions ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", HANDLERS)
def test_numpy_sees_what_ctxalloc_selects(name: str) -> None:
    with use(name) as handler:
        assert numpys_name() == name == ctxalloc.get_handler_name()
        assert numpys_version() == 1 == ctxalloc.get_handler_version()
        assert get_handler() is handler.capsule
        assert numpys_name(np.zeros(3)) == name


@pytest.mark.parametrize("name", HANDLERS)
def test_ctxalloc_sees_what_foreign_code_selects(name: str) -> None:
    old = numpys_set_handler(ctxalloc.handler(name).capsule)
    assert old is numpys_default
    assert current() is ctxalloc.handler(name)
    assert seen_here()[0] == name
    numpys_set_handler(None)  # NULL is NumPy's default
    assert current().name == "default_allocator"


def test_foreign_code_inside_of_a_scope_is_seen_and_ends_with_the_scope() -> None:
    with use("aligned64"):
        numpys_set_handler(ctxalloc.handler("system").capsule)
        assert current().name == "system"
    assert current().name == "default_allocator"


def test_a_scope_inside_of_foreign_code_restores_what_that_selected() -> None:
    foreign = ForeignHandler("foreign around a scope")
    with foreign.selected():
        with use("aligned64"):
            assert current().name == "aligned64"
        assert get_handler() is foreign.capsule
        assert current().name == "foreign around a scope"
        token = set_handler(None)
        assert token.old_handler.name == "foreign around a scope"
        ctxalloc.reset(token)
        assert current().capsule is foreign.capsule


def test_the_default_is_numpys_own_capsule() -> None:
    assert ctxalloc.handler("default_allocator").capsule is numpys_default
    with use(None):
        assert get_handler() is numpys_default


# ---- Contexts ----------------------------------------------------------------------------------------


class Carrier:
    """Where an asyncio program may run something beside what `tests/oracle` has: the Context goes along."""

    @staticmethod
    async def ensure_future() -> tuple[str, str]:
        return await asyncio.ensure_future(seen_in_coroutine())

    @staticmethod
    async def gather() -> tuple[str, str]:
        first, second = await asyncio.gather(seen_in_coroutine(), seen_in_coroutine())
        assert first == second
        return first

    @staticmethod
    async def task_group() -> tuple[str, str]:
        async with asyncio.TaskGroup() as group:
            task = group.create_task(seen_in_coroutine())
        return task.result()

    @staticmethod
    async def wait_for() -> tuple[str, str]:
        return await asyncio.wait_for(seen_in_coroutine(), 60)

    @staticmethod
    async def shield() -> tuple[str, str]:
        return await asyncio.shield(seen_in_coroutine())

    @staticmethod
    async def timeout() -> tuple[str, str]:
        async with asyncio.timeout(60):
            return await seen_in_coroutine()

    @staticmethod
    async def call_soon() -> tuple[str, str]:
        return await Carrier._called(asyncio.get_running_loop().call_soon)

    @staticmethod
    async def call_soon_threadsafe() -> tuple[str, str]:
        return await Carrier._called(asyncio.get_running_loop().call_soon_threadsafe)

    @staticmethod
    async def call_later() -> tuple[str, str]:
        return await Carrier._called(functools.partial(asyncio.get_running_loop().call_later, 0))

    @staticmethod
    async def call_at() -> tuple[str, str]:
        loop = asyncio.get_running_loop()
        return await Carrier._called(functools.partial(loop.call_at, loop.time()))

    @staticmethod
    async def done_callback() -> tuple[str, str]:
        future = asyncio.get_running_loop().create_future()
        future.set_result(None)
        return await Carrier._called(lambda callback: future.add_done_callback(lambda _: callback()))

    @staticmethod
    async def _called(schedule: Callable[[Callable[[], None]], object]) -> tuple[str, str]:
        answer: asyncio.Future[tuple[str, str]] = asyncio.get_running_loop().create_future()

        def callback() -> None:
            try:
                answer.set_result(seen_here())
            finally:
                select("system")  # its own Context: nobody else sees this

        schedule(callback)
        return await answer


CARRIERS: list[Callable[[], Coroutine[Any, Any, tuple[str, str]]]] = [
    getattr(Carrier, name) for name in vars(Carrier) if not name.startswith("_")
]


@pytest.mark.parametrize("carrier", CARRIERS, ids=lambda carrier: carrier.__name__)
def test_the_selection_goes_where_context_variables_go(carrier: Callable[[], Awaitable[tuple[str, str]]]) -> None:
    async def main() -> None:
        select("aligned64")
        assert await carrier() == ("aligned64", "aligned64")
        assert seen_here() == ("aligned64", "aligned64")

    asyncio.run(main())
    assert seen_here() == ("default_allocator", "default_allocator")


@pytest.mark.skipif(sys.version_info < (3, 12), reason="eager tasks are new in Python 3.12")
def test_an_eager_task_has_a_context_of_its_own_from_its_first_step() -> None:
    async def child() -> tuple[str, str]:
        before = seen_here()
        select("system")
        await asyncio.sleep(0)
        assert seen_here() == ("system", "system")
        return before

    async def main() -> None:
        asyncio.get_running_loop().set_task_factory(asyncio.eager_task_factory)  # type: ignore[attr-defined,unused-ignore]
        select("aligned64")
        task = asyncio.create_task(child())
        assert seen_here() == ("aligned64", "aligned64")
        assert await task == ("aligned64", "aligned64")
        assert seen_here() == ("aligned64", "aligned64")

    asyncio.run(main())


def test_a_runner_keeps_one_context_between_its_runs() -> None:
    async def main(name: str | None) -> tuple[str, str]:
        if name:
            select(name)
        return seen_here()

    with asyncio.Runner() as runner:
        assert runner.run(main("aligned64")) == ("aligned64", "aligned64")
        assert runner.run(main(None)) == ("aligned64", "aligned64")
    assert seen_here() == ("default_allocator", "default_allocator")
