"""The service: Starlette, two routes that work on arrays in threads, and ``/peaks``, what each route needed.

Each request has its tenant's budget (``serving``). Run by ``demo``.
"""

import sys
from typing import Any, Final

import numpy as np
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.routing import Mount, Route

import ctxalloc
from ctxalloc import MiB
from ctxalloc.asgi import AllocatorMiddleware, Report, Scope, debug_app

from .serving import run, tenant_of

PAGE: Final = "/debug/memory"
"""Where the live page is."""

peaks: dict[str, list[int]] = {}


def on_end(_scope: Scope, report: Report) -> None:
    """Keeps the peak of each request that was served, by its route."""
    if report.route and report.outcome == "completed":
        peaks.setdefault(report.route, []).append(report.stats.peak_bytes)


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


def main() -> None:
    """``python -m examples.tenants.app guarded`` or ``bare``."""
    run(build(is_guarded=sys.argv[1] == "guarded"))


if __name__ == "__main__":
    main()
