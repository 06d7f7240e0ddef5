"""Memory, an account and a limit for each request of an ASGI application (Starlette, FastAPI, Django, ...).

::

    app.add_middleware(
        AllocatorMiddleware,
        routes={"POST /fft": ctxalloc.request(limit_bytes=64 * MiB), "/health": None},
        tenant=lambda scope: budgets[client_of(scope)],
        on_end=lambda scope, report: print(report.route, report.outcome, report.stats.peak_bytes),
    )

Pure ASGI: no dependency, and nothing of a body is buffered, except while its request waits for room; a whole request's
headers go with what follows them. Tasks that a request starts, ``asyncio.to_thread`` and Rust futures belong to it.
Neighbours: ``_serving`` has what is common with ``wsgi`` and ``django``; ``src/python/exchange`` does what every
request needs; docs/services.md is the guide.
"""

import inspect
import os
import sys
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any, Literal, TypeAlias

from ctxalloc import _frameworks, _routing, problems
from ctxalloc._choices import ACCOUNT, Choice, Scope, Terms, Unmatched
from ctxalloc._errors import BudgetExceeded, NoRoom
from ctxalloc._native import Budget, Exchange, Exchanges, Handler, Request, use
from ctxalloc._outcome import OnEnd, Report
from ctxalloc._sending import Sending
from ctxalloc._serving import KEY, SERVING, Served, Service, Serving, Step
from ctxalloc._waiting import Client, Gone, Waiting

__all__ = ["AllocatorMiddleware", "Choice", "Report", "Scope", "Terms", "debug_app"]

_Message: TypeAlias = MutableMapping[str, Any]
_Receive: TypeAlias = Callable[[], Awaitable[_Message]]
_Send: TypeAlias = Callable[[_Message], Awaitable[None]]
_Application: TypeAlias = Callable[[Scope, _Receive, _Send], Awaitable[None]]

_DENIAL = "websocket.http.response"
_CLOSE_CODES = {413: 1009, 429: 1013, 503: 1013}


