"""A handler, or memory and a limit of its own, for each request of an ASGI application (Starlette, FastAPI, ...).

::

    app.add_middleware(HandlerMiddleware, select=lambda scope: "aligned64" if scope["path"] == "/fft" else None)
    app.add_middleware(RequestMiddleware, request=lambda scope: ctxalloc.request(limit_bytes=64 * MiB, root=True))

The request's task has the handler selected while the application runs; tasks it starts and ``asyncio.to_thread``
inherit it, and so do Rust futures it awaits. Pure ASGI: no dependency, nothing is buffered.
"""

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from ctxalloc._native import Handler, Request, request, use

__all__ = ["HandlerMiddleware", "RequestMiddleware"]

_Scope = MutableMapping[str, Any]
_Message = MutableMapping[str, Any]
_Receive = Callable[[], Awaitable[_Message]]
_Send = Callable[[_Message], Awaitable[None]]
_Application = Callable[[_Scope, _Receive, _Send], Awaitable[None]]


class HandlerMiddleware:
    """Runs each request under the handler that ``select`` names for its ASGI scope.

    ``select(scope)`` returns a Handler, the name of one, or None to leave the selection as it is. Other scopes than
    ``http`` and ``websocket`` (``lifespan``) pass through.
    """

    def __init__(self, app: _Application, *, select: Callable[[_Scope], Handler | str | None]) -> None:
        self.app = app
        self.select = select

    async def __call__(self, scope: _Scope, receive: _Receive, send: _Send) -> None:
        """The ASGI entry point."""
        wanted = self.select(scope) if scope["type"] in ("http", "websocket") else None
        if wanted is None:
            await self.app(scope, receive, send)
            return
        async with use(wanted):
            await self.app(scope, receive, send)


class RequestMiddleware:
    """Runs each request of the application inside of a ``ctxalloc.request()``.

    ``request(scope)`` makes it for an ASGI scope, or returns None to do without; by default each is a root with memory
    and numbers of its own, and no limit. Make roots (``root=True``): servers begin the second request of a connection
    in a Context copied from the first one. The application finds it in ``scope["ctxalloc.request"]``. Other scopes than
    ``http`` and ``websocket`` (``lifespan``) pass through. What its budget refused leaves as BudgetExceeded: a
    middleware around this one may answer 503 for it.
    """

    def __init__(
        self, app: _Application, *, request: Callable[[_Scope], Request | None] = lambda _scope: request(root=True)
    ) -> None:
        self.app = app
        self.request = request

    async def __call__(self, scope: _Scope, receive: _Receive, send: _Send) -> None:
        """The ASGI entry point."""
        begun = self.request(scope) if scope["type"] in ("http", "websocket") else None
        if begun is None:
            await self.app(scope, receive, send)
            return
        async with begun:
            await self.app({**scope, "ctxalloc.request": begun}, receive, send)
