"""What `ctxalloc.asgi` does in Rust for each request: the route of a path, and the last message of an answer."""

import asyncio
import re
import types
from collections.abc import Awaitable, Callable, Generator
from typing import Any

import numpy as np
import pytest
from asgi_calls import Client, Message, Scope, answer, http
from hypothesis import example, given, settings
from hypothesis import strategies as st

import ctxalloc
from ctxalloc import current, request
from ctxalloc._serving import Service
from ctxalloc.asgi import AllocatorMiddleware, Report

# ---- the route of a path ----------------------------------------------------------------------------

PARTS = st.sampled_from(["/", "/", "a", "b", "aa", "-", ".", "ä", "{x}", "{x}", "{y:path}"])
PATHS = st.lists(st.sampled_from(["/", "/", "a", "b", "-", ".", "ä", "\n"]), max_size=9).map("".join)


def expression(route: str) -> str:
    """A pattern as docs/services.md words it: a parameter is a segment or the start of one, a path is anything."""
    pieces = re.split(r"(\{\w+(?::path)?\})", route)
    kinds = {"{x}": "[^/]+", "{y:path}": ".*"}
    return "".join(kinds.get(piece, re.escape(piece)) for piece in pieces)


@settings(max_examples=300, deadline=None)
@given(parts=st.lists(PARTS, max_size=7), path=PATHS)
@example(parts=["{x}", "a", "{x}"], path="aaa")
@example(parts=["{y:path}", "/", "a"], path="a/a/a")
@example(parts=["{y:path}", "aa", "{x}"], path="aaaa")
@example(parts=["{x}"], path="")
@example(parts=["{x}", "/", "{x}"], path="a//a")
def test_a_path_is_found_as_a_regular_expression_finds_it(parts: list[str], path: str) -> None:
    route = "/" + "".join(parts)
    # Slashes at the beginning count as one, in patterns and in paths.
    pattern = re.compile(expression("/" + route.lstrip("/")), re.DOTALL)
    service = Service(
        routes={route: request()},
        default=None,
        unmatched="default",
        tenant=None,
        on_end=None,
        retry_after_seconds=1,
    )
    path = f"/{path}"
    found, *_ = service.routes.find({}, "method", path)
    path = "/" + path.lstrip("/")
    without_parameters = "{" not in route  # whose values cannot end with a line break

    def matches(path: str) -> bool:
        bare = pattern.fullmatch(path.removesuffix("\n"))
        return bool(bare or (not without_parameters and pattern.fullmatch(path)))

    # Where a path matches nothing, slashes within it count as one too.
    expected = matches(path) or matches(re.sub("/+", "/", path))
    assert found == (route if expected else None)


def test_a_path_that_is_no_text_of_utf8_is_some_segment() -> None:
    routes: dict[str, Any] = {"/a/{name}": request()}
    service = Service(
        routes=routes,
        default=None,
        unmatched="default",
        tenant=None,
        on_end=None,
        retry_after_seconds=1,
    )
    assert service.routes.find({}, "method", "/a/\udcff")[0] == "/a/{name}"
    assert service.routes.find({}, "method", "/b/\udcff")[0] is None


# ---- the last message -------------------------------------------------------------------------------


class Sent:
    """What a server's `send` may return that is no coroutine."""

    def __init__(self, sending: Awaitable[None]) -> None:
        self._sending = sending

    def __await__(self) -> Generator[Any, None, None]:
        return self._sending.__await__()


@types.coroutine
def by_a_generator(sending: Awaitable[None]) -> Generator[Any, None, None]:
    yield from sending.__await__()


KINDS: dict[str, Callable[[Any], Awaitable[None]]] = {
    "coroutine": lambda sending: sending,
    "awaitable": Sent,
    "generator": by_a_generator,
    "future": asyncio.ensure_future,
}


class Server:
    """Suspends twice in each message; `fails` is raised in the last one."""

    def __init__(self, kind: str, fails: BaseException | None = None) -> None:
        self.kind, self.fails = KINDS[kind], fails
        self.account: Any = None
        self.reports: list[Report] = []
        self.ended: list[tuple[str, bool]] = []
        self.sent: list[Message] = []
        self.stopped: list[str] = []

    def send(self, message: Message) -> Awaitable[None]:
        return self.kind(self._send(message))

    async def _send(self, message: Message) -> None:
        self.ended.append((message["type"], self.account.escaped is not None))
        try:
            await asyncio.sleep(0)
        except asyncio.CancelledError:
            self.stopped.append(message["type"])
            raise
        if self.fails is not None and message["type"] == "http.response.body":
            raise self.fails
        await asyncio.sleep(0)
        self.ended.append((message["type"], self.account.escaped is not None))
        self.sent.append(message)

    def tell(self, _scope: Scope, report: Report) -> None:
        self.reports.append(report)

    async def serve(self, app: Any, **options: Any) -> None:
        async def noting(scope: Scope, receive: Any, send: Any) -> None:
            self.account = scope["ctxalloc.request"]
            await app(scope, receive, send)

        await AllocatorMiddleware(noting, **options)(http(), Client().receive, self.send)
        assert current().name == "default_allocator"


