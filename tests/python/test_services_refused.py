"""`ctxalloc.asgi.AllocatorMiddleware`: how refusals are answered, and ways around a limit that are none."""

import asyncio
import gc
import json
import logging
from typing import Any

import numpy as np
import pytest
from asgi_apps import BIG, Reports, makes, named, tells
from asgi_calls import Client, Scope, answer, call, http, websocket

import ctxalloc
from ctxalloc import Budget, BudgetExceeded, MiB, current, request
from ctxalloc.asgi import AllocatorMiddleware, Report

pytestmark = pytest.mark.any_numpy

# ---- refusals ---------------------------------------------------------------------------------------


def refused(app: Any, scope: Scope | None = None, **options: Any) -> tuple[Client, Report]:
    reports = Reports()
    client = asyncio.run(call(AllocatorMiddleware(app, on_end=reports, **options), scope or http("/big")))
    return client, reports.only


def test_never_fits_is_413_a_tenants_share_429_a_busy_service_503() -> None:
    service = Budget(64 * MiB, name="service")
    tenant = Budget(16 * MiB, parent=service, name="tenant")

    client, report = refused(makes(), default=request(limit_bytes=MiB))
    assert (client.status, report.outcome, report.status) == (413, "refused", 413)
    assert client.headers["content-type"] == "application/problem+json"
    assert json.loads(client.body)["status"] == 413
    assert "retry-after" not in client.headers
    assert isinstance(report.error, BudgetExceeded)

    client, _ = refused(makes(20 * MiB), tenant=lambda _: tenant)
    assert client.status == 413, "more than the tenant may ever have"

    with request(budget=tenant):
        theirs = np.empty(10 * MiB, np.uint8)
    client, _ = refused(makes(), tenant=lambda _: tenant, retry_after_seconds=7)
    assert (client.status, client.headers["retry-after"]) == (429, "7")
    del theirs

    with request(budget=service):
        others = np.empty(60 * MiB, np.uint8)
    client, _ = refused(makes(), tenant=lambda _: tenant)
    assert (client.status, client.headers["retry-after"]) == (503, "1")
    client, _ = refused(makes(), default=request(budget=service))
    assert client.status == 503
    assert b"service" not in client.body.replace(b"this service", b"")
    del others
    assert refused(makes(), tenant=lambda _: tenant)[0].status == 200


