"""A handler for each request of an ASGI application (Starlette, FastAPI, Litestar, Quart, ...).

::

    app.add_middleware(HandlerMiddleware, select=lambda scope: "aligned64" if scope["path"] == "/fft" else None)

The request's task has the handler selected while the application runs; tasks it starts and ``asyncio.to_thread``
inherit it, and so do Rust futures it awaits. Pure ASGI: no dependency, nothing is buffered.
"""

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from ctxalloc._native import Handler, use

__all__ = ["HandlerMiddleware"]

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