@pytest.mark.parametrize("tells", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_the_account_closes_when_the_server_has_sent_the_last_message(kind: str, tells: bool) -> None:
    server = Server(kind)
    after: list[bool] = []

    async def app(_scope: Scope, _receive: Any, send: Any) -> None:
        await answer(send, b"whole")
        after.append(server.account.escaped is not None)

    asyncio.run(server.serve(app, on_end=server.tell if tells else None))
    assert [ended for _, ended in server.ended] == [False] * 4
    assert after == [True]
    assert [report.outcome for report in server.reports] == ["completed"] * tells
    assert server.sent[1]["body"] == b"whole"


@pytest.mark.parametrize("kind", KINDS)
def test_a_part_of_the_body_does_not_close_the_account(kind: str) -> None:
    server = Server(kind)
    after: list[bool] = []

    async def app(_scope: Scope, _receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for more in (True, True, False):
            await send({"type": "http.response.body", "body": b"part", "more_body": more})
            after.append(server.account.escaped is not None)

    asyncio.run(server.serve(app))
    assert after == [False, False, True]


@pytest.mark.parametrize("kind", KINDS)
def test_a_client_that_is_gone_at_the_last_message_disconnects(kind: str) -> None:
    server = Server(kind, fails=BrokenPipeError("gone"))

    async def app(_scope: Scope, _receive: Any, send: Any) -> None:
        await answer(send)

    with pytest.raises(BrokenPipeError, match="gone"):
        asyncio.run(server.serve(app, on_end=server.tell))
    assert [(report.outcome, report.status) for report in server.reports] == [("disconnected", 200)]


@pytest.mark.parametrize("kind", KINDS)
def test_the_last_message_may_be_a_task_and_be_cancelled(kind: str) -> None:
    server = Server(kind)

    async def as_a_task(_scope: Scope, _receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await asyncio.create_task(send({"type": "http.response.body"}))

    asyncio.run(server.serve(as_a_task, on_end=server.tell))
    assert [report.outcome for report in server.reports] == ["completed"]

    server = Server(kind)

    async def cancelled(_scope: Scope, _receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        task = asyncio.create_task(send({"type": "http.response.body"}))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert server.account.escaped is None, "it was not sent"

    asyncio.run(server.serve(cancelled, on_end=server.tell))
    assert [report.outcome for report in server.reports] == ["unfinished"]
    assert server.stopped == ["http.response.body"]


def test_an_exchange_that_nobody_began_says_so() -> None:
    exchange = ctxalloc._native.Exchange()
    assert (exchange.scope, exchange.request, exchange.status, exchange.is_whole) == (None, None, None, False)
    for use in (exchange.leave, exchange.close):
        with pytest.raises(ValueError, match="AllocatorMiddleware begins them"):
            use()


# ---- the steps of the application -------------------------------------------------------------------


class Counted(asyncio.SelectorEventLoop):
    """A loop that counts what it is asked to call."""

    asked = 0

    def call_soon(self, *arguments: Any, **options: Any) -> asyncio.Handle:
        self.asked += 1
        return super().call_soon(*arguments, **options)


def bytes_of(escaped: ctxalloc.Escaped | None) -> int | None:
    return None if escaped is None else escaped.bytes


@pytest.mark.parametrize("on_end", [False, True])
def test_arrays_of_an_application_that_returns_ask_the_loop_for_nothing(on_end: bool) -> None:
    reports: list[Report] = []
    accounts: list[ctxalloc.Request] = []

    async def app(scope: Scope, _receive: Any, send: Any) -> None:
        array = np.ones(1000)
        await answer(send)
        accounts.append(scope["ctxalloc.request"])
        assert bytes_of(accounts[-1].escaped) == array.nbytes, "so far"

    tell = (lambda _scope, report: reports.append(report)) if on_end else None
    middleware = AllocatorMiddleware(app, on_end=tell)

    async def serve() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, Counted)
        before = loop.asked
        await middleware(http(), Client().receive, Client().send)
        assert loop.asked == before

    loop = Counted()
    loop.run_until_complete(serve())
    loop.close()
    assert [bytes_of(account.escaped) for account in accounts] == [0]
    assert [bytes_of(report.escaped) for report in reports] == [0] * on_end


def test_what_an_application_awaits_is_seen_through_the_middleware() -> None:
    waiting = asyncio.Event()

    async def app(_scope: Scope, _receive: Any, _send: Any) -> None:
        await waiting.wait()

    async def serve() -> list[str]:
        call: Any = AllocatorMiddleware(app)(http(), Client().receive, Client().send)
        task = asyncio.create_task(call)
        await asyncio.sleep(0)
        names: list[str] = []
        while hasattr(call, "cr_await"):  # as `asyncio.print_call_graph` does
            names.append(call.cr_frame.f_code.co_name)
            call = call.cr_await
        waiting.set()
        await task
        return names

    assert asyncio.run(serve()) == ["__call__", "app", "wait"]


class Later:
    """An awaitable that is no coroutine."""

    def __init__(self, answering: Awaitable[None]) -> None:
        self.answering = answering

    def __await__(self) -> Generator[Any, None, None]:
        return self.answering.__await__()


def test_an_application_may_return_any_awaitable_or_raise() -> None:
    reports: list[Report] = []

    async def answering(send: Any) -> None:
        await asyncio.sleep(0)
        await answer(send, b"later")

    def app(scope: Scope, _receive: Any, send: Any) -> Awaitable[None]:
        if scope["path"] == "/raise":
            raise KeyError("at once")
        return Later(answering(send))

    async def serve() -> None:
        middleware = AllocatorMiddleware(app, on_end=lambda _scope, report: reports.append(report))
        client = Client()
        await middleware(http(), client.receive, client.send)
        assert client.body == b"later"
        before = current()
        with pytest.raises(KeyError, match="at once"):
            await middleware(http("/raise"), client.receive, client.send)
        assert current() is before

    asyncio.run(serve())
    assert [report.outcome for report in reports] == ["completed", "failed"]
