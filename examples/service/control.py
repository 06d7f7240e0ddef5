"""The control: a switcher as allocator packages have it that know no contexts. It is wrong on purpose.

One stack for the whole process: entering pushes what was selected and selects the new handler, leaving selects what
lies on top. That is right as long as scopes nest. Requests that await do not nest: one leaves its scratch scope while
another one's handler lies on top, takes it, and keeps it. (numpy-allocator 1.2.1 has such a stack.) The audit must
see it; if it does not, then its zero for ``ctxalloc.use`` means nothing.
"""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from starlette.types import ASGIApp, Receive, Scope, Send

import ctxalloc


class SharedStack:
    """``use`` has the shape of ``ctxalloc.use``."""

    def __init__(self) -> None:
        self._stack: list[ctxalloc.Handler] = []

    @asynccontextmanager
    async def use(self, name: str) -> AsyncIterator[None]:
        """Select ``name`` until the scope is left, wherever other requests' scopes are by then."""
        self._stack.append(ctxalloc.current())
        ctxalloc.set_handler(name)
        try:
            yield
        finally:
            ctxalloc.set_handler(self._stack.pop())


class SharedStackMiddleware:
    """``ctxalloc.asgi.AllocatorMiddleware`` over a ``SharedStack``."""

    def __init__(self, app: ASGIApp, *, select: Callable[[Scope], str | None], stack: SharedStack) -> None:
        self.app = app
        self.select = select
        self.stack = stack

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI entry point."""
        wanted = self.select(scope) if scope["type"] == "http" else None
        if wanted is None:
            await self.app(scope, receive, send)
            return
        async with self.stack.use(wanted):
            await self.app(scope, receive, send)
