"""Whoever reaches a view has that view's terms, on paths strangers choose: random tables of routes that may overlap.

Starlette takes the route that was added first, Django the pattern that stands first, Flask the one that weighs most,
with hosts, languages, mounts, methods and the paths of an application's root. The naive statement: a request that
reaches the view of a route has the terms of the row that is written as this route. A failing one prints its seed.
"""

import asyncio
import os
import random
from collections.abc import Callable
from typing import Any

import pytest

flask = pytest.importorskip("flask")
fastapi = pytest.importorskip("fastapi")
django = pytest.importorskip("django")

from asgi_calls import call, http  # noqa: E402
from starlette.applications import Starlette  # noqa: E402
from starlette.requests import Request as HttpRequest  # noqa: E402
from starlette.responses import PlainTextResponse  # noqa: E402
from starlette.routing import Host, Mount, Route, Router  # noqa: E402

from ctxalloc import request  # noqa: E402
from ctxalloc.asgi import AllocatorMiddleware  # noqa: E402
from ctxalloc.wsgi import AllocatorMiddleware as WsgiMiddleware  # noqa: E402

pytestmark = pytest.mark.once

ROUNDS = int(os.environ.get("CTXALLOC_STRESS", "1"))
TERMS = request(name="random routes")
"""One name: those of a process that are counted apart are bounded."""
TABLES = 12
REQUESTS = 60

ROUTES = [
    "/a",
    "/a/{name}",
    "/a/b",
    "/a/{number:int}",
    "/{any}/b",
    "/{any}",
    "/{rest:path}",
    "/a/{rest:path}",
    "/a/{x}-{y}",
    "/a/{x}/b",
    "/a/{rest:path}/b",
    "/{any}/{number:int}",
    "/a/",
]
PIECES = [
    "/",
    "a",
    "b",
    "7",
    "-",
    "1-2",
    "//",
    "\n",
    "é",
    "%",
    "%0A",
    "%2f",
    "B",
    ";x",
    ".",
    "..",
    "?",
    " ",
    "\t",
    "\x85",
]


def table(chance: random.Random) -> list[str]:
    return chance.sample(ROUTES, chance.randrange(2, len(ROUTES)))


def path_in(chance: random.Random) -> str:
    if chance.random() < 0.3:
        return chance.choice(["/a", "/a/b", "/a/7", "/a/x", "/7/b", "/b", "/a/1-2", "/a/7/b", "/x/7", "/a/", "/a/b/"])
    pieces = [*PIECES, "x" * 600] if chance.random() < 0.3 else PIECES
    return "/" + "".join(chance.choice(pieces) for _ in range(chance.randrange(6)))


def is_read_only(route: str) -> bool:
    return ROUTES.index(route) % 2 == 1


def methods_of(route: str) -> list[str]:
    return ["GET"] if is_read_only(route) else ["GET", "POST"]


def rows_of(routes: list[str], chance: random.Random, before: str = "") -> dict[str, Any]:
    """A row for each route, in another order, some with the method."""
    rows = chance.sample(routes, len(routes))
    has_method = [is_read_only(route) and chance.random() < 0.7 for route in rows]
    return {"GET " * only + before + route: TERMS for only, route in zip(has_method, rows, strict=True)}


def bare(found: str | None) -> str | None:
    return found and found.removeprefix("GET ")


class Seen:
    """What a service served and what its middleware found, of one request."""

    def __init__(self) -> None:
        self.served: list[str] = []
        self.found: list[str | None] = []
        self.reached = 0

    def on_end(self, _: Any, report: Any) -> None:
        self.found.append(bare(report.route))

    def begin(self) -> None:
        self.served.clear(), self.found.clear()

    def check(self, *told: object) -> None:
        if self.served:
            self.reached += 1
            assert self.found == self.served, told

    def view(self, route: str) -> Any:
        async def view(_: HttpRequest) -> PlainTextResponse:
            self.served.append(route)
            return PlainTextResponse("")

        return view


def plain(routes: list[Any], _: random.Random) -> tuple[Any, str]:
    return Starlette(routes=routes), ""


