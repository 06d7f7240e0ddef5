"""What Flask and Django answer themselves, inside of the middleware: an endpoint's arrays have not escaped.

The traceback of the exception that they made an answer of has the view's frames, hence its arrays, in a cycle.
"""

import asyncio
import gc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

flask = pytest.importorskip("flask")
django = pytest.importorskip("django")

from asgi_calls import call, http  # noqa: E402
from starlette.applications import Starlette  # noqa: E402
from starlette.requests import Request as HttpRequest  # noqa: E402
from starlette.responses import PlainTextResponse  # noqa: E402
from starlette.routing import Route  # noqa: E402

from ctxalloc import MiB, problems, request, request_metrics  # noqa: E402
from ctxalloc.asgi import AllocatorMiddleware  # noqa: E402
from ctxalloc.wsgi import AllocatorMiddleware as WsgiMiddleware  # noqa: E402

pytestmark = pytest.mark.once
ENVIRON = {"REQUEST_METHOD": "GET", "wsgi.url_scheme": "http", "SERVER_NAME": "x", "SERVER_PORT": "80"}


@pytest.fixture(autouse=True)
def _without_collections() -> Iterator[None]:
    """A collection would end by chance what the frames hold."""
    gc.disable()
    yield
    gc.enable()


def raises(kind: str) -> str:
    held = np.ones(1000)
    if kind == "refused":
        np.ones(2 * MiB)
    if kind == "failed":
        raise ValueError(held.shape)
    kept.append(held)
    return ""


kept: list[Any] = []
TERMS = request(limit_bytes=MiB)


def flask_app(*, has_handler: bool) -> Any:
    app = flask.Flask("answers")
    app.logger.disabled = True
    app.add_url_rule("/<kind>", "view", raises)
    if has_handler:

        @app.errorhandler(MemoryError)
        def _refused(error: MemoryError) -> Any:
            problem = problems.problem(error)
            assert problem is not None
            return problem.body, problem.status, problem.headers

    return app


@pytest.mark.parametrize(("kind", "has_handler"), [("refused", True), ("refused", False), ("failed", False)])
def test_what_a_view_held_when_flask_answered_has_not_escaped(kind: str, *, has_handler: bool) -> None:
    reports: list[Any] = []
    app = flask_app(has_handler=has_handler)
    service: Any = WsgiMiddleware(app.wsgi_app, default=TERMS, on_end=lambda _, report: reports.append(report))
    for _ in range(2):
        body = service({**ENVIRON, "PATH_INFO": f"/{kind}"}, lambda status, headers, exc_info=None: None)
        b"".join(body)
        getattr(body, "close", lambda: None)()
    assert [report.status for report in reports] == [413 if kind == "refused" else 500] * 2
    assert [report.escaped.bytes for report in reports] == [0, 0]


@pytest.mark.parametrize("hook", ["before_request", "after_request", "teardown_request"])
def test_a_refusal_in_a_hook_of_flasks_is_answered_once(hook: str) -> None:
    reports: list[Any] = []
    told: list[Any] = []
    app = flask_app(has_handler=False)
    app.add_url_rule("/", "fine", lambda: "fine")
    app.config["PROPAGATE_EXCEPTIONS"] = False

    def refused(response: Any = None) -> Any:
        np.ones(2 * MiB)
        return response

    getattr(app, hook)(refused)
    service: Any = WsgiMiddleware(app.wsgi_app, default=TERMS, on_end=lambda _, report: reports.append(report))
    body = service({**ENVIRON, "PATH_INFO": "/"}, lambda *given: told.append(given))
    assert b"413" in b"".join(body)
    getattr(body, "close", lambda: None)()
    assert [(given[0][:3], len(given)) for given in told] == [("413", 2)]
    assert [report.outcome for report in reports] == ["refused"]


def test_what_a_view_keeps_has_escaped() -> None:
    """Else the ones above could not fail."""
    reports: list[Any] = []
    app = flask_app(has_handler=True)
    service: Any = WsgiMiddleware(app.wsgi_app, default=TERMS, on_end=lambda _, report: reports.append(report))
    body = service({**ENVIRON, "PATH_INFO": "/kept"}, lambda status, headers, exc_info=None: None)
    b"".join(body)
    body.close()
    assert reports[0].escaped.bytes == 8000
    kept.clear()


@pytest.mark.parametrize("kind", ["refused", "failed"])
def test_what_a_view_held_when_django_answered_has_not_escaped(kind: str) -> None:
    from django.conf import settings
    from django.http import HttpResponse
    from django.test import RequestFactory, override_settings
    from django.urls import path

    if not settings.configured:
        settings.configure(ALLOWED_HOSTS=["*"])
        django.setup()
    from django.core.handlers.wsgi import WSGIHandler

    reports: list[Any] = []

    def view(_: Any, kind: str) -> HttpResponse:
        return HttpResponse(raises(kind).encode())

    options = {"default": TERMS, "on_end": lambda _, report: reports.append(report), "answers": False}
    with override_settings(
        ROOT_URLCONF=(path("<kind>", view),),
        MIDDLEWARE=["ctxalloc.django.AllocatorMiddleware"],
        CTXALLOC=options,
        LOGGING_CONFIG=None,
    ):
        handler = WSGIHandler()
        for _ in range(2):
            answer = handler(RequestFactory().get(f"/{kind}").environ, lambda status, headers, exc_info=None: None)
            answer.close()
    assert [report.status for report in reports] == [500, 500]
    assert [report.escaped.bytes for report in reports] == [0, 0]


@pytest.mark.parametrize("tells", [False, True])
def test_what_a_view_held_when_starlette_answered_has_not_escaped(*, tells: bool) -> None:
    reports: list[Any] = []
    errors: list[BaseException] = []

    async def endpoint(_: HttpRequest) -> PlainTextResponse:
        return PlainTextResponse(raises("refused"))

    async def handler(_: HttpRequest, error: Exception) -> PlainTextResponse:
        errors.append(error)  # as a reporter of errors does
        problem = problems.problem(error)
        assert problem is not None
        return PlainTextResponse("", problem.status)

    app = Starlette(routes=[Route("/", endpoint)], exception_handlers={MemoryError: handler})
    options: Any = {"on_end": lambda _, report: reports.append(report)} if tells else {}
    before = request_metrics().present
    service = AllocatorMiddleware(app, default=TERMS, **options)

    async def some() -> None:
        client = await call(service, http("/"))
        assert client.status == 413

    asyncio.run(some())
    assert [report.escaped.bytes for report in reports] == [0] * tells
    assert request_metrics().present == before