class AllocatorMiddleware:
    """Serves each request of an application in a ``ctxalloc.request()``, or under a handler.

    ``routes``: for patterns of paths (``/path``, ``/path/{name}``, ``/path/{rest:path}``, with a method before them or
    without) what they get: a ``ctxalloc.request(...)``, of whose terms each gets a fresh one, which is a root; a
    Handler or the name of one, without an account; None, which leaves things as they are; or a function from the ASGI
    scope to one of these. ``default``: the same for all other paths; by default an account without a limit.
    ``unmatched``: with ``"strictest"``, a path that neither a pattern nor a route of the framework matches gets the
    terms with the smallest limit of all, under the name ``unmatched``.

    A request whose terms have ``reserve_bytes=`` waits in line for room, at most their ``timeout=``, before the
    application is called. One that gets none is refused; one whose client has gone leaves the line, unless its
    body is longer than 64 KiB, or has more than 64 parts.

    ``tenant(scope)``: the budget that the request is charged to, or None.

    ``ends``: ``"response"`` closes the account at the last body message; background tasks come after it, and the terms'
    ``after_end`` says what becomes of what they make. ``"application"`` closes it when the application returns.

    ``on_end(scope, report)`` is called once for each request that has an account.

    ``answers``: what a budget refused is answered with 413, 429 or 503 where no headers were sent yet, unless the
    application has a handler for BudgetExceeded, which then answers. False lets the BudgetExceeded pass.
    ``retry_after_seconds`` goes with 429 and 503.

    ``sites``: of one in so many requests it is noted which code made the arrays of its peak, and what escaped: in the
    report, and by route in ``metrics.sites()``. The others pay nothing.

    ``record``: a file that one request in ten is recorded in, as ``ctxalloc.record`` does; OSError: it cannot be.

    The application finds its Request in ``scope["ctxalloc.request"]``, and by ``ctxalloc.current_request()``.
    ``lifespan`` passes through. ValueError, TypeError: a route or a choice is not as it must be.
    """

    def __init__(
        self,
        app: _Application,
        *,
        routes: Mapping[str, Choice] | None = None,
        default: Choice = ACCOUNT,
        unmatched: Unmatched = "default",
        tenant: Callable[[Scope], Budget | None] | None = None,
        on_end: OnEnd | None = None,
        ends: Literal["response", "application"] = "response",
        answers: bool = True,
        retry_after_seconds: int = 1,
        sites: int | None = None,
        record: str | os.PathLike[str] | None = None,
    ) -> None:
        if ends not in ("response", "application"):
            raise ValueError(f"AllocatorMiddleware(ends={ends!r}): give 'response' or 'application'")
        self.app = app
        self._ends_with_response = ends == "response"
        self._answers = answers
        self._service = Service(
            routes=routes,
            default=default,
            unmatched=unmatched,
            tenant=tenant,
            on_end=on_end,
            retry_after_seconds=retry_after_seconds,
            sites=sites,
            record=record,
        )
        _frameworks.note_what_frameworks_answer()
        self._root_path = _routing.root_path_of(app)
        self._exchanges = Exchanges(
            _Exchange,
            self._service,
            SERVING,
            answers=answers,
            ends_with_response=self._ends_with_response,
            has_root=bool(self._root_path),
        )
        self._is_checked = self._is_ready = not routes

    async def __call__(self, scope: Scope, receive: _Receive, send: _Send) -> None:
        """The ASGI entry point."""
        if not self._is_ready:
            self._make_ready(scope)
        steps: Any = self._exchanges.begin(self.app, scope, receive, send)
        client: Client | None = None
        if steps is None:
            serving = self._begun_otherwise(scope, send)
            if isinstance(serving, Waiting):
                client = Client(receive)
                receive = client.receive
                serving = await self._admitted(serving, client)
                if serving is None:
                    return  # it was refused, or the client has gone
            if serving is None:
                await self.app(scope, receive, send)
                return
            if not isinstance(serving, _Exchange):
                with Step(serving):
                    await self.app({**scope, KEY: serving}, receive, send)
                return
            if serving.is_websocket and serving.counts_whole:
                receive = serving.outside(receive)
            steps = serving.call(self.app, receive)
        try:
            left = await steps
        except BaseException as error:  # noqa: BLE001 - `_failed` raises it again
            exchange = steps.exchange
            try:
                exchange.leave()
                await self._failed(exchange, error, receive)
            finally:
                exchange.forget()
        else:
            if left is not None:
                try:
                    await self._returned(left, receive)
                finally:
                    left.forget()
        finally:
            if client is not None:
                client.close()

    def _make_ready(self, scope: Scope) -> None:
        """Look at the application's routes, once."""
        if not self._is_checked:
            self._is_checked = True
            _routing.warn_of_typos(self._service.patterns, self.app)
        if scope["type"] != "lifespan":  # at which some add routes
            _frameworks.attach(self._service.routes, self._service.rows, self.app)
            self._is_ready = True  # now, for other threads

    async def _admitted(self, waiting: "Waiting[Serving | _Exchange]", client: Client) -> "Serving | _Exchange | None":
        """Wait for the reservation. None: there was none, and all that is to be done was done."""
        refused: NoRoom | Gone | None = None
        try:
            exchange, refused = await waiting.begin(client)
            if refused is None:
                return exchange
            assert isinstance(exchange, _Exchange)  # noqa: S101 - `around` makes it
            try:
                exchange.leave()
                if isinstance(refused, Gone):
                    exchange.end("disconnected")
                else:
                    await self._failed(exchange, refused, client.receive)
            finally:
                exchange.forget()
        except BaseException:
            client.close()
            raise
        finally:
            del refused  # its traceback has this frame
        client.close()
        return None

    def _begun_otherwise(
        self, scope: Scope, send: _Send
    ) -> "Serving | _Exchange | Waiting[Serving | _Exchange] | None":
        """What the usual way leaves out: a handler without an account, a middleware around this one, a WebSocket."""
        if scope["type"] not in ("http", "websocket"):
            return None
        path: str = scope["path"]
        root = self._root_path or scope.get("root_path")
        is_plain = not root
        if root and (path == root or path.startswith(f"{root}/")):
            path, is_plain = path[len(root) :] or "/", True

        def around(route: str | None, begun: Request, base: Handler) -> _Exchange:
            return self._exchanges.around(scope, send, route, begun, base)

        return self._service.begin(scope, "method", path, is_plain=is_plain, around=around, is_async=True)

    async def _failed(self, exchange: "_Exchange", error: BaseException, receive: _Receive) -> None:
        """The application has raised: answer a refusal, or let the exception go on."""
        exchange.drop_headers()
        refused = exchange.refusal_of(error)
        if refused is None and isinstance(error, Exception):
            refused = exchange.replaced  # it failed once more
        try:
            if refused is None:
                exchange.end_unanswered(error)
                raise error
            try:
                exchange.close_after(error)
                if not self._answers or not await exchange.answer(refused, receive):
                    if refused is error:
                        raise error
                    raise refused from refused.__cause__
            finally:
                exchange.end("refused", refused)
        finally:
            del error, refused  # their tracebacks have this frame

    async def _returned(self, exchange: "_Exchange", receive: _Receive) -> None:
        """The application has returned, and something is left to do."""
        exchange.drop_headers()
        if exchange.replaced is not None:  # and the framework has kept its exception
            try:
                exchange.close_after(exchange.replaced)
                await exchange.answer(exchange.replaced, receive)
            finally:
                exchange.end("refused", exchange.replaced)
        elif exchange.is_whole or exchange.is_websocket:
            if not (exchange.is_whole and self._ends_with_response):
                exchange.end("completed")
        else:
            exchange.end_unanswered(None)


