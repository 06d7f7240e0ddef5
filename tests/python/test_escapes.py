"""What has escaped a request that ends on an event loop: what its code keeps, not what asyncio's step still holds."""

import asyncio
import contextvars
import itertools
import random
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from asgi_calls import Scope, answer, call, http
from subprocesses import says

import ctxalloc
from ctxalloc import metrics, request
from ctxalloc.asgi import AllocatorMiddleware, Report

REQUESTS = 50
NUMBERS = itertools.count()
"""For names: metrics keep counting under one that was there before."""


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Runs a coroutine as ``asyncio.run`` does."""
    factory = None
    if request.param == "uvloop":
        factory = pytest.importorskip("uvloop").new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        yield runner.run


def escapes(name: str) -> tuple[int, int, int, int]:
    series = metrics.snapshot().series.get(name)
    if series is None:
        return (0, 0, 0, 0)
    return (series.requests, series.escaped_requests, series.escaped_blocks, series.escaped_bytes)


async def computes(scope: Scope, receive: Any, send: Any) -> None:
    computed = await asyncio.to_thread(np.ones, 1000)
    del computed
    await answer(send)


@pytest.mark.parametrize("tells", [True, False])
def test_what_the_step_of_asyncio_holds_has_not_escaped(run: Any, *, tells: bool) -> None:
    name, reports = f"step {tells} {next(NUMBERS)}", list[Report]()
    on_end = (lambda _, report: reports.append(report)) if tells else None
    service = AllocatorMiddleware(computes, default=request(name=name), on_end=on_end)

    async def scenario() -> None:
        for _ in range(REQUESTS):
            await asyncio.create_task(call(service, http()))
        await asyncio.sleep(0.3)

    run(scenario())
    assert escapes(name) == (REQUESTS, 0, 0, 0)
    assert [(one.escaped.count, one.escaped.bytes, one.outcome) for one in reports] == [
        (0, 0, "completed")
    ] * REQUESTS * tells
    assert all(one.stats.peak_bytes >= 8000 for one in reports)


def test_what_is_kept_has_escaped_with_its_blocks(run: Any) -> None:
    kept: list[Any] = []
    reports: list[Report] = []

    async def app(scope: Scope, receive: Any, send: Any) -> None:
        kept.append(await asyncio.to_thread(np.ones, 1000))
        dropped = await asyncio.to_thread(np.ones, 2000)
        del dropped
        await answer(send)

    service = AllocatorMiddleware(
        app,
        default=lambda _: request(strategy=ctxalloc.strategies.Tracked(ctxalloc.strategies.Pool()), name="kept"),
        on_end=lambda _, report: reports.append(report),
    )

    async def scenario() -> None:
        await asyncio.create_task(call(service, http()))
        await asyncio.sleep(0.3)

    run(scenario())
    (report,) = reports
    assert (report.escaped.count, report.escaped.bytes, report.stats.live_bytes) == (1, 8000, 24_000)
    assert report.escaped.blocks is not None
    assert [block.size_bytes for block in report.escaped.blocks] == [8000]


def test_on_end_sees_the_context_of_the_request(run: Any) -> None:
    user: contextvars.ContextVar[str] = contextvars.ContextVar("user")
    seen: list[tuple[str, str]] = []
    kept: list[Any] = []

    async def app(scope: Scope, receive: Any, send: Any) -> None:
        user.set("ann")
        kept.append(np.ones(10))
        await answer(send)

    def on_end(_scope: Scope, _report: Report) -> None:
        seen.append((user.get(), ctxalloc.current().name))

    async def scenario() -> None:
        await asyncio.create_task(call(AllocatorMiddleware(app, on_end=on_end), http()))
        await asyncio.sleep(0.3)

    run(scenario())
    assert seen == [("ann", "default_allocator")]


def test_the_last_report_is_not_lost_when_the_loop_closes(run: Any) -> None:
    kept: list[Any] = []
    reports: list[Report] = []

    async def app(scope: Scope, receive: Any, send: Any) -> None:
        kept.append(np.ones(10))
        await answer(send)

    service = AllocatorMiddleware(app, default=request(name="closed"), on_end=lambda _, report: reports.append(report))
    before = escapes("closed")
    loop = asyncio.new_event_loop()
    loop.run_until_complete(call(service, http()))
    loop.close()
    del loop
    assert [report.escaped.bytes for report in reports] == [80]
    assert escapes("closed") == tuple(map(sum, zip(before, (1, 1, 1, 80), strict=True)))


def test_the_report_of_a_loop_that_never_closes_comes_at_the_exit() -> None:
    said = says(
        """
