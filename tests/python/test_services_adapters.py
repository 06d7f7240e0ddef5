"""The answer to each refusal in each adapter: 413 for what can never fit, 429 for the tenant's own share, 503 else.

At the door, where a reservation finds no room, and inside, where an array does. Both are asked of ASGI, FastAPI, WSGI,
Flask and Django, whose views are functions or coroutines.
"""

import asyncio
import contextlib
import json
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
from asgi_calls import Client, answer, http

for library in ("django", "fastapi", "flask"):
    pytest.importorskip(library)

import django  # noqa: E402
import fastapi  # noqa: E402
import flask  # noqa: E402
from django.conf import settings  # noqa: E402
from django.http import HttpResponse  # noqa: E402
from django.test import override_settings  # noqa: E402
from django.urls import path  # noqa: E402

from ctxalloc import Budget, BudgetExceeded, MiB, NoRoom, problems, request  # noqa: E402
from ctxalloc.asgi import AllocatorMiddleware  # noqa: E402
from ctxalloc.wsgi import AllocatorMiddleware as WsgiMiddleware  # noqa: E402

if not settings.configured:
    settings.configure(ALLOWED_HOSTS=["*"], SECRET_KEY="-")
    django.setup()

from django.core.handlers.asgi import ASGIHandler  # noqa: E402
from django.core.handlers.wsgi import WSGIHandler  # noqa: E402

pytestmark = pytest.mark.any_numpy


class Answer(NamedTuple):
    status: int
    retry_after: str | None
    body: bytes


def work() -> bytes:
    """What every application does: it needs 10 MiB."""
    return str(np.empty(10 * MiB, np.uint8).size).encode()


def by_asgi(app: Any) -> Answer:
    class Staying(Client):
        async def receive(self) -> Any:
            if not self.messages:
                await asyncio.Event().wait()
            return await super().receive()

    async def call() -> Answer:
        client = Staying()
        await asyncio.wait_for(app(http(), client.receive, client.send), 20)
        return Answer(client.status, client.headers.get("retry-after"), client.body)

    return asyncio.run(call())


def by_wsgi(app: Any) -> Answer:
    from wsgiref.util import setup_testing_defaults

    environ: dict[str, Any] = {}
    setup_testing_defaults(environ)
    told: list[Any] = []
    content = app(environ, lambda status, headers, exc_info=None: told.append((status, headers)))
    body = b"".join(content)
    if hasattr(content, "close"):
        content.close()
    headers = {name.lower(): value for name, value in told[-1][1]}
    return Answer(int(told[-1][0][:3]), headers.get("retry-after"), body)


def asgi(options: Any) -> Answer:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await answer(send, work())

    return by_asgi(AllocatorMiddleware(app, **options))


def fastapi_in(options: Any, *, is_async: bool, is_added: bool) -> Answer:
    app: Any = fastapi.FastAPI()

    def plain() -> fastapi.Response:
        return fastapi.Response(work())

    async def awaited() -> fastapi.Response:
        return plain()

    app.get("/")(awaited if is_async else plain)
    if is_added:
        app.add_middleware(AllocatorMiddleware, **options)
    else:
        app = AllocatorMiddleware(app, **options)
    return by_asgi(app)


def wsgi(options: Any) -> Answer:
    def app(environ: Any, start_response: Any) -> list[bytes]:
        body = work()
        start_response("200 OK", [])
        return [body]

    return by_wsgi(WsgiMiddleware(app, **options))


def wsgi_stream(options: Any) -> Answer:
    def app(environ: Any, start_response: Any) -> Iterator[bytes]:
        start_response("200 OK", [])
        yield work()

    return by_wsgi(WsgiMiddleware(app, **options))


def flask_in(options: Any, *, answers_itself: bool) -> Answer:
    app = flask.Flask(__name__)
    app.get("/")(work)
    if not answers_itself:
        return by_wsgi(WsgiMiddleware(app.wsgi_app, **options))

    @app.errorhandler(MemoryError)
    def refused(error: MemoryError) -> Any:
        problem = problems.problem(error)
        if problem is None:
            raise error
        return problem.body, problem.status, problem.headers

    return by_wsgi(WsgiMiddleware(app.wsgi_app, **options))


def django_in(options: Any, *, is_async: bool, by: str) -> Answer:
    def plain(_: Any) -> HttpResponse:
        return HttpResponse(work())

    async def awaited(_: Any) -> HttpResponse:
        return plain(_)

    with override_settings(
        ROOT_URLCONF=(path("", awaited if is_async else plain),),
        MIDDLEWARE=[] if by == "wsgi, around it" else ["ctxalloc.django.AllocatorMiddleware"],
        CTXALLOC=options,
        ALLOWED_HOSTS=["*"],
        LOGGING_CONFIG=None,
    ):
        if by == "wsgi, around it":
            return by_wsgi(WsgiMiddleware(WSGIHandler(), **options))
        return by_wsgi(WSGIHandler()) if by == "wsgi" else by_asgi(ASGIHandler())