def mounted(routes: list[Any], _: random.Random) -> tuple[Any, str]:
    return Starlette(routes=[Mount("/x", routes=[Mount("/{tenant}", app=Starlette(routes=routes))])]), "/x/{tenant}"


def hosted(routes: list[Any], _: random.Random) -> tuple[Any, str]:
    return Starlette(routes=[Host("other.org", app=Router([])), Host("{sub}.test", app=Router(routes))]), ""


def included(routes: list[Any], _: random.Random) -> tuple[Any, str]:
    router = fastapi.APIRouter(routes=routes)
    app = fastapi.FastAPI(openapi_url=None)
    app.include_router(router, prefix="/v1")
    return app, "/v1"


def with_a_root(routes: list[Any], _: random.Random) -> tuple[Any, str]:
    outer = fastapi.FastAPI(openapi_url=None)
    outer.root_path = "/api"
    outer.mount("/sub", Starlette(routes=routes))
    return outer, "/sub"


@pytest.mark.parametrize("make", [plain, mounted, hosted, included, with_a_root])
@pytest.mark.parametrize("inside", [False, True])
def test_whoever_reaches_overlapping_routes_of_starlette(
    make: Callable[[list[Any], random.Random], tuple[Any, str]], *, inside: bool
) -> None:
    seed = random.randrange(1 << 32)
    chance = random.Random(seed)
    seen = Seen()
    for _ in range(TABLES * ROUNDS):
        routes = table(chance)
        own = before_of(make)
        app, before = make([Route(one, seen.view(own + one), methods=methods_of(one)) for one in routes], chance)
        rows = rows_of(routes, chance, before)
        service = app if inside else AllocatorMiddleware(app, routes=rows, on_end=seen.on_end)
        if inside:
            app.add_middleware(AllocatorMiddleware, routes=rows, on_end=seen.on_end)

        async def some(service: Any = service, before: str = before, routes: Any = (routes, list(rows))) -> None:
            for _ in range(REQUESTS):
                path = before.replace("{tenant}", "a") + path_in(chance)
                method = chance.choice(["GET", "HEAD", "POST"])
                root = chance.choice(["", "", "/api"])
                scope = http(chance.choice([path, path, root + path]), method)
                scope |= {"root_path": root, "headers": [(b"host", b"A.test")]}
                seen.begin()
                await call(service, scope)
                seen.check(seed, method, scope["path"], root, routes)

        asyncio.run(some())
    assert seen.reached > REQUESTS


def before_of(make: Any) -> str:
    return {mounted: "/x/{tenant}", included: "/v1", with_a_root: "/sub"}.get(make, "")


def test_whoever_reaches_overlapping_routes_of_flask() -> None:
    seed = random.randrange(1 << 32)
    chance = random.Random(seed)
    seen = Seen()
    for number in range(TABLES * ROUNDS):
        routes = table(chance)
        before = chance.choice(["", "/v1"])
        has_hosts = chance.random() < 0.5
        app = flask.Flask("random", subdomain_matching=has_hosts, static_folder=None)
        app.config["SERVER_NAME"] = "test" if has_hosts else None
        blueprint = flask.Blueprint("all", __name__, url_prefix=before or None, subdomain="a" if has_hosts else None)
        for place, route in enumerate(routes):

            def view(route: str = before + route, **_: Any) -> str:
                seen.served.append(route)
                return ""

            blueprint.add_url_rule(as_flasks(route), f"view{place}", view, methods=methods_of(route))
        app.register_blueprint(blueprint)
        rows = rows_of(routes, chance, before)
        service: Any = WsgiMiddleware(app.wsgi_app, routes=rows, on_end=seen.on_end)
        for _ in range(REQUESTS):
            path = "/" * chance.choice([0, 0, 1, 2]) + before + path_in(chance)
            asked = {
                "REQUEST_METHOD": chance.choice(["GET", "HEAD", "POST", "get", "hEAD", "pOST", "OPTIONS"]),
                "SCRIPT_NAME": chance.choice(["", "/api"]),
                "PATH_INFO": path.encode().decode("latin-1").lstrip("/" if chance.random() < 0.1 else ""),
                "HTTP_HOST": chance.choice(["a.test", "A.test:80", "test"]),
                "SERVER_NAME": "test",
                "SERVER_PORT": "80",
                "wsgi.url_scheme": "http",
            }
            seen.begin()
            body = service(asked, lambda status, headers, exc_info=None: lambda _: None)
            b"".join(body)
            getattr(body, "close", lambda: None)()
            seen.check(seed, number, asked, routes, list(rows))
    assert seen.reached > REQUESTS


