"""Other loops and executors: trio, anyio, gevent, greenlets, joblib, multiprocessing: what has to be done."""

import asyncio
import contextvars
import multiprocessing
import subprocess
import sys
import textwrap
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import anyio
import anyio.lowlevel
import greenlet
import joblib
import numpy as np
import pytest
import trio
from asgi_calls import Client, answer, http

import ctxalloc
from ctxalloc import current, request
from ctxalloc.asgi import AllocatorMiddleware


def name(_: object = None) -> str:
    return current().name


async def app(scope: Any, receive: Any, send: Any) -> None:
    np.empty(1000, np.uint8)
    seen = [current().name]
    async with anyio.create_task_group() as group:

        async def child() -> None:
            await anyio.lowlevel.checkpoint()
            seen.append(current().name)

        group.start_soon(child)
    seen.append(await anyio.to_thread.run_sync(name))
    await answer(send, ",".join(seen).encode())


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_the_middleware_needs_no_asyncio(backend: str) -> None:
    reports: list[Any] = []
    service = AllocatorMiddleware(app, routes={"/a": request()}, on_end=lambda _, report: reports.append(report))

    async def main() -> None:
        client = Client()
        await service(http("/a"), client.receive, client.send)
        assert client.body == b"/a,/a,/a"
        assert current().name == "default_allocator"

    anyio.run(main, backend=backend)
    assert reports[0].outcome == "completed"


def test_a_cancelled_request_on_trio_ends_as_cancelled() -> None:
    reports: list[Any] = []

    async def hangs(scope: Any, receive: Any, send: Any) -> None:
        await trio.sleep_forever()

    async def main() -> None:
        client = Client()
        with trio.move_on_after(0):
            await AllocatorMiddleware(hangs, on_end=lambda _, r: reports.append(r))(http(), client.receive, client.send)

    trio.run(main)
    assert [report.outcome for report in reports] == ["cancelled"]


def test_trios_tasks_and_threads_carry_the_request() -> None:
    async def main() -> list[str]:
        seen = []
        async with request(name="mine"), trio.open_nursery() as nursery:

            async def child() -> None:
                await trio.lowlevel.checkpoint()
                seen.append(name())

            nursery.start_soon(child)
            seen.append(await trio.to_thread.run_sync(name))
        return seen

    assert trio.run(main) == ["mine", "mine"]


def test_a_greenlet_starts_with_the_default_or_with_a_given_context() -> None:
    with request(name="mine"):
        plain, carried, wrapped = (
            greenlet.greenlet(name),
            greenlet.greenlet(name),
            greenlet.greenlet(ctxalloc.wrap(name)),
        )
        carried.gr_context = contextvars.copy_context()
        assert plain.switch() == "default_allocator"
        assert carried.switch() == "mine"
        assert wrapped.switch() == "mine"


def test_gevents_greenlets_are_kept_apart_and_carry_what_is_wrapped() -> None:
    program = """
    from gevent import monkey; monkey.patch_all()
    import threading, gevent, ctxalloc
    def name(): gevent.sleep(0); return ctxalloc.current().name
    def one(own):
        with ctxalloc.request(name=own):
            gevent.sleep(0)
            assert ctxalloc.current().name == own
            return gevent.spawn(name).get(), gevent.spawn(ctxalloc.wrap(name)).get()
    both = [gevent.spawn(one, own) for own in "ab"]
    gevent.joinall(both, raise_error=True)
    print([greenlet.value for greenlet in both])
    """
    said = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=True)
    assert said.stdout == "[('default_allocator', 'a'), ('default_allocator', 'b')]\n"


def test_joblibs_threads_carry_what_is_wrapped() -> None:
    with request(name="mine") as scope, joblib.parallel_config(backend="threading", n_jobs=2):
        assert set(joblib.Parallel()(joblib.delayed(name)(n) for n in range(4))) <= {"default_allocator", "mine"}
        assert set(joblib.Parallel()(joblib.delayed(ctxalloc.wrap(name))(n) for n in range(4))) == {"mine"}
        assert scope.stats.refused == 0


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_processes_have_what_their_initializer_selects(method: str) -> None:
    context = multiprocessing.get_context(method)
    options: Any = {"initializer": ctxalloc.set_handler, "initargs": ("aligned64",), "mp_context": context}
    with ProcessPoolExecutor(1, **options) as executor:
        assert executor.submit(name).result() == "aligned64"
    with context.Pool(1, ctxalloc.set_handler, ("aligned64",)) as pool:
        assert pool.apply(name) == "aligned64"


def test_uvloop_carries_as_asyncio_does() -> None:
    import uvloop

    async def main() -> list[str]:
        loop = asyncio.get_running_loop()
        loop.set_default_executor(ctxalloc.ThreadPoolExecutor(1))
        async with request(name="mine"):
            called = loop.create_future()
            loop.call_soon(lambda: called.set_result(name()))
            return [await asyncio.to_thread(name), await loop.run_in_executor(None, name), await called]

    assert uvloop.run(main()) == ["mine"] * 3
