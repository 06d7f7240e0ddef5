"""`ctxalloc.asgi.AllocatorMiddleware`: what a request gets, and its one end. No server here."""

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
from asgi_apps import BIG, Reports, makes, tells
from asgi_calls import Client, Scope, answer, call, http, websocket
from built_in import HANDLERS

import ctxalloc
from ctxalloc import Budget, KiB, MiB, current, handler_of, request
from ctxalloc.asgi import AllocatorMiddleware, Report

pytestmark = pytest.mark.any_numpy

# ---- what a request gets ----------------------------------------------------------------------------


def test_a_route_runs_under_its_handler_wherever_its_work_is_done() -> None:
    app = AllocatorMiddleware(tells, routes={f"/{name}": name for name in HANDLERS}, default=None)

    async def main() -> None:
        for kind in (http, websocket):
            for name in HANDLERS:
                assert (await call(app, kind(f"/{name}"))).body == name.encode()
        assert (await call(app, http("/else"))).body == b"default_allocator"
        async with ctxalloc.use("aligned64"):
            assert (await call(app, http("/else"))).body == b"aligned64"
        assert current().name == "default_allocator"

    asyncio.run(main())


def test_patterns_have_parameters_rests_and_methods() -> None:
    reports = Reports()
    routes: dict[str, Any] = {
        "POST /a/{name}": request(),
        "/a/{name}": request(),
        "/a/b": request(),
        "/files/{rest:path}": request(),
        "/skipped": None,
    }
    app = AllocatorMiddleware(makes(10), routes=routes, on_end=reports)

    async def main() -> None:
        for method, path in [
            ("POST", "/a/x"),
            ("GET", "/a/x"),
            ("GET", "/a/b"),
            ("GET", "/a/b/c"),
            ("GET", "/files/a/b"),
            ("GET", "/skipped"),
        ]:
            await call(app, http(path, method))
        await call(app, http("/mounted/a/b", root_path="/mounted"))
        await call(app, http("/a/b", root_path="/mounted"))
        await call(app, http("/a/b", root_path="/a/b"))
        await call(app, http("/a/b", root_path="/a/"))

    asyncio.run(main())
    assert [report.route for report in reports.all] == [
        "POST /a/{name}",
        "/a/{name}",
        "/a/b",
        None,
        "/files/{rest:path}",
        "/a/b",
        "/a/b",
        None,
        "/a/b",
    ]


@pytest.mark.parametrize("route", ["a", "post /a", "/a/{b", "/a/{b}}", ""])
def test_a_pattern_that_cannot_be_is_refused(route: str) -> None:
    with pytest.raises(ValueError, match="routes: "):
        AllocatorMiddleware(tells, routes={route: None})


def test_a_choice_or_an_end_that_cannot_be_is_refused() -> None:
    with pytest.raises(TypeError, match="/a: 3 is no choice"):
        AllocatorMiddleware(tells, routes={"/a": 3})  # type: ignore[dict-item]
    with pytest.raises(ValueError, match="'response' or 'application'"):
        AllocatorMiddleware(tells, ends="never")  # type: ignore[arg-type]


def test_a_function_may_choose_and_sees_the_scope() -> None:
    reports = Reports()

    def choose(scope: Scope) -> ctxalloc.Request | str:
        return "aligned64" if scope["method"] == "GET" else request(name="chosen", limit_bytes=100)

    async def app(scope: Scope, receive: Any, send: Any) -> None:
        await answer(send, current().name.encode())

    middleware = AllocatorMiddleware(app, default=choose, on_end=reports)
    assert asyncio.run(call(middleware, http())).body == b"aligned64"
    assert asyncio.run(call(middleware, http("/", "POST"))).body == b"chosen"
    assert reports.only.route is None


def test_an_unknown_handler_fails_the_request_and_selects_nothing() -> None:
    app = AllocatorMiddleware(tells, default="fast")
    with pytest.raises(ctxalloc.UnknownHandlerError, match="no handler is named 'fast'"):
        asyncio.run(call(app, http()))
    assert ctxalloc._serving.serving() is None


