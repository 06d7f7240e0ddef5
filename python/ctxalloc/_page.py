"""The live page: ``ctxalloc.asgi.debug_app()``. One HTML file with nothing from elsewhere, and its numbers as JSON."""

import asyncio
import contextlib
import hmac
import ipaddress
import json
import math
import os
import re
import time
from collections.abc import Awaitable, Callable, MutableMapping
from importlib import resources
from pathlib import Path
from typing import Any, Final, TypeAlias
from urllib.parse import parse_qs

from ctxalloc import metrics, prometheus, tracking
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
MAX_NAME: Final = 128
"""Bytes of a name that are shown."""
MAX_SECONDS: Final = 300.0
"""The longest profile that can be asked for."""
SITES_SHOWN: Final = 5
"""Lines of code that are shown of each route."""
_KINDS: Final = {"html": b"text/html; charset=utf-8", "folded": b"text/plain; charset=utf-8"}
"""Of what is written of sites and profiles; else pprof."""
_DATA: Final = ("/data", "/profile", "/sites")
"""What has numbers: only the page itself may ask for it."""
_PLAIN: Final = b"text/plain; charset=utf-8"

_Receive: TypeAlias = Callable[[], Awaitable[MutableMapping[str, Any]]]
_Send: TypeAlias = Callable[[MutableMapping[str, Any]], Awaitable[None]]
_Answer: TypeAlias = tuple[int, bytes, bytes]


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
                if not name.endswith(("_bytes", "_micros")) or name == "escaped_bytes"
            },
            **_peaks(series),
            "max_peak_bytes": series.max_peak_bytes,
            "waited": series.waited_micros.count,
            "waited_p95": series.waited_micros.quantile(0.95) / 1e6,
            "total": series.total_bytes.sum,
            "whole": {part: size_bytes / series.whole_requests for part, size_bytes in prometheus.parts_of(series)},
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
        "waiting": [_cut(one._asdict()) for one in metrics.waiting(MAX_SHOWN)],
        "waiting_count": sum(process.waiting_requests for process in snapshot.processes if process.pid == os.getpid()),
        "budgets": [_cut(budget._asdict()) for budget in metrics.budgets()[:MAX_SHOWN]],
        "sites": _sites(),
    }


def _sites() -> list[dict[str, Any]]:
    """Which code made the peaks of the requests that were looked at, by route."""
    found = sorted(metrics.sites().values(), key=lambda one: -one.requests)
    return [
        {
            "name": one.name,
            "requests": one.requests,
            "largest": [site._asdict() for site in one.largest(SITES_SHOWN)],
        }
        for one in found
    ]


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
    shown = {name: value for name, value in one._asdict().items() if name != "escapes"}
    if one.whole is not None:
        parts = {"arrays": one.whole.array_bytes, "native": one.whole.native_bytes, "objects": one.whole.object_bytes}
        shown["whole"] = {**parts, "error": one.whole.error_bytes, "granted": one.whole.granted}
    return _cut(shown)


def _cut(numbers: dict[str, Any]) -> dict[str, Any]:
    """With the first 128 bytes of each name, as counters have them."""
    return {
        key: value.encode("utf-8", "replace")[:MAX_NAME].decode("utf-8", "ignore") if isinstance(value, str) else value
        for key, value in numbers.items()
    }


def _is_page(path: str, root: str) -> bool:
    """Whether it is the page itself. Where the server does not say where it is mounted, any path may be that."""
    if root and path.startswith(root):
        return path[len(root) :] in ("", "/")
    return not path.rstrip("/").endswith(_DATA)


def _query(scope: MutableMapping[str, Any]) -> dict[str, str]:
    """The first value of each name in the query."""
    query = parse_qs(scope.get("query_string", b"").decode("latin-1"), keep_blank_values=True)
    return {name: values[0] for name, values in query.items()}


def _written_sites(query: dict[str, str]) -> _Answer:
    """All stacks of a route."""
    found = metrics.sites().get(query.get("name", ""))
    if found is None:
        return 404, _PLAIN, b"ctxalloc: no request of this name was looked at: AllocatorMiddleware(sites=...)\n"
    kind: Any = query.get("as", "html")
    try:
        return 200, _KINDS.get(kind, b"application/gzip"), found.written(kind)
    except ValueError:
        return 400, _PLAIN, b"ctxalloc: give as=html, as=folded or as=pb.gz\n"


