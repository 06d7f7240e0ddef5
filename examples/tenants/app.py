"""The service: Starlette, two routes that work on arrays in threads, and ``/peaks``, what each route needed.

``SERVICE`` has 320 MiB. Half of it is the patient tenant's own; the other half is for whoever comes, and the greedy
tenant has to do with that. Run by ``demo``: says on standard output where it listens, and ends when its standard input
closes.
"""

import asyncio
import os
import socket
import sys
from typing import Any, Final

import numpy as np
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.routing import Mount, Route

import ctxalloc
from ctxalloc import Budget, MiB
from ctxalloc.asgi import AllocatorMiddleware, Report, Scope, debug_app

SERVICE: Final = Budget(320 * MiB, name="service")
GUESTS: Final = Budget(160 * MiB, parent=SERVICE, name="guests")
TENANTS: Final = {
    "patient": Budget(160 * MiB, parent=SERVICE, name="patient"),
    "greedy": Budget(parent=GUESTS, name="greedy"),
}
OTHERS: Final = Budget(parent=GUESTS, name="others")
"""Of whoever does not say who they are."""

PAGE: Final = "/debug/memory"
"""Where the live page is."""

peaks: dict[str, list[int]] = {}


def on_end(_scope: Scope, report: Report) -> None:
    """Keeps the peak of each request that was served, by its route."""
    if report.route and report.outcome == "completed":
        peaks.setdefault(report.route, []).append(report.stats.peak_bytes)


def tenant_of(scope: Scope) -> Budget:
    """Whose request it is."""
    names = [value.decode("latin-1") for name, value in scope["headers"] if name == b"tenant"]
    return TENANTS.get(names[0], OTHERS) if len(names) == 1 else OTHERS


def smooth(request: Request) -> PlainTextResponse:
    """A few passes over one array: three of its size are alive at a time."""
    size = int(request.path_params["mib"]) * MiB // 8
    values = np.ones(size)
    for _ in range(6):
        values = np.sqrt(values) * 0.5 + values
    return PlainTextResponse(f"{values[-1]:.6f}")


def total(request: Request) -> PlainTextResponse:
    """One array, and its sum."""
    return PlainTextResponse(f"{np.ones(int(request.path_params['mib']) * MiB // 8).sum():.0f}")


async def show_peaks(_: Request) -> JSONResponse:
    """What ``on_end`` was told."""
    return JSONResponse(peaks)


def build(*, is_guarded: bool) -> Any:
    """The application, with the middleware or without."""
    app = Starlette(
        routes=[
            Route("/smooth/{mib:int}", smooth, methods=["POST"]),
            Route("/total/{mib:int}", total, methods=["POST"]),
            Route("/peaks", show_peaks),
            Mount(PAGE, debug_app()),
        ]
    )
    if not is_guarded:
        return app
    terms = ctxalloc.request(limit_bytes=256 * MiB)
    routes: dict[str, Any] = {
        "/smooth/{mib}": terms,
        "/total/{mib}": terms,
        "/peaks": None,
        f"{PAGE}/{{rest:path}}": None,
    }
    return AllocatorMiddleware(app, routes=routes, tenant=tenant_of, on_end=on_end, sites=20)


async def serve(listening: socket.socket, *, is_guarded: bool) -> None:
    """Until standard input ends."""
    server = uvicorn.Server(
        uvicorn.Config(build(is_guarded=is_guarded), log_level="warning", timeout_graceful_shutdown=2)
    )

    def stop() -> None:
        asyncio.get_running_loop().remove_reader(sys.stdin)
        server.should_exit = True

    asyncio.get_running_loop().add_reader(sys.stdin, stop)
    await server.serve(sockets=[listening])


def main() -> None:
    """``python -m examples.tenants.app guarded`` or ``bare``."""
    ctxalloc.configure(decay_seconds=1)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        print(f"{os.getpid()} http://127.0.0.1:{listening.getsockname()[1]}", flush=True)
        asyncio.run(serve(listening, is_guarded=sys.argv[1] == "guarded"))


if __name__ == "__main__":
    main()
