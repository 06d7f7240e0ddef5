"""The live page: ``ctxalloc.asgi.debug_app()``. One HTML file with nothing from elsewhere, and its numbers as JSON."""

import hmac
import json
import os
import time
from collections.abc import Awaitable, Callable, MutableMapping
from importlib import resources
from typing import Any, Final
from urllib.parse import parse_qs

from ctxalloc import metrics, tracking
from ctxalloc._coverage import coverage

_LOOPBACK: Final = ("127.0.0.1", "::1", "localhost")
_HEADERS: Final = (
    (b"cache-control", b"no-store"),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (
        b"content-security-policy",
        (
            b"default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; "
            b"frame-ancestors 'none'; base-uri 'none'"
        ),
    ),
)
MAX_SHOWN: Final = 200
"""Live requests that are shown; the page says how many there are."""


def numbers() -> dict[str, Any]:
    """What the page shows, as JSON has it."""
    seen, snapshot, present = coverage(), metrics.snapshot(), metrics.present()
    live = [one for one in present if not one.has_ended]
    kept = sorted((one for one in present if one.has_ended and one.live_bytes), key=lambda one: -one.live_bytes)
    routes = [
        {
            **{name: getattr(series, name) for name in metrics.Series._fields if not name.endswith("total_bytes")},
            "peak_bytes": series.peak_bytes.counts,
            "p50": min(series.peak_bytes.quantile(0.5), series.max_peak_bytes),
            "p95": min(series.peak_bytes.quantile(0.95), series.max_peak_bytes),
            "total": series.total_bytes.sum,
        }
        for series in sorted(snapshot.series.values(), key=lambda one: -one.requests)
    ]
    escapes = [
        {**_shown(one), "sites": tracking.report(one.escapes) if one.escapes else None} for one in kept[:MAX_SHOWN]
    ]
    return {
        "time": time.time(),
        "pid": os.getpid(),
        "memory": seen._asdict(),
        "processes": [process._asdict() for process in snapshot.processes],
        "live": [_shown(one) for one in live[:MAX_SHOWN]],
        "live_count": len(live),
        "escapes": escapes,
        "escapes_count": len(kept),
        "routes": routes,
        "budgets": [budget._asdict() for budget in metrics.budgets()[:MAX_SHOWN]],
    }


def _shown(one: metrics.Present) -> dict[str, Any]:
    return {name: value for name, value in one._asdict().items() if name != "escapes"}


class DebugApp:
    """See ``ctxalloc.asgi.debug_app``."""

    def __init__(self, token: str | None) -> None:
        self._token = token
        self._page = resources.files("ctxalloc").joinpath("_page.html").read_bytes()

    async def __call__(
        self,
        scope: MutableMapping[str, Any],
        receive: Callable[[], Awaitable[MutableMapping[str, Any]]],  # noqa: ARG002 - ASGI
        send: Callable[[MutableMapping[str, Any]], Awaitable[None]],
    ) -> None:
        """The ASGI entry point."""
        if scope["type"] != "http":
            raise RuntimeError(f"ctxalloc.asgi.debug_app() serves HTTP only, not {scope['type']!r}; mount it at a path")
        status, kind, body = self._answer(scope)
        headers = [*_HEADERS, (b"content-type", kind), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else body})

    def _answer(self, scope: MutableMapping[str, Any]) -> tuple[int, bytes, bytes]:
        plain = b"text/plain; charset=utf-8"
        refused = self._refusal(scope)
        if refused is not None:
            return 403, plain, refused.encode()
        if scope["method"] not in ("GET", "HEAD"):
            return 405, plain, b"GET only"
        if scope.get("path", "").endswith("/data"):
            return 200, b"application/json", json.dumps(numbers()).encode()
        return 200, b"text/html; charset=utf-8", self._page

    def _refusal(self, scope: MutableMapping[str, Any]) -> str | None:
        """Why it is not shown to this client; None: it is."""
        headers = {name.lower(): value.decode("latin-1") for name, value in scope.get("headers", ())}
        if self._token is not None:
            given = headers.get(b"authorization", "").removeprefix("Bearer ")
            given = given or parse_qs(scope.get("query_string", b"").decode("latin-1")).get("token", [""])[0]
            is_right = hmac.compare_digest(given.encode("utf-8", "replace"), self._token.encode())
            return None if is_right else "ctxalloc: give the token of debug_app(token=...), as ?token= or as a Bearer\n"
        client = scope.get("client")
        host = headers.get(b"host", "localhost")
        name = host[: host.rfind("]") + 1].strip("[]") if host.startswith("[") else host.partition(":")[0]
        is_forwarded = any(header in headers for header in (b"x-forwarded-for", b"forwarded", b"x-real-ip"))
        # A proxy on this machine is a local client too, and so is a page of another site whose name leads here.
        if (client is None or client[0] in _LOOPBACK) and name in _LOOPBACK and not is_forwarded:
            return None
        return "ctxalloc: this page is for this machine only; for others give it a token: debug_app(token=...)\n"
