"""`ctxalloc.asgi.AllocatorMiddleware`: a request has one end, whatever ends it. No server here."""

import asyncio
import contextlib
import contextvars
import gc
import subprocess
import sys
import types
import weakref
from typing import Any

import numpy as np
import pytest
from asgi_apps import BIG, Reports, makes
from asgi_calls import Client, Scope, answer, call, http

import ctxalloc
from ctxalloc import Budget, MiB, current, request
from ctxalloc.asgi import AllocatorMiddleware, Report

pytestmark = pytest.mark.any_numpy


def test_the_account_closes_at_the_last_message_before_background_work() -> None:
    reports = Reports()
    tenant = Budget(name="tenant")
    seen: list[object] = []

    async def app(scope: Scope, receive: Any, send: Any) -> None:
        before = np.empty(1000, np.uint8)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"a", "more_body": True})
        assert not reports.all
        del before
        await send({"type": "http.response.body", "body": b"b"})
        assert reports.only.stats.total_bytes == 1000
        handler = current()
        background = np.empty(5000, np.uint8)
        seen.append((handler == scope["ctxalloc.request"].handler, tenant.in_use_bytes))
        del background

    for after_end, in_use in [("charge", 5000), ("detach", 0)]:
        reports.all.clear()
        seen.clear()
        terms = request(after_end=after_end)  # type: ignore[arg-type]
        service = AllocatorMiddleware(app, default=terms, tenant=lambda _: tenant, on_end=reports)
        asyncio.run(call(service, http()))
        assert seen == [(True, in_use)]
        assert reports.only.outcome == "completed"
    service = AllocatorMiddleware(app, default=request(after_end="refuse"), on_end=reports)
    reports.all.clear()
    with pytest.raises(MemoryError):
        asyncio.run(call(service, http()))
    assert reports.only.outcome == "completed"


def test_background_work_counts_if_the_account_ends_with_the_application() -> None:
    reports = Reports()

    async def app(scope: Scope, receive: Any, send: Any) -> None:
        await answer(send)
        np.empty(5000, np.uint8)
        assert not reports.all

    asyncio.run(call(AllocatorMiddleware(app, ends="application", on_end=reports), http()))
    assert reports.only.stats.total_bytes == 5000


def test_the_last_message_may_be_sent_from_another_task_and_context() -> None:
    reports = Reports()

    async def app(scope: Scope, receive: Any, send: Any) -> None:
        await asyncio.get_running_loop().create_task(answer(send), context=contextvars.Context())
        assert current() == scope["ctxalloc.request"].handler

    asyncio.run(call(AllocatorMiddleware(app, on_end=reports), http()))
    assert reports.only.outcome == "completed"


@pytest.mark.parametrize(("wanted", "error"), [("failed", KeyError), ("cancelled", asyncio.CancelledError)])
@pytest.mark.parametrize("sent", ["nothing", "headers", "everything"])
def test_an_exception_ends_it_once_and_passes(wanted: str, error: type[BaseException], sent: str) -> None:
    reports = Reports()

    async def app(scope: Scope, receive: Any, send: Any) -> None:
        if sent == "headers":
            await send({"type": "http.response.start", "status": 201, "headers": []})
        elif sent == "everything":
            await answer(send, status=201)
        raise error("thrown")

    async def main() -> None:
        with pytest.raises(error):
            await call(AllocatorMiddleware(app, on_end=reports), http())
        assert current().name == "default_allocator"

    asyncio.run(main())
    assert reports.only.outcome == ("completed" if sent == "everything" else wanted)
    assert reports.only.status == (None if sent == "nothing" else 201)


def test_a_client_that_goes_away_ends_it_as_disconnected() -> None:
    async def hears_of_it(scope: Scope, receive: Any, send: Any) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    async def cannot_send(scope: Scope, receive: Any, send: Any) -> None:
        async def gone(_: Any) -> None:
            raise OSError("gone")

        exchange_send = AllocatorMiddleware(lambda *a: answer(a[2]), on_end=reports)
        with pytest.raises(OSError, match="gone"):
            await exchange_send(scope, receive, gone)

    reports = Reports()
    asyncio.run(call(AllocatorMiddleware(hears_of_it, on_end=reports), http()))
    assert reports.only.outcome == "disconnected"
    reports.all.clear()
    asyncio.run(call(cannot_send, http()))
    assert reports.only.outcome == "disconnected"
    reports.all.clear()

    async def returns(scope: Scope, receive: Any, send: Any) -> None: ...

    asyncio.run(call(AllocatorMiddleware(returns, on_end=reports), http()))
    assert reports.only.outcome == "unfinished"


def test_a_call_that_a_server_throws_away_ends_once_and_selects_nothing() -> None:
    reports = Reports()

    @types.coroutine
    def never() -> Any:
        yield

    async def hangs(scope: Scope, receive: Any, send: Any) -> None:
        await never()

    client = Client()
    coroutine = AllocatorMiddleware(hangs, on_end=reports)(http(), client.receive, client.send)
    contextvars.copy_context().run(coroutine.send, None)  # type: ignore[attr-defined]
    coroutine.close()  # type: ignore[attr-defined]
    assert reports.only.outcome == "cancelled"
    assert current().name == "default_allocator"