import asyncio, threading
import numpy as np
from ctxalloc.asgi import AllocatorMiddleware

kept, ready = [], threading.Event()

async def app(scope, receive, send):
    kept.append(np.ones(10))
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b""})
    ready.set()
    threading.Event().wait()

async def send(message): ...

service = AllocatorMiddleware(app, on_end=lambda _, report: print(report.outcome, report.escaped.bytes))
scope = {"type": "http", "path": "/", "method": "GET", "headers": []}
threading.Thread(target=asyncio.run, args=(service(scope, None, send),), daemon=True).start()
ready.wait()
"""
    )
    assert said == "completed 80"


def test_random_requests_leave_what_a_naive_model_says(run: Any) -> None:
    """Each request computes arrays here and in threads, keeps some, drops the others, at random."""
    chance, name, kept = random.Random(36), f"random {next(NUMBERS)}", list[Any]()
    expected, ended = [0, 0, 0, 0], list[tuple[ctxalloc.Request, int]]()

    async def one() -> None:
        own = list[Any]()
        async with request(name=name, root=True) as scope:
            for _ in range(chance.randrange(5)):
                size = chance.randrange(1, 3000)
                array = (
                    np.ones(size, np.uint8) if chance.random() < 0.5 else await asyncio.to_thread(np.ones, size, "u1")
                )
                if chance.random() < 0.2:
                    own.append(array)
                elif chance.random() < 0.5:
                    await asyncio.sleep(0)
                del array
        expected[0] += 1
        expected[1] += bool(own)
        expected[2] += len(own)
        expected[3] += sum(array.nbytes for array in own)
        kept.extend(own)
        ended.append((scope, len(own)))

    async def scenario() -> None:
        for _ in range(20):
            await asyncio.gather(*(one() for _ in range(chance.randrange(1, 9))))
        await asyncio.sleep(0.3)

    run(scenario())
    kept.clear()
    assert escapes(name) == tuple(expected)
    assert [scope.escaped.count for scope, _ in ended] == [count for _, count in ended]  # as it was settled


def test_a_request_of_a_thread_without_a_loop_is_settled_at_its_end() -> None:
    kept: list[Any] = []

    def work() -> None:
        with request(name="thread") as scope:
            kept.append(np.ones(10))
        kept.clear()
        kept.append(scope.escaped.count)

    before = escapes("thread")
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert kept == [1]
    assert escapes("thread") == tuple(map(sum, zip(before, (1, 1, 1, 80), strict=True)))


@pytest.mark.parametrize("kind", ["state", "variable"])
@pytest.mark.parametrize("observed", [False, True], ids=["unobserved", "on_end"])
def test_waiting_for_on_end_keeps_nothing_alive(run: Any, kind: str, *, observed: bool) -> None:
    held: contextvars.ContextVar[Any] = contextvars.ContextVar("held")
    word: contextvars.ContextVar[str] = contextvars.ContextVar("word")
    told: list[tuple[Any, Report, str]] = []
    name = f"{kind} {observed}"

    async def app(scope: Scope, receive: Any, send: Any) -> None:
        word.set("said")
        scope["state"].update(id="a7", pair=("b", 1))
        if kind == "state":
            scope["state"]["big"] = np.ones(1000)
        else:
            held.set(np.ones(1000))
        await answer(send)

    def on_end(scope: Scope, report: Report) -> None:
        told.append((scope["state"], report, word.get()))

    service = AllocatorMiddleware(app, default=request(name=name), on_end=on_end if observed else None)
    pool = object()

    async def server() -> None:  # which lets go of the scope and of the Context with the call
        scope = {**http(), "state": {"pool": pool}}
        await asyncio.create_task(call(service, scope))

    async def scenario() -> None:
        await server()
        await asyncio.sleep(0.3)

    before = escapes(name)
    run(scenario())
    assert escapes(name) == tuple(map(sum, zip(before, (1, 0, 0, 0), strict=True)))
    for state, report, said in told:
        assert report.escaped.count == 0
        assert (state, said) == ({"pool": pool, "id": "a7", "pair": ("b", 1)}, "said")
    assert len(told) == observed
