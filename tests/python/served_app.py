"""An application that checks itself: every array that it makes is asked whose it is. Raw ASGI, and WSGI.

`/work` makes arrays of the body in the coroutine, in a thread and after a pause; `/big` wants more than it may;
`/stream` works in each part; `/hang` waits until the client goes; `/health` has nothing; `/counts` tells what was seen
so far; `/keep` keeps an array. Servers are told `served_app:service`, `served_app:wsgi_service`; a test starts them
(`servers.py`).
"""

import asyncio
import contextvars
import gc
import json
import os
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

import ctxalloc
from ctxalloc import MiB, current, current_request, handler_of, request
from ctxalloc.asgi import AllocatorMiddleware, Report
from ctxalloc.wsgi import AllocatorMiddleware as WsgiMiddleware

counts: Counter[str] = Counter(begun=0, ended=0, wrong=0, refused=0, completed=0, disconnected=0)
USER: contextvars.ContextVar[int] = contextvars.ContextVar("user", default=0)


KEPT: list[Any] = []
"""What `/keep` keeps: one array each time."""
ENDS = os.environ.get("CTXALLOC_TEST_ENDS")
"""A file that gets a line for each beginning and each end, also when the server is on its way out."""


def note(line: str) -> None:
    if ENDS:
        file = os.open(ENDS, os.O_WRONLY | os.O_APPEND)
        os.write(file, f"{line}\n".encode())
        os.close(file)


def on_end(scope: Any, report: Report) -> None:
    counts["ended"] += 1
    counts[report.outcome] += 1
    counts["escaped"] += report.escaped.count
    note(f"{report.route or scope.get('path')} {report.outcome}")


def is_mine(begun: ctxalloc.Request, *arrays: Any) -> bool:
    """Whether arrays, and the selection, are those of the request that is being served."""
    counts["arrays"] += len(arrays)
    own = begun.handler
    return current() == own and all(handler_of(array) == own for array in arrays)


def of(body: bytes) -> Any:
    return np.frombuffer(body, np.uint8) + np.ones(1, np.uint8)


async def work(begun: ctxalloc.Request, body: bytes) -> bool:
    first = of(body)
    await asyncio.sleep(0)
    second = await asyncio.to_thread(of, body)
    third = np.concatenate([first, second])
    task = await asyncio.create_task(asyncio.sleep(0, np.arange(9)))
    return is_mine(begun, first, second, third, task) and int(third.sum()) == 2 * int(first.sum())


async def read(receive: Any) -> bytes | None:
    body = b""
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        body += message.get("body", b"")
        if not message.get("more_body", False):
            return body


def snapshot() -> dict[str, Any]:
    gc.collect()
    metrics = ctxalloc.request_metrics()
    rss = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return {**counts, "present": metrics.present, "rss": rss, "pid": os.getpid()}


async def send_json(send: Any, document: Any, status: int = 200) -> None:
    body = json.dumps(document).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def app(scope: Any, receive: Any, send: Any) -> None:
    if scope["type"] == "lifespan":
        while True:
            message = await receive()
            await send({"type": message["type"] + ".complete"})
            if message["type"] == "lifespan.shutdown":
                return
    path = scope["path"]
    if scope["type"] == "websocket":
        counts["begun"] += 1
        await receive()
        await send({"type": "websocket.accept"})
        ok = await work(scope["ctxalloc.request"], b"websocket")
        await send({"type": "websocket.send", "text": json.dumps(ok)})
        await send({"type": "websocket.close", "code": 1000})
        return
    if path == "/health":
        ok = current_request() is None and "ctxalloc.request" not in scope
        await send_json(send, {"ok": ok, "handler": current().name})
        return
    if path == "/counts":
        await send_json(send, snapshot())
        return
    counts["begun"] += 1
    begun = scope["ctxalloc.request"]
    body = await read(receive)
    if body is None:
        return
    if path == "/big":
        kept = np.ones(10 * MiB, np.uint8)
        await send_json(send, {"ok": False, "bytes": kept.nbytes})
    elif path == "/keep":
        KEPT.append(await asyncio.to_thread(of, body))
        await send_json(send, {"ok": True})
    elif path == "/hang":
        note("/hang begun")
        while (await receive())["type"] != "http.disconnect":
            counts["woken"] += 1
    elif path == "/stream":
        await send({"type": "http.response.start", "status": 200, "headers": [(b"transfer-encoding", b"chunked")]})
        ok = True
        for _ in range(3):
            ok &= await work(begun, body)
            await send({"type": "http.response.body", "body": b" ", "more_body": True})
        await send({"type": "http.response.body", "body": json.dumps({"ok": ok}).encode()})
    else:
        ok = await work(begun, body)
        counts["wrong"] += not ok
        await send_json(send, {"ok": ok, "handler": current().name, "length": len(body)})


LIMITED = request(limit_bytes=8 * MiB)
ROUTES: Any = {"/health": None, "/counts": None, "/big": LIMITED, "/pool": "pool"}

service = AllocatorMiddleware(app, routes=ROUTES, default=LIMITED, on_end=on_end)


def wsgi_app(environ: Any, start_response: Any) -> Iterable[bytes]:
    path = environ["PATH_INFO"]
    if path == "/counts":
        document: Any = snapshot()
    elif path == "/health":
        document = {"ok": current_request() is None, "handler": current().name}
    else:
        counts["begun"] += 1
        body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        if path == "/big":
            np.ones(10 * MiB, np.uint8)
        if path == "/stream":
            return wsgi_parts(environ["ctxalloc.request"], body, start_response)
        first = of(body)
        ok = is_mine(environ["ctxalloc.request"], first, np.concatenate([first, first]))
        counts["wrong"] += not ok
        document = {"ok": ok, "handler": current().name, "length": len(body)}
    answer = json.dumps(document).encode()
    start_response("200 OK", [("content-type", "application/json"), ("content-length", str(len(answer)))])
    return iter([answer])


def wsgi_parts(begun: ctxalloc.Request, body: bytes, start_response: Any) -> Iterable[bytes]:
    start_response("200 OK", [("content-type", "application/json")])
    ok = True
    for _ in range(3):
        ok &= is_mine(begun, of(body))
        yield b" "
    yield json.dumps({"ok": ok}).encode()


wsgi_service = WsgiMiddleware(wsgi_app, routes=ROUTES, default=LIMITED, on_end=on_end)
