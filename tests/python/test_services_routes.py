"""What a hostile path costs, which rows are typing errors, and how a root path is taken off.

That whoever reaches a view has that view's terms is held by random routes: `test_services_order.py`.
"""

import asyncio
import time
import warnings
from typing import Any

import pytest

flask = pytest.importorskip("flask")
fastapi = pytest.importorskip("fastapi")

from asgi_calls import call, http  # noqa: E402
from starlette.applications import Starlette  # noqa: E402
from starlette.requests import Request as HttpRequest  # noqa: E402
from starlette.responses import PlainTextResponse  # noqa: E402
from starlette.routing import Mount, Route  # noqa: E402

import ctxalloc  # noqa: E402
from ctxalloc import request  # noqa: E402
from ctxalloc._choices import parts_of, pattern_of  # noqa: E402
from ctxalloc._native import RouteTable  # noqa: E402
from ctxalloc.asgi import AllocatorMiddleware  # noqa: E402
from ctxalloc.wsgi import AllocatorMiddleware as WsgiMiddleware  # noqa: E402

pytestmark = pytest.mark.once


def is_found(route: str, path: str) -> bool:
    found = (route, None, None, False, route)
    table = RouteTable(
        [], [(None, *parts_of(pattern_of(route)[1], route), found)], (None, None, None, False, None), has_methods=False
    )
    return bool(table.find({}, "method", path)[0] == route)


@pytest.mark.parametrize(
    ("route", "path"),
    [
        ("/report/{year}-{month}-{day}", "/report/" + "-" * 100_000 + "/"),
        ("/{a}-{b}-{c}-{d}-{e}", "/" + "-" * 100_000 + "/"),
        ("/{a:path}/{b:path}/{c:path}/end", "/" + "/" * 100_000),
        ("/{a}{b}{c}{d}x", "/" + "y" * 100_000),
    ],
)
def test_a_hostile_path_costs_what_its_length_does(route: str, path: str) -> None:
    """It was cubic in the length: hours for these. By processor time, with room for a hundred of a second's noise."""
    begun = time.process_time()
    assert not is_found(route, path)
    assert time.process_time() - begun < 1


# ---- patterns for nothing ---------------------------------------------------------------------------


async def _answer(_: HttpRequest) -> PlainTextResponse:
    return PlainTextResponse("")


SOME = [
    Route("/item/{name:int}", _answer),
    Route("/big", _answer, methods=["POST"]),
    Mount("/sub", routes=[Route("/in", _answer)]),
]


@pytest.mark.parametrize(
    "route", ["/item/{id}", "/item/7", "POST /big", "/big", "/sub/in", "/{rest:path}", "/sub/{rest:path}"]
)
def test_a_pattern_that_matches_a_route_is_no_typo(route: str) -> None:
    service = AllocatorMiddleware(Starlette(routes=SOME), routes={route: request()})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        asyncio.run(call(service, http("/big")))


@pytest.mark.parametrize("route", ["/items/{id}", "GET /big", "/bigg", "/sub/out", "/sub"])
@pytest.mark.parametrize("inside", [False, True])
def test_a_pattern_that_matches_no_route_of_the_application_is_a_warning(route: str, *, inside: bool) -> None:
    service: Any = Starlette(routes=SOME)
    if inside:
        service.add_middleware(AllocatorMiddleware, routes={route: request()})
    else:
        service = AllocatorMiddleware(service, routes={route: request()})
    with pytest.warns(ctxalloc.RouteWarning, match=f"{route!r} matches no route.*/big") as warned:
        asyncio.run(call(service, http("/big")))
    asyncio.run(call(service, http("/big")))  # a second warning would be an error
    assert len(warned) == 1


def test_a_pattern_that_matches_no_route_of_flask_is_a_warning() -> None:
    app = flask.Flask("typo")
    app.add_url_rule("/item/<int:name>", "item", lambda name: name)
    service = WsgiMiddleware(app.wsgi_app, routes={"/item/{id}": request(), "/itm/{id}": request()})
    asked = {
        "REQUEST_METHOD": "GET",
        "PATH_INFO": "/item/1",
        "wsgi.url_scheme": "http",
        "SERVER_NAME": "x",
        "SERVER_PORT": "80",
    }
    with pytest.warns(ctxalloc.RouteWarning, match="'/itm/{id}' matches no route.*'/item/<int:name>'") as warned:
        b"".join(service(asked, lambda status, headers, exc_info=None: lambda _: None))
    assert len(warned) == 1


def test_an_application_that_cannot_be_asked_is_left_alone() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await PlainTextResponse("")(scope, receive, send)

    assert asyncio.run(call(AllocatorMiddleware(app, routes={"/none": request()}), http("/"))).status == 200


@pytest.mark.parametrize("around", [True, False])
@pytest.mark.parametrize(("path", "route"), [("/api//big", "/big"), ("/api/big", "/{a}/{b}"), ("/api/", None)])
def test_a_root_path_that_ends_with_a_slash_is_taken_off_as_it_is(
    path: str, route: str | None, *, around: bool
) -> None:
    # Starlette takes off `/api/`, and only before one more slash.
    found: list[str | None] = []
    service: Any = fastapi.FastAPI()
    service.root_path = "/api/"
    routes = ["/big", "/{last}", "/{a}/{b}"]

    async def view() -> str:
        current = ctxalloc.current_request()
        found.append(current and current.name)
        return ""

    for each in routes:
        service.add_api_route(each, view)
    rows: Any = {each: request() for each in reversed(routes)}
    if around:
        service = AllocatorMiddleware(service, routes=rows)
    else:
        service.add_middleware(AllocatorMiddleware, routes=rows)
    asyncio.run(call(service, http(path)))
    assert found == ([route] if route else [])
