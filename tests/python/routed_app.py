"""Applications of each framework whose views tell by which route they were reached, and whose terms they have.

Servers are told `routed_app:starlette`, `:flask_wsgi`, `:django_wsgi`, `:django_asgi`; a test starts them
(`servers.py`) and compares the headers `x-route` and `x-terms`. Routes overlap, and the rows of the middleware stand in
another order.
"""

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import django
import flask
from django.conf import settings
from django.http import HttpResponse
from django.urls import path
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.requests import Request as HttpRequest
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Mount, Route, WebSocketRoute
from starlette.websockets import WebSocket

import ctxalloc
from ctxalloc import request
from ctxalloc.asgi import AllocatorMiddleware
from ctxalloc.wsgi import AllocatorMiddleware as WsgiMiddleware

ROUTES = ["/health", "/a/{name}", "/a/b", "/d/{y}-{m}", "/{any}/b", "/x/{rest:path}", "/big", "/{any}"]
MOUNTED = ["/in/{name}", "/in/{rest:path}"]
ROWS: Any = {route: request() for route in sorted(["/sub" + route for route in MOUNTED] + ROUTES)}


def headers(route: str) -> dict[str, str]:
    current = ctxalloc.current_request()
    return {"x-route": route, "x-terms": str(current and current.name)}


def of_starlette(route: str, full: str) -> Route:
    async def view(_: HttpRequest) -> PlainTextResponse:
        return PlainTextResponse("", headers=headers(full))

    return Route(route, view, methods=["GET", "POST"])


mounted = Mount("/sub", routes=[of_starlette(route, "/sub" + route) for route in MOUNTED])
starlette = AllocatorMiddleware(
    Starlette(routes=[mounted, *(of_starlette(route, route) for route in ROUTES)]), routes=ROWS
)

for_flask = flask.Flask("routed", static_folder=None)
blueprint = flask.Blueprint("sub", __name__, url_prefix="/sub")


def as_rule(route: str) -> str:
    return route.replace("{rest:path}", "<path:rest>").replace("{", "<").replace("}", ">")


for place, route in enumerate(ROUTES):
    for_flask.add_url_rule(
        as_rule(route), f"v{place}", lambda route=route, **_: ("", headers(route)), methods=["GET", "POST"]
    )
for place, route in enumerate(MOUNTED):
    blueprint.add_url_rule(as_rule(route), f"v{place}", lambda route="/sub" + route, **_: ("", headers(route)))
for_flask.register_blueprint(blueprint)
flask_wsgi = WsgiMiddleware(for_flask.wsgi_app, routes=ROWS)


def of_django(route: str) -> Any:
    def view(_: Any, **__: Any) -> HttpResponse:
        return HttpResponse(b"", headers=headers(route))

    return path(as_rule(route)[1:], view)


if not settings.configured:
    settings.configure(
        ROOT_URLCONF=tuple(of_django(route) for route in ["/sub" + route for route in MOUNTED] + ROUTES),
        MIDDLEWARE=["ctxalloc.django.AllocatorMiddleware", "django.middleware.common.CommonMiddleware"],
        CTXALLOC={"routes": ROWS},
        ALLOWED_HOSTS=["*"],
        LOGGING_CONFIG=None,
    )
    django.setup()

from django.core.handlers.asgi import ASGIHandler  # noqa: E402
from django.core.handlers.wsgi import WSGIHandler  # noqa: E402

django_wsgi = WSGIHandler()
django_asgi = ASGIHandler()

# ---- clients that go away -------------------------------------------------------------------------------

ENDS = os.environ.get("CTXALLOC_TEST_ENDS")


def note(_: Any, report: ctxalloc.asgi.Report) -> None:
    if ENDS:
        with Path(ENDS).open("a", encoding="utf-8") as file:
            file.write(f"{report.route} {report.outcome}\n")


async def hears(request: HttpRequest) -> PlainTextResponse:
    """Look for two seconds whether the client has gone, and answer then."""
    for _ in range(100):
        if await request.is_disconnected():
            break
        await asyncio.sleep(0.02)
    return PlainTextResponse("too late")


async def streams(_: HttpRequest) -> Response:
    async def parts() -> AsyncIterator[bytes]:
        for _ in range(50):
            yield b"x" * 100_000
            await asyncio.sleep(0.02)

    return StreamingResponse(parts())


class Streamed(Response):
    """Parts that are sent without asking whether the client is there."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(50):
            await send({"type": "http.response.body", "body": b"x" * 100_000, "more_body": True})
            await asyncio.sleep(0.02)
        await send({"type": "http.response.body", "body": b""})


async def deaf(_: HttpRequest) -> Response:
    return Streamed()


async def ticks(websocket: WebSocket) -> None:
    """Says something for ever, and never listens."""
    await websocket.accept()
    while True:
        await websocket.send_text("tick")
        await asyncio.sleep(0.02)


class Passes(BaseHTTPMiddleware):
    async def dispatch(self, request: HttpRequest, call_next: Any) -> Any:
        return await call_next(request)


async def well(_: HttpRequest) -> PlainTextResponse:
    return PlainTextResponse("", headers={"content-length": "0"})


LEAVES = [
    Route("/health", well),
    *(Route(f"/{view.__name__}", view, methods=["POST"]) for view in (hears, streams, deaf)),
    WebSocketRoute("/ticks", ticks),
]
TOLD: Any = {"routes": {"/health": None, **{f"/{path}": request() for path in ("hears", "streams", "deaf", "ticks")}}}
TOLD["on_end"] = note
bare = AllocatorMiddleware(Starlette(routes=LEAVES), **TOLD)
based = AllocatorMiddleware(Starlette(routes=LEAVES, middleware=[Middleware(Passes)]), **TOLD)
