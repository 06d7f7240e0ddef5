"""What `test_whole.py` has served: a request that counts everything, one with a limit, and one that holds nothing."""

import asyncio
import json
from typing import Any

import ctxalloc
from ctxalloc import asgi, wsgi
from ctxalloc._outcome import Report

TERMS = {
    "/parse": ctxalloc.request(whole=True),
    "/greedy": ctxalloc.request(whole=True, limit_bytes=8 * ctxalloc.MiB),
}
DOCUMENT = json.dumps([{"number": n, "word": str(n)} for n in range(20_000)])
counts = {"ended": 0, "escaped": 0, "refused": 0}


def note(_: Any, report: Report) -> None:
    if report.route in TERMS:
        counts["ended"] += 1
        counts["escaped"] += report.escaped.bytes > ctxalloc.MiB
        counts["refused"] += report.outcome == "refused"


def parsed() -> dict[str, Any]:
    """What a request has of a parsed document."""
    document = json.loads(DOCUMENT)
    begun = ctxalloc.current_request()
    assert begun is not None
    parts = begun.stats.whole
    assert parts is not None
    return {"rows": len(document), "object_bytes": parts.object_bytes}


def answer(path: str) -> bytes:
    if path == "/parse":
        return json.dumps(parsed()).encode()
    if path == "/greedy":
        return str(len([json.loads(DOCUMENT) for _ in range(100)])).encode()
    return json.dumps(counts).encode()


async def application(scope: dict[str, Any], receive: Any, send: Any) -> None:
    if scope["type"] == "lifespan":
        while (message := await receive())["type"] == "lifespan.startup":
            await send({"type": "lifespan.startup.complete"})
        await send({"type": f"{message['type']}.complete"})
        return
    while (await receive()).get("more_body"):
        pass
    path = scope["path"]
    body = await asyncio.to_thread(answer, path) if path == "/parse" else answer(path)
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
    await send({"type": "http.response.body", "body": body})


def wsgi_application(environ: dict[str, Any], start_response: Any) -> list[bytes]:
    body = answer(environ["PATH_INFO"])
    start_response("200 OK", [("Content-Length", str(len(body)))])
    return [body]


service = asgi.AllocatorMiddleware(application, routes=TERMS, on_end=note)  # type: ignore[arg-type]
wsgi_service = wsgi.AllocatorMiddleware(wsgi_application, routes=TERMS, on_end=note)