@pytest.mark.parametrize("kind", ["lifespan", "something.new"])
def test_other_scopes_pass_through(kind: str) -> None:
    seen: list[Any] = []

    async def app(*arguments: Any) -> None:
        seen.extend(arguments)
        assert ctxalloc.current_request() is None

    client = Client()
    scope: Scope = {"type": kind}
    asyncio.run(AllocatorMiddleware(app)(scope, client.receive, client.send))
    assert seen[0] is scope
    assert "ctxalloc.request" not in scope


def test_each_request_has_an_account_the_servers_scope_is_left_alone() -> None:
    reports = Reports()
    seen = []

    async def app(scope: Scope, receive: Any, send: Any) -> None:
        begun = scope["ctxalloc.request"]
        array = np.empty(scope["size"], np.uint8)
        await asyncio.sleep(0)
        assert handler_of(array) == begun.handler == current()
        assert begun == ctxalloc.current_request()
        seen.append(begun.stats.live_bytes)
        del array
        await answer(send)

    async def main() -> None:
        service = AllocatorMiddleware(app, on_end=reports)
        scopes = [http(size=size) for size in range(10, 30)]
        await asyncio.gather(*(call(service, scope) for scope in scopes))
        assert all("ctxalloc.request" not in scope for scope in scopes)

    asyncio.run(main())
    assert seen == list(range(10, 30))
    assert [(report.outcome, report.status, report.stats.peak_bytes) for report in reports.all] == [
        ("completed", 200, size) for size in range(10, 30)
    ]


# ---- a connection that is used again ----------------------------------------------------------------


def test_a_context_copied_from_another_request_gives_the_next_one_nothing() -> None:
    """As uvicorn does it: it begins the next request of a connection where the last message of the first is sent."""
    first, second = Budget(16 * KiB, name="first"), Budget(512 * MiB, name="second")
    seen: dict[str, str] = {}
    following: list[asyncio.Task[Client]] = []

    async def app(scope: Scope, receive: Any, send: Any) -> None:
        path = scope["path"]
        seen[path] = current().name
        np.empty(1000 if path == "/first" else 1_000_000, np.uint8)
        if path == "/first":
            following.extend(asyncio.create_task(call(service, http(p))) for p in ("/second", "/health", "/named"))
            await asyncio.wait(following)  # they run while the first has not ended
        await answer(send)

    routes: dict[str, Any] = {"/first": request(budget=first), "/second": request(budget=second), "/health": None}
    service = AllocatorMiddleware(app, routes={**routes, "/named": "pool"}, default=None)

    async def main() -> None:
        await call(service, http("/first"))
        for client in await asyncio.gather(*following):
            assert client.status == 200

    asyncio.run(main())
    assert seen == {"/first": "/first", "/second": "/second", "/health": "default_allocator", "/named": "pool"}
    assert first.peak_bytes == 1000
    assert second.peak_bytes == 1_000_000


def test_each_request_of_a_connection_begins_with_the_servers_selection() -> None:
    seen = []

    async def app(scope: Scope, receive: Any, send: Any) -> None:
        seen.append(current().name)
        if scope["path"] == "/first":
            await asyncio.create_task(call(service, http("/health")))
        await answer(send)

    service = AllocatorMiddleware(app, routes={"/first": "system"}, default=None)

    async def main() -> None:
        async with ctxalloc.use("aligned64"):
            await call(service, http("/first"))
            assert current().name == "aligned64"

    asyncio.run(main())
    assert seen == ["system", "aligned64"]


def test_a_middleware_inside_of_another_is_inside_of_its_request() -> None:
    outers, inners = Reports(), Reports()
    inner = AllocatorMiddleware(tells, routes={"/in": request(), "/named": "system"}, default=None, on_end=inners)
    outer = AllocatorMiddleware(inner, default=request(name="outer"), on_end=outers)
    assert asyncio.run(call(outer, http("/other"))).body == b"outer"
    assert asyncio.run(call(outer, http("/named"))).body == b"system"
    assert asyncio.run(call(outer, http("/in"))).body == b"/in"
    assert outers.all[-1].stats.total_bytes >= inners.only.stats.total_bytes > 0


# ---- the end ----------------------------------------------------------------------------------------


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
    assert reports.only.outcome in ("disconnected", "failed")
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
