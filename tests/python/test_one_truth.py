"""NumPy's ContextVar is the only truth: who selects by other means is seen here, and the other way round.

In every kind of Context that Python makes. What asyncio and threads carry is what a plain ContextVar tells.
"""

import asyncio
import concurrent.futures
import contextvars
import functools
import sys
import threading
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import numpy as np
import pytest
from numpy_c import ForeignHandler, get_handler, numpys_default, numpys_name, numpys_version
from numpy_c import set_handler as numpys_set_handler

import ctxalloc
from ctxalloc import current, set_handler, use

HANDLERS = ["default_allocator", "system", "aligned64", "pool", "tracked"]

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


def test_a_copied_context_carries_the_selection_and_keeps_its_own() -> None:
    select("aligned64")
    copy = contextvars.copy_context()
    select("system")
    assert copy.run(seen_here) == ("aligned64", "aligned64")
    copy.run(select, "default_allocator")
    assert copy.run(seen_here) == ("default_allocator", "default_allocator")
    assert seen_here() == ("system", "system")
    assert contextvars.Context().run(seen_here) == ("default_allocator", "default_allocator")
    select("default_allocator")


class Carrier:
    """Where an asyncio program may run something, and whether the Context goes along."""

    @staticmethod
    async def create_task() -> tuple[str, str]:
        return await asyncio.create_task(seen_in_coroutine())

    @staticmethod
    async def create_task_in_a_context() -> tuple[str, str]:
        context = contextvars.copy_context()
        context.run(select, "system")
        return await asyncio.create_task(seen_in_coroutine(), context=context)

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
    async def to_thread() -> tuple[str, str]:
        return await asyncio.to_thread(seen_here)

    @staticmethod
    async def run_in_executor() -> tuple[str, str]:
        return await asyncio.get_running_loop().run_in_executor(None, seen_here)

    @staticmethod
    async def run_in_executor_with_a_context() -> tuple[str, str]:
        context = contextvars.copy_context()
        call = functools.partial(context.run, seen_here)
        return await asyncio.get_running_loop().run_in_executor(None, call)

    @staticmethod
    async def thread() -> tuple[str, str]:
        done: asyncio.Future[tuple[str, str]] = asyncio.get_running_loop().create_future()
        loop = asyncio.get_running_loop()

        def run() -> None:
            try:
                loop.call_soon_threadsafe(done.set_result, seen_here())
            except BaseException as error:
                loop.call_soon_threadsafe(done.set_exception, error)
                raise

        threading.Thread(target=run).start()
        return await done

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
INHERIT = {
    "create_task", "ensure_future", "gather", "task_group", "wait_for", "shield", "timeout", "to_thread", "call_soon",
    "run_in_executor_with_a_context", "call_soon_threadsafe", "call_later", "call_at", "done_callback",
}  # fmt: skip


@pytest.mark.parametrize("carrier", CARRIERS, ids=lambda carrier: carrier.__name__)
@pytest.mark.parametrize("name", HANDLERS)
def test_the_selection_goes_where_context_variables_go(
    carrier: Callable[[], Awaitable[tuple[str, str]]], name: str
) -> None:
    async def main() -> None:
        select(name)
        ours, plain = await carrier()
        assert ours == plain
        if carrier.__name__ in INHERIT:
            assert ours == name
        elif carrier.__name__ == "create_task_in_a_context":
            assert ours == "system"
        elif threads_inherit() and carrier.__name__ in ("thread", "run_in_executor"):
            assert ours == name
        else:
            assert ours == "default_allocator"
        assert seen_here() == (name, name)

    asyncio.run(main())
    assert seen_here() == ("default_allocator", "default_allocator")


def threads_inherit() -> bool:
    """Python 3.14's `-X thread_inherit_context`; False before."""
    return bool(getattr(sys.flags, "thread_inherit_context", False))


@pytest.mark.parametrize("name", HANDLERS)
def test_a_plain_thread_starts_as_python_says(name: str) -> None:
    seen: list[tuple[str, str]] = []
    select(name)
    thread = threading.Thread(target=lambda: seen.append(seen_here()))
    thread.start()
    thread.join()
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        seen.append(pool.submit(seen_here).result())
    expected = name if threads_inherit() else "default_allocator"
    assert seen == [(expected, expected)] * 2
    select("default_allocator")


def test_a_timer_thread_and_a_subclass_of_thread_do_as_threads_do() -> None:
    seen: list[tuple[str, str]] = []

    class Worker(threading.Thread):
        def run(self) -> None:
            seen.append(seen_here())

    select("aligned64")
    for thread in (Worker(), threading.Timer(0, lambda: seen.append(seen_here()))):
        thread.start()
        thread.join()
    expected = "aligned64" if threads_inherit() else "default_allocator"
    assert seen == [(expected, expected)] * 2
    select("default_allocator")


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


def test_siblings_parents_and_children_do_not_see_each_other() -> None:
    async def sibling(name: str, gate: asyncio.Barrier) -> None:
        select(name)
        for _ in range(5):
            await gate.wait()
            assert seen_here() == (name, name)

            async def child(own: str = name) -> None:
                assert seen_here() == (own, own)
                select("default_allocator")

            await asyncio.create_task(child())

    async def main() -> None:
        gate = asyncio.Barrier(9)
        await asyncio.gather(*(sibling(HANDLERS[n % 4], gate) for n in range(9)))
        assert seen_here() == ("default_allocator", "default_allocator")

    asyncio.run(main())


def test_a_child_copies_the_selection_at_the_call_not_at_its_first_step() -> None:
    async def main() -> None:
        select("aligned64")
        task = asyncio.create_task(seen_in_coroutine())
        thread = asyncio.create_task(asyncio.to_thread(seen_here))
        select("system")
        assert await task == ("aligned64", "aligned64")
        assert await thread == ("aligned64", "aligned64")

    asyncio.run(main())


def test_two_event_loops_on_two_threads_do_not_meet() -> None:
    barrier = threading.Barrier(2)

    def run(name: str) -> list[tuple[str, str]]:
        async def main() -> list[tuple[str, str]]:
            select(name)
            seen = []
            for _ in range(20):
                barrier.wait()
                seen.append(await asyncio.create_task(seen_in_coroutine()))
            return seen

        return asyncio.run(main())

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        left, right = pool.map(run, ["aligned64", "system"])
    assert left == [("aligned64", "aligned64")] * 20
    assert right == [("system", "system")] * 20


def test_a_runner_keeps_one_context_between_its_runs() -> None:
    async def main(name: str | None) -> tuple[str, str]:
        if name:
            select(name)
        return seen_here()

    with asyncio.Runner() as runner:
        assert runner.run(main("aligned64")) == ("aligned64", "aligned64")
        assert runner.run(main(None)) == ("aligned64", "aligned64")
    assert seen_here() == ("default_allocator", "default_allocator")
