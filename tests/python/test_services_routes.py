"""Whoever reaches a view has that view's terms: each framework's own router against ours, on paths strangers choose.

Random paths, methods and prefixes; a failing one prints its seed. The naive statement: a request that reaches the view
of a route has the terms of the pattern that is written as that route.
"""

import asyncio
import os
import random
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any
from urllib.parse import unquote

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

ROUNDS = int(os.environ.get("CTXALLOC_STRESS", "1"))


# ---- the matcher, against a regular expression -------------------------------------------------------


def is_found(route: str, path: str) -> bool:
    found = (route, None, None, False, route)
    table = RouteTable(
        [], [(None, *parts_of(pattern_of(route)[1], route), found)], (None, None, None, False, None), has_methods=False
    )
    return bool(table.find({}, "method", path)[0] == route)


def naive(route: str, path: str) -> bool:
    """Every way to cut the path, one after the other."""
    texts, are_paths = parts_of(route, route)

    def follows(at: int, number: int) -> bool:
        if number == len(are_paths):
            return at == len(path)
        ends = range(at + (0 if are_paths[number] else 1), len(path) + 1)
        text = texts[number + 1]
        return any(
            (are_paths[number] or "/" not in path[at:end])
            and path.startswith(text, end)
            and follows(end + len(text), number + 1)
            for end in ends
        )

    return path.startswith(texts[0]) and follows(len(texts[0]), 0)


def test_patterns_match_as_a_naive_matcher_does() -> None:
    seed = random.randrange(1 << 32)
    chance = random.Random(seed)
    matched = 0
    for _ in range(4000 * ROUNDS):
        pieces = ["{a}", "{b:path}", "-", "/", "x", "é", ""]
        route = "/" + "".join(chance.choice(pieces) for _ in range(chance.randrange(1, 7)))
        if "{" not in route or route.startswith("//"):
            continue
        path = "/" + "".join(chance.choice("-/xé") for _ in range(chance.randrange(9)))
        if path.startswith("//"):
            continue
        expected = naive(route, path)
        matched += expected
        # Slashes in a run may count as one, so that more is found.
        assert is_found(route, path) == expected or ("//" in path and not expected), (seed, route, path)
    assert matched > 100


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


# ---- frameworks -------------------------------------------------------------------------------------

STARLETTES = [
    "/big",
    "/a/b",
    "/item/{name}",
    "/render/{name}",
    "/d/{y}-{m}-{d}",
    "/files/{rest:path}",
    "/x/{name}/end",
    "/é/{n}",
]
PIECES = [
    "/",
    "//",
    "a",
    "b",
    "big",
    "item",
    "render",
    "d",
    "files",
    "x",
    "end",
    "-",
    "1-2-3",
    "\n",
    "%0A",
    "%2f",
    ".",
    "..",
    "é",
    " ",
    "\t",
    "%",
    "?",
    ";",
    "\x85",
]
METHODS = ["GET", "HEAD", "POST", "get", "Get", "head", "pOST", "OPTIONS", "PUT"]


def random_path(chance: random.Random) -> str:
    if chance.random() < 0.5:
        path = chance.choice(STARLETTES)
        for name in ("{name}", "{y}", "{m}", "{d}", "{rest:path}", "{n}"):
            path = path.replace(name, "".join(chance.choice(PIECES) for _ in range(chance.randrange(1, 3))))
        if chance.random() < 0.5:
            at = chance.randrange(len(path) + 1)
            path = path[:at] + chance.choice(PIECES) + path[at:]
    else:
        path = "/" + "".join(chance.choice(PIECES) for _ in range(chance.randrange(6)))
    return unquote(path) if chance.random() < 0.7 else path


def terms(routes: list[str]) -> dict[str, Any]:
    one = request(name="random routes")
    return {f"GET {route}" if number % 2 else route: one for number, route in enumerate(routes)}


def path_of(found: str | None) -> str | None:
    return found and pattern_of(found)[1]