class _Exchange(Exchange, Served):
    """A request that is being served, and what its server was sent. What is done for each of them is in Rust."""

    __slots__ = ("_before", "_began", "outer", "refused_inside")

    @property
    def is_websocket(self) -> bool:
        return self.scope is not None and self.scope["type"] == "websocket"

    @property
    def to_server(self) -> _Send:
        """The server's ``send``."""
        return self._to_server or _too_late

    def outside(self, receive: _Receive) -> _Receive:
        """The server's ``receive``, called outside of the request.

        Where it resumes reading, asyncio runs the server's reader in the Context of that call: all messages would be
        decoded in the request, which may have no room, and be broken off without a reason.
        """
        base = self.base

        async def received() -> _Message:
            with use(base):
                return await receive()

        return received

    def _watching(self, receive: _Receive) -> _Receive:
        """The application's ``receive``, where somebody asks for the end: it notes that the client has gone."""

        async def watching() -> _Message:
            message = await receive()
            if message["type"] in ("http.disconnect", "websocket.disconnect") and not self.is_ending:
                self.is_disconnected = True
            return message

        return watching

    def _send(self, message: _Message) -> Awaitable[None]:
        """The application's ``send``, of what it does not send in every answer."""
        kind = message["type"]
        if kind == "http.response.body":
            if self.replaced is not None:
                return _nothing()
            if not message.get("more_body", False):
                return self._give(message, is_last=True)
        elif kind == "http.response.start":
            status = message["status"]
            refused = self._refusal_handled() if status >= 400 else None
            if refused is not None and self._answers and (status == 500 or _frameworks.has_parsed(sys.exception())):
                self.replaced = refused
                return _nothing()
            self.status = status
            if self.counts_whole:
                self.headers = message
                return _nothing()
            self.started = True
        elif kind in ("http.response.pathsend", "websocket.close", "http.response.zerocopysend"):
            if kind == "websocket.close":
                self._note_closed()
            if not message.get("more_body", False):  # the last of them only may have it
                return self._give(message, is_last=True)
        elif kind == "websocket.accept":
            self.started = True
            self.status = 101
        elif kind == "websocket.http.response.start":
            self.started = True
            self.status = message["status"]
        return self._give(message, is_last=False)

    async def _send_after_headers(self, message: _Message) -> None:
        """The headers, if nobody has begun to send them, and what follows them.

        So a stream that passes the limit before its first part is answered. ASGI has servers wait as well, as hypercorn
        does.
        """
        if isinstance(self.headers, Sending):
            await self.headers.ended()
        elif self.headers is not None:
            headers, sending = self.headers, Sending()
            self.headers, self.started = sending, True
            try:
                await self._give(headers, is_last=False)
            finally:
                self.headers = None
                sending.end()
        await self.send(message)

    def drop_headers(self) -> None:
        """Nothing has followed them."""
        if self.headers is not None and not self.started:
            self.headers = self.status = None

    async def _last(self, sending: Awaitable[None]) -> None:
        """The last message, and the end of the account. The ContextVar is not touched: this may be another task."""
        try:
            await sending
        except OSError:  # what servers raise where the client has gone (ASGI 2.4)
            self.is_disconnected = True
            raise
        self._sent_whole()

    async def _part(self, sending: Awaitable[None]) -> None:
        """Another message. As `_last`, for what is no coroutine."""
        try:
            await sending
        except OSError:
            self.is_disconnected = self.is_disconnected or not self.is_ending
            raise

    def _refusal_handled(self) -> BudgetExceeded | None:
        """The refusal because of which a handler inside answers, in an ``except``. It is noted, for the outcome.

        Where it is a framework's 500, or FastAPI's 400 for a body, ours is the answer, and given when the application
        has returned.
        """
        error = sys.exception()
        if error is not None:
            return self.refusal_of(error)
        refused = getattr(self, "refused_inside", None)  # it is there only where a framework has told
        self.refused_inside = None
        return refused

    async def answer(self, refused: BudgetExceeded, receive: _Receive) -> bool:
        """Answer a refusal, if that is still possible."""
        scope = self.inner
        assert scope is not None  # noqa: S101 - the application was called with it
        is_http = not self.is_websocket
        if self.is_whole or (is_http and self.started):
            return False
        handler = _handler_of_the_application(scope, refused)
        if handler is not None:
            await _answer_by(handler, refused, scope, receive, self._noting)
            return True
        problem = problems.of(refused, self)
        if is_http:
            await self._send_problem(problem)
        elif not self.started and _DENIAL in (scope.get("extensions") or {}):
            await self._send_problem(problem, "websocket.http.response")
        else:
            self._note_closed()
            code = _CLOSE_CODES[problem.status]
            await self.to_server({"type": "websocket.close", "code": code, "reason": "out of memory"})
        return True

    def _note_closed(self) -> None:
        """A WebSocket is closed: before it was accepted, servers answer so, as ASGI has it."""
        if not self.started:
            self.status = 403

    async def _send_problem(self, problem: problems.Problem, kind: str = "http.response") -> None:
        self.status = problem.status
        headers = [(name.encode(), value.encode()) for name, value in problem.headers]
        await self.to_server({"type": f"{kind}.start", "status": problem.status, "headers": headers})
        await self.to_server({"type": f"{kind}.body", "body": problem.body})

    def _noting(self, message: _Message) -> Awaitable[None]:
        """A ``send`` for the application's own answer."""
        if "status" in message:
            self.status = message["status"]
        return self.to_server(message)