def test_the_sum_of_what_a_request_needs_is_413_by_its_own_limit() -> None:
    async def app(scope: Scope, receive: Any, send: Any) -> None:
        kept = [np.empty(MiB // 2, np.uint8) for _ in range(5)]
        await answer(send, str(len(kept)).encode())

    assert refused(app, default=request(limit_bytes=MiB))[0].status == 413


def test_terms_with_a_budget_and_a_tenant_are_refused() -> None:
    app = AllocatorMiddleware(makes(), default=request(budget=Budget()), tenant=lambda _: Budget())
    with pytest.raises(ValueError, match="its terms name a budget and so does `tenant`"):
        asyncio.run(call(app, http()))


def test_after_the_headers_a_refusal_passes_as_budget_exceeded() -> None:
    reports = Reports()

    async def app(scope: Scope, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        np.empty(BIG, np.uint8)

    for options in ({}, {"answers": False}):
        with pytest.raises(BudgetExceeded, match="'/big' has no room"):
            asyncio.run(
                call(
                    AllocatorMiddleware(
                        app, routes={"/big": request(limit_bytes=MiB)}, on_end=reports, answers=bool(options) or True
                    ),
                    http("/big"),
                )
            )
    assert [report.outcome for report in reports.all] == ["refused", "refused"]


def test_without_answers_a_refusal_passes() -> None:
    app = AllocatorMiddleware(makes(), default=request(limit_bytes=MiB), answers=False)
    with pytest.raises(BudgetExceeded):
        asyncio.run(call(app, http()))


def test_another_memory_error_is_no_refusal() -> None:
    async def app(scope: Scope, receive: Any, send: Any) -> None:
        raise MemoryError("mine")

    with pytest.raises(MemoryError, match="mine"):
        asyncio.run(call(AllocatorMiddleware(app, default=request(limit_bytes=MiB)), http()))


def test_a_refusal_in_a_group_of_one_is_a_refusal() -> None:
    async def app(scope: Scope, receive: Any, send: Any) -> None:
        async def task() -> None:
            np.empty(BIG, np.uint8)

        async with asyncio.TaskGroup() as group:
            group.create_task(task())

    assert refused(app, default=request(limit_bytes=MiB))[0].status == 413


def test_a_refused_requests_arrays_are_gone_when_it_is_answered() -> None:
    tenant = Budget(16 * MiB, name="tenant")

    async def app(scope: Scope, receive: Any, send: Any) -> None:
        held = np.empty(10 * MiB, np.uint8)
        held = np.concatenate([held, held])
        await answer(send)

    gc.collect()
    gc.disable()
    try:
        service = AllocatorMiddleware(app, tenant=lambda _: tenant)
        assert asyncio.run(call(service, http())).status == 413
        assert tenant.in_use_bytes == 0
    finally:
        gc.enable()


# ---- WebSockets -------------------------------------------------------------------------------------


def test_a_websocket_is_one_request_until_it_closes() -> None:
    reports = Reports()

    async def app(scope: Scope, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "websocket.accept"})
        np.empty(1000, np.uint8)
        await send({"type": "websocket.send", "text": current().name})
        await send({"type": "websocket.close", "code": 1000})

    client = asyncio.run(call(AllocatorMiddleware(app, on_end=reports), websocket(), [{"type": "websocket.connect"}]))
    assert [message["type"] for message in client.sent] == ["websocket.accept", "websocket.send", "websocket.close"]
    assert (reports.only.outcome, reports.only.status, reports.only.stats.total_bytes) == ("completed", 101, 1000)


@pytest.mark.parametrize("accepts", [False, True])
def test_a_refusal_closes_a_websocket(accepts: bool) -> None:
    async def app(scope: Scope, receive: Any, send: Any) -> None:
        if accepts:
            await send({"type": "websocket.accept"})
        np.empty(BIG, np.uint8)

    client, report = refused(app, websocket(), default=request(limit_bytes=MiB))
    assert client.sent[-1] == {"type": "websocket.close", "code": 1009, "reason": "out of memory"}
    assert (report.outcome, report.status) == ("refused", 101 if accepts else 403)
    denial = {"extensions": {"websocket.http.response": {}}}
    client, report = refused(app, websocket(**denial), default=request(limit_bytes=MiB))
    kinds = [message["type"] for message in client.sent]
    if accepts:
        assert kinds == ["websocket.accept", "websocket.close"]
    else:
        assert kinds == ["websocket.http.response.start", "websocket.http.response.body"]
        assert client.sent[0]["status"] == report.status == 413


def test_a_websocket_that_is_closed_before_it_was_accepted_is_403() -> None:
    """So servers answer, as ASGI has it."""
    reports = Reports()

    async def app(scope: Scope, receive: Any, send: Any) -> None:
        await send({"type": "websocket.close", "code": 1000})

    asyncio.run(call(AllocatorMiddleware(app, on_end=reports), websocket(), [{"type": "websocket.connect"}]))
    assert (reports.only.outcome, reports.only.status) == ("completed", 403)


def test_options_are_keywords() -> None:
    with pytest.raises(TypeError):
        AllocatorMiddleware(tells, {})  # type: ignore[misc]


def test_logging_is_quiet_where_nothing_is_wrong(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "ctxalloc"):
        asyncio.run(call(AllocatorMiddleware(makes(10)), http()))
    assert not caplog.records


# ---- ways around a limit ----------------------------------------------------------------------------


def routes_found(routes: dict[str, Any], *asked: tuple[str, str]) -> list[str | None]:
    reports = Reports()
    service = AllocatorMiddleware(makes(10), routes=routes, on_end=reports)
    for method, path in asked:
        asyncio.run(call(service, http(path, method)))
    return [report.route for report in reports.all]


def test_a_route_with_the_method_comes_before_one_without() -> None:
    routes = {"/a/{name}": request(), "POST /a/{name}": request(), "/b": request(), "POST /b": request()}
    asked = [("POST", "/a/x"), ("GET", "/a/x"), ("POST", "/b"), ("GET", "/b")]
    assert routes_found(routes, *asked) == ["POST /a/{name}", "/a/{name}", "POST /b", "/b"]


def test_a_line_break_in_a_path_is_no_way_around_a_route() -> None:
    """Starlette's patterns end with `$`, which stands before a last line break too: `/a%0A` is served as `/a`."""
    routes = {"/a": request(), "GET /b": request(), "/c/{name}": request(), "/files/{rest:path}": request()}
    asked = [("GET", f"{path}\n") for path in ("/a", "/b", "/c/x", "/files/a/b")]
    assert routes_found(routes, *asked) == list(routes)
    assert routes_found(routes, ("GET", "/files/a\nb/c")) == ["/files/{rest:path}"]


def test_head_is_served_as_get_is() -> None:
    """Starlette, Flask and Django answer HEAD by what they have for GET."""
    routes = {"GET /a": request(), "GET /c/{name}": request(), "HEAD /d": request(), "GET /d": request()}
    asked = [("HEAD", "/a"), ("HEAD", "/c/x"), ("HEAD", "/d"), ("POST", "/a")]
    assert routes_found(routes, *asked) == ["GET /a", "GET /c/{name}", "HEAD /d", None]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"retry_after_seconds": -1}, ValueError, "retry_after_seconds=-1"),
        ({"retry_after_seconds": 0.5}, TypeError, "retry_after_seconds=0.5"),
        ({"retry_after_seconds": True}, TypeError, "retry_after_seconds=True"),
        ({"on_end": named}, TypeError, "on_end=.*async"),
        ({"on_end": 3}, TypeError, "on_end=3"),
        ({"tenant": named}, TypeError, "tenant=.*async"),
        ({"tenant": Budget(name="b")}, TypeError, "tenant="),
        ({"default": named}, TypeError, "default: .*async"),
        ({"routes": {"/a": named}}, TypeError, "/a: .*async"),
    ],
)
def test_an_option_that_cannot_be_is_refused(options: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        AllocatorMiddleware(tells, **options)


def test_what_is_no_choice_or_no_budget_fails_the_request_and_says_so() -> None:
    for options in ({"default": lambda _: 3}, {"tenant": lambda _: "red"}):
        with pytest.raises(TypeError, match=r"3 is no choice|'red' is no budget"):
            asyncio.run(call(AllocatorMiddleware(tells, **options), http()))
        assert ctxalloc._serving.serving() is None


def test_a_body_that_the_server_takes_from_a_file_is_whole() -> None:
    reports = Reports()

    async def app(scope: Scope, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.zerocopysend", "file": 1, "more_body": True})
        assert not reports.all
        await send({"type": "http.response.zerocopysend", "file": 1})
        assert reports.only.outcome == "completed"

    asyncio.run(call(AllocatorMiddleware(app, on_end=reports), http()))
    assert reports.only.outcome == "completed"
