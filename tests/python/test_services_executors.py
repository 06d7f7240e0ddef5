"""The context in threads: `ctxalloc.ThreadPoolExecutor`, `ctxalloc.wrap`, `ctxalloc.detached`."""

import asyncio
import concurrent.futures
import gc
import pickle
import threading
from contextvars import ContextVar

import numpy as np
import pytest
from asgi_calls import answer, call, http

import ctxalloc
from ctxalloc import current, current_request, request
from ctxalloc.asgi import AllocatorMiddleware

pytestmark = pytest.mark.any_numpy

USER: ContextVar[str] = ContextVar("user", default="nobody")


def work(size: int) -> tuple[str, str]:
    np.empty(size, np.uint8)
    USER.set("changed")
    ctxalloc.set_handler("system")
    before = USER.get()
    return before, "ran"


def names(_: int = 0) -> str:
    return current().name


def test_an_executor_carries_the_submitters_request_and_keeps_what_is_set() -> None:
    with ctxalloc.ThreadPoolExecutor(2) as executor, request(name="mine") as scope:
        USER.set("me")
        assert executor.submit(names).result() == "mine"
        assert list(executor.map(names, range(5))) == ["mine"] * 5
        assert executor.submit(work, 1000).result() == ("changed", "ran")
        assert current() == scope.handler
        assert scope.stats.total_bytes == 1000
    USER.set("nobody")
    assert isinstance(executor, concurrent.futures.ThreadPoolExecutor)


def test_two_submitters_on_one_thread_do_not_meet() -> None:
    async def one(name: str) -> list[str]:
        async with request(name=name):
            loop = asyncio.get_running_loop()
            return [await loop.run_in_executor(None, names) for _ in range(10)]

    async def main() -> None:
        asyncio.get_running_loop().set_default_executor(ctxalloc.ThreadPoolExecutor(1))
        assert await asyncio.gather(one("a"), one("b")) == [["a"] * 10, ["b"] * 10]

    asyncio.run(main())


def test_an_executor_holds_no_request_when_its_calls_are_done() -> None:
    gc.collect()
    before = ctxalloc.request_metrics().present
    with ctxalloc.ThreadPoolExecutor(1) as executor:
        with request():
            executor.submit(work, 10).result()
        executor.submit(int).result()  # the thread has let go of the first
        gc.collect()
        assert ctxalloc.request_metrics().present == before


def test_many_threads_run_a_wrapped_function_where_it_was_wrapped() -> None:
    with request(name="mine"):
        wrapped = ctxalloc.wrap(names)
    both = threading.Barrier(3)

    def meets() -> None:
        both.wait(60)

    with request():
        meet = ctxalloc.wrap(meets)
    threads = [threading.Thread(target=meet) for _ in range(2)]
    for thread in threads:
        thread.start()
    both.wait(60)
    for thread in threads:
        thread.join()
    assert wrapped(1) == "mine"
    assert wrapped.__name__ == "names"
    assert current().name == "default_allocator"


def test_what_cannot_be_wrapped_is_refused() -> None:
    async def coroutine() -> None: ...

    with pytest.raises(TypeError, match="wrap plain functions"):
        ctxalloc.wrap(coroutine)
    with pytest.raises((TypeError, pickle.PicklingError, AttributeError)):
        pickle.dumps(ctxalloc.wrap(names))


def test_detached_work_belongs_to_no_request() -> None:
    async def app(scope: object, receive: object, send: object) -> None:
        async def forever() -> None:
            seen.append((current().name, current_request()))
            np.empty(10_000, np.uint8)

        with ctxalloc.detached():
            task = asyncio.create_task(forever())
        assert current_request() is not None
        await task
        await answer(send)  # type: ignore[arg-type]
        totals.append(ctxalloc.current_request().stats.total_bytes)  # type: ignore[union-attr]

    seen: list[object] = []
    totals: list[int] = []

    async def main() -> None:
        with ctxalloc.use("aligned64"):
            await call(AllocatorMiddleware(app), http())

    asyncio.run(main())
    assert seen == [("aligned64", None)]
    assert totals == [0]
    with ctxalloc.use("pool"), ctxalloc.detached():
        assert current().name == "default_allocator"
