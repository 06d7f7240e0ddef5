"""Paths that no row matches, rows for one path of a route, routes that come later, frameworks that cannot be asked."""

import asyncio
import time
import warnings
from typing import Any

import pytest

flask = pytest.importorskip("flask")
fastapi = pytest.importorskip("fastapi")

from asgi_calls import call, http, websocket  # noqa: E402
from starlette.applications import Starlette  # noqa: E402
from starlette.requests import Request as HttpRequest  # noqa: E402
from starlette.responses import PlainTextResponse  # noqa: E402
from starlette.routing import Mount, Route, WebSocketRoute  # noqa: E402
from starlette.websockets import WebSocket  # noqa: E402

import ctxalloc  # noqa: E402
from ctxalloc import Budget, MiB, request  # noqa: E402
from ctxalloc.asgi import AllocatorMiddleware  # noqa: E402
from ctxalloc.wsgi import AllocatorMiddleware as WsgiMiddleware  # noqa: E402

pytestmark = pytest.mark.once
SMALL, LARGE = request(limit_bytes=MiB), request(limit_bytes=64 * MiB)


async def view(_: HttpRequest) -> PlainTextResponse:
    current = ctxalloc.current_request()
    return PlainTextResponse(str(current and current.name))


async def unknown(scope: Any, receive: Any, send: Any) -> None:
    """An application that cannot be asked."""
    await PlainTextResponse(str(getattr(ctxalloc.current_request(), "name", None)))(scope, receive, send)


def ask(app: Any, path: str, rows: Any, method: str = "GET", **options: Any) -> tuple[str, Any]:
    reports: list[Any] = []
    service = AllocatorMiddleware(app, routes=rows, on_end=lambda _, report: reports.append(report), **options)
    client = asyncio.run(call(service, http(path, method)))
    return client.body.decode(), reports[0] if reports else None


# ---- unmatched="strictest" ----------------------------------------------------------------------------


def test_what_no_row_matches_is_as_strict_as_the_strictest_row() -> None:
    rows = {"/small": SMALL, "/large": LARGE, "/health": None, "/pool": "pool"}
    body, report = ask(unknown, "/other", rows, unmatched="strictest")
    assert (body, report.route) == ("unmatched", None)
    limited = AllocatorMiddleware(unknown, routes=rows, unmatched="strictest", default=request(limit_bytes=1000))
    assert limited._service.routes.find({}, "method", "/other")[2]._wanted_limit_bytes == 1000
    assert limited._service.routes.find({}, "method", "/large")[0] == "/large"


def test_a_view_without_a_row_has_the_default() -> None:
    app = Starlette(routes=[Route("/small", view), Route("/other/{name:int}", view)])
    default = request(name="default")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert ask(app, "/other/1", {"/small": SMALL}, unmatched="strictest", default=default)[0] == "default"
    service = AllocatorMiddleware(app, routes={"/small": SMALL}, unmatched="strictest", default=default)
    asyncio.run(call(service, http("/small")))
    for path, limit_bytes in [("/other/x", MiB), ("/nothing", MiB), ("/other/1", None)]:
        terms = service._service.routes.find(http(path), "method", path)[2]
        assert terms._wanted_limit_bytes == limit_bytes, path


