"""Whoever reaches a view whose route has a row has that row's terms, however long the path is and whatever they are."""

import asyncio
import warnings
from typing import Any

import numpy as np
import pytest

fastapi = pytest.importorskip("fastapi")

from asgi_calls import call, http, websocket  # noqa: E402
from starlette.applications import Starlette  # noqa: E402
from starlette.requests import Request as HttpRequest  # noqa: E402
from starlette.responses import PlainTextResponse  # noqa: E402
from starlette.routing import BaseRoute, Mount, Route, WebSocketRoute  # noqa: E402
from starlette.websockets import WebSocket  # noqa: E402

import ctxalloc  # noqa: E402
from ctxalloc import MiB, request  # noqa: E402
from ctxalloc.asgi import AllocatorMiddleware  # noqa: E402

pytestmark = pytest.mark.once
LONG = "a" * 600
SMALL, LARGE = request(limit_bytes=MiB), request(limit_bytes=1024 * MiB)


async def large(_: HttpRequest) -> PlainTextResponse:
    np.zeros(10 * MiB, np.uint8)
    return PlainTextResponse(str(getattr(ctxalloc.current_request(), "name", None)))


async def other(_: HttpRequest) -> PlainTextResponse:
    return PlainTextResponse("other")


def test_a_long_path_to_a_view_without_a_row_has_the_default() -> None:
    app = Starlette(routes=[Route("/large/{a}-{b}", large), Route("/{rest:path}", large)])
    service = AllocatorMiddleware(app, routes={"/large/{a}-{b}": SMALL}, default=request(name="default"))
    assert asyncio.run(call(service, http(f"/large/a/-{LONG}"))).body == b"default"
    assert asyncio.run(call(service, http(f"/large/a-{LONG}"))).status == 413


class Backwards(Route):
    """A route that matches in a way of its own."""

    def matches(self, scope: Any) -> Any:
        return super().matches({**scope, "path": scope["path"][::-1]})


@pytest.mark.parametrize("mount", ["", "/{rest:path}"])
def test_routes_that_match_in_their_own_way_are_asked(mount: str) -> None:
    """The mount takes as much as it can: `/a/b-c/d-e` is `/d-e` below it, and `/b-c/d-e` is nobody's."""
    routes: list[BaseRoute] = [Route("/{a}-{b}/{c}-{d}", other), Route("/{c}-{d}", large)]
    if not mount:
        routes = [Backwards("/{a}-{b}/x", large), Route("/x/{a}-{b}/{c:path}", other)]
    rows = {mount + getattr(route, "path", ""): LARGE for route in routes}
    app = Starlette(routes=[Mount(mount, routes=routes)] if mount else routes)
    service = AllocatorMiddleware(app, routes=rows)
    path = f"/{LONG}/b-c/d-e" if mount else f"x/{LONG}-b/"
    assert asyncio.run(call(service, http(path))).body.decode() == (mount + "/{c}-{d}" if mount else "/{a}-{b}/x")


# ---- WebSockets ---------------------------------------------------------------------------------------


async def socket(socket: WebSocket) -> None:
    await socket.accept()
    await socket.send_text(str(socket.scope["ctxalloc.request"].name))
    await socket.close()


@pytest.mark.parametrize("asked", [False, True])
def test_a_web_socket_has_the_row_for_get(*, asked: bool) -> None:
    app = Starlette(routes=[WebSocketRoute("/ws/{a}-{b}", socket), *[Route("/{rest:path}", other)] * asked])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        service = AllocatorMiddleware(app, routes={"GET /ws/{a}-{b}": SMALL, "/ws/{a}-{b}": LARGE})
        sent = asyncio.run(call(service, websocket(f"/ws/{LONG}-b"), [{"type": "websocket.connect"}])).sent
    assert sent[1]["text"] == "GET /ws/{a}-{b}"


def test_a_row_for_another_method_of_a_web_socket_is_for_nothing() -> None:
    service = AllocatorMiddleware(Starlette(routes=[WebSocketRoute("/ws", socket)]), routes={"POST /ws": SMALL})
    with pytest.warns(ctxalloc.RouteWarning, match="'POST /ws' matches no route"):
        asyncio.run(call(service, websocket("/ws"), [{"type": "websocket.connect"}]))


# ---- root_path, blanks --------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:The `root_path` parameter is deprecated")
@pytest.mark.parametrize(
    ("root", "path"), [("/rp", "/m/x"), ("/m", "/m/a/x"), ("/other", "/m/x"), ("", "/m/a/x"), ("/m", f"/m/{LONG}/x")]
)
def test_a_mounted_application_with_its_own_root_path_is_asked(root: str, path: str) -> None:
    app, sub = fastapi.FastAPI(), fastapi.FastAPI(root_path=root)
    sub.add_api_route("/{p}/x", large, response_model=None)
    app.mount("/m", sub)
    service = AllocatorMiddleware(app, routes={"/m/{p}/x": SMALL}, default=LARGE)
    assert asyncio.run(call(service, http(path))).status == 413


def test_a_path_may_have_a_blank() -> None:
    app = Starlette(routes=[Route("/a b/{c}", large)])
    for row in ("/a b/{c}", "GET /a b/{c}"):
        service = AllocatorMiddleware(app, routes={row: SMALL})
        assert asyncio.run(call(service, http("/a b/c"))).status == 413
