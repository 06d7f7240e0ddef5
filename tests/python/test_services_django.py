"""Django under `ctxalloc.django`: views of both kinds, streams, refusals, by ASGI and by WSGI. No server."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import numpy as np
import pytest
from asgi_calls import Client, http
from test_services_wsgi import Server

for library in ("asgiref", "django"):
    pytest.importorskip(library)

# What is not installed was skipped above.
import django  # noqa: E402
from asgiref.sync import sync_to_async  # noqa: E402
from django.conf import settings  # noqa: E402

import ctxalloc  # noqa: E402
from ctxalloc import MiB, current, current_request, request  # noqa: E402
from ctxalloc.asgi import Report  # noqa: E402

pytestmark = pytest.mark.any_numpy

django_reports: list[Report] = []


SETTINGS: dict[str, Any] = {
    "ROOT_URLCONF": __name__,
    "ALLOWED_HOSTS": ["*"],
    "DEBUG": False,
    "LOGGING_CONFIG": None,
    "MIDDLEWARE": ["ctxalloc.django.AllocatorMiddleware", "django.middleware.common.CommonMiddleware"],
    "CTXALLOC": {
        "routes": {
            "/named/{kind}": request(),
            "/stream/{kind}": request(),
            "/own/{kind}": request(limit_bytes=MiB),
            "/pool": "pool",
        },
        "on_end": lambda _, report: django_reports.append(report),
    },
}

if not settings.configured:  # by another file of tests
    settings.configure(SECRET_KEY="test")
    django.setup()

from django.core.handlers.asgi import ASGIHandler  # noqa: E402
from django.core.handlers.wsgi import WSGIHandler  # noqa: E402
from django.http import HttpResponse, StreamingHttpResponse  # noqa: E402
from django.test import override_settings  # noqa: E402
from django.urls import path  # noqa: E402

from ctxalloc.asgi import AllocatorMiddleware as ASGIMiddleware  # noqa: E402
from ctxalloc.django import AllocatorMiddleware  # noqa: E402


@pytest.fixture(autouse=True)
def _django() -> Iterator[None]:
    with override_settings(**SETTINGS):
        yield


def view(request: Any) -> HttpResponse:
    account = request.META["ctxalloc.request"]
    assert account == current_request()
    return HttpResponse(current().name)


async def async_view(request: Any) -> HttpResponse:
    await sync_to_async(ctxalloc.set_handler)("system")
    ctxalloc.set_handler(request.META["ctxalloc.request"].handler)
    return view(request)


def stream_view(request: Any) -> StreamingHttpResponse:
    def parts() -> Iterator[str]:
        for _ in range(3):
            np.empty(1000, np.uint8)
            yield current().name + " "

    return StreamingHttpResponse(parts())


async def async_stream_view(request: Any) -> StreamingHttpResponse:
    async def parts() -> AsyncIterator[str]:
        for _ in range(3):
            np.empty(1000, np.uint8)
            await asyncio.sleep(0)
            yield current().name + " "

    return StreamingHttpResponse(parts())


def big_view(request: Any) -> HttpResponse:
    np.empty(2 * MiB, np.uint8)
    return HttpResponse("never")


async def async_big_view(request: Any) -> HttpResponse:
    np.empty(2 * MiB, np.uint8)
    return HttpResponse("never")


async def awaited(held: Any) -> HttpResponse:
    await asyncio.sleep(0)
    return HttpResponse(np.empty(2 * MiB, np.uint8).tobytes() + held.tobytes())


async def async_busy_view(request: Any) -> HttpResponse:
    """Its frame holds an array as it is refused, and so does that of what it awaits."""
    kept = np.empty(1000, np.uint8)
    return await awaited(kept)


urlpatterns = [
    path("named/sync", view),
    path("named/async", async_view),
    path("stream/sync", stream_view),
    path("stream/async", async_stream_view),
    path("own/sync", big_view),
    path("own/async", async_big_view),
    path("own/busy", async_busy_view),
    path("pool", lambda request: HttpResponse(current().name)),
]


def receiving(client: Client) -> Any:
    """The client's messages; it does not leave."""

    async def receive() -> Any:
        return client.messages.pop(0) if client.messages else await asyncio.Event().wait()

    return receive