@pytest.mark.parametrize("kind", ["starlette", "fastapi around", "fastapi inside", "mounted"])
def test_whoever_reaches_a_view_of_starlette_has_its_terms(kind: str) -> None:
    seed = random.randrange(1 << 32)
    chance = random.Random(seed)
    served: list[str] = []
    found: list[str | None] = []

    def view(route: str) -> Any:
        async def answer(_: HttpRequest) -> PlainTextResponse:
            served.append(route)
            return PlainTextResponse("")

        return answer

    options: dict[str, Any] = {"on_end": lambda _, report: found.append(report.route)}
    root = "/api" if kind.startswith("fastapi") else "/sub" if kind == "mounted" else ""
    routes = [
        Route(route, view(route), methods=["GET"] if number % 2 else ["GET", "POST"])
        for number, route in enumerate(STARLETTES)
    ]
    service: Any
    if kind == "starlette":
        service = AllocatorMiddleware(Starlette(routes=routes), routes=terms(STARLETTES), **options)
    elif kind == "mounted":
        mounted = {
            route.replace(" /", f" {root}/") if " " in route else root + route: value
            for route, value in terms(STARLETTES).items()
        }
        service = AllocatorMiddleware(Starlette(routes=[Mount(root, routes=routes)]), routes=mounted, **options)
    else:
        service = fastapi.FastAPI(routes=routes)
        service.root_path = root
        if kind == "fastapi around":
            service = AllocatorMiddleware(service, routes=terms(STARLETTES), **options)
        else:
            service.add_middleware(AllocatorMiddleware, routes=terms(STARLETTES), **options)
    reached = 0
    for _ in range(1500 * ROUNDS):
        path = random_path(chance)
        path = root + path if root and chance.random() < 0.7 else path
        method = chance.choice(METHODS[:3])
        served.clear(), found.clear()
        asyncio.run(call(service, http(path, method)))
        if served:
            reached += 1
            expected = root + served[0] if kind == "mounted" else served[0]
            assert [path_of(route) for route in found] == [expected], (seed, method, path)
    assert reached > 100


@pytest.mark.parametrize("root", ["", "/api"])
def test_whoever_reaches_a_view_of_flask_has_its_terms(root: str) -> None:
    seed = random.randrange(1 << 32)
    chance = random.Random(seed)
    served: list[str] = []
    found: list[str | None] = []
    app = flask.Flask("random")
    for number, route in enumerate(STARLETTES):

        def view(route: str = route, **_: str) -> str:
            served.append(route)
            return ""

        rule = route.replace("{rest:path}", "<path:rest>").replace("{", "<").replace("}", ">")
        app.add_url_rule(rule, route, view, methods=["GET"] if number % 2 else ["GET", "POST"])
    service = WsgiMiddleware(
        app.wsgi_app, routes=terms(STARLETTES), on_end=lambda _, report: found.append(report.route)
    )
    reached = 0
    for _ in range(1500 * ROUNDS):
        path = random_path(chance)
        if chance.random() < 0.2:
            path = path.lstrip("/") if chance.random() < 0.5 else "/" * chance.randrange(4) + path
        asked = {
            "REQUEST_METHOD": chance.choice(METHODS),
            "SCRIPT_NAME": root,
            "PATH_INFO": path.encode("utf-8", "surrogateescape").decode("latin-1"),
            "QUERY_STRING": "",
            "SERVER_NAME": "test",
            "SERVER_PORT": "80",
            "SERVER_PROTOCOL": "HTTP/1.1",
            "wsgi.url_scheme": "http",
            "wsgi.input": None,
            "wsgi.errors": None,
        }
        served.clear(), found.clear()
        body: Any = service(asked, lambda status, headers, exc_info=None: lambda _: None)
        b"".join(body)
        getattr(body, "close", lambda: None)()
        if served:
            reached += 1
            assert [path_of(route) for route in found] == [served[0]], (seed, asked)
    assert reached > 100


def test_whoever_reaches_a_view_of_django_has_its_terms() -> None:
    """In a process of its own, because Django has its settings once; the routes overlap (routed_app.py)."""
    pytest.importorskip("django")
    program = Path(__file__).parent / "routed_app.py"
    paths = [sys.executable, str(program), str(random.randrange(1 << 32)), str(2000 * ROUNDS)]
    ended = subprocess.run(paths, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert int(ended.stdout) == 8, "of ten: nobody asks for /health, and /a/{name} comes before /a/b"


@pytest.mark.parametrize("path", ["//big", "///big", "big", "//item/a", "/big"])
@pytest.mark.parametrize("method", ["GET", "get", "HEAD", "hEaD"])
def test_slashes_and_a_methods_case_are_no_way_around_flasks_routes(path: str, method: str) -> None:
    found: list[str | None] = []
    app = flask.Flask("slashes")
    app.add_url_rule("/big", "big", lambda: "")
    app.add_url_rule("/item/<name>", "item", lambda name: name)
    routes = {"GET /big": request(), "GET /item/{name}": request()}
    app.wsgi_app = WsgiMiddleware(app.wsgi_app, routes=routes, on_end=lambda _, report: found.append(report.route))  # type: ignore[method-assign]
    asked = {
        "REQUEST_METHOD": method,
        "PATH_INFO": path,
        "wsgi.url_scheme": "http",
        "SERVER_NAME": "x",
        "SERVER_PORT": "80",
    }
    b"".join(app(asked, lambda status, headers, exc_info=None: lambda _: None))
    assert found == ["GET /item/{name}" if "item" in path else "GET /big"]


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