def as_flasks(route: str) -> str:
    for kind in ("int", "path"):
        for name in ("number", "rest"):
            route = route.replace(f"{{{name}:{kind}}}", f"<{kind}:{name}>")
    return route.replace("{", "<").replace("}", ">")


@pytest.mark.parametrize("languages", [False, True])
def test_whoever_reaches_overlapping_routes_of_django(*, languages: bool) -> None:
    from django.conf import settings
    from django.conf.urls.i18n import i18n_patterns
    from django.http import HttpResponse
    from django.test import RequestFactory, override_settings
    from django.urls import include, path, re_path

    if not settings.configured:
        settings.configure(ALLOWED_HOSTS=["*"], LANGUAGES=[("en", "English"), ("de", "German")])
        django.setup()
    from django.core.handlers.wsgi import WSGIHandler

    seed = random.randrange(1 << 32)
    chance = random.Random(seed)
    seen = Seen()
    middleware = ["django.middleware.locale.LocaleMiddleware", "django.middleware.common.CommonMiddleware"]
    for _ in range(TABLES * ROUNDS):
        routes = table(chance)
        before = chance.choice(["/v1", ""])

        def view(route: str) -> Any:
            def view(_: Any, **__: Any) -> HttpResponse:
                seen.served.append(route)
                return HttpResponse(b"")

            return view

        patterns: list[Any] = [path(as_flasks(route)[1:], view(before + route)) for route in routes]
        patterns.append(re_path(r"^regex/(?P<x>[ab]+)$", view("/regex")))
        patterns = [path("v1/", include(patterns))] if before else patterns
        prefixes = [""]
        if languages:
            has_default = chance.random() < 0.5
            patterns = i18n_patterns(*patterns, prefix_default_language=has_default)
            prefixes = ["/de", "/en" if has_default else ""]
        rows = [row.replace("/", f"{prefix}/", 1) for prefix in prefixes for row in rows_of(routes, chance, before)]
        methods = ["GET", "HEAD", "get"]
        if chance.random() < 0.5:
            methods, rows = ["POST", "pOST", "OPTIONS", "PUT"], [row.removeprefix("GET ") for row in rows]
        options = {"routes": dict.fromkeys(chance.sample(rows, len(rows)), TERMS), "on_end": seen.on_end}
        with override_settings(
            ROOT_URLCONF=tuple(patterns),
            MIDDLEWARE=["ctxalloc.django.AllocatorMiddleware", *middleware],
            CTXALLOC=options,
            ALLOWED_HOSTS=["*"],
            LANGUAGES=[("en", "English"), ("de", "German")],
            USE_I18N=True,
            LANGUAGE_CODE="en",
        ):
            handler = WSGIHandler()
            for _ in range(REQUESTS):
                asked = chance.choice(["", "/de", "/en"] if languages else [""]) + before + path_in(chance)
                asked = "/" * chance.choice([0, 0, 0, 1, 2]) + asked
                environ = RequestFactory().generic(chance.choice(methods), "/").environ
                environ["SCRIPT_NAME"] = chance.choice(["", "", "/api"])
                environ["PATH_INFO"] = asked.encode().decode("latin-1")
                seen.begin()
                handler(environ, lambda status, headers, exc_info=None: None).close()
                seen.found = [found and found.removeprefix("/de").removeprefix("/en") for found in seen.found]
                if seen.served != ["/regex"]:
                    seen.check(seed, asked, routes, list(options["routes"]))
    assert seen.reached > REQUESTS
