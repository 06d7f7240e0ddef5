"""The service: Starlette, one POST route a pipeline, each under the handler that the table gives it.

``AllocatorMiddleware`` selects it for the request's task; all that the request awaits or starts inherits it. The
body is a PNG or JPEG file, the answer a PNG file or JSON. What goes wrong is JSON with an ``error``: 400 an empty body,
413 one that is too large, 415 no picture, 404 and 405. Neighbours: ``pipelines`` does the work, ``server`` runs it.
"""

from collections.abc import Awaitable, Callable
from typing import Final, Literal

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Scope

import ctxalloc
from ctxalloc.asgi import AllocatorMiddleware

from . import pipelines
from .audit import Audit
from .control import SharedStack, SharedStackMiddleware
from .pipelines import Work
from .processing import PictureError, PictureTooLargeError
from .routes import Table, register_handlers

Switcher = Literal["ctxalloc", "shared-stack"]

MAX_BYTES: Final = 8 * ctxalloc.MiB

Endpoint = Callable[[Request], Awaitable[Response]]


def build_app(table: Table, *, switcher: Switcher = "ctxalloc") -> Starlette:
    """The service as ASGI application. Its ``state.audit`` counts; ``GET /audit`` gives the counts as JSON."""
    register_handlers()
    audit = Audit()

    def select(scope: Scope) -> str | None:
        return table.handlers.get(scope["path"])

    if switcher == "ctxalloc":
        use: pipelines.Use = ctxalloc.use
        middleware = Middleware(AllocatorMiddleware, default=select)
    else:
        stack = SharedStack()
        use = stack.use
        middleware = Middleware(SharedStackMiddleware, select=select, stack=stack)

    def endpoint(route: str) -> Endpoint:
        async def process(request: Request) -> Response:
            body = await posted(request)
            work = Work.begin(audit, route, asked=table.handlers[route], scratch=table.scratch, use=use)
            try:
                answer = await pipelines.answer(route, body, work)
            except PictureTooLargeError as error:
                raise HTTPException(413, str(error)) from error
            except PictureError as error:
                raise HTTPException(415, str(error)) from error
            headers = {"x-handler": ctxalloc.current().name}
            return Response(answer.content, media_type=answer.media_type, headers=headers)

        return process

    async def show_audit(_: Request) -> Response:
        return JSONResponse(audit.to_json())

    app = Starlette(
        routes=[
            *(Route(route, endpoint(route), methods=["POST"]) for route in pipelines.ROUTES),
            Route("/audit", show_audit, methods=["GET"]),
        ],
        middleware=[middleware],
        exception_handlers={HTTPException: explain},
    )
    app.state.audit = audit
    return app


async def posted(request: Request) -> bytes:
    """The body, read no further than is allowed."""
    body = bytearray()
    try:
        async for chunk in request.stream():
            body += chunk
            if len(body) > MAX_BYTES:
                raise HTTPException(413, f"the body has more than {MAX_BYTES} bytes, the most that is taken")
    except ClientDisconnect as error:
        raise HTTPException(400, f"the client went away after {len(body)} bytes of the body") from error
    if not body:
        raise HTTPException(400, "the body is empty; post a PNG or JPEG file")
    return bytes(body)


async def explain(request: Request, error: Exception) -> Response:
    """An HTTP error as JSON; for those that Starlette raises itself, the message says what would be right."""
    assert isinstance(error, HTTPException)
    message = error.detail
    if error.status_code == 404:
        message = f"there is no {request.url.path}; post a picture to one of {', '.join(pipelines.ROUTES)}"
    elif error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "another method")
        message = f"{request.method} is not taken at {request.url.path}; use {allowed}"
    return JSONResponse({"error": message}, status_code=error.status_code, headers=error.headers)