@pytest.mark.parametrize("raised", [KeyError, asyncio.CancelledError, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("when", ["completed", "failed", "refused"])
def test_an_on_end_that_raises_is_not_called_again(raised: type[BaseException], when: str) -> None:
    reports = Reports()

    def on_end(scope: Scope, report: Report) -> None:
        reports(scope, report)
        raise raised("from on_end")

    async def app(scope: Scope, receive: Any, send: Any) -> None:
        if when == "failed":
            raise OSError("mine")
        if when == "refused":
            np.empty(BIG, np.uint8)
        await answer(send)

    async def main() -> None:
        # An Exception is logged; what ends a program or a task passes, as from anywhere else.
        expected = OSError if when == "failed" and raised is KeyError else None if raised is KeyError else raised
        service = AllocatorMiddleware(app, default=request(limit_bytes=MiB), on_end=on_end)
        with pytest.raises(expected) if expected else contextlib.nullcontext():
            await call(service, http())
        assert current().name == "default_allocator"
        assert ctxalloc._serving.serving() is None

    asyncio.run(main())
    assert reports.only.outcome == when


@pytest.mark.parametrize("where", ["application", "first message", "last message", "answer", "background"])
def test_a_request_that_is_cancelled_at_any_step_ends_once(where: str) -> None:
    reports = Reports()
    reached = asyncio.Event()

    async def forever() -> None:
        reached.set()
        await asyncio.Event().wait()

    async def app(scope: Scope, receive: Any, send: Any) -> None:
        if where == "application":
            await forever()
        if where == "answer":
            np.empty(BIG, np.uint8)
        await answer(send)
        await forever()

    async def send(message: Any) -> None:
        if (message["type"], where) in {
            ("http.response.start", "first message"),
            ("http.response.start", "answer"),
            ("http.response.body", "last message"),
        }:
            await forever()

    async def main() -> None:
        service = AllocatorMiddleware(app, default=request(limit_bytes=MiB), on_end=reports)
        task = asyncio.create_task(service(http(), Client().receive, send))
        await reached.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert current().name == "default_allocator"

    asyncio.run(main())
    expected = {"answer": "refused", "background": "completed"}
    assert reports.only.outcome == expected.get(where, "cancelled")


EXITS = {
    "the loop is closed": "loop.close()",
    "the loop is closed and the task is gone": "del task; loop.close(); gc.collect()",
    "the loop is stopped": "",
    "the task is in a cycle": "task.own = [task]; del task; gc.freeze()",
    "another thread has the loop": "threading.Thread(target=loop.run_forever, daemon=True).start()",
    "the program ends by an exception": "raise SystemExit(3)",
}


@pytest.mark.parametrize("how", EXITS)
def test_what_a_program_drops_at_its_exit_ends_once(how: str) -> None:
    """Servers cancel their tasks; those that do not leave coroutines to the interpreter."""
    program = f"""
import asyncio, gc, os, sys, threading
import numpy
from ctxalloc.asgi import AllocatorMiddleware

class Task(asyncio.Task): pass

def on_end(scope, report):
    os.write(1, f"{{scope['path']}} {{report.outcome}} {{report.stats.peak_bytes}}\\n".encode())

async def hangs(scope, receive, send):
    held = numpy.empty(1000)
    await asyncio.Event().wait()

loop = asyncio.new_event_loop()
loop.set_task_factory(lambda loop, coroutine, **more: Task(coroutine, loop=loop, **more))
scope = {{"type": "http", "method": "GET", "path": "/a", "headers": []}}
task = loop.create_task(AllocatorMiddleware(hangs, on_end=on_end)(scope, None, None))
loop.run_until_complete(asyncio.sleep(0))
{EXITS[how]}
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60)
    assert done.stdout == "/a cancelled 8000\n", done.stderr
    assert done.returncode == (3 if "exception" in how else 0)


def test_on_end_is_outside_of_the_request_and_its_errors_harm_nobody(caplog: pytest.LogCaptureFixture) -> None:
    seen = []

    def on_end(scope: Scope, report: Report) -> None:
        seen.append(current().name)
        raise KeyError("mine")

    client = asyncio.run(call(AllocatorMiddleware(makes(10), on_end=on_end), http()))
    assert client.status == 200
    assert seen == ["default_allocator"]
    assert "on_end raised" in caplog.text


def test_a_context_that_goes_on_holds_no_scope_and_no_refusal() -> None:
    contexts = []

    class Marker: ...

    async def app(scope: Scope, receive: Any, send: Any) -> None:
        contexts.append(contextvars.copy_context())
        await answer(send)

    async def asks(scope: Scope, receive: Any, send: Any) -> None:
        contexts.append(contextvars.copy_context())
        try:
            held = np.empty(MiB // 2, np.uint8)
            held = np.empty(10 * MiB, np.uint8)
        except MemoryError as error:
            problem = ctxalloc.problems.problem(error)
        del held
        assert problem is not None
        await answer(send, problem.body, problem.status)

    class Connection(Client): ...

    for number, one in enumerate([app, asks]):
        client, marker = Connection(), Marker()
        gone = [weakref.ref(client), weakref.ref(marker)]
        service = AllocatorMiddleware(one, default=request(limit_bytes=MiB))
        asyncio.run(service(http(marker=marker), client.receive, client.send))
        del client, marker
        gc.collect()
        serving = contexts[number][ctxalloc._serving.SERVING]
        assert serving is not None
        assert serving.scope is serving._refusal is None
        assert [reference() for reference in gone] == [None, None]
        with pytest.raises(RuntimeError, match="the application has returned"):
            asyncio.run(serving.to_server({"type": "late"}))  # type: ignore[attr-defined]