def by_asgi(where: str) -> tuple[int, dict[str, str], bytes]:
    client = Client()
    asyncio.run(ASGIHandler()(http(where, server=("test", 80)), receiving(client), client.send))
    return client.status, {name.lower(): value for name, value in client.headers.items()}, client.body


def by_wsgi(where: str) -> tuple[int, dict[str, str], bytes]:
    server = Server()
    body = server.get(WSGIHandler(), where)
    return int(server.status[:3]), {name.lower(): value for name, value in server.headers.items()}, body


@pytest.mark.parametrize("ask", [by_asgi, by_wsgi])
@pytest.mark.parametrize("kind", ["sync", "async"])
def test_django_serves_views_of_both_kinds_in_requests(ask: Any, kind: str) -> None:
    django_reports.clear()
    status, _, body = ask(f"/named/{kind}")
    assert (status, body) == (200, b"/named/{kind}")
    assert [(report.outcome, report.route) for report in django_reports] == [("completed", "/named/{kind}")]
    assert ask("/pool")[2] == b"pool"
    assert current().name == "default_allocator"


@pytest.mark.parametrize(("ask", "kind"), [(by_asgi, "async"), (by_wsgi, "sync")])
def test_djangos_streams_are_in_the_request_to_their_end(ask: Any, kind: str) -> None:
    django_reports.clear()
    assert ask(f"/stream/{kind}")[2] == b"/stream/{kind} " * 3
    assert [(report.outcome, report.stats.total_bytes) for report in django_reports] == [("completed", 3000)]


class Greedy:
    """A middleware that needs more than there is."""

    sync_capable = True
    async_capable = False

    def __init__(self, get_response: Any) -> None:
        self.get_response = get_response

    def __call__(self, asked: Any) -> Any:
        np.empty(2 * MiB, np.uint8)
        return self.get_response(asked)


def refused_again(_: Any, error: Exception) -> None:
    np.empty(2 * MiB, np.uint8)


@pytest.mark.parametrize("ask", [by_asgi, by_wsgi])
@pytest.mark.parametrize("handler_fails", [False, True])
def test_what_another_middleware_of_django_is_refused_is_answered(
    ask: Any, monkeypatch: pytest.MonkeyPatch, *, handler_fails: bool
) -> None:
    """Django has made a 500 of it; or it has not, where it was refused that too."""
    django_reports.clear()
    if handler_fails:
        monkeypatch.setattr("django.core.handlers.exception.response_for_exception", refused_again)
    with override_settings(MIDDLEWARE=["ctxalloc.django.AllocatorMiddleware", f"{__name__}.Greedy"]):
        status, headers, _ = ask("/own/sync")
    assert (status, headers["content-type"]) == (413, "application/problem+json")
    assert [(report.outcome, report.escaped.bytes) for report in django_reports] == [("refused", 0)]
    django_reports.clear()


def test_a_refusal_that_django_answers_itself_is_replaced_around_it() -> None:
    """Django sends its 500 after its `except`, so the exception was not seen there."""
    reports: list[Report] = []

    async def answers() -> list[int]:
        given = []
        for where in ("/own/sync", "/own/async", "/own/busy", "/named/none", "/named/sync"):
            client = Client()
            await service(http(where, server=("test", 80)), receiving(client), client.send)
            given.append(client.status)
        return given

    with override_settings(MIDDLEWARE=[]):
        service = ASGIMiddleware(
            ASGIHandler(), default=request(limit_bytes=MiB), on_end=lambda _, report: reports.append(report)
        )
        assert asyncio.run(answers()) == [413, 413, 413, 404, 500]
    assert [report.outcome for report in reports] == [*["refused"] * 3, "completed", "failed"]
    assert [report.escaped.bytes for report in reports] == [0] * 5


def test_djangos_setting_with_an_unknown_option_is_refused() -> None:
    with override_settings(CTXALLOC={"route": {}}), pytest.raises(TypeError, match="CTXALLOC has \\['route'\\]"):
        AllocatorMiddleware(lambda _: HttpResponse())
