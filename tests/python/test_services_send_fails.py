"""`send` raises OSError where the client has gone (ASGI 2.4): the report says so, whichever message it was.

What the application itself raises is another thing, also where it is an OSError.
"""

import asyncio
import contextlib
import gc
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from asgi_apps import Reports
from asgi_calls import Client, Message, Scope, http, websocket

import ctxalloc
from ctxalloc import request
from ctxalloc.asgi import AllocatorMiddleware

pytestmark = pytest.mark.any_numpy

START: Message = {"type": "http.response.start", "status": 200, "headers": []}
PART: Message = {"type": "http.response.body", "body": b"x", "more_body": True}
LAST: Message = {"type": "http.response.body", "body": b"y"}


class GoneError(ConnectionResetError):
    """What this server raises."""


async def raises(message: Message) -> None:
    await asyncio.sleep(0)
    raise GoneError


def raises_at_once(message: Message) -> Any:
    raise GoneError


def fails(message: Message) -> "asyncio.Future[None]":
    future = asyncio.get_running_loop().create_future()
    future.set_exception(GoneError())
    return future


async def is_sent(message: Message) -> None: ...


SERVERS: dict[str, Callable[[Message], Any]] = {"coroutine": raises, "future": fails, "at once": raises_at_once}


async def report_of(
    app: Any, failing: Callable[[Message], Any], at: int | None, scope: Scope | None = None, **options: Any
) -> ctxalloc.asgi.Report:
    """How a call ended whose ``send`` fails from one message on."""
    reports, count = Reports(), 0

    def send(message: Message) -> Any:
        nonlocal count
        count += 1
        return failing(message) if at is not None and count >= at else is_sent(message)

    service = AllocatorMiddleware(app, on_end=reports, **options)
    with contextlib.suppress(Exception):
        await service(http() if scope is None else scope, Client().receive, send)
    return reports.only


def sends(*messages: Message) -> Any:
    async def app(scope: Scope, receive: Any, send: Any) -> None:
        for message in messages:
            await send(message)

    return app


ANSWERS = {
    "200": (http(), [START, PART, PART, LAST]),
    "404": (http(), [{**START, "status": 404}, PART, LAST]),
    "a message of another type": (http(), [type("Message", (dict,), {})(START), type("M", (dict,), {})(PART), LAST]),
    "an early hint": (http(), [{"type": "http.response.debug", "info": {}}, START, LAST]),
    "a file": (http(), [START, {"type": "http.response.pathsend", "path": "/"}]),
    "pieces of a file": (
        http(),
        [START, {"type": "http.response.zerocopysend", "file": 0, "more_body": True}, LAST],
    ),
    "a WebSocket": (
        websocket(),
        [{"type": "websocket.accept"}, {"type": "websocket.send", "text": ""}, {"type": "websocket.close"}],
    ),
    "a denied WebSocket": (
        websocket(),
        [
            {"type": "websocket.http.response.start", "status": 403, "headers": []},
            {"type": "websocket.http.response.body", "body": b""},
        ],
    ),
}
FAILURES = [(answer, at) for answer, (_, messages) in ANSWERS.items() for at in range(1, len(messages) + 1)]


@pytest.mark.parametrize("server", SERVERS)
@pytest.mark.parametrize(("answer", "at"), FAILURES)
def test_a_client_that_has_gone_at_any_message_is_disconnected(server: str, answer: str, at: int) -> None:
    scope, messages = ANSWERS[answer]
    report = asyncio.run(report_of(sends(*messages), SERVERS[server], at, scope))
    assert (report.outcome, type(report.error)) == ("disconnected", GoneError)


def raising(after: int, error: BaseException) -> Any:
    async def app(scope: Scope, receive: Any, send: Any) -> None:
        for message in (START, PART, PART)[:after]:
            await send(message)
        raise error

    return app


@pytest.mark.parametrize("after", range(4))
@pytest.mark.parametrize("error", [OSError("mine"), TimeoutError(), ConnectionResetError(), KeyError("mine")], ids=repr)
def test_an_error_of_the_applications_own_is_a_failure(error: BaseException, after: int) -> None:
    report = asyncio.run(report_of(raising(after, error), is_sent, None))
    assert (report.outcome, report.error) == ("failed", error)