async def _until_gone(receive: _Receive, seconds: float) -> None:
    """Waits so long, or until the client goes."""

    async def gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    leaving = asyncio.create_task(gone())
    try:
        await asyncio.wait([leaving], timeout=seconds)
    finally:
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)


class DebugApp:
    """See ``ctxalloc.asgi.debug_app``."""

    def __init__(self, token: str | None) -> None:
        self._token = token
        self._page = resources.files("ctxalloc").joinpath("_page.html").read_bytes()

    async def __call__(self, scope: MutableMapping[str, Any], receive: _Receive, send: _Send) -> None:
        """The ASGI entry point."""
        if scope["type"] != "http":
            raise RuntimeError(f"ctxalloc.asgi.debug_app() serves HTTP only, not {scope['type']!r}; mount it at a path")
        answer = self._answer(scope)
        if answer is None:
            answer = await self._profile(scope, receive)
        status, kind, body = answer
        headers = [*_HEADERS, (b"content-type", kind), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else body})

    def _answer(self, scope: MutableMapping[str, Any]) -> _Answer | None:
        """What needs no waiting; None for a profile."""
        path: str = scope.get("path", "")
        refused = self._refusal(scope)
        if refused is not None:
            return 403, _PLAIN, refused.encode()
        if path.endswith("/profile"):
            if self._token is None:
                return 403, _PLAIN, b"ctxalloc: profiles are for those who have the token: debug_app(token=...)\n"
            return None if scope["method"] == "POST" else (405, _PLAIN, b"POST only")
        if scope["method"] not in ("GET", "HEAD"):
            return 405, _PLAIN, b"GET only"
        if path.endswith("/data"):
            # The page offers profiles to those who may have them.
            return 200, b"application/json", json.dumps({**numbers(), "profiles": self._token is not None}).encode()
        if path.endswith("/sites"):
            return _written_sites(_query(scope))
        if not _is_page(path, scope.get("root_path", "")):
            return 404, _PLAIN, b"ctxalloc: there is no such page here\n"
        return 200, b"text/html; charset=utf-8", self._page

    async def _profile(self, scope: MutableMapping[str, Any], receive: _Receive) -> _Answer:
        """A profile of so many seconds; shorter if the client goes."""
        query = _query(scope)
        try:
            seconds = float(query.get("seconds", "10"))
        except ValueError:
            seconds = math.nan
        if not 0 < seconds <= MAX_SECONDS:
            said = f"ctxalloc: seconds={query['seconds']!r}: give a number above 0, and at most {MAX_SECONDS:g}\n"
            return 400, _PLAIN, said.encode("utf-8", "replace")
        kind = query.get("as", "html")
        from ctxalloc import _flame, _profile  # noqa: PLC0415 - for those who ask

        if f".{kind}" not in _flame.SUFFIXES:
            return 400, _PLAIN, b"ctxalloc: give as=html, as=folded or as=pb.gz\n"
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return 501, _PLAIN, b"ctxalloc: this server runs no event loop of asyncio; ctxalloc.profile_on_signal\n"
        with contextlib.ExitStack() as running:
            try:
                profile = running.enter_context(_profile.profiled(_flame.FRAMES))
            except RuntimeError as error:
                return 409, _PLAIN, f"ctxalloc: {error}\n".encode()
            await _until_gone(receive, seconds)
        title = f"ctxalloc: {seconds:g} s of process {os.getpid()}"
        body = await asyncio.to_thread(_flame.written_as, Path(f"profile.{kind}"), profile, title)
        return 200, _KINDS.get(kind, b"application/gzip"), body

    def _refusal(self, scope: MutableMapping[str, Any]) -> str | None:
        """Why it is not shown to this client; None: it is."""
        headers = [(name.lower(), value) for name, value in scope.get("headers", ())]
        if _is_of_another_site(headers, is_data=scope.get("path", "").endswith(_DATA)):
            return "ctxalloc: a browser asks for another site; open the page itself\n"
        if self._token is not None:
            words = next((value for name, value in headers if name == b"authorization"), b"").split(b" ", 1)
            if words[0].lower() == b"bearer":
                given = words[-1]
            else:
                given = _query(scope).get("token", "").encode("utf-8", "replace")
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