ADAPTERS: dict[str, Callable[[Any], Answer]] = {
    "asgi": asgi,
    "fastapi": lambda options: fastapi_in(options, is_async=True, is_added=True),
    "fastapi, a function": lambda options: fastapi_in(options, is_async=False, is_added=True),
    "fastapi, around it": lambda options: fastapi_in(options, is_async=True, is_added=False),
    "fastapi, a function, around it": lambda options: fastapi_in(options, is_async=False, is_added=False),
    "wsgi": wsgi,
    "wsgi, a stream": wsgi_stream,
    "flask": lambda options: flask_in(options, answers_itself=False),
    "flask, by a handler": lambda options: flask_in(options, answers_itself=True),
    "django by wsgi": lambda options: django_in(options, is_async=False, by="wsgi"),
    "django by wsgi, a coroutine": lambda options: django_in(options, is_async=True, by="wsgi"),
    "django in wsgi": lambda options: django_in(options, is_async=False, by="wsgi, around it"),
    "django by asgi": lambda options: django_in(options, is_async=True, by="asgi"),
    "django by asgi, a function": lambda options: django_in(options, is_async=False, by="asgi"),
}


class Situation(NamedTuple):
    """Why a request that needs 10 MiB is refused."""

    status: int
    service_bytes: int
    tenant_bytes: int | None
    limit_bytes: int | None
    """Of the request itself."""
    others: str | None
    """What others hold 12 MiB of: nothing, the service's budget or the tenant's."""
    guaranteed_bytes: int
    """To others, of the service's."""


SITUATIONS = {
    "there is room": Situation(200, 64 * MiB, 20 * MiB, 16 * MiB, None, 30 * MiB),
    "others have the service's": Situation(503, 20 * MiB, None, None, "service", 0),
    "others have it beside guarantees": Situation(503, 40 * MiB, None, None, "service", 20 * MiB),
    "others have the tenant's": Situation(429, 64 * MiB, 20 * MiB, None, "tenant", 0),
    "its own limit": Situation(413, 64 * MiB, 20 * MiB, 9 * MiB, None, 0),
    "the tenant's limit": Situation(413, 64 * MiB, 9 * MiB, None, None, 0),
    "the service's limit": Situation(413, 9 * MiB, 20 * MiB, None, None, 0),
    "the guarantees of others": Situation(413, 40 * MiB, None, None, None, 31 * MiB),
    "those, for a tenant": Situation(413, 40 * MiB, 20 * MiB, None, None, 31 * MiB),
}


# Which answer it is, is decided in one place for all of them.
IN_EACH = ("there is room", "others have the tenant's", "its own limit")
CASES = [(one, why) for one in ADAPTERS for why in SITUATIONS if one in ("asgi", "wsgi") or why in IN_EACH]


@pytest.mark.parametrize("reserves", [False, True], ids=["inside", "at the door"])
@pytest.mark.parametrize(("adapter", "why"), CASES)
def test_each_refusal_has_its_answer_in_each_adapter(adapter: str, why: str, *, reserves: bool) -> None:
    situation = SITUATIONS[why]
    service = Budget(situation.service_bytes, name="service")
    tenant = service if situation.tenant_bytes is None else Budget(situation.tenant_bytes, parent=service, name="own")
    promised = None
    if situation.guaranteed_bytes:
        promised = Budget(parent=service, guarantee_bytes=situation.guaranteed_bytes)
    terms: dict[str, Any] = {"limit_bytes": situation.limit_bytes}
    if reserves:
        terms |= {"reserve_bytes": 10 * MiB, "timeout": 0.01}
    if tenant is service:
        terms["budget"] = service
    reports: list[Any] = []
    options = {
        "default": request(**terms),
        "tenant": None if tenant is service else (lambda _: tenant),
        "on_end": lambda _, report: reports.append(report),
        "retry_after_seconds": 7,
    }
    with contextlib.ExitStack() as others:
        if situation.others is not None:
            holder = request(budget=tenant if situation.others == "tenant" else service, root=True)
            with holder:
                held = np.empty(12 * MiB, np.uint8)
            others.callback(held.resize, 0, refcheck=False)
            del held
        status, retry_after, body = ADAPTERS[adapter](options)

    assert status == situation.status
    assert retry_after == ("7" if status in (429, 503) else None)
    (report,) = reports
    if status == 200:
        assert (body, report.outcome) == (str(10 * MiB).encode(), "completed")
        return
    assert json.loads(body)["status"] == status
    error = report.error
    assert (report.outcome, report.status, type(error)) == ("refused", status, NoRoom if reserves else BudgetExceeded)
    assert error.never_fits == (status == 413)
    refuses = situation.limit_bytes is None and error.budget_id == service.id
    assert error.guaranteed_bytes == (situation.guaranteed_bytes if refuses else 0)
    assert ("guaranteed to others" in str(error)) == (error.guaranteed_bytes > 0 and (status == 413 or not reserves))
    del report, error, promised
    reports.clear()
    assert (service.in_use_bytes, service.waiting, tenant.in_use_bytes, tenant.waiting) == (0, 0, 0, 0)
