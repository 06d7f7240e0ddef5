"""The ASGI application that the benches of services serve: half a dozen arrays, and a number from them."""

from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np

ROUTE = "/multiply/{size}"
SIZES = {"arrays of 800 kB": 100_000, "arrays of 8 kB": 1000}

Application = Callable[..., Awaitable[None]]


async def multiplies(scope: Any, _receive: Any, send: Any) -> None:
    """A NumPy route: half a dozen arrays."""
    if scope["type"] != "http":
        return
    size = int(scope["path"].rpartition("/")[2])
    first = np.arange(size, dtype=np.float64)
    for _ in range(3):
        first = np.sqrt(first * first + 1.0)
    body = str(float(first[-1])).encode()
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
    await send({"type": "http.response.body", "body": body})


def http_scope(path: str) -> dict[str, Any]:
    """As uvicorn makes it."""
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "GET",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 2),
        "state": {},
    }
