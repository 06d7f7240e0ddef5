"""The live page: ``ctxalloc.asgi.debug_app()``. One HTML file with nothing from elsewhere, and its numbers as JSON."""

import hmac
import ipaddress
import json
import os
import re
import time
from collections.abc import Awaitable, Callable, MutableMapping
from importlib import resources
from typing import Any, Final
from urllib.parse import parse_qs

from ctxalloc import metrics, tracking
from ctxalloc._coverage import coverage

_FORWARDED: Final = re.compile(
    rb"forwarded|via|client-ip|cf-.*|cdn-loop|(x-)?(original-)?forwarded-.*|x-original-.*|x-envoy-.*|x-proxy.*"
    rb"|x-real-(ip|port)|x-remote-(ip|addr)|x-host|.*-client-ip|.*-client-addr|.*-connecting-ip"
)
"""What proxies say of themselves. One that says nothing looks like a client of its own machine."""
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
            **{
                name: getattr(series, name)
                for name in metrics.Series._fields
                if "_bytes" not in name or name == "escaped_bytes"
            },
            **_peaks(series),
            "max_peak_bytes": series.max_peak_bytes,
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
        "live": [_shown(one) for one in sorted(live, key=lambda one: -one.live_bytes)[:MAX_SHOWN]],
        "live_count": len(live),
        "escapes": escapes,
        "escapes_count": len(kept),
        "routes": routes,
        "budgets": [budget._asdict() for budget in metrics.budgets()[:MAX_SHOWN]],
    }


def _peaks(series: metrics.Series) -> dict[str, Any]:
    """The peaks of requests that were not refused, by powers of two: the others say how much they got, not wanted."""
    refused = dict(series.refused_peak_bytes.buckets)
    served = [(end, count - refused.get(end, 0)) for end, count in series.peak_bytes.buckets]
    counts = [0] * 65
    for end, count in served:
        counts[max(0, end - 1).bit_length()] += count
    peaks = metrics.Histogram(tuple(one for one in served if one[1]), 0)
    quantiles = {name: min(peaks.quantile(q), series.max_peak_bytes) for name, q in (("p50", 0.5), ("p95", 0.95))}
    return {"peak_bytes": counts, **(quantiles if peaks.count else {"p50": None, "p95": None})}


_HOST: Final = re.compile(r"^\[?([^\[\]]*?)\]?(?::\d*)?$")


def _is_here(name: str) -> bool:
    """Whether an address, or the name in a URL, is this machine's own."""
    if name.lower() == "localhost":
        return True
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)  # of a socket that takes both
    return (mapped or address).is_loopback


def _is_of_another_site(headers: list[tuple[bytes, bytes]], *, is_data: bool) -> bool:
    """Whether a browser asks for another site, which could read it where the application allows all origins."""
    found = dict(headers)
    origin = found.get(b"origin")
    if origin is not None and origin.lower().partition(b"://")[2] != found.get(b"host", b"").lower():
        return True
    is_link = not is_data and found.get(b"sec-fetch-mode") == b"navigate"
    return not is_link and found.get(b"sec-fetch-site", b"none") not in (b"none", b"same-origin")


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
        headers = [(name.lower(), value) for name, value in scope.get("headers", ())]
        if _is_of_another_site(headers, is_data=scope.get("path", "").endswith("/data")):
            return "ctxalloc: a browser asks for another site; open the page itself\n"
        if self._token is not None:
            words = next((value for name, value in headers if name == b"authorization"), b"").split(b" ", 1)
            if words[0].lower() == b"bearer":
                given = words[-1]
            else:
                query = parse_qs(scope.get("query_string", b"").decode("latin-1"))
                given = query.get("token", [""])[0].encode("utf-8", "replace")
            is_right = hmac.compare_digest(given, self._token.encode())
            return None if is_right else "ctxalloc: give the token of debug_app(token=...), as ?token= or as a Bearer\n"
        client = scope.get("client")
        hosts = [value.decode("latin-1") for name, value in headers if name == b"host"]
        # A proxy on this machine is a local client too, and so is a page of another site whose name leads here.
        if (
            (client is None or _is_here(client[0]))
            and all(_is_here(_HOST.sub(r"\1", host)) for host in hosts)
            and not any(_FORWARDED.fullmatch(name) for name, _ in headers)
        ):
            return None
        return "ctxalloc: this page is for this machine only; for others give it a token: debug_app(token=...)\n"
