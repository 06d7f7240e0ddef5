"""Two middlewares, one around the other: the outer one knows a refusal of the request inside, whoever answers."""

import asyncio
import contextlib
from io import BytesIO
from typing import Any

import numpy as np
import pytest

flask = pytest.importorskip("flask")
django = pytest.importorskip("django")
pytest.importorskip("starlette")

from asgi_calls import call, http  # noqa: E402
from starlette.applications import Starlette  # noqa: E402
from starlette.requests import Request as HttpRequest  # noqa: E402
from starlette.responses import PlainTextResponse  # noqa: E402
from starlette.routing import Route  # noqa: E402

from ctxalloc import Budget, MiB, request  # noqa: E402
from ctxalloc.asgi import AllocatorMiddleware  # noqa: E402
from ctxalloc.wsgi import AllocatorMiddleware as WsgiMiddleware  # noqa: E402

pytestmark = pytest.mark.once
INNER, OUTER = request(limit_bytes=MiB), request(limit_bytes=8 * MiB)
ENVIRON = {
    "REQUEST_METHOD": "GET",
    "SERVER_NAME": "x",
    "SERVER_PORT": "80",
    "wsgi.url_scheme": "http",
    "wsgi.input": BytesIO(),
}


def work(kind: str) -> str:
    if kind == "refused":
        np.empty(2 * MiB, np.uint8)
    if kind == "failed":
        with contextlib.suppress(MemoryError):
            np.empty(2 * MiB, np.uint8)
        raise ValueError
    return kind


class Nested:
    """What both of them report, the inner one first."""

    def __init__(self, middleware: Any, app: Any, *, answers: bool) -> None:
        self.told: list[tuple[str, int | None]] = []
        inner = middleware(app, default=INNER, answers=answers, on_end=self._on_end)
        self.service = middleware(inner, default=OUTER, on_end=self._on_end)

    def _on_end(self, _: Any, report: Any) -> None:
        self.told.append((report.outcome, report.status))


def starlette_app() -> Any:
    async def view(asked: HttpRequest) -> PlainTextResponse:
        return PlainTextResponse(work(asked.path_params["kind"]))

    return Starlette(routes=[Route("/{kind}", view)])


def flask_app() -> Any:
    app = flask.Flask("nested")
    app.logger.disabled = True
    app.add_url_rule("/<kind>", "view", work)
    return app.wsgi_app


def asked_by_wsgi(service: Any, path: str) -> int:
    told: list[str] = []
    body = service({**ENVIRON, "PATH_INFO": path}, lambda status, headers, exc_info=None: told.append(status))
    b"".join(body)
    getattr(body, "close", lambda: None)()
    return int(told[-1][:3])


@pytest.mark.parametrize(("answers", "inner"), [(False, 500), (True, 413)])
def test_an_outer_asgi_middleware_knows_what_the_inner_refused(inner: int, *, answers: bool) -> None:
    nested = Nested(AllocatorMiddleware, starlette_app(), answers=answers)
    assert asyncio.run(call(nested.service, http("/refused"))).status == 413
    assert nested.told == [("refused", inner), ("refused", 413)]


@pytest.mark.parametrize(("answers", "inner"), [(False, 500), (True, 413)])
def test_an_outer_wsgi_middleware_knows_what_the_inner_refused(inner: int, *, answers: bool) -> None:
    nested = Nested(WsgiMiddleware, flask_app(), answers=answers)
    assert asked_by_wsgi(nested.service, "/refused") == 413
    assert sorted(nested.told) == sorted([("refused", inner), ("refused", 413)])


@pytest.mark.parametrize(("kind", "status", "outcome"), [("failed", 500, "failed"), ("fine", 200, "completed")])
def test_what_was_not_refused_stays_as_it_is(kind: str, status: int, outcome: str) -> None:
    """Also where a view survived a refusal before."""
    nested = Nested(WsgiMiddleware, flask_app(), answers=False)
    assert asked_by_wsgi(nested.service, f"/{kind}") == status
    assert nested.told == [(outcome, status)] * 2


NEVER_FITS = request(budget=Budget(MiB, name="small"), reserve_bytes=2 * MiB)


@pytest.mark.parametrize(
    ("path", "terms", "answers", "inner"),
    [("refused", INNER, False, 500), ("refused", INNER, True, 413), ("fine", NEVER_FITS, True, 413)],
)
def test_the_one_around_django_knows_what_djangos_refused(path: str, terms: Any, inner: int, *, answers: bool) -> None:
    from django import urls
    from django.conf import settings
    from django.http import HttpResponse
    from django.test import override_settings

    if not settings.configured:
        settings.configure(ALLOWED_HOSTS=["*"])
        django.setup()
    from django.core.handlers.wsgi import WSGIHandler

    told: list[tuple[str, int | None]] = []
    options = {"default": terms, "answers": answers, "on_end": lambda _, report: told.append(report[1:3])}
    with override_settings(
        ROOT_URLCONF=(urls.path("<kind>", lambda _, kind: HttpResponse(work(kind).encode())),),
        MIDDLEWARE=["ctxalloc.django.AllocatorMiddleware"],
        CTXALLOC=options,
        LOGGING_CONFIG=None,
    ):
        service = WsgiMiddleware(WSGIHandler(), default=OUTER, on_end=lambda _, report: told.append(report[1:3]))
        assert asked_by_wsgi(service, f"/{path}") == 413
    assert sorted(told) == [("refused", 413), ("refused", inner)]