async def translated(scope: Scope, receive: Any, send: Any) -> None:
    try:
        await sends(START, PART, LAST)(scope, receive, send)
    except OSError:
        raise RuntimeError("ClientDisconnect, as Starlette calls it") from None


async def grouped(scope: Scope, receive: Any, send: Any) -> None:
    async with asyncio.TaskGroup() as group:
        await group.create_task(sends(START, PART, LAST)(scope, receive, send))


async def swallowed(scope: Scope, receive: Any, send: Any) -> None:
    for message in (START, PART, LAST):
        with contextlib.suppress(OSError):
            await send(message)


async def left_alone(scope: Scope, receive: Any, send: Any) -> None:
    with contextlib.suppress(OSError):
        await sends(START, PART, LAST)(scope, receive, send)


async def watched(scope: Scope, receive: Any, send: Any) -> None:
    async with asyncio.timeout(20):
        await asyncio.wait_for(sends(START, PART, LAST)(scope, receive, send), 20)


@pytest.mark.parametrize("app", [translated, grouped, swallowed, left_alone, watched])
@pytest.mark.parametrize("at", [1, 2, 3])
def test_whatever_becomes_of_the_error_it_is_disconnected(app: Any, at: int) -> None:
    report = asyncio.run(report_of(app, raises, at))
    assert report.outcome == "disconnected"


def test_an_application_that_gives_up_sending_has_failed() -> None:
    """`TimeoutError` is an OSError, and nothing of the server's."""

    async def hangs(message: Message) -> None:
        await asyncio.Event().wait()

    async def app(scope: Scope, receive: Any, send: Any) -> None:
        async with asyncio.timeout(0.001):
            await send(START)

    report = asyncio.run(report_of(app, hangs, 1))
    assert (report.outcome, type(report.error)) == ("failed", TimeoutError)


def test_another_error_of_send_is_a_failure() -> None:
    async def is_wrong(message: Message) -> None:
        raise RuntimeError("Unexpected ASGI message")

    report = asyncio.run(report_of(sends(START, PART), is_wrong, 2))
    assert (report.outcome, type(report.error)) == ("failed", RuntimeError)


def test_what_send_says_after_the_last_message_changes_nothing() -> None:
    for ends in ("response", "application"):
        report = asyncio.run(report_of(sends(START, LAST, PART), raises, 3, ends=ends))
        assert report.outcome == ("completed" if ends == "response" else "failed")


def test_a_refusal_stays_a_refusal_where_its_answer_cannot_be_sent() -> None:
    async def app(scope: Scope, receive: Any, send: Any) -> None:
        np.empty(5000, np.uint8)

    report = asyncio.run(report_of(app, raises, 1, default=request(limit_bytes=1000)))
    assert report.outcome == "refused"


def test_two_middlewares_of_ours_both_say_so() -> None:
    inner = Reports()
    report = asyncio.run(report_of(AllocatorMiddleware(sends(START, PART, LAST), on_end=inner), raises, 2))
    assert (report.outcome, inner.only.outcome) == ("disconnected", "disconnected")


def test_where_nobody_asks_for_the_end_a_part_is_sent_as_it_is() -> None:
    sent: list[Any] = []

    def send(message: Message) -> Any:
        sent.append(is_sent(message))
        return sent[-1]

    async def app(scope: Scope, receive: Any, send: Any) -> None:
        for message in (START, PART):
            given = send(message)
            assert given is sent[-1]
            await given
        await send(LAST)

    asyncio.run(AllocatorMiddleware(app)(http(), Client().receive, send))
    assert len(sent) == 3


def test_a_part_that_was_not_sent_holds_nothing() -> None:
    class Held: ...

    held = [Held()]
    gone = weakref.ref(held[0])

    async def app(scope: Scope, receive: Any, send: Any) -> None:
        mine = held.pop()
        with contextlib.suppress(OSError):
            await send(START)
        del mine
        gc.collect()
        assert gone() is None

    assert asyncio.run(report_of(app, raises, 1)).outcome == "disconnected"
