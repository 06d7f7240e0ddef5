"""`ctxalloc.asgi.AllocatorMiddleware`: what a request gets. No server here."""

import asyncio
from typing import Any

import numpy as np
import pytest
from asgi_apps import Reports, makes, tells
from asgi_calls import Client, Scope, answer, call, http, websocket
from built_in import HANDLERS

import ctxalloc
from ctxalloc import Budget, KiB, MiB, current, handler_of, request
from ctxalloc.asgi import AllocatorMiddleware

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
