"""A refusal that a handler inside of the application answers: its outcome is `refused`, whoever made the answer."""

import asyncio
import contextlib
from io import BytesIO
from typing import Any

import numpy as np
import pytest

flask = pytest.importorskip("flask")
pytest.importorskip("starlette")

from asgi_calls import Client, http  # noqa: E402
from starlette.applications import Starlette  # noqa: E402
from starlette.requests import Request as HttpRequest  # noqa: E402
from starlette.responses import PlainTextResponse  # noqa: E402
from starlette.routing import Route  # noqa: E402

from ctxalloc import BudgetExceeded, MiB, problems, request  # noqa: E402
from ctxalloc.asgi import AllocatorMiddleware  # noqa: E402
from ctxalloc.wsgi import AllocatorMiddleware as WsgiMiddleware  # noqa: E402

pytestmark = pytest.mark.once
SMALL = request(limit_bytes=MiB)


async def large(_: HttpRequest) -> PlainTextResponse:
    np.zeros(10 * MiB, np.uint8)
    return PlainTextResponse("")


async def smaller(_: HttpRequest) -> PlainTextResponse:
    try:
        np.zeros(10 * MiB, np.uint8)
    except MemoryError as error:
        if problems.refusal(error) is None:
            raise
    return PlainTextResponse("smaller")


async def otherwise(_: HttpRequest) -> PlainTextResponse:
    with contextlib.suppress(MemoryError):
        np.zeros(10 * MiB, np.uint8)
    return PlainTextResponse("there is no such thing", 404)


def asks(_: HttpRequest, error: Exception) -> PlainTextResponse:
    problem = problems.problem(error)
    assert problem is not None
    return PlainTextResponse(problem.body, problem.status)


async def asks_nobody(_: HttpRequest, error: Exception) -> PlainTextResponse:
    return PlainTextResponse(type(error).__name__, 507)


def ended(app: Any, path: str = "/") -> Any:
    reports: list[Any] = []
    service = AllocatorMiddleware(app, default=SMALL, on_end=lambda _, report: reports.append(report))
    client = Client()

    async def one() -> None:
        with contextlib.suppress(BudgetExceeded):
            await service(http(path), client.receive, client.send)

    asyncio.run(one())
    (report,) = reports
    assert report.status == client.status
    return report


@pytest.mark.parametrize("handler", [asks, asks_nobody])
@pytest.mark.parametrize("kind", [MemoryError, Exception, BudgetExceeded])
def test_a_refusal_that_a_handler_answers_is_refused(handler: Any, kind: type[Exception]) -> None:
    report = ended(Starlette(routes=[Route("/", large)], exception_handlers={kind: handler}))
    assert (report.outcome, report.status) == ("refused", 413 if handler is asks else 507)
    assert isinstance(report.error, BudgetExceeded)
    assert report.escaped is None or report.escaped.count == 0


def test_a_refusal_that_a_view_survives_is_not_refused() -> None:
    report = ended(Starlette(routes=[Route("/", smaller)]))
    assert (report.outcome, report.status, report.error) == ("completed", 200, None)
    report = ended(Starlette(routes=[Route("/", otherwise)]))
    assert (report.outcome, report.status, report.error) == ("completed", 404, None)


@pytest.mark.parametrize("is_told", [False, True])
def test_a_refusal_that_flasks_handler_answers_is_refused(is_told: bool) -> None:
    app = flask.Flask("handled")

    @app.get("/")
    def view() -> str:
        # Out of a request comes a BudgetExceeded, as where a whole one is told on the main thread.
        with SMALL if is_told else contextlib.nullcontext():
            return str(np.zeros(10 * MiB, np.uint8).size)

    @app.errorhandler(MemoryError)
    def refused(error: MemoryError) -> Any:
        problem = problems.problem(error)
        assert problem is not None
        return problem.body, problem.status, problem.headers

    reports: list[Any] = []
    service = WsgiMiddleware(app.wsgi_app, default=SMALL, on_end=lambda _, report: reports.append(report))
    environ = {
        "REQUEST_METHOD": "GET",
        "PATH_INFO": "/",
        "SERVER_NAME": "x",
        "SERVER_PORT": "80",
        "wsgi.url_scheme": "http",
        "wsgi.input": BytesIO(),
    }
    body: Any = service(environ, lambda *_: lambda _: None)
    b"".join(body)
    body.close()
    (report,) = reports
    assert (report.outcome, report.status) == ("refused", 413)
    assert isinstance(report.error, BudgetExceeded)