async def _awaiting(awaitable: Awaitable[None]) -> None:
    await awaitable


async def _raising(error: BaseException) -> None:
    """What stands for the coroutine of an application that raises when it is called."""
    try:
        raise error
    finally:
        del error


async def _too_late(message: _Message) -> None:
    raise RuntimeError(f"{message['type']!r} is sent, but the application has returned")


async def _nothing() -> None:
    """A message that is not sent."""


def _handler_of_the_application(scope: Scope, refused: BudgetExceeded) -> Callable[..., Any] | None:
    """What Starlette has been given for BudgetExceeded. Its other handlers have had their turn."""
    handlers: Any = (scope.get("starlette.exception_handlers") or ({},))[0]
    kinds = [kind for kind in type(refused).__mro__ if issubclass(kind, BudgetExceeded)]
    found = next((handlers[kind] for kind in kinds if kind in handlers), None)
    if found is None:
        handlers = getattr(scope.get("app"), "exception_handlers", None)
        if isinstance(handlers, dict):
            found = next((handlers[kind] for kind in kinds if kind in handlers), None)
    return found if callable(found) else None


async def _answer_by(
    handler: Callable[..., Any], refused: BudgetExceeded, scope: Scope, receive: _Receive, send: _Send
) -> None:
    """As Starlette calls its handlers; it is there, for it has left the handler in the scope."""
    from starlette.concurrency import run_in_threadpool  # noqa: PLC0415 - ours does not need it
    from starlette.requests import Request as HttpRequest  # noqa: PLC0415
    from starlette.websockets import WebSocket  # noqa: PLC0415

    connection = (HttpRequest if scope["type"] == "http" else WebSocket)(scope, receive, send)
    if inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(getattr(handler, "__call__", None)):  # noqa: B004
        response = await handler(connection, refused)
    else:
        response = await run_in_threadpool(handler, connection, refused)
    if response is not None:
        await response(scope, receive, send)


def debug_app(*, token: str | None = None) -> _Application:
    """An ASGI application that shows what goes on: requests, routes, budgets, memory over time, who keeps escapes.

    ::

        app.mount("/debug/memory", ctxalloc.asgi.debug_app())

    It answers clients of this machine only, unless it has a ``token``, which clients then give as ``?token=`` or as
    a Bearer token. Give it one behind a proxy that adds no header of its own: one on this machine cannot be told
    from a client. It shows names of routes, budgets and files, and no data. With a token it also makes profiles of the
    process, of some seconds. Not mounted it costs nothing. ValueError:
    the token is shorter than 16 characters, or not of printable ASCII. TypeError: it is no str.
    """
    if token is not None and not isinstance(token, str):
        raise TypeError(f"debug_app(token=...): give a str, not {type(token).__name__}")
    if token is not None and len(token) < 16:
        raise ValueError(
            f"debug_app(token=...): {len(token)} characters can be guessed; give 16 or more: secrets.token_urlsafe()"
        )
    if token is not None and not (token.isascii() and token.isprintable() and token == token.strip()):
        raise ValueError(
            "debug_app(token=...): it has what no header carries as it is; give printable ASCII, without a space at "
            "either end: secrets.token_urlsafe()"
        )
    from ctxalloc._page import DebugApp  # noqa: PLC0415 - for those who mount it

    return DebugApp(token)
