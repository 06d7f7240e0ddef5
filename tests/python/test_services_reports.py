"""What the middlewares report: refusals in groups, clients that left, 5xx, and what exceptions hold."""

import asyncio
from typing import Any

import numpy as np
import pytest
from asgi_calls import Scope, answer, call, http

import ctxalloc
from ctxalloc import MiB, request, wsgi
from ctxalloc.asgi import AllocatorMiddleware, Report

pytestmark = pytest.mark.any_numpy

BIG = 10 * MiB


def served(app: Any, **options: Any) -> tuple[Any, Report]:
    reports: list[Report] = []
    service = AllocatorMiddleware(app, on_end=lambda _, report: reports.append(report), **options)
    try:
        answered = asyncio.run(call(service, http()))
    except Exception as error:  # noqa: BLE001 - told by the report
        answered = error
    (report,) = reports
    return answered, report


def too_much() -> None:
    np.empty(BIG, np.uint8)


def test_a_group_whose_leaves_are_all_refusals_is_a_refusal() -> None:
    async def app(scope: Scope, receive: Any, send: Any) -> None:
        async def task() -> None:
            too_much()

        async with asyncio.TaskGroup() as group:
            group.create_task(task())
            group.create_task(task())

    answered, report = served(app, default=request(limit_bytes=MiB))
    assert (report.outcome, report.status) == ("refused", 413)
    assert answered.status == 413


def test_a_group_with_another_failure_in_it_is_no_refusal() -> None:
    async def app(scope: Scope, receive: Any, send: Any) -> None:
        try:
            too_much()
        except MemoryError as error:
            raise ExceptionGroup("two", [error, ValueError("mine")]) from None

    assert served(app, default=request(limit_bytes=MiB))[1].outcome == "failed"


@pytest.mark.parametrize("said", [True, False])
def test_what_is_raised_from_a_refusal_is_one_and_what_follows_it_is_not(*, said: bool) -> None:
    async def app(scope: Scope, receive: Any, send: Any) -> None:
        try:
            too_much()
        except MemoryError as error:
            if said:
                raise RuntimeError("no picture") from error
            raise RuntimeError("no picture")  # noqa: B904 - the case

    assert served(app, default=request(limit_bytes=MiB))[1].outcome == ("refused" if said else "failed")


def test_the_current_request_is_the_scopes() -> None:
    seen: list[bool] = []

    async def app(scope: Scope, receive: Any, send: Any) -> None:
        seen.append(ctxalloc.current_request() is scope["ctxalloc.request"])
        with request(name="inside") as inside:
            seen.append(ctxalloc.current_request() == inside)
        await answer(send)

    served(app)

    def plain(environ: Any, start_response: Any) -> list[bytes]:
        seen.append(ctxalloc.current_request() is environ["ctxalloc.request"])
        start_response("200 OK", [])
        return []

    wsgi.AllocatorMiddleware(plain)({"REQUEST_METHOD": "GET", "PATH_INFO": "/"}, lambda *_: None)
    assert seen == [True, True, True]


@pytest.mark.parametrize("limit_bytes", [2 * MiB, 100 * MiB])
def test_what_the_frames_of_an_exception_held_has_not_escaped(limit_bytes: int) -> None:
    async def app(scope: Scope, receive: Any, send: Any) -> None:
        held = np.ones(MiB, np.uint8)
        too_much()
        raise ValueError(held.size)

    _, report = served(app, default=request(limit_bytes=limit_bytes))
    assert report.outcome == ("refused" if limit_bytes < BIG else "failed")
    assert report.escaped.bytes == 0
    assert report.stats.live_bytes == 0
    assert report.error is not None


@pytest.mark.parametrize("leaves", [True, False])
def test_a_client_that_left_before_the_last_message_is_not_completed(*, leaves: bool) -> None:
    async def app(scope: Scope, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        if leaves:
            await receive()
        await send({"type": "http.response.body", "body": b""})
        await receive()

    reports: list[Report] = []
    service = AllocatorMiddleware(app, on_end=lambda _, report: reports.append(report), ends="application")

    async def gone() -> Any:
        return {"type": "http.disconnect"}

    async def sent(message: Any) -> None:
        pass

    asyncio.run(service(http(), gone, sent))
    assert [report.outcome for report in reports] == ["disconnected" if leaves else "completed"]


@pytest.mark.parametrize(("status", "outcome"), [(500, "failed"), (503, "failed"), (404, "completed")])
def test_an_answer_of_5xx_is_failed_under_asgi_and_wsgi(status: int, outcome: str) -> None:
    async def app(scope: Scope, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    assert served(app)[1].outcome == outcome
    reports: list[Report] = []

    def plain(environ: Any, start_response: Any) -> list[bytes]:
        start_response(f"{status} What", [])
        return []

    service = wsgi.AllocatorMiddleware(plain, on_end=lambda _, report: reports.append(report))
    service({"REQUEST_METHOD": "GET", "PATH_INFO": "/"}, lambda *_: None)
    assert [report.outcome for report in reports] == [outcome]