def test_flask_and_the_strictest() -> None:
    app = flask.Flask("strict")
    app.add_url_rule("/large", "large", lambda: str(ctxalloc.current_request().name))  # type: ignore[union-attr]
    app.add_url_rule("/other", "other", lambda: str(ctxalloc.current_request().name))  # type: ignore[union-attr]
    app.register_error_handler(404, lambda _: str(ctxalloc.current_request().name))  # type: ignore[union-attr]
    app.wsgi_app = WsgiMiddleware(  # type: ignore[method-assign]
        app.wsgi_app, routes={"/large": LARGE}, unmatched="strictest", default=request(name="default")
    )
    client = app.test_client()
    assert [client.get(path).text for path in ("/large", "/other", "/no")] == ["/large", "default", "unmatched"]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ({"/a": request()}, "no row has a limit_bytes"),
        ({"/a": SMALL, "/b": request(budget=Budget(MiB))}, "'/b' name a budget"),
        ({"/a": SMALL, "/b": lambda _: SMALL}, "'/b' has a function"),
    ],
)
def test_the_strictest_that_cannot_be_known_is_an_error(rows: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AllocatorMiddleware(unknown, routes=rows, unmatched="strictest")
    with pytest.raises(ValueError, match="unmatched='most': give 'default' or 'strictest'"):
        AllocatorMiddleware(unknown, routes=rows, unmatched="most")  # type: ignore[arg-type]


# ---- which row it is ------------------------------------------------------------------------------------


def test_a_row_for_one_path_of_a_route_goes_before_the_routes() -> None:
    app = Starlette(routes=[Route("/item/{name}", view), Route("/{rest:path}", view)])
    rows = {"/item/{name}": LARGE, "/item/7": SMALL, "/{rest:path}": SMALL}
    assert [ask(app, path, rows)[0] for path in ("/item/7", "/item/8", "/item")] == [
        "/item/7",
        "/item/{name}",
        "/{rest:path}",
    ]


def test_a_row_that_covers_several_routes_has_those_that_have_none() -> None:
    app = Starlette(routes=[Route("/api/small", view), Route("/api/{name}", view), Route("/api/{a}/{b}", view)])
    rows = {"/api/{rest:path}": LARGE, "/api/{name}": SMALL}
    assert ask(app, "/api/x", rows)[0] == "/api/{name}"
    assert ask(app, "/api/x/y", rows)[0] == "/api/{rest:path}"


def test_a_route_that_is_added_later_is_asked_for_too() -> None:
    app = Starlette(routes=[Route("/late/{name:int}", view)])
    rows = {"/late/{name}": LARGE, "/{a}/{b}": SMALL}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        service = AllocatorMiddleware(app, routes=rows)
        asyncio.run(call(service, http("/late/1")))
    app.router.routes.insert(0, Route("/{a}/{b}", view))
    assert asyncio.run(call(service, http("/late/1"))).body == b"/{a}/{b}"


def test_a_middleware_in_a_mount_asks_what_it_is_around() -> None:
    inner = Starlette(routes=[Route("/{name}", view), Route("/a", view)])
    guarded = AllocatorMiddleware(inner, routes={"/a": SMALL, "/{name}": LARGE})
    outer = Starlette(routes=[Route("/a", view), Mount("/sub", app=guarded)])
    assert asyncio.run(call(outer, http("/sub/a"))).body == b"/{name}"


def test_web_sockets_have_their_own_routes_terms() -> None:
    async def socket(socket: WebSocket) -> None:
        await socket.accept()
        await socket.send_text(str(socket.scope["ctxalloc.request"].name))
        await socket.close()

    app = Starlette(routes=[Route("/{name}", view), WebSocketRoute("/ws", socket)])
    service = AllocatorMiddleware(app, routes={"/ws": SMALL, "GET /{name}": LARGE})
    sent = asyncio.run(call(service, websocket("/ws"), [{"type": "websocket.connect"}])).sent
    assert sent[1]["text"] == "/ws"
    assert asyncio.run(call(service, http("/ws"))).body == b"GET /{name}"


@pytest.mark.parametrize("path", ["/in/1", "/v1/in/1", "/v1/deep/1"])
def test_routers_that_are_included_are_known(path: str) -> None:
    """They were a RouteWarning, with each of FastAPI's include_router."""
    deep, router, app = fastapi.APIRouter(), fastapi.APIRouter(), fastapi.FastAPI()
    deep.add_api_route("/deep/{x}", lambda x: x)
    router.add_api_route("/in/{x}", lambda x: x)
    router.include_router(deep)
    app.include_router(router, prefix="/v1")
    app.include_router(router)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert ask(app, path, {path.replace("1", "{x}", 2).replace("v{x}", "v1"): SMALL})[1].route
    with pytest.warns(ctxalloc.RouteWarning, match="'/v2/in/{x}' matches no route"):
        ask(app, path, {"/v2/in/{x}": SMALL})


def test_a_hostile_path_is_not_given_to_a_cubic_expression() -> None:
    """Starlette's own matching of this path is not counted: the route is asked for, and no request is made."""
    app = Starlette(routes=[Route("/{a}-{b}-{c}-{d}", view), Route("/{x}-{y}", view)])
    service = AllocatorMiddleware(app, routes={"/{a}-{b}-{c}-{d}": LARGE, "/{x}-{y}": SMALL})
    asyncio.run(call(service, http("/1-2-3-4")))
    path = "/" + "-" * 20_000
    begun = time.process_time()
    found = service._service.routes.find(http(path), "method", path)
    assert time.process_time() - begun < 1
    assert found[0] == "/{a}-{b}-{c}-{d}"  # the first that matches it, as Starlette would find hours later
    assert service._service.routes.find(http("/1-2-3-4"), "method", "/1-2-3-4")[0] == "/{a}-{b}-{c}-{d}"
