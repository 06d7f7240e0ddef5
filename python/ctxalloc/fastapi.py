"""The request's account as a dependency of FastAPI.

::

    @app.post("/fft")
    async def fft(account: ctxalloc.fastapi.Account) -> dict[str, int]:
        ...
        return {"peak_bytes": account.stats.peak_bytes}

Needs FastAPI (it is imported here and nowhere else), and ``ctxalloc.asgi.AllocatorMiddleware`` around the application.
A dependency that is not ``async`` and enters a scope (``with ctxalloc.use(...): yield``) does nothing for the
endpoint: FastAPI runs it in a thread, in a copy of the Context. This one reads the ASGI scope and selects nothing.
"""

import sys
from typing import Annotated

try:
    from fastapi import Depends
    from starlette.requests import HTTPConnection
except ImportError:
    raise ImportError("ctxalloc.fastapi needs FastAPI, and its import fails: pip install fastapi") from sys.exception()

from ctxalloc._native import Request
from ctxalloc._serving import REQUEST_KEY

__all__ = ["Account", "account"]


async def account(connection: HTTPConnection) -> Request:
    """The Request that the middleware began. RuntimeError: it began none for this route."""
    request = connection.scope.get(REQUEST_KEY)
    if not isinstance(request, Request):
        raise RuntimeError(  # noqa: TRY004 - it is not the caller's argument
            "this route has no account; put ctxalloc.asgi.AllocatorMiddleware around the application, and give the "
            "route a ctxalloc.request(...), or leave it to the default"
        )
    return request


Account = Annotated[Request, Depends(account)]
